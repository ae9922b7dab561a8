// Command single trains the tutorial's model in one process, on one device. It is where the series single, multi,
// launcher, nodes begins; docs/tutorial explains it step by step.
//
//	go run ./cmd/tutorial/single TOTAL_EPOCHS SAVE_EVERY
package main

import (
	"context"
	"fmt"
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
	model     nn.Module
	loader    *data.DataLoader[*data.Batch]
	optimizer *optim.SGD
	label     string
	saveEvery int
}

func (t *trainer) runBatch(source, targets *ts.Tensor) error {
	if err := t.optimizer.ZeroGrad(true); err != nil {
		return err
	}
	output, err := nn.Forward(t.model, source, true)
	if err != nil {
		return err
	}
	defer output.MustDrop()
	loss := nn.MSELoss{}.Forward(output, targets)
	defer loss.MustDrop()
	if err := loss.Backward(); err != nil {
		return err
	}
	return t.optimizer.Step()
}

func (t *trainer) runEpoch(ctx context.Context, epoch int) error {
	fmt.Printf("[%s] Epoch %d | Steps: %d\n", t.label, epoch, t.loader.Len())
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

func (t *trainer) saveCheckpoint(epoch int) error {
	if err := checkpoint.Save("checkpoint.pt", checkpoint.ModuleState(t.model)); err != nil {
		return err
	}
	fmt.Printf("Epoch %d | Training checkpoint saved at checkpoint.pt\n", epoch)
	return nil
}

func (t *trainer) train(ctx context.Context, totalEpochs int) error {
	for epoch := 0; epoch < totalEpochs; epoch++ {
		if err := t.runEpoch(ctx, epoch); err != nil {
			return err
		}
		if epoch%t.saveEvery == 0 {
			if err := t.saveCheckpoint(epoch); err != nil {
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
	return data.NewDataLoader(set, data.Options{BatchSize: 32, Shuffle: true, Device: device})
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
	device, kind := pick(0)
	set, model, optimizer, err := loadTrainObjs(device)
	if err != nil {
		return err
	}
	loader, err := prepareDataLoader(set, device)
	if err != nil {
		return err
	}
	defer loader.Close()
	t := &trainer{model: model, loader: loader, optimizer: optimizer, label: kind + "0", saveEvery: saveEvery}
	return t.train(ctx, totalEpochs)
}

func main() { os.Exit(launch.Main(run)) }
