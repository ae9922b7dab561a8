package train

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/goddp/goddp/checkpoint"
	"github.com/goddp/goddp/data"
	"github.com/goddp/goddp/internal/testenv"
	"github.com/goddp/goddp/launch"
	"github.com/goddp/goddp/models/nn"
	"github.com/goddp/goddp/torchddp"
	"github.com/goddp/goddp/torchddp/amp"
	"github.com/goddp/goddp/torchddp/optim"
	"github.com/goddp/goddp/train/report"
)

// everything trains with all that has a state: schedule, scaler, average, random numbers that differ by rank.
func everything(r *rank, o *Options) error {
	if err := torchddp.ManualSeed(uint64(10 + r.pg.Rank())); err != nil {
		return err
	}
	o.Accumulate, o.LogEvery, o.ClipNorm, o.Logger = 2, 3, 1, quiet
	o.EarlyStop = EarlyStop{Patience: 10}
	o.SchedulePerStep = true
	var err error
	if o.Scheduler, err = optim.NewOneCycleLR(r.opt, optim.OneCycleOptions{MaxLR: []float64{0.2}, TotalSteps: 40}); err != nil {
		return err
	}
	if o.Plateau, err = optim.NewReduceLROnPlateau(r.opt, optim.PlateauOptions{}); err != nil {
		return err
	}
	if o.Scaler, err = amp.NewGradScaler(amp.ScalerOptions{GrowthInterval: 3}); err != nil {
		return err
	}
	r.closers = append(r.closers, o.Scaler)
	if o.Average, err = optim.NewAveragedModel(r.model, optim.AverageOptions{Decay: 0.9}); err != nil {
		return err
	}
	r.closers = append(r.closers, o.Average)
	return nil
}

// resumable is a rank, a process of its own, of the jobs of TestResumeIsBitIdentical.
var resumable = launch.Register("resumable", func(ctx context.Context, _ launch.Env) error {
	pg, err := torchddp.InitProcessGroup(ctx, torchddp.InitOptions{GlooInterfaces: []string{"lo"}, Timeout: time.Minute})
	if err != nil {
		return err
	}
	err = setup{samples: 90, batch: 3, evals: 7, dropout: true}.each(func(r *rank) error {
		steps, err := strconv.ParseInt(os.Getenv("GODDP_TRAIN_STEPS"), 10, 64)
		if err != nil {
			return err
		}
		o := Options{Epochs: 3, MaxSteps: steps, Snapshots: Snapshots{Dir: os.Getenv("GODDP_TRAIN_DIR"), Resume: true, EverySteps: 4}}
		if err := everything(r, &o); err != nil {
			return err
		}
		return r.train(ctx, o)
	})(pg)
	return errors.Join(err, pg.Destroy())
})

// TestResumeIsBitIdentical: a job that is stopped in the middle of epochs and started again, as new processes, has in its
// last snapshot what a job has that ran through: weights, optimizer, schedule, scaler, averages, random numbers, figures.
func TestResumeIsBitIdentical(t *testing.T) {
	job := func(dir string, steps int) {
		t.Helper()
		require.NoError(t, resumable.Spawn(t.Context(), 2, launch.SpawnOptions{
			Env: []string{"GODDP_TRAIN_DIR=" + dir, fmt.Sprintf("GODDP_TRAIN_STEPS=%d", steps), "OMP_NUM_THREADS=1"}}))
	}
	whole, cut := t.TempDir(), t.TempDir()
	job(whole, 0)
	for _, steps := range []int{2, 11, 13, 16, 0} { // 8 steps an epoch
		job(cut, steps)
	}
	want, got := snapshotOf(t, filepath.Join(whole, "ckpt-00000024.pt")), snapshotOf(t, filepath.Join(cut, "ckpt-00000024.pt"))
	require.Greater(t, len(want), 40)
	require.Contains(t, want, ".optimizer.state.0.momentum_buffer")
	require.NotEqual(t, want[".rng.0.cpu"], want[".rng.1.cpu"], "the ranks draw different numbers")
	requireSame(t, want, got)
}

func TestSnapshotsAreReadByPython(t *testing.T) {
	dir := t.TempDir()
	group(t, 1, setup{}.each(func(r *rank) error {
		return r.train(context.Background(), Options{Epochs: 2, Logger: quiet, Snapshots: Snapshots{Dir: dir}})
	}))
	require.Equal(t, "2 20 ['0.weight', '0.bias', '2.weight', '2.bias'] 0.1\n", testenv.RunPython(t, `
import sys, torch
s = torch.load(sys.argv[1])
print(s["epoch"], s["step"], list(s["model"]), s["optimizer"]["param_groups"][0]["lr"])`, filepath.Join(dir, "ckpt-00000020.pt")))
}

// TestResumeWithOtherRanks: each sample of the epoch still comes once, and a warning says what is not the same.
func TestResumeWithOtherRanks(t *testing.T) {
	for _, c := range [][2]int{{2, 1}, {1, 2}, {3, 2}} {
		t.Run(fmt.Sprint(c), func(t *testing.T) {
			dir := t.TempDir()
			seen := make([]map[int]int, max(c[0], c[1]))
			var epoch report.Epoch
			var log bytes.Buffer
			run := func(world int, o Options) {
				o.Snapshots = Snapshots{Dir: dir, Resume: true}
				group(t, world, setup{samples: 48, batch: 4}.each(func(r *rank) error {
					o, rank := o, r.pg.Rank()
					o.Logger = quiet
					if rank == 0 {
						o.Logger = slog.New(slog.NewTextHandler(&log, nil))
					}
					o.Callbacks = []Callback{{AfterEpoch: func(_ *Progress, _, all report.Epoch) error {
						if rank == 0 {
							epoch = all
						}
						return nil
					}}}
					task := r.task()
					plain := task.Step
					task.Step = func(m Model, b *data.Batch) (Result, error) {
						if seen[rank] == nil {
							seen[rank] = map[int]int{}
						}
						for _, i := range b.Indices() {
							seen[rank][i]++
						}
						return plain(m, b)
					}
					trainer, err := New(task, o)
					if err != nil {
						return err
					}
					return trainer.Run(context.Background())
				}))
			}
			run(c[0], Options{Epochs: 1, MaxSteps: 2})
			require.NotContains(t, log.String(), "another number of ranks")
			run(c[1], Options{Epochs: 1})
			total := map[int]int{}
			for _, m := range seen {
				for i, n := range m {
					total[i] += n
				}
			}
			require.Len(t, total, 48)
			for i, n := range total {
				require.Equal(t, 1, n, "sample %d", i)
			}
			require.Contains(t, log.String(), "resumed with another number of ranks")
			require.NotEmpty(t, epoch.Train)
		})
	}
}

// TestStopOfOneRank: a context that ends on one rank stops, and saves, all of them; what follows is what would have been.
func TestStopOfOneRank(t *testing.T) {
	cause := errors.New("told to stop")
	train := func(dir string, resume bool, stop string) (weights []float64, errs []error) {
		errs = ranks(t, 2, setup{samples: 80, evals: 6}.each(func(r *rank) error {
			ctx, cancel := context.WithCancelCause(context.Background())
			defer cancel(nil)
			at := func(when string) {
				if stop == when && r.pg.Rank() == 1 {
					cancel(cause)
				}
			}
			schedule, err := optim.NewStepLR(r.opt, 1, 0.5)
			if err != nil {
				return err
			}
			err = r.train(ctx, Options{Epochs: 2, LogEvery: 3, Logger: quiet, Scheduler: schedule, Snapshots: Snapshots{Dir: dir, Resume: resume},
				Callbacks: []Callback{{
					AfterStep:  func(p *Progress) error { at(fmt.Sprint("step ", p.Step)); return nil },
					AfterEpoch: func(p *Progress, _, _ report.Epoch) error { at("epoch"); return nil },
				}}})
			if r.pg.Rank() == 0 {
				weights = r.weights()
			}
			return err
		}))
		return weights, errs
	}
	want, errs := train("", false, "")
	require.NoError(t, errors.Join(errs...))
	for stop, saved := range map[string]string{"step 4": "ckpt-00000006.pt", "step 10": "ckpt-00000010.pt", "epoch": "ckpt-00000010.pt"} {
		t.Run(stop, func(t *testing.T) {
			dir := t.TempDir()
			_, errs := train(dir, true, stop)
			for rank, err := range errs {
				require.ErrorIs(t, err, launch.ErrResume, "rank %d", rank)
				require.ErrorContains(t, err, filepath.Join(dir, saved))
			}
			require.ErrorContains(t, errs[1], "told to stop")
			require.ErrorContains(t, errs[0], "another rank was told to stop")
			got, errs := train(dir, true, "")
			require.NoError(t, errors.Join(errs...))
			require.Equal(t, want, got)
		})
	}
	_, errs = train("", false, "step 4")
	require.ErrorIs(t, errs[1], cause)
	require.ErrorIs(t, errs[0], context.Canceled)
	for _, err := range errs {
		require.NotErrorIs(t, err, launch.ErrResume, "nothing was saved")
	}
}

// slowJob is one rank of the job that TestSIGTERM stops.
func slowJob(ctx context.Context, dir string) error {
	pg, err := torchddp.InitProcessGroup(ctx, torchddp.InitOptions{GlooInterfaces: []string{"lo"}, Timeout: time.Minute})
	if err != nil {
		return err
	}
	err = setup{samples: 80, dropout: true}.each(func(r *rank) error {
		o := Options{Epochs: 3, Snapshots: Snapshots{Dir: dir, Resume: true}}
		if err := everything(r, &o); err != nil {
			return err
		}
		o.Callbacks = []Callback{{AfterStep: func(p *Progress) error {
			if os.Getenv("GODDP_TRAIN_SLOW") != "" && p.GlobalStep >= 4 {
				fmt.Println("at work")
				time.Sleep(50 * time.Millisecond)
			}
			return nil
		}}}
		return r.train(ctx, o)
	})(pg)
	return errors.Join(err, pg.Destroy())
}

// TestSIGTERM: a job that gets the signal saves and ends with the status that asks for a new start; started again it ends
// as one that was never stopped.
func TestSIGTERM(t *testing.T) {
	job := func(dir string, env ...string) (*exec.Cmd, *bytes.Buffer) {
		ctx, cancel := context.WithTimeout(context.Background(), 3*time.Minute)
		t.Cleanup(cancel)
		cmd := exec.CommandContext(ctx, os.Args[0])
		cmd.Env = append(append(os.Environ(), "GODDP_TRAIN_JOB="+dir, "OMP_NUM_THREADS=1"), env...)
		var stderr bytes.Buffer
		cmd.Stderr = &stderr
		return cmd, &stderr
	}
	whole, cut := t.TempDir(), t.TempDir()
	cmd, stderr := job(whole)
	require.NoError(t, cmd.Run(), stderr)

	cmd, stderr = job(cut, "GODDP_TRAIN_SLOW=1")
	out, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	buf := make([]byte, 64)
	n, err := out.Read(buf)
	require.NoError(t, err, stderr)
	require.Contains(t, string(buf[:n]), "at work")
	require.NoError(t, cmd.Process.Signal(syscall.SIGTERM))
	for err == nil {
		_, err = out.Read(buf)
	}
	var exit *exec.ExitError
	require.ErrorAs(t, cmd.Wait(), &exit)
	require.Equal(t, launch.ExitResume, exit.ExitCode(), stderr)
	latest, err := checkpoint.Latest(cut)
	require.NoError(t, err)
	require.NotEqual(t, "ckpt-00000015.pt", filepath.Base(latest), "it ended before it was stopped")

	cmd, stderr = job(cut)
	require.NoError(t, cmd.Run(), stderr)
	requireSame(t, snapshotOf(t, filepath.Join(whole, "ckpt-00000015.pt")), snapshotOf(t, filepath.Join(cut, "ckpt-00000015.pt")))
}

// TestSnapshotThatDoesNotFit: all ranks say why.
func TestSnapshotThatDoesNotFit(t *testing.T) {
	write := func(t *testing.T, v any) string {
		dir := t.TempDir()
		require.NoError(t, checkpoint.Save(filepath.Join(dir, "ckpt-00000001.pt"), v))
		return dir
	}
	made := t.TempDir() // of a model with dropout, whose layers have other numbers
	group(t, 1, setup{dropout: true}.each(func(r *rank) error {
		return r.train(context.Background(), Options{MaxSteps: 1, Logger: quiet, Snapshots: Snapshots{Dir: made}})
	}))
	blocked := filepath.Join(t.TempDir(), "file")
	require.NoError(t, os.WriteFile(blocked, nil, 0o600))
	toy := nn.Must(nn.NewLinear(2, 2, nn.LinearOptions{}))
	defer toy.Drop()
	for name, c := range map[string]struct {
		dir, text string
		options   func(r *rank, o *Options) error
	}{
		"another model": {made, "is it one of another model? name another folder, or do not resume", nil},
		"a state dict":  {write(t, checkpoint.ModuleState(toy)), "no snapshot of package train", nil},
		"a number":      {write(t, checkpoint.NewDict().Set("epoch", 3)), "no snapshot of package train", nil},
		"not a folder":  {blocked, "rank 0 failed", nil},
		"without parts": {made, "average", func(r *rank, o *Options) (err error) { return everything(r, o) }},
	} {
		t.Run(name, func(t *testing.T) {
			errs := ranks(t, 2, setup{dropout: name == "without parts"}.each(func(r *rank) error {
				o := Options{Epochs: 1, Logger: quiet, Snapshots: Snapshots{Dir: c.dir, Resume: true}}
				if c.options != nil {
					if err := c.options(r, &o); err != nil {
						return err
					}
					o.Scheduler, o.SchedulePerStep, o.Scaler, o.Plateau = nil, false, nil, nil
				}
				return r.train(context.Background(), o)
			}))
			for rank, err := range errs {
				require.Error(t, err, "rank %d", rank)
				if rank == 1 || !strings.Contains(c.text, "rank 0") {
					require.ErrorContains(t, err, c.text, "rank %d", rank)
				}
			}
		})
	}
	// A folder without a snapshot is the beginning of a run.
	group(t, 2, setup{}.each(func(r *rank) error {
		return r.train(context.Background(), Options{MaxSteps: 1, Logger: quiet, Snapshots: Snapshots{Dir: filepath.Join(made, "new"), Resume: true}})
	}))
}

// lost is a loader that does not know where it stands.
type lost struct{ Loader[*data.Batch] }

func (lost) State() (data.State, error) { return data.State{}, data.ErrNotResumable }

func TestLoaderThatCannotResume(t *testing.T) {
	steps := 0
	for _, err := range ranks(t, 2, setup{}.each(func(r *rank) error {
		task := r.task()
		if r.pg.Rank() == 1 {
			task.Train = lost{task.Train}
		}
		trainer, err := New(task, Options{Epochs: 1, Snapshots: Snapshots{Dir: t.TempDir()}, Callbacks: []Callback{{
			AfterStep: func(*Progress) error { steps++; return nil },
		}}})
		if err != nil {
			return err
		}
		return trainer.Run(context.Background())
	})) {
		require.ErrorContains(t, err, "the training loader cannot tell where it stands")
	}
	require.Zero(t, steps)
}

func TestBestAndKeep(t *testing.T) {
	dir := t.TempDir()
	losses := []float64{}
	group(t, 2, setup{evals: 6}.each(func(r *rank) error {
		return r.train(context.Background(), Options{Epochs: 5, Logger: quiet, Snapshots: Snapshots{Dir: dir, Keep: 2, Async: true},
			Callbacks: []Callback{{AfterEpoch: func(_ *Progress, _, all report.Epoch) error {
				if r.pg.Rank() == 0 {
					losses = append(losses, value(all.Eval, "loss"))
				}
				return nil
			}}}})
	}))
	files, err := filepath.Glob(filepath.Join(dir, "ckpt-0*.pt"))
	require.NoError(t, err)
	require.Len(t, files, 2)
	best := 0
	for i, l := range losses {
		if l < losses[best] {
			best = i
		}
	}
	v := snapshotOf(t, filepath.Join(dir, "ckpt-best.pt"))
	require.EqualValues(t, best+1, v[".epoch"])
}
