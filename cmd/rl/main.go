// Command rl is the tutorial's reinforcement learning in Go: it teaches a small network to balance CartPole's pole, by
// policy gradient (REINFORCE). Every rank plays its own episodes, of another seed; DistributedDataParallel averages the
// gradients.
//
//	go run ./cmd/rl --iterations 60
//	go run ./cmd/rl --iterations 120 --resume rl.pt
//
// Started plainly it starts its ranks itself; under torchrun, goddp run, Slurm or Kubernetes it is one rank of the job
// that they started.
package main

import (
	"context"
	"fmt"
	"os"

	"github.com/goddp/goddp/checkpoint"
	"github.com/goddp/goddp/cmd/internal/program"
	"github.com/goddp/goddp/launch"
	"github.com/spf13/pflag"
)

// config is what the command line says.
type config struct {
	ranks program.Ranks

	iterations, saveEvery, logEvery int

	envs               int
	hidden             int64
	lr, gamma          float64
	seed               uint64
	checkpoint, resume string
}

const usage = `Teaches a network to balance CartPole's pole by policy gradient (REINFORCE), with DistributedDataParallel. Every rank plays
its own episodes.`

func main() { os.Exit(launch.Main(run)) }

func run(ctx context.Context) error {
	c := config{ranks: program.Ranks{Flag: "nproc-per-node"}}
	return program.Command{
		Name: "rl", Usage: usage, Bind: c.bind, Check: c.check, Ranks: &c.ranks, Prepare: c.prepare, Rank: c.trainRank,
	}.Run(ctx)
}

func (c *config) bind(flags *pflag.FlagSet) {
	flags.IntVar(&c.iterations, "iterations", 60, "iterations in all, those before a resume included")
	flags.IntVar(&c.envs, "envs", 8, "episodes that each rank plays side by side in an iteration")
	flags.Int64Var(&c.hidden, "hidden", 128, "width of the network")
	flags.Float64Var(&c.lr, "lr", 1e-2, "Adam's learning rate")
	flags.Float64Var(&c.gamma, "gamma", 0.99, "what a reward one step later is worth")
	flags.Uint64Var(&c.seed, "seed", 0, "seeds the first weights, on every rank alike, and the episodes, on every rank differently")
	flags.StringVar(&c.checkpoint, "checkpoint", "rl.pt", "where rank 0 saves {iter_no, model, optimizer}; torch.load reads it")
	flags.IntVar(&c.saveEvery, "save-every", 20, "how often to save, in iterations; the last one is saved in any case")
	flags.StringVar(&c.resume, "resume", "", "a checkpoint to go on from")
	flags.IntVar(&c.logEvery, "log-every", 1, "how often rank 0 prints the loss and the return, in iterations")
}

// check tells what of the command line makes no sense.
func (c *config) check() error {
	for _, p := range []struct {
		name  string
		value int64
	}{{"iterations", int64(c.iterations)}, {"envs", int64(c.envs)}, {"hidden", c.hidden}, {"save-every", int64(c.saveEvery)}, {"log-every", int64(c.logEvery)}} {
		if p.value < 1 {
			return fmt.Errorf("--%s must be positive, got %d", p.name, p.value)
		}
	}
	switch {
	case !(c.lr >= 0):
		return fmt.Errorf("--lr must not be negative, got %v", c.lr)
	case !(c.gamma >= 0 && c.gamma <= 1):
		return fmt.Errorf("--gamma must lie between 0 and 1, got %v", c.gamma)
	}
	if c.resume != "" {
		if _, err := os.Stat(c.resume); err != nil {
			return fmt.Errorf("--resume: %w; start without it to train from the beginning", err)
		}
	}
	return nil
}

// prepare finds out before hours of training, not after.
func (c *config) prepare(context.Context) error {
	if err := checkpoint.CheckWritable(c.checkpoint); err != nil {
		return fmt.Errorf("the checkpoint cannot be saved: %w", err)
	}
	return nil
}
