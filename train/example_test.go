package train_test

import (
	"context"
	"fmt"
	"os"
	"runtime"

	"github.com/goddp/goddp/data"
	"github.com/goddp/goddp/models"
	"github.com/goddp/goddp/models/nn"
	"github.com/goddp/goddp/torchddp"
	"github.com/goddp/goddp/torchddp/optim"
	"github.com/goddp/goddp/train"
	"github.com/goddp/goddp/train/report"
)

// The tutorial's model on one rank of one. In a job, launch.Run calls such a function in every rank, and
// InitProcessGroup takes its place from the environment.
func Example() {
	run := func(ctx context.Context) error {
		store, err := torchddp.NewHashStore()
		if err != nil {
			return err
		}
		defer store.Close()
		pg, err := torchddp.InitProcessGroup(ctx, torchddp.InitOptions{Store: store, WorldSize: 1, GlooInterfaces: []string{"lo"}})
		if err != nil {
			return err
		}
		defer pg.Destroy()
		if err := torchddp.ManualSeed(0); err != nil {
			return err
		}
		set, err := data.NewRandomToy(256)
		if err != nil {
			return err
		}
		defer set.Close()
		model, err := models.NewToyNet()
		if err != nil {
			return err
		}
		ddp, err := torchddp.NewDDP(model, pg, torchddp.DDPOptions{})
		if err != nil {
			return err
		}
		defer ddp.Close()
		optimizer, err := optim.NewSGD(model.NamedParameters(), optim.SGDOptions{LR: 0.05})
		if err != nil {
			return err
		}
		defer optimizer.Close()
		sampler, err := data.NewDistributedSampler(set.Len(), data.DistributedOptions{Replicas: pg.Size(), Rank: pg.Rank()})
		if err != nil {
			return err
		}
		loader, err := data.NewDataLoader(set, data.Options{BatchSize: 32, Sampler: sampler})
		if err != nil {
			return err
		}
		defer loader.Close()

		trainer, err := train.New(train.Task[*data.Batch]{
			Model: ddp, Optimizer: optimizer, Train: loader, Step: train.Supervised(nn.MSELoss{}),
		}, train.Options{
			Epochs: 2,
			Callbacks: []train.Callback{{AfterEpoch: func(p *train.Progress, own, all report.Epoch) error {
				fmt.Printf("epoch %d, %d steps, %s %.3f\n", p.Epoch, p.Step, all.Train[0].Name, all.Train[0].Value)
				return nil
			}}},
		})
		if err != nil {
			return err
		}
		return trainer.Run(ctx)
	}
	runtime.LockOSThread() // package launch does it for a rank
	defer runtime.UnlockOSThread()
	if err := run(context.Background()); err != nil {
		fmt.Fprintln(os.Stderr, err)
	}
	// Output:
	// epoch 0, 8 steps, loss 0.123
	// epoch 1, 8 steps, loss 0.113
}
