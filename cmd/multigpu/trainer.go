package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"

	"github.com/goddp/goddp/checkpoint"
	"github.com/goddp/goddp/data"
	"github.com/goddp/goddp/launch"
	"github.com/goddp/goddp/models"
	"github.com/goddp/goddp/models/nn"
	"github.com/goddp/goddp/torchddp"
	"github.com/goddp/goddp/torchddp/optim"
	"github.com/sugarme/gotch"
	"github.com/sugarme/gotch/ts"
)

// trainRank is what every rank does: the tutorial's main(rank, world_size, total_epochs, save_every).
func trainRank(ctx context.Context, env launch.Env, c config) (err error) {
	backend, device, label := torchddp.Gloo, gotch.CPU, fmt.Sprintf("CPU%d", env.Rank)
	if c.backendFor(launch.GPUs().Count() > 0 && torchddp.IsNCCLAvailable()) == "nccl" {
		backend, device, label = torchddp.NCCL, gotch.CudaBuilder(uint(env.LocalRank)), fmt.Sprintf("GPU%d", env.Rank)
	}
	pg, err := torchddp.InitProcessGroup(ctx, torchddp.InitOptions{Backend: backend, Device: device})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, pg.Destroy()) }()

	set, model, optimizer, err := loadTrainObjs(c, device)
	if err != nil {
		return err
	}
	loader, sampler, err := prepareDataLoader(set, c, pg)
	if err != nil {
		return err
	}
	defer loader.Close()

	trainer, err := newTrainer(model, loader, sampler, optimizer, pg, label, c)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, trainer.model.Close()) }()
	if err := trainer.loadSnapshot(); err != nil {
		return err
	}
	return trainer.train(ctx)
}

// loadTrainObjs makes the data set, the model and the optimizer, in the tutorial's order: with the same seed Python
// draws the same numbers.
func loadTrainObjs(c config, device gotch.Device) (*data.TensorDataset, nn.Module, *optim.SGD, error) {
	if err := torchddp.ManualSeed(c.seed); err != nil {
		return nil, nil, nil, err
	}
	set, err := data.NewRandomToy(c.datasetSize)
	if err != nil {
		return nil, nil, nil, err
	}
	model, err := newModel(c)
	if err != nil {
		return nil, nil, nil, err
	}
	if err := model.To(device, gotch.Float); err != nil {
		return nil, nil, nil, err
	}
	optimizer, err := optim.NewSGD(model.NamedParameters(), optim.SGDOptions{LR: c.lr})
	return set, model, optimizer, err
}

func newModel(c config) (nn.Module, error) {
	toy, err := models.NewToyNet()
	if err != nil || !c.batchNorm && !c.syncBN {
		return toy, err
	}
	norm, err := nn.NewBatchNorm1d(20, nn.BatchNormOptions{})
	if err != nil {
		return nil, err
	}
	return nn.NewSequential(norm, toy), nil
}

// prepareDataLoader gives this rank its share of the samples.
func prepareDataLoader(set *data.TensorDataset, c config, pg *torchddp.ProcessGroup) (*data.DataLoader[*data.Batch], *data.DistributedSampler, error) {
	sampler, err := data.NewDistributedSampler(set.Len(), data.DistributedOptions{Replicas: pg.Size(), Rank: pg.Rank()})
	if err != nil {
		return nil, nil, err
	}
	loader, err := data.NewDataLoader(set, data.Options{BatchSize: c.batchSize, Sampler: sampler, Device: pg.Device()})
	return loader, sampler, err
}

type trainer struct {
	model     *torchddp.DDP
	module    nn.Module
	loader    *data.DataLoader[*data.Batch]
	sampler   *data.DistributedSampler
	optimizer *optim.SGD
	loss      func(output, target *ts.Tensor) *ts.Tensor
	rank      int
	label     string // [GPU0] or [CPU0]
	config    config
	epochsRun int // before this start
}

func newTrainer(model nn.Module, loader *data.DataLoader[*data.Batch], sampler *data.DistributedSampler, optimizer *optim.SGD,
	pg *torchddp.ProcessGroup, label string, c config) (*trainer, error) {
	if c.syncBN {
		if _, err := torchddp.ConvertSyncBatchNorm(model, pg); err != nil {
			return nil, err
		}
	}
	ddp, err := torchddp.NewDDP(model, pg, torchddp.DDPOptions{})
	if err != nil {
		return nil, err
	}
	loss := nn.CrossEntropyLoss{}.Forward
	if c.loss == "mse" {
		loss = nn.MSELoss{}.Forward
	}
	return &trainer{ddp, model, loader, sampler, optimizer, loss, pg.Rank(), label, c, 0}, nil
}

func (t *trainer) train(ctx context.Context) error {
	for epoch := t.epochsRun; epoch < t.config.totalEpochs; epoch++ {
		if err := t.runEpoch(ctx, epoch); err != nil {
			return err
		}
		// The ranks' models are equal: one of them saves.
		if t.rank == 0 && epoch%t.config.saveEvery == 0 {
			if err := t.saveCheckpoint(epoch); err != nil {
				return err
			}
		}
	}
	return nil
}

func (t *trainer) runEpoch(ctx context.Context, epoch int) error {
	batchSize := min(t.config.batchSize, t.sampler.Len())
	fmt.Printf("[%s] Epoch %d | Batchsize: %d | Steps: %d\n", t.label, epoch, batchSize, t.loader.Len())
	t.sampler.SetEpoch(epoch) // without it every epoch would have the same order
	for batch, err := range t.loader.All(ctx) {
		if err != nil {
			return err
		}
		if err := t.runBatch(batch.Input(), batch.Target()); err != nil {
			return fmt.Errorf("epoch %d: %w", epoch, err)
		}
	}
	return nil
}

func (t *trainer) runBatch(source, target *ts.Tensor) error {
	if err := t.optimizer.ZeroGrad(true); err != nil {
		return err
	}
	output, err := t.model.Forward(source)
	if err != nil {
		return err
	}
	defer output.MustDrop()
	loss := t.loss(output, target)
	defer loss.MustDrop()
	if err := t.model.Backward(loss); err != nil {
		return err
	}
	return t.optimizer.Step()
}

func (t *trainer) saveCheckpoint(epoch int) error {
	if t.config.snapshot != "" {
		return t.saveSnapshot(epoch)
	}
	if err := checkpoint.Save(t.config.checkpoint, checkpoint.ModuleState(t.module)); err != nil {
		return err
	}
	fmt.Printf("Epoch %d | Training checkpoint saved at %s\n", epoch, t.config.checkpoint)
	return nil
}

// saveSnapshot saves what is needed to go on: the tutorial saves the model and the epoch, here the optimizer is with them.
func (t *trainer) saveSnapshot(epoch int) error {
	snapshot, err := checkpoint.Capture(int64(epoch)+1, 0, t.module, t.optimizer, nil, nil, nil)
	if err != nil {
		return err
	}
	if err := checkpoint.Save(t.config.snapshot, snapshot.Value()); err != nil {
		return err
	}
	fmt.Printf("Epoch %d | Training snapshot saved at %s\n", epoch, t.config.snapshot)
	return nil
}

// loadSnapshot goes on from the snapshot, on every rank alike, if there is one.
func (t *trainer) loadSnapshot() error {
	path := t.config.snapshot
	if _, err := os.Stat(path); path == "" || errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	device := t.model.ProcessGroup().Device()
	value, err := checkpoint.Load(path, checkpoint.LoadOptions{MapLocation: checkpoint.MapTo(device)})
	if err != nil {
		return err
	}
	snapshot, err := checkpoint.SnapshotOf(value)
	if err == nil {
		err = snapshot.Restore(t.module, t.optimizer, nil, nil, nil)
	}
	if err != nil {
		return fmt.Errorf("resuming from %s: %w", path, err)
	}
	t.epochsRun = int(snapshot.Epoch)
	fmt.Printf("[%s] Resuming training from snapshot at Epoch %d\n", t.label, t.epochsRun)
	return nil
}
