package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"

	"github.com/sugarme/gotch"
	"github.com/sugarme/gotch/ts"

	"github.com/goddp/goddp/bench/internal/pair"
	"github.com/goddp/goddp/bench/internal/record"
	"github.com/goddp/goddp/internal/tdp"
	"github.com/goddp/goddp/models"
	"github.com/goddp/goddp/models/nn"
	"github.com/goddp/goddp/torchddp"
	"github.com/goddp/goddp/torchddp/optim"
)

type resnetArgs struct {
	Net   string
	Batch int64
}

var resnet = benchmark{
	name: "resnet", title: "ResNet on CIFAR's shapes",
	run: func(ctx context.Context, h *harness) ([]record.Table, error) {
		var t = record.Table{First: "network", Ratio: "ratio"}
		for _, net := range []string{"resnet18", "resnet50"} {
			o := setup{threads: len(h.cores), args: resnetArgs{net, 128}}
			err := h.both(ctx, "resnet", o, func(players ...pair.Player) error {
				turns, err := h.plan(7, 2).Play(ctx, pair.Request{Do: "step", N: h.pick(2, 1)}, players...)
				if err != nil {
					return err
				}
				if ours, theirs := turns[0].All("loss"), turns[1].All("loss"); !slices.Equal(ours, theirs) {
					return fmt.Errorf("%s: the losses differ: %v and %v", net, ours, theirs)
				}
				step := record.Compare(net+", a step", record.Seconds, "seconds", turns)
				if net == "resnet50" {
					step = step.AtMost("resnet50", 1)
				}
				rate := record.Compare(net+", images a second", record.PerSecond, "images", turns)
				rate.Ratio = nil // the step's, turned round
				t.Sides = record.Names(turns)
				t.Rows = append(t.Rows, step, rate, record.Compare(net+", processor time of a step", record.Seconds, "cpu", turns),
					record.Compare(net+", peak memory", record.Bytes, "peak", turns))
				return nil
			})
			if err != nil {
				return nil, err
			}
		}
		return []record.Table{t}, nil
	},
}

var scaling = benchmark{
	name: "scaling", title: "From one rank to two",
	run: func(ctx context.Context, h *harness) ([]record.Table, error) {
		t := record.Table{First: "world", Ratio: "ratio"}
		rates := map[int][]pair.Turns{}
		for _, world := range []int{1, 2} {
			o := setup{ranks: world, args: resnetArgs{"resnet18", 32}}
			err := h.both(ctx, "resnet", o, func(players ...pair.Player) error {
				turns, err := h.plan(7, 2).Play(ctx, pair.Request{Do: "step", N: h.pick(2, 1)}, players...)
				if err != nil {
					return err
				}
				rates[world], t.Sides = turns, record.Names(turns)
				t.Rows = append(t.Rows, record.Compare(fmt.Sprintf("%d, a step", world), record.Seconds, "seconds", turns))
				return nil
			})
			if err != nil {
				return nil, err
			}
		}
		efficiency := record.Row{Name: "efficiency"}
		for side := range t.Sides {
			part := pair.Ratio(rates[1][side], rates[2][side], "seconds")
			efficiency.Values = append(efficiency.Values, part)
		}
		t.Rows = append(t.Rows, efficiency)
		return []record.Table{t}, nil
	},
}

// resnetSide trains a residual network, as a rank with DDP or by itself.
func resnetSide(ctx context.Context, args resnetArgs) (err error) {
	if err := torchddp.ManualSeed(0); err != nil {
		return err
	}
	net, err := models.NewResNet(args.Net, models.ResNetOptions{})
	if err != nil {
		return err
	}
	x := ts.MustEmpty([]int64{args.Batch, 3, 32, 32}, gotch.Float, gotch.CPU)
	if err := nn.Normal(x, 0, 1); err != nil {
		return err
	}
	labels := make([]int64, args.Batch)
	for i := range labels {
		labels[i] = int64(i) * 7 % 1000
	}
	y := ts.MustOfSlice(labels)
	opt, err := optim.NewSGD(net.NamedParameters(), optim.SGDOptions{LR: 0.001, Momentum: 0.9})
	if err != nil {
		return err
	}
	defer opt.Close()
	forward := func() (*ts.Tensor, error) { return nn.Forward(net, x, true) }
	backward := func(loss *ts.Tensor) error { return tdp.Backward(loss, nil, false, nil) }
	if os.Getenv("RANK") != "" {
		pg, initErr := torchddp.InitProcessGroup(ctx, torchddp.InitOptions{})
		if initErr != nil {
			return initErr
		}
		defer func() { err = errors.Join(err, pg.Destroy()) }()
		ddp, wrapErr := torchddp.NewDDP(net, pg, torchddp.DDPOptions{})
		if wrapErr != nil {
			return wrapErr
		}
		defer func() { err = errors.Join(err, ddp.Close()) }()
		forward = func() (*ts.Tensor, error) { return ddp.Forward(x) }
		backward = ddp.Backward
	}
	return pair.Serve(nil, func(r pair.Request) (pair.Answer, error) {
		var last []float32
		a, err := pair.Measure(r.N, func() error {
			for i := range r.N {
				if err := opt.ZeroGrad(true); err != nil {
					return err
				}
				out, err := forward()
				if err != nil {
					return err
				}
				loss := nn.CrossEntropyLoss{}.Forward(out, y)
				out.MustDrop()
				if err := errors.Join(backward(loss), opt.Step()); err != nil {
					return err
				}
				if i == r.N-1 {
					if last, err = tdp.ToSlice[float32](loss); err != nil {
						return err
					}
				}
				loss.MustDrop()
			}
			return nil
		})
		if err == nil {
			a["loss"], a["peak"] = []float64{float64(last[0])}, []float64{pair.PeakMemory()}
			a["images"] = []float64{float64(args.Batch) / a["seconds"][0]}
		}
		return a, err
	})
}
