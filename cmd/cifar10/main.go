// Command cifar10 is the tutorial's CIFAR-10 job in Go: it trains a ResNet-50 with DistributedDataParallel and SGD on
// randomly cropped and flipped images, and tells each rank's loss and accuracy every 10 batches.
//
//	go run ./cmd/cifar10 --world-size 2 --download
//	go run ./cmd/cifar10 --arch resnet18 --synthetic --size 512 --snapshot snapshots --resume
//
// Started plainly it starts its ranks itself; under torchrun, goddp run, Slurm or Kubernetes it is one rank of the job
// that they started.
package main

import (
	"context"
	"fmt"
	"os"
	"slices"

	"github.com/goddp/goddp/cmd/internal/program"
	"github.com/goddp/goddp/data/vision"
	"github.com/goddp/goddp/launch"
	"github.com/goddp/goddp/models"
	"github.com/goddp/goddp/train"
	"github.com/spf13/pflag"
)

// config is what the command line says. What is set before it is read are the tutorial's values.
type config struct {
	flags  train.Flags
	ranks  program.Ranks
	images program.Images

	arch               string
	classes            int64
	cifarStem          bool
	batchSize, workers int
	evalEvery          int
	lr                 float64
	momentum           float64
	weightDecay        float64
	seed               uint64
	syncBN             bool
	channelsLast       bool
}

const usage = `Trains a ResNet on CIFAR-10 with DistributedDataParallel: SGD with momentum, cross entropy, random crops and flips. Every rank
tells its loss and accuracy every --log-every batches. It wants CIFAR-10's archive or folder in --data; fetch it with
--download, or do without by --synthetic.`

func main() { os.Exit(launch.Main(run)) }

func run(ctx context.Context) error {
	c := config{
		flags:  train.Flags{Epochs: 1, LogEvery: 10, Progress: "off"},
		ranks:  program.Ranks{Flag: "world-size"},
		images: program.Images{Load: vision.CIFAR10},
	}
	return program.Command{
		Name: "cifar10", Usage: usage, Bind: c.bind, Check: c.check, Ranks: &c.ranks, Prepare: c.images.Prepare, JSON: &c.flags.JSON,
		Rank: c.rank,
	}.Run(ctx)
}

func (c *config) bind(flags *pflag.FlagSet) {
	c.images.Bind(flags)
	flags.StringVar(&c.arch, "arch", "resnet50", "the network, by torchvision's name, such as resnet18 or wide_resnet50_2")
	flags.Int64Var(&c.classes, "classes", 10, "outputs of the network; the tutorial leaves torchvision's 1000")
	flags.BoolVar(&c.cifarStem, "cifar-stem", false, "begin with a 3x3 convolution and no pooling, which suits small images better")
	flags.IntVar(&c.batchSize, "batch-size", 128, "images in a batch of each rank")
	flags.IntVar(&c.workers, "workers", 8, "goroutines of each rank that prepare batches; 0 prepares them between the steps")
	flags.Float64Var(&c.lr, "lr", 0.1, "learning rate")
	flags.Float64Var(&c.momentum, "momentum", 0.9, "momentum")
	flags.Float64Var(&c.weightDecay, "weight-decay", 5e-4, "weight decay")
	flags.Uint64Var(&c.seed, "seed", 0, "seeds the first weights and the augmentation")
	flags.BoolVar(&c.syncBN, "sync-bn", false, "normalise over the batches of all ranks together")
	flags.BoolVar(&c.channelsLast, "channels-last", false, "lay images and weights out channels last, which tensor cores and oneDNN like")
	flags.IntVar(&c.evalEvery, "eval-every", 1, "epochs between evaluations with the test images; 0 is never")
	c.flags.Bind(flags)
}

func (c *config) check() error {
	switch {
	case !slices.Contains(models.ResNets(), c.arch):
		return fmt.Errorf("--arch must be one of %v, got %q", models.ResNets(), c.arch)
	case c.classes < 10:
		return fmt.Errorf("--classes must be at least the 10 that CIFAR-10 has, got %d", c.classes)
	case c.batchSize < 1:
		return fmt.Errorf("--batch-size must be positive, got %d", c.batchSize)
	case c.workers < 0:
		return fmt.Errorf("--workers must not be negative, got %d", c.workers)
	case c.evalEvery < 0:
		return fmt.Errorf("--eval-every must not be negative, got %d", c.evalEvery)
	case !(c.lr > 0):
		return fmt.Errorf("--lr must be positive, got %v", c.lr)
	case !(c.momentum >= 0):
		return fmt.Errorf("--momentum must not be negative, got %v", c.momentum)
	case !(c.weightDecay >= 0):
		return fmt.Errorf("--weight-decay must not be negative, got %v", c.weightDecay)
	}
	if err := c.images.Check(); err != nil {
		return err
	}
	return c.flags.Check()
}
