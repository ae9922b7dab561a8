// Command elastic is the program that the launcher's tests run on several nodes: it trains Linear(20, 1) with
// DistributedDataParallel on a data set that every rank can compute, saves a snapshot after every step, goes on from it when it is
// started again, and can be told to die.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"math"
	"os"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/goddp/goddp/checkpoint"
	"github.com/goddp/goddp/internal/tdp"
	"github.com/goddp/goddp/launch"
	"github.com/goddp/goddp/models"
	"github.com/goddp/goddp/models/nn"
	"github.com/goddp/goddp/torchddp"
	"github.com/goddp/goddp/torchddp/optim"
	"github.com/sugarme/gotch"
	"github.com/sugarme/gotch/ts"
)

var (
	steps    = flag.Int("steps", 20, "training steps")
	pause    = flag.Duration("pause", 0, "sleep in every step")
	snapshot = flag.String("snapshot", "", "where rank 0 saves after each step, and all ranks begin")
	die      = flag.String("die", "", "RANK:STEP:ATTEMPT,…: that rank kills itself before that step of that attempt (*: every one)")
)

func main() {
	flag.Parse()
	os.Exit(launch.Main(func(ctx context.Context) error { return launch.Run(ctx, 2, train) }))
}

func train(ctx context.Context, env launch.Env) (err error) {
	pg, err := torchddp.InitProcessGroup(ctx, torchddp.InitOptions{Backend: torchddp.Gloo, Timeout: 20 * time.Second})
	if err != nil {
		return err
	}
	defer func() {
		if err == nil {
			err = pg.Destroy()
		}
	}()
	if err := torchddp.ManualSeed(7); err != nil {
		return err
	}
	model, err := models.NewToyNet()
	if err != nil {
		return err
	}
	opt, err := optim.NewSGD(model.NamedParameters(), optim.SGDOptions{LR: 0.05, Momentum: 0.9})
	if err != nil {
		return err
	}
	first := 0
	switch v, err := checkpoint.Load(*snapshot, checkpoint.LoadOptions{}); {
	case errors.Is(err, fs.ErrNotExist):
	case err != nil:
		return err
	default:
		s, err := checkpoint.SnapshotOf(v)
		if err != nil {
			return err
		}
		if err := s.Restore(model, opt, nil, nil, nil); err != nil {
			return err
		}
		first = int(s.Step)
	}
	ddp, err := torchddp.NewDDP(model, pg, torchddp.DDPOptions{})
	if err != nil {
		return err
	}
	defer ddp.Close()
	fmt.Printf("begin step %d rank %d world %d attempt %d\n", first, env.Rank, env.WorldSize, env.RestartCount)

	loss := nn.MSELoss{}
	for step := first; step < *steps; step++ {
		if dies(env, step) {
			fmt.Println("dying before step", step)
			syscall.Kill(os.Getpid(), syscall.SIGKILL)
			select {}
		}
		x, y, err := batch(step, env.Rank, env.WorldSize)
		if err != nil {
			return err
		}
		if err := opt.ZeroGrad(true); err != nil {
			return err
		}
		out, err := ddp.Forward(x)
		if err != nil {
			return err
		}
		l := loss.Forward(out, y)
		if err := ddp.Backward(l); err != nil {
			return err
		}
		if err := opt.Step(); err != nil {
			return err
		}
		for _, t := range []interface{ MustDrop() }{x, y, out, l} {
			t.MustDrop()
		}
		if env.Rank == 0 {
			s, err := checkpoint.Capture(0, int64(step+1), model, opt, nil, nil, nil)
			if err != nil {
				return err
			}
			if err := checkpoint.Save(*snapshot, s.Value()); err != nil {
				return err
			}
			fmt.Println("step", step, "done")
		}
		// Nobody goes on before the snapshot is there, so that all begin alike after a restart.
		if err := pg.Barrier(); err != nil {
			return err
		}
		time.Sleep(*pause)
	}
	if env.Rank == 0 {
		for name, t := range model.NamedParameters() {
			v, err := tdp.ToSlice[float32](t)
			if err != nil {
				return err
			}
			var bits []string
			for _, f := range v {
				bits = append(bits, fmt.Sprintf("%08x", math.Float32bits(f)))
			}
			fmt.Println("final", name, strings.Join(bits, " "))
		}
	}
	return nil
}

// dies says whether this rank is to kill itself now.
func dies(env launch.Env, step int) bool {
	if *die == "" {
		return false
	}
	for part := range strings.SplitSeq(*die, ",") {
		f := strings.Split(part, ":")
		if f[0] == strconv.Itoa(env.Rank) && f[1] == strconv.Itoa(step) && (f[2] == "*" || f[2] == strconv.Itoa(env.RestartCount)) {
			return true
		}
	}
	return false
}

// batch is a rank's part of a step's 8 samples: any number of ranks that divides 8 sees the same samples together.
func batch(step, rank, world int) (x, y *ts.Tensor, err error) {
	const all, in = 8, 20
	var xs, ys []float32
	n := all / world
	for i := rank * n; i < (rank+1)*n; i++ {
		sum := float32(0)
		for j := range in {
			v := float32(math.Sin(float64(step*all+i)*0.7 + float64(j)*1.3))
			xs, sum = append(xs, v), sum+v*float32(j-8)/10
		}
		ys = append(ys, sum)
	}
	if x, err = tdp.FromSlice(xs, []int64{int64(n), in}, gotch.CPU); err != nil {
		return nil, nil, err
	}
	y, err = tdp.FromSlice(ys, []int64{int64(n), 1}, gotch.CPU)
	return x, y, err
}
