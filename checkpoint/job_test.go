package checkpoint_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/sugarme/gotch"
	"github.com/sugarme/gotch/ts"

	"github.com/goddp/goddp/checkpoint"
	"github.com/goddp/goddp/checkpoint/internal/cptest"
	"github.com/goddp/goddp/data"
	"github.com/goddp/goddp/internal/tdp"
	"github.com/goddp/goddp/internal/testenv"
	"github.com/goddp/goddp/launch"
	"github.com/goddp/goddp/models"
	"github.com/goddp/goddp/models/nn"
	"github.com/goddp/goddp/torchddp"
	"github.com/goddp/goddp/torchddp/amp"
	"github.com/goddp/goddp/torchddp/optim"
)

// The jobs of these tests are this binary, run again with the name of a job in a variable.
const (
	jobVar  = "GODDP_TEST_JOB"
	dirVar  = "GODDP_TEST_JOB_DIR"
	stopVar = "GODDP_TEST_JOB_STOP"
	world   = 2
)

var jobs = map[string]*launch.Entry{
	"saves":  launch.Register("saves", inGroup(saves)),
	"trains": launch.Register("trains", inGroup(trains)),
}

func TestMain(m *testing.M) {
	if name := os.Getenv(jobVar); name != "" {
		os.Exit(launch.Main(func(ctx context.Context) error {
			return jobs[name].Spawn(ctx, world, launch.SpawnOptions{StopGrace: time.Minute})
		}))
	}
	cptest.Main(m)
}

// run runs a job to its end, and gives its exit status and what it printed.
func run(t *testing.T, name, dir string, env ...string) (status int, printed string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, os.Args[0])
	cmd.Env = append(os.Environ(), append(env, jobVar+"="+name, dirVar+"="+dir)...)
	out, err := cmd.CombinedOutput()
	if exit := (*exec.ExitError)(nil); !errors.As(err, &exit) {
		require.NoError(t, err, string(out))
	}
	return cmd.ProcessState.ExitCode(), string(out)
}

// rank is what a rank of a job does in its group.
type rank func(ctx context.Context, pg *torchddp.ProcessGroup, dir string) error

func inGroup(do rank) func(context.Context, launch.Env) error {
	return func(ctx context.Context, _ launch.Env) (err error) {
		pg, err := torchddp.InitProcessGroup(ctx, torchddp.InitOptions{Backend: torchddp.Gloo, Timeout: 2 * time.Minute})
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, pg.Destroy()) }()
		return do(ctx, pg, os.Getenv(dirVar))
	}
}

func agreeIn(pg *torchddp.ProcessGroup) checkpoint.Agree {
	return checkpoint.AgreeBy(pg.Rank(), func(mine string) ([]string, error) { return torchddp.AllGatherObject(pg, mine) })
}

// A job of processes: rank 0 saves, no rank goes on before the file is there, and all load it. An error of rank 0's is
// every rank's.
func TestSavingInAJob(t *testing.T) {
	dir := t.TempDir()
	cuda, err := os.ReadFile("ptfile/testdata/cuda.ckpt")
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(filepath.Join(dir, "cuda.pt"), cuda, 0o666))
	status, out := run(t, "saves", dir)
	require.Zero(t, status, out)
	for _, kind := range []string{"sync", "async"} {
		entries, err := os.ReadDir(filepath.Join(dir, kind))
		require.NoError(t, err)
		var left []string
		for _, e := range entries {
			left = append(left, e.Name())
		}
		require.Equal(t, []string{"ckpt-00000004.pt", "ckpt-00000005.pt"}, left)
	}
}

func saves(ctx context.Context, pg *torchddp.ProcessGroup, dir string) error {
	const n = 4 << 20
	expect := func(what string, ok bool, err error) error {
		if ok {
			return nil
		}
		return fmt.Errorf("%s: %v", what, err)
	}
	x, err := tdp.Empty([]int64{n}, gotch.Uint8, gotch.CPU, false)
	if err != nil {
		return err
	}
	defer x.MustDrop()
	fill := func(v byte) error {
		b, err := tdp.HostBytes(x)
		for i := range b {
			b[i] = v
		}
		return err
	}
	for _, async := range []bool{false, true} {
		folder := filepath.Join(dir, map[bool]string{false: "sync", true: "async"}[async])
		m, err := checkpoint.NewManager(checkpoint.ManagerOptions{
			Dir: folder, Keep: 2, Rank: pg.Rank(), Agree: agreeIn(pg), Async: async,
		})
		if err != nil {
			return err
		}
		for step := range int64(6) {
			if err := fill(byte(step)); err != nil {
				return err
			}
			if err := m.Save(ctx, step, checkpoint.NewDict().Set("x", x)); err != nil {
				return err
			}
			if async {
				continue
			}
			// At once: a rank that ran ahead would find no file.
			v, err := checkpoint.Load(m.Path(step), checkpoint.LoadOptions{MapLocation: checkpoint.MapTo(gotch.CPU)})
			if err != nil {
				return err
			}
			got, err := checkpoint.Get[*ts.Tensor](v, "x")
			if err != nil {
				return err
			}
			b, err := tdp.ToSlice[uint8](got)
			got.MustDrop()
			same := err == nil && bytes.Equal(b, bytes.Repeat([]byte{byte(step)}, n))
			if err := expect(fmt.Sprintf("what step %d saved", step), same, err); err != nil {
				return err
			}
		}
		if err := m.Close(); err != nil {
			return err
		}
		if err := pg.Barrier(); err != nil { // the asynchronous ones are there when rank 0 has closed
			return err
		}
		latest, err := m.Latest()
		if err := expect("the latest one", latest == m.Path(5), err); err != nil {
			return err
		}
	}

	// A file of a GPU's: every rank has a place of its own for it.
	cuda := filepath.Join(dir, "cuda.pt")
	if have, err := tdp.CUDAAvailable(); err != nil || !have {
		_, err = checkpoint.Load(cuda, checkpoint.LoadOptions{
			MapLocation: checkpoint.MapDevices(map[string]string{"cuda:0": fmt.Sprintf("cuda:%d", pg.Rank())}),
		})
		if err := expect("a GPU that is not there", errors.Is(err, checkpoint.ErrDevice), err); err != nil {
			return err
		}
	}
	toCPU := checkpoint.MapDevices(map[string]string{"cuda:0": "cpu"})
	if _, err := checkpoint.Load(cuda, checkpoint.LoadOptions{MapLocation: toCPU}); err != nil {
		return err
	}

	// Rank 0's disk is full: for the others there is nothing wrong here, and yet they learn of it.
	if pg.Rank() == 0 {
		signal.Ignore(syscall.SIGXFSZ)
		if err := syscall.Setrlimit(1 /* RLIMIT_FSIZE */, &syscall.Rlimit{Cur: 64 << 10, Max: 64 << 10}); err != nil {
			return err
		}
	}
	for _, async := range []bool{false, true} {
		m, err := checkpoint.NewManager(checkpoint.ManagerOptions{
			Dir: filepath.Join(dir, "full"), Rank: pg.Rank(), Agree: agreeIn(pg), Async: async,
		})
		if err != nil {
			return err
		}
		err = m.Save(ctx, 1, checkpoint.NewDict().Set("x", x))
		if async { // it comes with the next one
			if err := expect("an asynchronous save begins", err == nil, err); err != nil {
				return err
			}
			err = m.Save(ctx, 2, checkpoint.NewDict())
		}
		if err := expect("the error of the full disk", err != nil && strings.Contains(err.Error(), "rank 0: saving") &&
			strings.Contains(err.Error(), "file too large"), err); err != nil {
			return err
		}
		if err := m.Close(); err != nil {
			return err
		}
	}
	return nil
}

// A job with all that has a state is stopped by SIGTERM in mid-epoch and started again: loss by loss, learning rate by
// learning rate, on both ranks, it is the job that was never stopped.
func TestStoppedJobGoesOnBitForBit(t *testing.T) {
	whole, stopped := t.TempDir(), t.TempDir()
	status, out := run(t, "trains", whole)
	require.Zero(t, status, out)
	status, out = run(t, "trains", stopped, stopVar+"=13")
	require.Equal(t, launch.ExitResume, status, out)

	path, err := checkpoint.Latest(stopped)
	require.NoError(t, err)
	v, err := checkpoint.Load(path, checkpoint.LoadOptions{})
	require.NoError(t, err)
	s, err := checkpoint.SnapshotOf(v)
	require.NoError(t, err)
	require.GreaterOrEqual(t, s.Step, int64(13))
	require.Less(t, s.Step, int64(40))
	require.Len(t, s.RNG, world)
	require.Equal(t, fmt.Sprintf("%d 7\n", s.Step), testenv.RunPython(t, `
import sys, torch
s = torch.load(sys.argv[1])
model = torch.nn.Linear(20, 1)
opt = torch.optim.Adam(model.parameters())
sched = torch.optim.lr_scheduler.StepLR(opt, 3)
scaler = torch.amp.GradScaler("cpu")
for part, name in ((model, "model"), (opt, "optimizer"), (sched, "scheduler"), (scaler, "scaler")):
    part.load_state_dict(s[name])
assert sched.last_epoch == s["step"] and scaler.get_scale() > 256, (sched.last_epoch, scaler.get_scale())
assert s["sampler"]["sampler"]["kind"] == "distributed" and len(s["rng"]) == 2
for r in s["rng"]: torch.set_rng_state(r["cpu"])
print(s["step"], sched.step_size)`, path))

	status, out = run(t, "trains", stopped)
	require.Zero(t, status, out)
	for rank := range world {
		name := fmt.Sprintf("rank%d.log", rank)
		want, err := os.ReadFile(filepath.Join(whole, name))
		require.NoError(t, err)
		got, err := os.ReadFile(filepath.Join(stopped, name))
		require.NoError(t, err)
		require.Equal(t, 40, strings.Count(string(want), "step "))
		require.Equal(t, string(want), string(got))
	}
}

func trains(ctx context.Context, pg *torchddp.ProcessGroup, dir string) error {
	stopAt, _ := strconv.ParseInt(os.Getenv(stopVar), 10, 64)
	log, err := os.OpenFile(filepath.Join(dir, fmt.Sprintf("rank%d.log", pg.Rank())), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o666)
	if err != nil {
		return err
	}
	defer log.Close()
	if err := torchddp.ManualSeed(7); err != nil {
		return err
	}
	set, err := data.NewRandomToy(80)
	if err != nil {
		return err
	}
	model, err := models.NewToyNet()
	if err != nil {
		return err
	}
	opt, err := optim.NewAdam(model.NamedParameters(), optim.AdamOptions{LR: 0.05})
	if err != nil {
		return err
	}
	defer opt.Close()
	sched, err := optim.NewStepLR(opt, 7, 0.8)
	if err != nil {
		return err
	}
	scaler, err := amp.NewGradScaler(amp.ScalerOptions{InitScale: 256, GrowthInterval: 3})
	if err != nil {
		return err
	}
	defer scaler.Close()
	share := data.DistributedOptions{Replicas: world, Rank: pg.Rank(), Seed: 3}
	sampler, err := data.NewDistributedSampler(set.Len(), share)
	if err != nil {
		return err
	}
	loader, err := data.NewDataLoader(set, data.Options{BatchSize: 4, Sampler: sampler, Workers: 2})
	if err != nil {
		return err
	}
	defer loader.Close()
	m, err := checkpoint.NewManager(checkpoint.ManagerOptions{
		Dir: dir, Keep: 2, Rank: pg.Rank(), Agree: agreeIn(pg), Async: true,
	})
	if err != nil {
		return err
	}
	defer m.Close()

	// The ranks draw different numbers.
	if err := torchddp.ManualSeed(uint64(100 + pg.Rank())); err != nil {
		return err
	}
	epoch, step := int64(0), int64(0)
	switch path, err := m.Latest(); {
	case errors.Is(err, checkpoint.ErrNoCheckpoint):
	case err != nil:
		return err
	default:
		v, err := checkpoint.Load(path, checkpoint.LoadOptions{MapLocation: checkpoint.MapTo(gotch.CPU)})
		if err != nil {
			return err
		}
		s, err := checkpoint.SnapshotOf(v)
		if err != nil {
			return err
		}
		if err := s.Restore(model, opt, sched, scaler, loader); err != nil {
			return err
		}
		if err := s.RNG[pg.Rank()].Restore(); err != nil {
			return err
		}
		epoch, step = s.Epoch, s.Step
	}
	ddp, err := torchddp.NewDDP(model, pg, torchddp.DDPOptions{})
	if err != nil {
		return err
	}
	defer ddp.Close()

	stop := checkpoint.WatchPreemption()
	defer stop.Stop()
	anyRank := func(_ context.Context, mine bool) (bool, error) {
		flag, err := tdp.FromSlice([]uint8{map[bool]uint8{true: 1}[mine]}, []int64{1}, gotch.CPU)
		if err != nil {
			return false, err
		}
		defer flag.MustDrop()
		if err := pg.AllReduce(flag, torchddp.Max); err != nil {
			return false, err
		}
		v, err := tdp.ToSlice[uint8](flag)
		return err == nil && v[0] == 1, err
	}
	going := context.WithoutCancel(ctx) // launch cancels ctx at once; a step is finished first
	for ; epoch < 4; epoch++ {
		loader.SetEpoch(int(epoch))
		for batch, err := range loader.All(going) {
			if err != nil {
				return err
			}
			loss, err := trainStep(ddp, opt, scaler, batch)
			if err != nil {
				return err
			}
			if err := sched.Step(); err != nil {
				return err
			}
			step++
			scale, err := scaler.GetScale()
			if err != nil {
				return err
			}
			fmt.Fprintf(log, "step %d: loss %x, rate %x, scale %v, samples %v\n",
				step, loss, sched.LastLR(), scale, batch.Indices())

			if step == stopAt && pg.Rank() == 0 {
				// As a cluster manager does, and a second time as a launcher between does.
				for range 2 {
					if err := syscall.Kill(os.Getppid(), syscall.SIGTERM); err != nil {
						return err
					}
				}
			}
			if stopAt > 0 && step == stopAt+10 { // on a slow machine: not further than this without the signal
				select {
				case <-stop.Done():
				case <-time.After(time.Minute):
					return errors.New("the signal did not come")
				}
			}
			over, err := stop.Agreed(going, anyRank)
			if err != nil {
				return err
			}
			if !over && step%5 != 0 {
				continue
			}
			s, err := snapshot(pg, epoch, step, model, opt, sched, scaler, loader)
			if err != nil {
				return err
			}
			if err := m.Save(going, step, s); err != nil {
				return err
			}
			if over {
				// Rank 0 may still be writing: the others wait, or the launcher takes the job for over.
				return errors.Join(m.Close(), pg.Barrier(), launch.ErrResume)
			}
		}
	}
	return m.Close()
}

// snapshot gathers the random numbers of all ranks; only rank 0's is saved.
func snapshot(pg *torchddp.ProcessGroup, epoch, step int64, model checkpoint.Module,
	opt, sched, scaler, loader checkpoint.Stateful) (*checkpoint.Dict, error) {
	rng, err := checkpoint.CaptureRNG()
	if err != nil {
		return nil, err
	}
	mine, err := tdp.ToSlice[uint8](rng.CPU)
	rng.CPU.MustDrop()
	if err != nil {
		return nil, err
	}
	all, err := torchddp.GatherObject(pg, mine, 0)
	if err != nil || pg.Rank() != 0 {
		return nil, err
	}
	s, err := checkpoint.Capture(epoch, step, model, opt, sched, scaler, loader)
	if err != nil {
		return nil, err
	}
	for _, state := range all {
		t, err := tdp.FromSlice(state, []int64{int64(len(state))}, gotch.CPU)
		if err != nil {
			return nil, err
		}
		s.RNG = append(s.RNG, &checkpoint.RNGState{CPU: t})
	}
	return s.Value(), nil
}

func trainStep(ddp *torchddp.DDP, opt optim.Optimizer, scaler *amp.GradScaler, batch *data.Batch) (float64, error) {
	if err := opt.ZeroGrad(true); err != nil {
		return 0, err
	}
	x, err := tdp.Dropout(batch.Input(), 0.2, true, false) // draws from the default generator
	if err != nil {
		return 0, err
	}
	defer x.MustDrop()
	out, err := ddp.Forward(x)
	if err != nil {
		return 0, err
	}
	defer out.MustDrop()
	loss := nn.MSELoss{}.Forward(out, batch.Target())
	defer loss.MustDrop()
	scaled, err := scaler.Scale(loss)
	if err != nil {
		return 0, err
	}
	defer scaled.MustDrop()
	if err := ddp.Backward(scaled); err != nil {
		return 0, err
	}
	if _, err := scaler.Step(opt); err != nil {
		return 0, err
	}
	if err := scaler.Update(); err != nil {
		return 0, err
	}
	v, err := tdp.ToSlice[float32](loss)
	if err != nil {
		return 0, err
	}
	return float64(v[0]), nil
}
