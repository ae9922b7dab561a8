// Command mnist is the tutorial's MNIST job in Go: it trains SimpleNet with DistributedDataParallel and Adam on the
// digits, and tells each rank's average loss and the test accuracy of every epoch.
//
//	go run ./cmd/mnist --download
//	go run ./cmd/mnist --synthetic
//
// Started plainly it starts its ranks itself, one a GPU, or two on the CPU; under torchrun, goddp run, Slurm or
// Kubernetes it is one rank of the job that they started.
package main

import (
	"context"
	"fmt"
	"os"

	"github.com/goddp/goddp/cmd/internal/program"
	"github.com/goddp/goddp/data/vision"
	"github.com/goddp/goddp/launch"
	"github.com/goddp/goddp/train"
	"github.com/spf13/pflag"
)

// config is what the command line says. What is set before it is read are the tutorial's values.
type config struct {
	flags  train.Flags
	ranks  program.Ranks
	images program.Images

	batchSize, workers int
	lr                 float64
	seed               uint64
	plain, curriculum  bool
}

const usage = `Trains the tutorial's SimpleNet on MNIST with DistributedDataParallel: Adam, cross entropy, 2 epochs in batches of 64 on each
rank. It wants MNIST's four files in --data; fetch them with --download, or do without by --synthetic.`

func main() { os.Exit(launch.Main(run)) }

func run(ctx context.Context) error {
	c := config{
		flags:  train.Flags{Epochs: 2, LogEvery: 100, Progress: "off"},
		ranks:  program.Ranks{Flag: "nproc-per-node"},
		images: program.Images{Load: vision.MNIST},
	}
	return program.Command{
		Name: "mnist", Usage: usage, Bind: c.bind, Check: c.check, Ranks: &c.ranks, Prepare: c.images.Prepare, JSON: &c.flags.JSON,
		Rank: c.rank,
	}.Run(ctx)
}

func (c *config) bind(flags *pflag.FlagSet) {
	c.images.Bind(flags)
	flags.IntVar(&c.batchSize, "batch-size", 64, "images in a batch of each rank")
	flags.IntVar(&c.workers, "workers", 0, "goroutines of each rank that prepare batches; 0 prepares them between the steps")
	flags.Float64Var(&c.lr, "lr", 1e-3, "learning rate of one rank alone; see --plain")
	flags.Uint64Var(&c.seed, "seed", 0, "seeds the first weights, on every rank alike")
	flags.BoolVar(&c.plain, "plain", false, "train to the letter of the tutorial: "+
		"pixels from 0 to 1, not mean 0 and deviation 1; the rate as given and constant, not times the ranks and falling "+
		"along a cosine. It then comes to 97 % a little later")
	flags.BoolVar(&c.curriculum, "curriculum", false, "begin with the easier half of the images and come to all of them in the last epoch")
	c.flags.Bind(flags)
}

func (c *config) check() error {
	switch {
	case c.batchSize < 1:
		return fmt.Errorf("--batch-size must be positive, got %d", c.batchSize)
	case c.workers < 0:
		return fmt.Errorf("--workers must not be negative, got %d", c.workers)
	case !(c.lr > 0):
		return fmt.Errorf("--lr must be positive, got %v", c.lr)
	}
	if err := c.images.Check(); err != nil {
		return err
	}
	return c.flags.Check()
}
