package docs

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/goddp/goddp/checkpoint"
	"github.com/goddp/goddp/data/vision"
	"github.com/goddp/goddp/internal/testenv"
	"github.com/goddp/goddp/launch"
	"github.com/goddp/goddp/models"
	"github.com/goddp/goddp/models/nn"
	"github.com/goddp/goddp/torchddp"
	"github.com/sugarme/gotch"
	"github.com/sugarme/gotch/ts"
)

func TestMain(m *testing.M) {
	os.Exit(launch.Main(func(context.Context) error { return launch.Exit(m.Run()) }))
}

// mistakes are programs with a mistake in them, two ranks each. troubleshooting.md shows what each one prints.
var mistakes = map[string]*launch.Entry{
	"only-one-rank": mistake("only-one-rank", short, func(pg *torchddp.ProcessGroup) error {
		if pg.Rank() == 0 { // only rank 0 has something to log
			loss := ts.MustOfSlice([]float32{1})
			defer loss.MustDrop()
			return pg.Reduce(loss, 0, torchddp.Sum)
		}
		time.Sleep(2 * short.Timeout) // rank 1 goes on with its work
		return nil
	}),
	"different-collectives": mistake("different-collectives", short, func(pg *torchddp.ProcessGroup) error {
		x := ts.MustOfSlice([]float32{1, 2})
		defer x.MustDrop()
		if pg.Rank() == 0 {
			return pg.Broadcast(x, 0)
		}
		return pg.AllReduce(x, torchddp.Sum)
	}),
	"detail": mistake("detail", torchddp.InitOptions{Timeout: short.Timeout, Debug: torchddp.DebugDetail},
		func(pg *torchddp.ProcessGroup) error {
			x := ts.MustZeros([]int64{int64(2 + pg.Rank())}, gotch.Float, gotch.CPU)
			defer x.MustDrop()
			return pg.AllReduce(x, torchddp.Sum)
		}),
	"died": mistake("died", torchddp.InitOptions{}, func(pg *torchddp.ProcessGroup) error {
		if pg.Rank() == 1 {
			me, err := os.FindProcess(os.Getpid())
			if err != nil {
				return err
			}
			return me.Kill() // as the kernel does where memory runs out
		}
		return pg.Barrier()
	}),
	"uneven": mistake("uneven", short, func(pg *torchddp.ProcessGroup) error {
		return train(pg, torchddp.DDPOptions{}, 2-pg.Rank()) // rank 1 has one batch less
	}),
	"unused": mistake("unused", torchddp.InitOptions{}, func(pg *torchddp.ProcessGroup) error {
		return trainTwoHeads(pg, torchddp.DDPOptions{})
	}),
	"mismatch": mistake("mismatch", torchddp.InitOptions{}, func(pg *torchddp.ProcessGroup) error {
		model, err := nn.NewLinear(20, int64(1+pg.Rank()), nn.LinearOptions{})
		if err != nil {
			return err
		}
		_, err = torchddp.NewDDP(model, pg, torchddp.DDPOptions{})
		return err
	}),
	"sync": mistake("sync", torchddp.InitOptions{}, func(pg *torchddp.ProcessGroup) error {
		model, err := models.NewToyNet()
		if err != nil {
			return err
		}
		ddp, err := torchddp.NewDDP(model, pg, torchddp.DDPOptions{})
		if err != nil {
			return err
		}
		out, err := ddp.Forward(ts.MustOnes([]int64{4, 20}, gotch.Float, gotch.CPU))
		if err != nil {
			return err
		}
		loss := out.MustSum(gotch.Float, true)
		return ddp.NoSync(func() error { return ddp.Backward(loss) }) // the forward was outside
	}),
	"nccl": launch.Register("nccl", func(ctx context.Context, env launch.Env) error {
		_, err := torchddp.InitProcessGroup(ctx, torchddp.InitOptions{Backend: torchddp.NCCL})
		return err
	}),
}

// short is a timeout for what is meant to hang.
var short = torchddp.InitOptions{Timeout: 2 * time.Second}

// mistake registers a rank's function that joins its job first.
func mistake(name string, o torchddp.InitOptions, fn func(*torchddp.ProcessGroup) error) *launch.Entry {
	return launch.Register(name, func(ctx context.Context, env launch.Env) (err error) {
		o.Backend = torchddp.Gloo
		o.GlooInterfaces = []string{"lo"}
		pg, err := torchddp.InitProcessGroup(ctx, o)
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, pg.Destroy()) }()
		return fn(pg)
	})
}

// train makes some steps with the toy model.
func train(pg *torchddp.ProcessGroup, o torchddp.DDPOptions, steps int) error {
	model, err := models.NewToyNet()
	if err != nil {
		return err
	}
	ddp, err := torchddp.NewDDP(model, pg, o)
	if err != nil {
		return err
	}
	for range steps {
		out, err := ddp.Forward(ts.MustOnes([]int64{4, 20}, gotch.Float, gotch.CPU))
		if err != nil {
			return err
		}
		if err := ddp.Backward(out.MustSum(gotch.Float, false)); err != nil {
			return err
		}
	}
	return nil
}

// twoHeads has a head that its forward leaves out.
type twoHeads struct {
	nn.Base
	body, head, spare *nn.Linear
}

func (m *twoHeads) ForwardT(x *ts.Tensor, train bool) *ts.Tensor {
	return nn.Run(x, train, m.body, m.head)
}

func (m *twoHeads) String() string { return nn.Repr(m) }

func trainTwoHeads(pg *torchddp.ProcessGroup, o torchddp.DDPOptions) error {
	m := &twoHeads{}
	for _, c := range []struct {
		name string
		slot **nn.Linear
	}{{"body", &m.body}, {"head", &m.head}, {"spare", &m.spare}} {
		l, err := nn.NewLinear(20, 20, nn.LinearOptions{})
		if err != nil {
			return err
		}
		*c.slot = l
		if err := nn.Register(m, c.name, c.slot); err != nil {
			return err
		}
	}
	ddp, err := torchddp.NewDDP(m, pg, o)
	if err != nil {
		return err
	}
	out, err := ddp.Forward(ts.MustOnes([]int64{4, 20}, gotch.Float, gotch.CPU))
	if err != nil {
		return err
	}
	return ddp.Backward(out.MustSum(gotch.Float, false))
}

// alone are mistakes that one process can make.
var alone = map[string]func(t *testing.T) error{
	"nobody-comes": func(t *testing.T) error { // rank 0 of 2, and no rank 1
		_, err := torchddp.InitProcessGroup(t.Context(), torchddp.InitOptions{
			Backend: torchddp.Gloo, GlooInterfaces: []string{"lo"}, ConnectTimeout: 2 * time.Second,
			InitMethod: fmt.Sprintf("tcp://127.0.0.1:%d?rank=0&world_size=2", testenv.FreePort(t)),
		})
		return err
	},
	"no-master": func(t *testing.T) error { // rank 1 of 2, and no rank 0
		_, err := torchddp.InitProcessGroup(t.Context(), torchddp.InitOptions{
			Backend: torchddp.Gloo, GlooInterfaces: []string{"lo"}, ConnectTimeout: 2 * time.Second,
			InitMethod: fmt.Sprintf("tcp://127.0.0.1:%d?rank=1&world_size=2", testenv.FreePort(t)),
		})
		return err
	},
	"port-taken": func(t *testing.T) error {
		ln, err := net.Listen("tcp4", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		defer ln.Close()
		port := ln.Addr().(*net.TCPAddr).Port
		return mistakes["unused"].Spawn(t.Context(), 2, launch.SpawnOptions{MasterPort: port})
	},
	"no-data": func(t *testing.T) error {
		_, err := vision.CIFAR10(t.Context(), vision.Options{Root: t.TempDir()})
		return err
	},
	"module-prefix": func(t *testing.T) error { // Python saved ddp.state_dict() instead of ddp.module.state_dict()
		model, err := models.NewToyNet()
		if err != nil {
			t.Fatal(err)
		}
		_, err = checkpoint.LoadStateDict(model, checkpoint.ModuleState(model).AddPrefix(checkpoint.DDPPrefix), true)
		return err
	},
	"no-device": func(t *testing.T) error {
		if launch.GPUs().Count() > 0 {
			t.Skip("there is a GPU")
		}
		model, err := models.NewToyNet()
		if err != nil {
			t.Fatal(err)
		}
		path := filepath.Join(t.TempDir(), "model.pt")
		if err := checkpoint.Save(path, checkpoint.ModuleState(model)); err != nil {
			t.Fatal(err)
		}
		_, err = checkpoint.Load(path, checkpoint.LoadOptions{MapLocation: checkpoint.MapTo(gotch.CudaBuilder(0))})
		return err
	},
}

// nextRank is where the error of another rank begins.
var nextRank = regexp.MustCompile(`; (rank \d+ \(pid)`)

// TestMessages makes every mistake, and holds what it prints against what troubleshooting.md says it does.
func TestMessages(t *testing.T) {
	quoted := map[string]string{}
	for _, b := range onePage(t, "troubleshooting.md").blocks {
		if name, ok := strings.CutPrefix(b.mark, "message: "); ok {
			quoted[name] = b.text
		}
	}
	check := func(t *testing.T, err error) {
		t.Helper()
		name := path.Base(t.Name())
		want, ok := quoted[name]
		switch {
		case err == nil:
			t.Error("the mistake went unnoticed")
		case !ok:
			t.Errorf("troubleshooting.md does not show %q, which is\n%v", name, err)
		default:
			if gone := missing(want, nextRank.ReplaceAllString(err.Error(), "\n$1")); len(gone) > 0 {
				t.Errorf("troubleshooting.md shows\n\t%s\nwhich is not in\n%v", strings.Join(gone, "\n\t"), err)
			}
		}
	}
	for name := range mistakes {
		t.Run(name, func(t *testing.T) {
			if name == "nccl" && torchddp.IsNCCLAvailable() {
				t.Skip("this build has NCCL")
			}
			check(t, mistakes[name].Spawn(t.Context(), 2, launch.SpawnOptions{Logger: slog.New(slog.DiscardHandler)}))
		})
	}
	for name, mistake := range alone {
		t.Run(name, func(t *testing.T) { check(t, mistake(t)) })
	}
	for name := range quoted {
		if mistakes[name] == nil && alone[name] == nil {
			t.Errorf("troubleshooting.md shows %q, which is no mistake here", name)
		}
	}
}
