package program

import (
	"context"
	"fmt"
	"os"
	"runtime"
	"strconv"

	"github.com/goddp/goddp/launch"
	"github.com/goddp/goddp/torchddp"
	"github.com/spf13/pflag"
	"github.com/sugarme/gotch"
)

// Ranks says how many ranks a program starts and what they compute on.
type Ranks struct {
	Flag       string // the name of the flag for Count: "nproc-per-node", or "world-size" as in the tutorial
	Count      string // a number, gpu, cpu or auto
	Backend    string // auto, nccl or gloo
	MasterPort int
}

func (r *Ranks) bind(flags *pflag.FlagSet) {
	flags.StringVar(&r.Count, r.Flag, "auto", "ranks to start on this machine: a number, gpu, cpu, or auto (one a GPU; 2 without a GPU)")
	flags.StringVar(&r.Backend, "backend", "auto", "auto, nccl or gloo")
	flags.IntVar(&r.MasterPort, "master-port", 0, "port of the ranks' meeting point; 0 takes a free one (the tutorials' is 12355)")
	// torch.distributed.launch gives it to each rank; LOCAL_RANK, which it sets as well, says the same.
	flags.Int("local-rank", -1, "")
	if err := flags.MarkHidden("local-rank"); err != nil {
		panic(err) // only where there is no such flag
	}
}

func (r *Ranks) check() error {
	switch {
	case r.Backend != "auto" && r.Backend != "nccl" && r.Backend != "gloo":
		return fmt.Errorf("--backend must be auto, nccl or gloo, got %q", r.Backend)
	case r.MasterPort < 0 || r.MasterPort > 65535:
		return fmt.Errorf("--master-port must lie between 0 and 65535, got %d", r.MasterPort)
	}
	return nil
}

// agree refuses a --world-size that is not the job's. A number of ranks for each machine has nothing to say in a rank.
func (r *Ranks) agree(env launch.Env) error {
	n, err := strconv.Atoi(r.Count)
	if err != nil || r.Flag != "world-size" || n == env.WorldSize {
		return nil
	}
	return fmt.Errorf("--world-size is %d, but this job was started with %d ranks: leave the flag out, or start that many", n, env.WorldSize)
}

// here tells how many ranks to start on this machine, and why.
func (r *Ranks) here() (n int, why string, err error) {
	gpus := launch.GPUs()
	if r.Count != "auto" {
		if n, why, err = launch.NProcPerNode(r.Count); err != nil {
			return 0, "", fmt.Errorf("--%s: %w", r.Flag, err)
		}
	} else if n = gpus.Count(); n == 0 {
		n, why = 2, "no GPU: "+gpus.Reason
	}
	if !r.NCCL() {
		return n, fmt.Sprintf("Training with %d Gloo ranks on the CPU: %s", n, why), nil
	}
	if n > gpus.Count() {
		return 0, "", fmt.Errorf("%d NCCL ranks need %d GPUs, and there are %d here (%s); lower --%s or use --backend gloo",
			n, n, gpus.Count(), gpus, r.Flag)
	}
	return n, fmt.Sprintf("Training on %d GPUs, one NCCL rank each", n), nil
}

// threads shares out the cores. The launchers' own rule, one thread a rank, is for ranks with a GPU each.
func (r *Ranks) threads(n int) []string {
	if r.NCCL() || os.Getenv("OMP_NUM_THREADS") != "" {
		return nil
	}
	return []string{fmt.Sprintf("OMP_NUM_THREADS=%d", Threads(n))}
}

// Threads is a rank's share of the cores.
func Threads(n int) int { return max(1, runtime.NumCPU()/n) }

// NCCL tells whether the ranks train on GPUs.
func (r *Ranks) NCCL() bool {
	if r.Backend == "auto" {
		return torchddp.IsNCCLAvailable() && launch.GPUs().Count() > 0
	}
	return r.Backend == "nccl"
}

// join makes this process a rank of the group.
func (r *Ranks) join(ctx context.Context, env launch.Env) (*torchddp.ProcessGroup, error) {
	o := torchddp.InitOptions{Backend: torchddp.Gloo, Device: gotch.CPU}
	if r.NCCL() {
		gpu, err := env.GPU(launch.GPUs().Count())
		if err != nil {
			return nil, err
		}
		o = torchddp.InitOptions{Backend: torchddp.NCCL, Device: gotch.CudaBuilder(uint(gpu))}
	}
	return torchddp.InitProcessGroup(ctx, o)
}
