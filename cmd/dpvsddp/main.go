// Command dpvsddp holds DataParallel against DistributedDataParallel, as the tutorial does in words: the same network, the
// same batches and the same number of devices, once in one process that uses them all, once with a process for each. It
// prints how long a step takes, how much memory that needs and how many weights are copied about, and how far the two
// trained weights are from each other.
//
//	go run ./cmd/dpvsddp --arch resnet18
//
// On a machine without a GPU both sides train CPU replicas. Started plainly it starts its ranks itself; under torchrun,
// goddp run or Slurm it is one rank of the job that they started, on one machine.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"

	"github.com/goddp/goddp/cmd/internal/program"
	"github.com/goddp/goddp/launch"
	"github.com/goddp/goddp/models"
	"github.com/spf13/pflag"
)

// config is what the command line says.
type config struct {
	ranks program.Ranks

	arch                         string
	batchSize                    int64
	rounds, steps, warmup, image int
	lr                           float64
	seed                         uint64
}

const usage = `Compares DataParallel with DistributedDataParallel: the same network, the same batches, the same number of devices.`

// simpleNet is the one network that is no ResNet: small enough that copying weights is most of DataParallel's work.
const simpleNet = "simplenet"

func main() { os.Exit(launch.Main(run)) }

func run(ctx context.Context) error {
	c := config{ranks: program.Ranks{Flag: "nproc-per-node"}}
	command := program.Command{Name: "dpvsddp", Usage: usage, Bind: c.bind, Check: c.check, Ranks: &c.ranks, Rank: c.rank}
	if dir := os.Getenv(childVar); dir != "" {
		// Rank 0 started this process for DataParallel's side, with its own arguments.
		if err := command.Parse(os.Args[1:], os.Stdout); err != nil {
			return err
		}
		return c.childMain(ctx, dir)
	}
	return command.Run(ctx)
}

func (c *config) bind(flags *pflag.FlagSet) {
	flags.StringVar(&c.arch, "arch", "resnet18", "the network: simplenet, or a ResNet by torchvision's name")
	flags.Int64Var(&c.batchSize, "batch-size", 64, "images in a batch of all devices together")
	flags.IntVar(&c.image, "image-size", 32, "height and width of the images; simplenet's are 28")
	flags.IntVar(&c.rounds, "rounds", 5, "rounds that are measured, of which the median counts")
	flags.IntVar(&c.steps, "steps", 4, "steps of a round; devices are waited for at its end")
	flags.IntVar(&c.warmup, "warmup", 2, "steps before that")
	flags.Float64Var(&c.lr, "lr", 0.01, "SGD's learning rate")
	flags.Uint64Var(&c.seed, "seed", 0, "seeds weights and images")
}

func (c *config) check() error {
	if c.arch != simpleNet && !slices.Contains(models.ResNets(), c.arch) {
		return fmt.Errorf("--arch must be %s or one of %v, got %q", simpleNet, models.ResNets(), c.arch)
	}
	if c.arch == simpleNet {
		c.image = 28
	}
	for _, f := range []struct {
		name string
		v    int64
	}{{"batch-size", c.batchSize}, {"image-size", int64(c.image)}, {"rounds", int64(c.rounds)}, {"steps", int64(c.steps)}} {
		if f.v < 1 {
			return fmt.Errorf("--%s must be positive, got %d", f.name, f.v)
		}
	}
	if c.warmup < 0 {
		return fmt.Errorf("--warmup must not be negative, got %d", c.warmup)
	}
	if !(c.lr > 0) {
		return errors.New("--lr must be positive")
	}
	return nil
}
