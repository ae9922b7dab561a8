package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"

	"github.com/goddp/goddp/cmd/internal/program"
	"github.com/goddp/goddp/data"
	"github.com/goddp/goddp/data/transforms"
	"github.com/goddp/goddp/internal/tdp"
	"github.com/goddp/goddp/models"
	"github.com/goddp/goddp/models/nn"
	"github.com/goddp/goddp/torchddp"
	"github.com/goddp/goddp/torchddp/optim"
	"github.com/goddp/goddp/train"
	"github.com/goddp/goddp/train/report"
	"github.com/sugarme/gotch"
)

// rank is what every rank does: the tutorial's train(rank, world_size).
func (c *config) rank(ctx context.Context, pg *torchddp.ProcessGroup) (err error) {
	if err := torchddp.ManualSeed(c.seed); err != nil {
		return err
	}
	out := program.Out(c.flags.JSON)
	fmt.Fprintf(out, "Rank %d: Preparing data..\n", pg.Rank())
	loader, err := c.trainLoader(ctx, pg)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, loader.Close()) }()
	task := train.Task[*data.Batch]{Train: loader}
	if c.evalEvery > 0 {
		tests, err := c.testLoader(ctx, pg)
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, tests.Close()) }()
		task.Eval = tests
	}

	fmt.Fprintf(out, "Rank %d: Building model..\n", pg.Rank())
	net, err := c.network(pg)
	if err != nil {
		return err
	}
	defer net.Drop()
	if task.Model, err = torchddp.NewDDP(net, pg, torchddp.DDPOptions{}); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, task.Model.Close()) }()
	task.Optimizer, err = optim.NewSGD(net.NamedParameters(),
		optim.SGDOptions{LR: c.lr, Momentum: c.momentum, WeightDecay: c.weightDecay})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, task.Optimizer.Close()) }()

	opts, err := c.flags.Options(pg, os.Stdout)
	if err != nil {
		return err
	}
	opts.EvalEvery = c.evalEvery
	opts.About = report.Run{Name: "cifar10", Model: c.arch, BatchSize: c.batchSize, Hyper: c.hyper()}
	var tally program.Tally
	defer tally.Reset()
	opts.Callbacks = append(opts.Callbacks, lines(out, pg.Rank(), c.flags.LogEvery, &tally))
	task.Step = tally.Watch(c.step())
	trainer, err := train.New(task, opts)
	if err != nil {
		return err
	}
	return trainer.Run(ctx)
}

// trainLoader gives this rank its share of the training images, augmented.
func (c *config) trainLoader(ctx context.Context, pg *torchddp.ProcessGroup) (*data.DataLoader[*data.Batch], error) {
	pipeline, err := transforms.Compose(transforms.RandomCrop{Height: 32, Padding: 4}, transforms.RandomHorizontalFlip{},
		transforms.ToTensor{}, normalize)
	if err != nil {
		return nil, err
	}
	set, err := c.images.Set(ctx, false, pipeline)
	if err != nil {
		return nil, err
	}
	sampler, err := data.NewDistributedSampler(set.Len(), data.DistributedOptions{Replicas: pg.Size(), Rank: pg.Rank()})
	if err != nil {
		return nil, err
	}
	return data.NewDataLoader(set, data.Options{
		BatchSize: c.batchSize, Sampler: sampler, Workers: c.workers, Device: pg.Device(),
	})
}

// normalize has the tutorial's numbers.
var normalize = transforms.Normalize{Mean: []float64{0.4914, 0.4822, 0.4465}, Std: []float64{0.2023, 0.1994, 0.2010}}

// testLoader gives this rank its share of the test images, as they are.
func (c *config) testLoader(ctx context.Context, pg *torchddp.ProcessGroup) (*data.DataLoader[*data.Batch], error) {
	pipeline, err := transforms.Compose(transforms.ToTensor{}, normalize)
	if err != nil {
		return nil, err
	}
	set, err := c.images.Set(ctx, true, pipeline)
	if err != nil {
		return nil, err
	}
	return c.images.TestLoader(set, pg, data.Options{BatchSize: c.batchSize, Workers: c.workers, Device: pg.Device()})
}

// network makes the model on the rank's device.
func (c *config) network(pg *torchddp.ProcessGroup) (*models.ResNet, error) {
	net, err := models.NewResNet(c.arch, models.ResNetOptions{NumClasses: c.classes, CIFARStem: c.cifarStem})
	if err != nil {
		return nil, err
	}
	if err := net.To(pg.Device(), gotch.Float); err != nil {
		return nil, err
	}
	if c.channelsLast {
		if err := net.ToChannelsLast(); err != nil {
			return nil, err
		}
	}
	if c.syncBN {
		if _, err := torchddp.ConvertSyncBatchNorm(net, pg); err != nil {
			return nil, err
		}
	}
	return net, nil
}

// step computes a batch's loss, and how many of its images are classified right.
func (c *config) step() train.StepFunc[*data.Batch] {
	step := train.Supervised(nn.CrossEntropyLoss{}, train.Accuracy())
	if !c.channelsLast {
		return step
	}
	return func(m train.Model, b *data.Batch) (train.Result, error) {
		if err := tdp.Move(b.Input(), nil, gotch.Invalid, tdp.ChannelsLast); err != nil {
			return train.Result{}, err
		}
		return step(m, b)
	}
}

// hyper is what reports say of the run.
func (c *config) hyper() (list []report.Param) {
	for _, p := range []struct {
		name  string
		value any
	}{
		{"lr", c.lr}, {"momentum", c.momentum}, {"weight decay", c.weightDecay}, {"amp", c.flags.AMP},
		{"sync-bn", c.syncBN}, {"channels-last", c.channelsLast}, {"synthetic", c.images.Synthetic},
	} {
		list = append(list, report.Param{Name: p.name, Value: fmt.Sprint(p.value)})
	}
	return list
}

// lines prints what the tutorial's ranks do. After a resume in the middle of an epoch the figures are those of the
// batches since then.
func lines(out io.Writer, rank, every int, tally *program.Tally) train.Callback {
	return train.Callback{
		BeforeEpoch: func(*train.Progress) error {
			tally.Reset()
			return nil
		},
		AfterStep: func(p *train.Progress) error {
			if (p.Step-1)%every == 0 {
				loss, accuracy := tally.Read()
				fmt.Fprintf(out, "Rank %d, Batch: %d, Loss: %s, Accuracy: %s%%\n",
					rank, p.Step-1, program.Float(loss), program.Float(accuracy))
			}
			return nil
		},
		AfterEpoch: func(p *train.Progress, own, all report.Epoch) error {
			fmt.Fprintf(out, "Rank %d: Training time for epoch %d: %s seconds\n",
				rank, p.Epoch, program.Float(own.Duration.Seconds()))
			for _, v := range all.Eval {
				if rank == 0 && v.Name == "accuracy" {
					fmt.Fprintf(out, "Epoch %d, Test Accuracy: %.2f%%\n", p.Epoch, 100*v.Value)
				}
			}
			return nil
		},
	}
}
