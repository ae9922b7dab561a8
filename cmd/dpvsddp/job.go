package main

import (
	"errors"
	"fmt"
	"iter"
	"time"

	"github.com/goddp/goddp/launch"
	"github.com/goddp/goddp/models"
	"github.com/goddp/goddp/models/nn"
	"github.com/goddp/goddp/torchddp"
	"github.com/goddp/goddp/torchddp/optim"
	"github.com/sugarme/gotch"
	"github.com/sugarme/gotch/ts"
)

// network is what both sides train.
type network interface {
	torchddp.Module
	nn.Module
	To(gotch.Device, gotch.DType) error
	Drop()
}

// newNetwork makes it on a device; the seed decides about its weights.
func (c *config) newNetwork(dev gotch.Device) (net network, err error) {
	if err := torchddp.ManualSeed(c.seed); err != nil {
		return nil, err
	}
	if c.arch == simpleNet {
		net, err = models.NewSimpleNet()
	} else {
		net, err = models.NewResNet(c.arch, models.ResNetOptions{NumClasses: 10, CIFARStem: c.image < 64})
	}
	if err != nil {
		return nil, err
	}
	return net, net.To(dev, gotch.Float)
}

// batches are a few, which the steps take in turns.
type batches struct{ inputs, targets []*ts.Tensor }

// newBatches draws them: share of shares, equally large, on a device.
func (c *config) newBatches(dev gotch.Device, share, shares int) (b batches, err error) {
	const count = 4
	if c.batchSize%int64(shares) != 0 {
		err := fmt.Errorf("--batch-size %d cannot be shared out equally to %d devices: choose a multiple", c.batchSize, shares)
		return b, &launch.ExitError{Code: 2, Err: err}
	}
	channels := int64(3)
	if c.arch == simpleNet {
		channels = 1
	}
	if err := torchddp.ManualSeed(c.seed + 1); err != nil {
		return b, err
	}
	n := c.batchSize / int64(shares)
	_, err = nn.Try(func() (none struct{}) {
		mine := func(whole *ts.Tensor) *ts.Tensor {
			defer whole.MustDrop()
			return whole.MustNarrow(0, int64(share)*n, n, false).MustContiguous(true).MustTo(dev, true)
		}
		for range count {
			size := int64(c.image)
			b.inputs = append(b.inputs, mine(ts.MustRandn([]int64{c.batchSize, channels, size, size}, gotch.Float, gotch.CPU)))
			b.targets = append(b.targets, mine(ts.MustRandint(10, []int64{c.batchSize}, gotch.Int64, gotch.CPU)))
		}
		return none
	})
	return b, err
}

func (b batches) drop() {
	for i := range b.inputs {
		b.inputs[i].MustDrop()
	}
	for i := range b.targets {
		b.targets[i].MustDrop()
	}
}

// side is one of the two ways to train.
type side interface {
	forward(x *ts.Tensor) (*ts.Tensor, error)
	backward(loss *ts.Tensor) error
	NamedParameters() iter.Seq2[string, *ts.Tensor]
}

// measure trains, and gives how long a step took in each round. meet waits for the other ranks, if there are any.
func (c *config) measure(s side, b batches, meet func() error) (rounds []time.Duration, err error) {
	optimizer, err := optim.NewSGD(s.NamedParameters(), optim.SGDOptions{LR: c.lr, Momentum: 0.9})
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, optimizer.Close()) }()
	next := 0
	train := func(steps int) (loss *ts.Tensor, err error) {
		for range steps {
			if loss != nil {
				loss.MustDrop()
			}
			if loss, err = step(s, optimizer, b.inputs[next], b.targets[next]); err != nil {
				return nil, err
			}
			next = (next + 1) % len(b.inputs)
		}
		return loss, nil
	}
	for round := -1; round < c.rounds; round++ {
		steps := c.steps
		if round < 0 {
			steps = c.warmup
		}
		if err := meet(); err != nil {
			return nil, err
		}
		start := time.Now()
		loss, err := train(steps)
		if err != nil {
			return nil, err
		}
		if loss != nil {
			_ = loss.Float64Values() // waits for the device
			loss.MustDrop()
		}
		if round >= 0 {
			rounds = append(rounds, time.Since(start)/time.Duration(steps))
		}
	}
	return rounds, nil
}

func step(s side, optimizer *optim.SGD, x, y *ts.Tensor) (*ts.Tensor, error) {
	if err := optimizer.ZeroGrad(true); err != nil {
		return nil, err
	}
	output, err := s.forward(x)
	if err != nil {
		return nil, err
	}
	defer output.MustDrop()
	loss, err := nn.Try(func() *ts.Tensor { return nn.CrossEntropyLoss{}.Forward(output, y) })
	if err != nil {
		return nil, err
	}
	if err := s.backward(loss); err != nil {
		loss.MustDrop()
		return nil, err
	}
	if err := optimizer.Step(); err != nil {
		loss.MustDrop()
		return nil, err
	}
	return loss, nil
}
