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
	"github.com/goddp/goddp/data/vision"
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
	// The numbers that the weights are drawn from are the same on every rank, and Python's.
	if err := torchddp.ManualSeed(c.seed); err != nil {
		return err
	}
	digits, loader, err := c.trainLoader(ctx, pg)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, loader.Close()) }()
	pixels, err := c.pixels()
	if err != nil {
		return err
	}
	tests, err := c.images.Set(ctx, true, pixels)
	if err != nil {
		return err
	}
	// Without gradients there is room for larger batches.
	testLoader, err := c.images.TestLoader(tests, pg, data.Options{
		BatchSize: max(c.batchSize, 500), Workers: c.workers, Device: pg.Device(),
	})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, testLoader.Close()) }()

	model, err := models.NewSimpleNet()
	if err != nil {
		return err
	}
	defer model.Drop()
	if err := model.To(pg.Device(), gotch.Float); err != nil {
		return err
	}
	ddp, err := torchddp.NewDDP(model, pg, torchddp.DDPOptions{})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, ddp.Close()) }()
	lr := c.lr
	if !c.plain {
		// The batch grows with the ranks and its gradient gets less noisy, so that a step may be longer.
		lr *= float64(pg.Size())
	}
	optimizer, err := optim.NewAdam(model.NamedParameters(), optim.AdamOptions{LR: lr})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, optimizer.Close()) }()

	opts, err := c.flags.Options(pg, os.Stdout)
	if err != nil {
		return err
	}
	opts.About = report.Run{Name: "mnist", Model: "SimpleNet", BatchSize: c.batchSize, Hyper: []report.Param{
		{Name: "data", Value: digits.Name()}, {Name: "lr", Value: fmt.Sprint(lr)},
		{Name: "curriculum", Value: fmt.Sprint(c.curriculum)}, {Name: "amp", Value: fmt.Sprint(c.flags.AMP)},
	}}
	if !c.plain {
		// At a constant rate two epochs end a little short of 97 % of the test images.
		if opts.Scheduler, err = optim.NewCosineAnnealingLR(optimizer, c.steps(loader), 0); err != nil {
			return err
		}
		opts.SchedulePerStep = true
	}
	var tally program.Tally
	defer tally.Reset()
	opts.Callbacks = append(opts.Callbacks, lines(program.Out(c.flags.JSON), pg.Rank(), &tally))
	trainer, err := train.New(train.Task[*data.Batch]{
		Model: ddp, Optimizer: optimizer, Train: loader, Eval: testLoader,
		Step: tally.Watch(train.Supervised(nn.CrossEntropyLoss{}, train.Accuracy())),
	}, opts)
	if err != nil {
		return err
	}
	return trainer.Run(ctx)
}

// pixels makes floats from 0 to 1 of an image, as the tutorial does, or such whose mean is 0 and deviation 1.
func (c *config) pixels() (*transforms.Pipeline, error) {
	if c.plain {
		return transforms.Compose(transforms.ToTensor{})
	}
	// MNIST's mean and deviation over all training images.
	return transforms.Compose(transforms.ToTensor{},
		transforms.Normalize{Mean: []float64{0.1307}, Std: []float64{0.3081}})
}

// trainLoader gives this rank its share of the training images.
func (c *config) trainLoader(ctx context.Context, pg *torchddp.ProcessGroup) (*vision.Images, *data.DataLoader[*data.Batch], error) {
	pixels, err := c.pixels()
	if err != nil {
		return nil, nil, err
	}
	digits, err := c.images.Set(ctx, false, pixels)
	if err != nil {
		return nil, nil, err
	}
	share := data.DistributedOptions{Replicas: pg.Size(), Rank: pg.Rank()}
	o := data.Options{BatchSize: c.batchSize, Workers: c.workers, Device: pg.Device()}
	if c.curriculum {
		scores, err := difficulty(ctx, digits)
		if err != nil {
			return nil, nil, err
		}
		o.Sampler, err = data.NewCurriculumSampler(scores, data.LinearPace(0.5, c.flags.Epochs-1), share)
		if err != nil {
			return nil, nil, err
		}
	} else if o.Sampler, err = data.NewDistributedSampler(digits.Len(), share); err != nil {
		return nil, nil, err
	}
	loader, err := data.NewDataLoader(digits, o)
	return digits, loader, err
}

// steps is how many the optimizer makes in all. With a curriculum epochs differ in length.
func (c *config) steps(loader *data.DataLoader[*data.Batch]) (n int) {
	for epoch := range c.flags.Epochs {
		loader.SetEpoch(epoch)
		n += (loader.Len() + c.flags.Accumulate - 1) / c.flags.Accumulate
	}
	return n
}

// lines prints the tutorial's line of every rank's epoch, and on rank 0 how many of all test images were right.
func lines(out io.Writer, rank int, tally *program.Tally) train.Callback {
	return train.Callback{
		BeforeEpoch: func(*train.Progress) error {
			tally.Reset()
			return nil
		},
		AfterEpoch: func(p *train.Progress, _, all report.Epoch) error {
			loss, _ := tally.Read()
			fmt.Fprintf(out, "Rank %d, Epoch %d, Avg Loss: %.6f\n", rank, p.Epoch+1, loss)
			for _, v := range all.Eval {
				if rank == 0 && v.Name == "accuracy" {
					fmt.Fprintf(out, "Epoch %d, Test Accuracy: %.2f%%\n", p.Epoch+1, 100*v.Value)
				}
			}
			return nil
		},
	}
}
