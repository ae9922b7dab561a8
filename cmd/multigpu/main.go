// Command multigpu is the tutorial's multigpu.py in Go: it trains a small model with DistributedDataParallel, one
// rank a GPU, or two ranks on the CPU.
//
//	go run ./cmd/multigpu 50 10
//
// runs 50 epochs and saves a checkpoint every 10. Started plainly it starts its ranks itself; under torchrun, Slurm or
// Kubernetes it is one rank of the job that they started.
//
// With --snapshot it goes on where it was stopped, as the tutorial's multigpu_torchrun.py does:
//
//	go run ./cmd/goddp run --nproc-per-node 2 --max-restarts 3 bin/multigpu 50 10 --snapshot snapshot.pt
package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"

	"github.com/goddp/goddp/checkpoint"
	"github.com/goddp/goddp/launch"
	"github.com/goddp/goddp/torchddp"
	"github.com/spf13/pflag"
)

// config is what the command line says.
type config struct {
	totalEpochs, saveEvery int

	batchSize    int
	nprocPerNode string
	backend      string
	checkpoint   string
	snapshot     string
	lr           float64
	seed         uint64
	loss         string
	datasetSize  int
	masterPort   int
	batchNorm    bool
	syncBN       bool
}

const usage = `Trains the tutorial's model, Linear(20, 1), with DistributedDataParallel.

Usage:
  multigpu [flags] TOTAL_EPOCHS SAVE_EVERY

  TOTAL_EPOCHS  how many epochs to train
  SAVE_EVERY    how often to save a checkpoint, in epochs

Flags:
`

// parseArgs reads the command line. Its error is what the user did wrong.
func parseArgs(args []string, out io.Writer) (config, error) {
	var c config
	flags := pflag.NewFlagSet("multigpu", pflag.ContinueOnError)
	flags.SortFlags = false
	flags.SetOutput(io.Discard)
	flags.IntVar(&c.batchSize, "batch-size", 32, "input batch size on each rank")
	flags.StringVar(&c.nprocPerNode, "nproc-per-node", "auto", "ranks on this machine: a number, gpu, cpu, or auto (one a GPU; 2 without a GPU)")
	flags.StringVar(&c.backend, "backend", "auto", "auto, nccl or gloo")
	flags.StringVar(&c.checkpoint, "checkpoint", "checkpoint.pt", "where rank 0 saves the model; torch.load reads it")
	flags.StringVar(&c.snapshot, "snapshot", "", "where rank 0 saves the whole state of the run instead; a run that finds the file goes on from it")
	flags.BoolVar(&c.batchNorm, "batch-norm", false, "put a batch norm layer in front of the model")
	flags.BoolVar(&c.syncBN, "sync-bn", false, "the same, with statistics over the batches of all ranks (SyncBatchNorm)")
	flags.Float64Var(&c.lr, "lr", 1e-3, "learning rate")
	flags.Uint64Var(&c.seed, "seed", 0, "seeds the data set and the first weights, on every rank alike")
	flags.StringVar(&c.loss, "loss", "cross_entropy", "cross_entropy or mse. The tutorial's cross entropy over one output is always 0, so its model stays as it began; mse learns")
	flags.IntVar(&c.datasetSize, "dataset-size", 2048, "number of random samples")
	flags.IntVar(&c.masterPort, "master-port", 0, "port of the ranks' meeting point; 0 takes a free one (the tutorial's is 12355)")
	help := func() { fmt.Fprint(out, usage+flags.FlagUsages()) }
	if err := flags.Parse(args); err != nil {
		if errors.Is(err, pflag.ErrHelp) {
			help()
		}
		return c, err
	}
	bad := func(format string, a ...any) (config, error) { return c, fmt.Errorf(format, a...) }
	if flags.NArg() != 2 {
		return bad("need TOTAL_EPOCHS and SAVE_EVERY, got %d arguments", flags.NArg())
	}
	for i, p := range []struct {
		name string
		dst  *int
	}{{"TOTAL_EPOCHS", &c.totalEpochs}, {"SAVE_EVERY", &c.saveEvery}} {
		n, err := strconv.Atoi(flags.Arg(i))
		if err != nil || n < 1 {
			return bad("%s must be a positive whole number, got %q", p.name, flags.Arg(i))
		}
		*p.dst = n
	}
	switch {
	case c.batchSize < 1:
		return bad("--batch-size must be positive, got %d", c.batchSize)
	case c.datasetSize < 1:
		return bad("--dataset-size must be positive, got %d", c.datasetSize)
	case c.backend != "auto" && c.backend != "nccl" && c.backend != "gloo":
		return bad("--backend must be auto, nccl or gloo, got %q", c.backend)
	case c.loss != "cross_entropy" && c.loss != "mse":
		return bad("--loss must be cross_entropy or mse, got %q", c.loss)
	case !(c.lr >= 0):
		return bad("--lr must not be negative, got %v", c.lr)
	case c.masterPort < 0 || c.masterPort > 65535:
		return bad("--master-port must lie between 0 and 65535, got %d", c.masterPort)
	}
	return c, nil
}

func main() { os.Exit(launch.Main(run)) }

func run(ctx context.Context) error {
	c, err := parseArgs(os.Args[1:], os.Stdout)
	if errors.Is(err, pflag.ErrHelp) {
		return nil
	}
	if err != nil {
		fmt.Fprintf(os.Stderr, "multigpu: %v\nRun multigpu --help for usage.\n", err)
		return launch.Exit(2)
	}
	env, inRank, err := launch.FromEnv()
	if err != nil {
		return err
	}
	if !inRank || env.Rank == 0 {
		// Known before hours of training, not after.
		if err := checkpoint.CheckWritable(cmp.Or(c.snapshot, c.checkpoint)); err != nil {
			return fmt.Errorf("the checkpoint cannot be saved: %w", err)
		}
	}
	ranks := 0
	if !inRank {
		var why string
		if ranks, why, err = c.ranks(); err != nil {
			fmt.Fprintf(os.Stderr, "multigpu: %v\n", err)
			return launch.Exit(2)
		}
		fmt.Println(why)
	}
	return launch.Run(ctx, ranks, func(ctx context.Context, env launch.Env) error { return trainRank(ctx, env, c) },
		launch.SpawnOptions{MasterPort: c.masterPort, Prefix: launch.PrefixOff})
}

// ranks tells how many ranks to start on this machine, and why.
func (c config) ranks() (n int, why string, err error) {
	gpus := launch.GPUs()
	backend := c.backendFor(gpus.Count() > 0 && torchddp.IsNCCLAvailable())
	if c.nprocPerNode != "auto" {
		if n, why, err = launch.NProcPerNode(c.nprocPerNode); err != nil {
			return 0, "", fmt.Errorf("--nproc-per-node: %w", err)
		}
	} else if n = gpus.Count(); n == 0 {
		n, why = 2, "no GPU: "+gpus.Reason
	}
	if backend == "nccl" {
		if gpus.Count() == 0 {
			return 0, "", fmt.Errorf("the nccl backend needs a GPU, and there is none here (%s); use --backend gloo", gpus.Reason)
		}
		if n > gpus.Count() {
			return 0, "", fmt.Errorf("%d NCCL ranks need %d GPUs, and there are %d; lower --nproc-per-node or use --backend gloo", n, n, gpus.Count())
		}
		return n, fmt.Sprintf("Training on %d GPUs, one NCCL rank each", n), nil
	}
	return n, fmt.Sprintf("Training with %d Gloo ranks on the CPU: %s", n, why), nil
}

// backendFor resolves "auto".
func (c config) backendFor(gpu bool) string {
	if c.backend != "auto" {
		return c.backend
	}
	if gpu {
		return "nccl"
	}
	return "gloo"
}
