package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"runtime"

	"github.com/sugarme/gotch"
	"github.com/sugarme/gotch/ts"

	"github.com/goddp/goddp/bench/internal/pair"
	"github.com/goddp/goddp/internal/tdp"
	"github.com/goddp/goddp/launch"
	"github.com/goddp/goddp/models"
	"github.com/goddp/goddp/models/nn"
	"github.com/goddp/goddp/torchddp"
	"github.com/goddp/goddp/torchddp/amp"
	"github.com/goddp/goddp/torchddp/optim"
)

// sideVar makes a process of this program the Go side; it holds its task as JSON.
const sideVar = "GODDP_GPU_SIDE"

// task is what both sides train.
type task struct {
	Net                         string // toy, mlp, or a network of torchvision's
	Batch                       int64
	BF16, ChannelsLast, Compile bool
	Device                      string // cuda or cpu
}

func (k task) device() gotch.Device {
	if k.Device == "cuda" {
		return gotch.CudaBuilder(0)
	}
	return gotch.CPU
}

// side is a process of the Go side: by itself, or the one rank of a job.
func side(ctx context.Context, text string) error {
	var k task
	if err := json.Unmarshal([]byte(text), &k); err != nil {
		return fmt.Errorf("%s: %w", sideVar, err)
	}
	if os.Getenv("RANK") != "" {
		return launch.Run(ctx, 1, func(ctx context.Context, _ launch.Env) error { return k.serve(ctx) })
	}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	return k.serve(ctx)
}

// network is a module that can be laid out as tensor cores like it.
type network interface {
	nn.Module
	ToChannelsLast() error
}

// make builds the network on the CPU, where its random numbers are Python's, with a batch for it.
func (k task) make() (net network, loss nn.Loss, x, y *ts.Tensor, err error) {
	if err := torchddp.ManualSeed(0); err != nil {
		return nil, nil, nil, nil, err
	}
	classes, shape := int64(1000), []int64{k.Batch, 3, 32, 32}
	loss = nn.CrossEntropyLoss{}
	switch k.Net {
	case "toy":
		net, err = models.NewToyNet()
		loss, shape = nn.MSELoss{}, []int64{k.Batch, 20}
	case "mlp":
		net, err = nn.Try(func() *nn.Sequential {
			dense := func(in, out int64) *nn.Linear { return nn.Must(nn.NewLinear(in, out, nn.LinearOptions{})) }
			return nn.NewSequential(dense(784, 512), nn.NewReLU(), dense(512, 512), nn.NewReLU(), dense(512, 10))
		})
		classes, shape = 10, []int64{k.Batch, 784}
	default:
		net, err = models.NewResNet(k.Net, models.ResNetOptions{})
	}
	if err != nil {
		return nil, nil, nil, nil, err
	}
	x = ts.MustEmpty(shape, gotch.Float, gotch.CPU)
	if k.Net == "toy" {
		y = ts.MustEmpty([]int64{k.Batch, 1}, gotch.Float, gotch.CPU)
		return net, loss, x, y, errors.Join(nn.Normal(x, 0, 1), nn.Normal(y, 0, 1))
	}
	labels := make([]int64, k.Batch)
	for i := range labels {
		labels[i] = int64(i) * 7 % classes
	}
	return net, loss, x, ts.MustOfSlice(labels), nn.Normal(x, 0, 1)
}

func (k task) serve(ctx context.Context) (err error) {
	net, criterion, x, y, err := k.make()
	if err != nil {
		return err
	}
	defer x.MustDrop()
	defer y.MustDrop()
	dev := k.device()
	if err := errors.Join(net.To(dev, gotch.Float), tdp.Move(x, &dev, gotch.Invalid, -1), tdp.Move(y, &dev, gotch.Invalid, -1)); err != nil {
		return err
	}
	if k.ChannelsLast {
		if err := errors.Join(net.ToChannelsLast(), tdp.Move(x, nil, gotch.Invalid, tdp.ChannelsLast)); err != nil {
			return err
		}
	}
	opt, err := optim.NewSGD(net.NamedParameters(), optim.SGDOptions{LR: 0.001, Momentum: 0.9})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, opt.Close()) }()
	forward := func() (*ts.Tensor, error) { return nn.Forward(net, x, true) }
	backward := func(loss *ts.Tensor) error { return tdp.Backward(loss, nil, false, nil) }
	if os.Getenv("RANK") != "" {
		pg, initErr := torchddp.InitProcessGroup(ctx, torchddp.InitOptions{Device: dev})
		if initErr != nil {
			return initErr
		}
		defer func() { err = errors.Join(err, pg.Destroy()) }()
		ddp, wrapErr := torchddp.NewDDP(net, pg, torchddp.DDPOptions{})
		if wrapErr != nil {
			return wrapErr
		}
		defer func() { err = errors.Join(err, ddp.Close()) }()
		forward, backward = func() (*ts.Tensor, error) { return ddp.Forward(x) }, ddp.Backward
	}
	var loss *ts.Tensor
	predict := func() error {
		out, err := forward()
		if err != nil {
			return err
		}
		defer out.MustDrop()
		loss = criterion.Forward(out, y)
		return nil
	}
	step := func() error {
		if err := opt.ZeroGrad(true); err != nil {
			return err
		}
		if loss != nil {
			loss.MustDrop()
			loss = nil
		}
		run := predict
		if k.BF16 {
			run = func() error { return amp.Autocast(amp.Options{Device: dev, DType: gotch.BFloat16}, predict) }
		}
		if err := run(); err != nil {
			return err
		}
		return errors.Join(backward(loss), opt.Step())
	}
	last := func() ([]float32, error) { return tdp.ToSlice[float32](loss) } // it waits for the device
	if err := step(); err != nil {
		return err
	}
	first, err := last()
	if err != nil {
		return err
	}
	return pair.Serve(pair.Answer{"first": {float64(first[0])}}, func(r pair.Request) (pair.Answer, error) {
		a, err := pair.Measure(r.N, func() error {
			for range r.N {
				if err := step(); err != nil {
					return err
				}
			}
			_, err := last()
			return err
		})
		if err == nil {
			a["samples"] = []float64{float64(k.Batch) / a["seconds"][0]}
		}
		return a, err
	})
}
