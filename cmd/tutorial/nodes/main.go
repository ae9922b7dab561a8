// Command nodes trains the tutorial's model as one rank of a job over several machines. It follows launcher;
// docs/tutorial explains the difference.
//
//	goddp run --nnodes 2 --node-rank N --master-addr HOST --nproc-per-node 2 nodes TOTAL_EPOCHS SAVE_EVERY
package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strconv"

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

type trainer struct {
	model     *torchddp.DDP
	module    nn.Module
	loader    *data.DataLoader[*data.Batch]
	optimizer *optim.SGD
	rank      int
	label     string
	saveEvery int
	epochsRun int
}

func (t *trainer) runBatch(source, targets *ts.Tensor) error {
	if err := t.optimizer.ZeroGrad(true); err != nil {
		return err
	}
	output, err := t.model.Forward(source)
	if err != nil {
		return err
	}
	defer output.MustDrop()
	loss := nn.MSELoss{}.Forward(output, targets)
	defer loss.MustDrop()
	if err := t.model.Backward(loss); err != nil {
		return err
	}
	return t.optimizer.Step()
}

func (t *trainer) runEpoch(ctx context.Context, epoch int) error {
	fmt.Printf("[%s] Epoch %d | Steps: %d\n", t.label, epoch, t.loader.Len())
	t.loader.SetEpoch(epoch)
	for batch, err := range t.loader.All(ctx) {
		if err != nil {
			return err
		}
		if err := t.runBatch(batch.Input(), batch.Target()); err != nil {
			return err
		}
	}
	return nil
}

func (t *trainer) saveSnapshot(epoch int) error {
	snapshot := checkpoint.Snapshot{Model: checkpoint.ModuleState(t.module), Epoch: int64(epoch) + 1}
	if err := checkpoint.Save("snapshot.pt", snapshot.Value()); err != nil {
		return err
	}
	fmt.Printf("Epoch %d | Training snapshot saved at snapshot.pt\n", epoch)
	return nil
}

func (t *trainer) loadSnapshot() error {
	value, err := checkpoint.Load("snapshot.pt", checkpoint.LoadOptions{MapLocation: checkpoint.MapTo(gotch.CPU)})
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	} else if err != nil {
		return err
	}
	snapshot, err := checkpoint.SnapshotOf(value)
	if err != nil {
		return err
	}
	t.epochsRun = int(snapshot.Epoch)
	fmt.Printf("[%s] Resuming training from snapshot at Epoch %d\n", t.label, t.epochsRun)
	return snapshot.Restore(t.module, nil, nil, nil, nil)
}

func (t *trainer) train(ctx context.Context, totalEpochs int) error {
	for epoch := t.epochsRun; epoch < totalEpochs; epoch++ {
		if err := t.runEpoch(ctx, epoch); err != nil {
			return err
		}
		if t.rank == 0 && epoch%t.saveEvery == 0 {
			if err := t.saveSnapshot(epoch); err != nil {
				return err
			}
		}
	}
	return nil
}

func loadTrainObjs(device gotch.Device) (*data.TensorDataset, nn.Module, *optim.SGD, error) {
	if err := torchddp.ManualSeed(0); err != nil {
		return nil, nil, nil, err
	}
	set, err := data.NewRandomToy(2048) // load your data set
	if err != nil {
		return nil, nil, nil, err
	}
	model, err := models.NewToyNet() // load your model
	if err != nil {
		return nil, nil, nil, err
	}
	if err := model.To(device, gotch.Float); err != nil {
		return nil, nil, nil, err
	}
	optimizer, err := optim.NewSGD(model.NamedParameters(), optim.SGDOptions{LR: 0.01})
	return set, model, optimizer, err
}

func prepareDataLoader(set data.Source, device gotch.Device) (*data.DataLoader[*data.Batch], error) {
	sampler, err := data.NewDistributedSampler(set.Len(), data.DistributedOptions{})
	if err != nil {
		return nil, err
	}
	return data.NewDataLoader(set, data.Options{BatchSize: 32, Sampler: sampler, Device: device})
}

// pick gives the GPU of this number, or the CPU where there is none.
func pick(gpu int) (device gotch.Device, kind string) {
	if launch.GPUs().Count() > 0 && torchddp.IsNCCLAvailable() {
		return gotch.CudaBuilder(uint(gpu)), "GPU"
	}
	return gotch.CPU, "CPU"
}

func run(ctx context.Context) error {
	if len(os.Args) != 3 {
		return fmt.Errorf("usage: %s TOTAL_EPOCHS SAVE_EVERY", os.Args[0])
	}
	totalEpochs, err1 := strconv.Atoi(os.Args[1])
	saveEvery, err2 := strconv.Atoi(os.Args[2])
	if err1 != nil || err2 != nil || saveEvery < 1 {
		return fmt.Errorf("TOTAL_EPOCHS and SAVE_EVERY must be whole numbers, got %q", os.Args[1:])
	}
	env, found, err := launch.FromEnv()
	if err == nil && !found {
		err = errors.New("no launcher has started this process: goddp run --nproc-per-node 2 nodes 50 10")
	}
	if err != nil {
		return err
	}
	return trainRank(ctx, env, totalEpochs, saveEvery)
}

func trainRank(ctx context.Context, env launch.Env, totalEpochs, saveEvery int) error {
	device, kind := pick(env.LocalRank)
	pg, err := torchddp.InitProcessGroup(ctx, torchddp.InitOptions{Device: device})
	if err != nil {
		return err
	}
	defer pg.Destroy()
	set, model, optimizer, err := loadTrainObjs(device)
	if err != nil {
		return err
	}
	loader, err := prepareDataLoader(set, device)
	if err != nil {
		return err
	}
	defer loader.Close()
	t := &trainer{module: model, loader: loader, optimizer: optimizer, rank: env.Rank, label: kind + strconv.Itoa(env.Rank), saveEvery: saveEvery}
	if env.Rank == 0 {
		err = t.loadSnapshot()
	}
	if err != nil {
		return err
	}
	if t.epochsRun, err = torchddp.BroadcastObject(pg, t.epochsRun, 0); err != nil {
		return err
	}
	if t.model, err = torchddp.NewDDP(model, pg, torchddp.DDPOptions{}); err != nil {
		return err
	}
	defer t.model.Close()
	return t.train(ctx, totalEpochs)
}

func main() { os.Exit(launch.Main(run)) }
