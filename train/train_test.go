package train

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/sugarme/gotch"
	"github.com/sugarme/gotch/ts"

	"github.com/goddp/goddp/data"
	"github.com/goddp/goddp/models/nn"
	"github.com/goddp/goddp/torchddp"
	"github.com/goddp/goddp/torchddp/amp"
	"github.com/goddp/goddp/torchddp/optim"
	"github.com/goddp/goddp/train/report"
)

// TestAccumulationIsTheBigBatch: four batches a step train like one of four times the size, also where the last ones are
// fewer, or shorter.
func TestAccumulationIsTheBigBatch(t *testing.T) {
	for _, c := range []struct {
		samples, world int
		weigh          bool
	}{{64, 1, false}, {64, 2, false}, {48, 2, false}, {58, 2, true}, {31, 1, true}} {
		t.Run(fmt.Sprintf("%d samples, %d ranks", c.samples, c.world), func(t *testing.T) {
			run := func(batch, accumulate int) (weights []float64, steps int64) {
				group(t, c.world, setup{samples: c.samples, batch: batch}.each(func(r *rank) error {
					trainer, err := New(r.task(), Options{Epochs: 3, Accumulate: accumulate, WeightBySamples: c.weigh})
					if err != nil {
						return err
					}
					if err := trainer.Run(context.Background()); err != nil {
						return err
					}
					if r.pg.Rank() == 0 {
						weights, steps = r.weights(), trainer.Progress().GlobalStep
					}
					return nil
				}))
				return weights, steps
			}
			want, wantSteps := run(16, 1)
			got, steps := run(4, 4)
			require.Equal(t, wantSteps, steps)
			require.InDeltaSlice(t, want, got, 1e-12)
		})
	}
}

// collect is a sink that keeps what it is given.
type collect struct {
	run    report.Run
	steps  []report.Step
	epochs []report.Epoch
	closed int
}

func (c *collect) Begin(r report.Run) error   { c.run = r; return nil }
func (c *collect) Step(s report.Step) error   { c.steps = append(c.steps, s); return nil }
func (c *collect) Epoch(e report.Epoch) error { c.epochs = append(c.epochs, e); return nil }
func (c *collect) Close() error               { c.closed++; return nil }

func value(list []report.Value, name string) float64 {
	if i := slices.IndexFunc(list, func(v report.Value) bool { return v.Name == name }); i >= 0 {
		return list[i].Value
	}
	return math.NaN()
}

// score computes loss and accuracy of the model over samples, one by one.
func score(model nn.Module, set *data.TensorDataset) (loss, accuracy float64) {
	n := set.Len()
	all := set.Tensors()
	for i := range n {
		x, y := all[0].MustNarrow(0, int64(i), 1, false), all[1].MustNarrow(0, int64(i), 1, false)
		out := nn.Must(nn.Evaluate(model, x))
		l := nn.CrossEntropyLoss{}.Forward(out, y)
		loss += l.Float64Values()[0] / float64(n)
		right := nn.Must(Accuracy().Sum(out, y))
		accuracy += right.Float64Values()[0] / float64(n)
		for _, d := range []*ts.Tensor{x, y, out, l, right} {
			d.MustDrop()
		}
	}
	return loss, accuracy
}

// TestFiguresAreExact: means over ranks weigh every sample alike, in uneven shards and on ranks without a sample.
func TestFiguresAreExact(t *testing.T) {
	for _, c := range []struct{ world, evals int }{{1, 7}, {2, 7}, {2, 1}, {3, 11}, {3, 2}} {
		t.Run(fmt.Sprintf("%d ranks, %d samples", c.world, c.evals), func(t *testing.T) {
			group(t, c.world, setup{evals: c.evals, batch: 3}.each(func(r *rank) error {
				trainer, err := New(r.task(), Options{Epochs: 1})
				if err != nil {
					return err
				}
				values, err := trainer.Evaluate(context.Background())
				if err != nil {
					return err
				}
				loss, accuracy := score(r.model, r.evals)
				if math.Abs(value(values, "loss")-loss) > 1e-14 || math.Abs(value(values, "accuracy")-accuracy) > 1e-14 {
					return fmt.Errorf("got %v, want %v and %v", values, loss, accuracy)
				}
				return nil
			}))
		})
	}
}

func TestReports(t *testing.T) {
	var sinks, owns [2]collect
	var mine [2][]float64 // every batch's loss
	group(t, 2, setup{samples: 44, batch: 4, evals: 9}.each(func(r *rank) error {
		rank := r.pg.Rank()
		task := r.task()
		plain := task.Step
		task.Step = func(m Model, b *data.Batch) (Result, error) {
			res, err := plain(m, b)
			if m.Training() {
				mine[rank] = append(mine[rank], res.Loss.Float64Values()[0], float64(res.Samples))
			}
			return res, err
		}
		trainer, err := New(task, Options{
			Epochs: 2, LogEvery: 4, Stragglers: true, Sink: &sinks[rank], OwnSink: &owns[rank], About: report.Run{Name: "test", BatchSize: 4},
		})
		if err != nil {
			return err
		}
		return trainer.Run(context.Background())
	}))
	s := sinks[0]
	require.Equal(t, collect{}, sinks[1], "rank 0 reports")
	require.Equal(t, 1, s.closed)
	require.Equal(t, []any{"test", "nn.Sequential", "cpu", "gloo", 2, 2, 6, 4, int64(67)},
		[]any{s.run.Name, s.run.Model, s.run.Device, s.run.Backend, s.run.World, s.run.Epochs, s.run.StepsPerEpoch, s.run.BatchSize, s.run.Parameters})
	require.Len(t, s.run.Hosts, 2)
	require.Len(t, s.steps, 4, "after steps 4 and 6 of either epoch")
	mean := func(ranks []int, from, to int) float64 {
		sum, n := 0.0, 0.0
		for _, r := range ranks {
			for i := from; i < to; i++ {
				sum += mine[r][2*i] * mine[r][2*i+1]
				n += mine[r][2*i+1]
			}
		}
		return sum / n
	}
	for i, w := range [][2]int{{0, 4}, {4, 6}, {6, 10}, {10, 12}} {
		st := s.steps[i]
		require.Equal(t, []any{i / 2, []int{4, 6}[i%2], w[1] - w[0], int64(w[1])}, []any{st.Epoch, st.Step, st.Steps, st.GlobalStep})
		require.InDelta(t, mean([]int{0, 1}, w[0], w[1]), value(st.Values, "loss"), 1e-14)
		require.InDelta(t, mean([]int{1}, w[0], w[1]), value(owns[1].steps[i].Values, "loss"), 1e-14)
		require.Equal(t, 0.1, st.LR)
		require.EqualValues(t, 67*8, st.Bytes)
		require.NotEmpty(t, st.Buckets)
		require.Len(t, st.Ranks, 2)
		require.Positive(t, st.Throughput)
		for _, times := range []report.Times{st.Times, st.Ranks[0].Times, st.Ranks[1].Times} {
			require.Positive(t, times.Forward)
			require.Positive(t, times.Optimizer)
			require.GreaterOrEqual(t, times.Backward, 0*times.Total)
			require.LessOrEqual(t, times.Data+times.Forward+times.Backward+times.Communication+times.Optimizer, times.Total+5)
		}
	}
	require.Len(t, s.epochs, 2)
	for i, e := range s.epochs {
		require.InDelta(t, mean([]int{0, 1}, 6*i, 6*i+6), value(e.Train, "loss"), 1e-14)
		require.Equal(t, []string{"loss", "accuracy"}, []string{e.Eval[0].Name, e.Eval[1].Name})
		require.Equal(t, []any{i, int64(6*i + 6)}, []any{e.Epoch, e.Step})
		require.Positive(t, e.Duration)
		require.Positive(t, e.Throughput)
	}
}

// TestRanksMeetEveryLogEverySteps: beside DDP's own collectives there is one in LogEvery steps.
func TestRanksMeetEveryLogEverySteps(t *testing.T) {
	group(t, 2, setup{samples: 160, batch: 4}.each(func(r *rank) error {
		var reduced []string
		seen := uint64(0)
		return r.train(context.Background(), Options{Epochs: 1, LogEvery: 10, Callbacks: []Callback{{
			AfterStep: func(p *Progress) error {
				list, err := r.pg.History()
				if err != nil {
					return err
				}
				for _, op := range list {
					if op.Seq > seen {
						seen = op.Seq
						if strings.Contains(op.Site, "meet.go") {
							reduced = append(reduced, fmt.Sprint(p.Step, " ", op.Op))
						}
					}
				}
				return nil
			},
			End: func(*Progress, error) error {
				// What happened after step 10 is seen after step 11. The last one is at the end of the epoch.
				if want := []string{"11 all_reduce"}; !slices.Equal(reduced, want) {
					return fmt.Errorf("collectives of the trainer: %v, want %v", reduced, want)
				}
				return nil
			},
		}}})
	}))
}

func TestSchedulesAndPrecision(t *testing.T) {
	rates := func(t *testing.T, options func(r *rank, o *Options) error) (epochs, steps []float64) {
		group(t, 1, setup{samples: 12, batch: 4}.each(func(r *rank) error {
			o := Options{Epochs: 3, Callbacks: []Callback{{
				AfterStep:  func(p *Progress) error { steps = append(steps, p.LR); return nil },
				AfterEpoch: func(p *Progress, _, all report.Epoch) error { epochs = append(epochs, all.LR); return nil },
			}}}
			if err := options(r, &o); err != nil {
				return err
			}
			return r.train(context.Background(), o)
		}))
		return epochs, steps
	}
	t.Run("by epoch", func(t *testing.T) {
		epochs, _ := rates(t, func(r *rank, o *Options) (err error) {
			o.Scheduler, err = optim.NewStepLR(r.opt, 1, 0.5)
			return err
		})
		require.Equal(t, []float64{0.1, 0.05, 0.025}, epochs)
	})
	t.Run("by step", func(t *testing.T) {
		_, steps := rates(t, func(r *rank, o *Options) (err error) {
			o.SchedulePerStep = true
			o.Scheduler, err = optim.NewStepLR(r.opt, 2, 0.5)
			return err
		})
		require.Equal(t, []float64{0.1, 0.05, 0.05, 0.025, 0.025, 0.0125, 0.0125, 0.00625, 0.00625}, steps)
	})
	t.Run("plateau", func(t *testing.T) {
		epochs, _ := rates(t, func(r *rank, o *Options) (err error) {
			o.Plateau, err = optim.NewReduceLROnPlateau(r.opt, optim.PlateauOptions{Patience: -1, Threshold: 10, Absolute: true, Factor: 0.5})
			return err
		})
		require.Equal(t, []float64{0.1, 0.1, 0.05}, epochs)
	})
	t.Run("infinite gradients do not count", func(t *testing.T) {
		_, steps := rates(t, func(r *rank, o *Options) (err error) {
			o.SchedulePerStep, o.ClipNorm = true, 1
			if o.Scheduler, err = optim.NewStepLR(r.opt, 1, 0.5); err != nil {
				return err
			}
			if o.Scaler, err = amp.NewGradScaler(amp.ScalerOptions{InitScale: math.Inf(1)}); err != nil {
				return err
			}
			r.closers = append(r.closers, o.Scaler)
			o.Callbacks = append([]Callback{{AfterStep: func(p *Progress) error {
				if p.GlobalStep == 1 { // until now the gradients were infinite
					return o.Scaler.SetScale(2)
				}
				return nil
			}}}, o.Callbacks...)
			return nil
		})
		require.Equal(t, []float64{0.1, 0.05, 0.025}, steps[:3], "steps with finite gradients")
	})
	t.Run("autocast", func(t *testing.T) {
		group(t, 2, func(pg *torchddp.ProcessGroup) error {
			r, err := setup{}.rank(pg)
			if err != nil {
				return err
			}
			defer r.close()
			if err := r.model.To(gotch.CPU, gotch.Float); err != nil {
				return err
			}
			task, saw := r.task(), 0
			task.Step = func(m Model, b *data.Batch) (Result, error) {
				x := b.Input().MustTotype(gotch.Float, false)
				defer x.MustDrop()
				out, err := m.Forward(x)
				if err != nil {
					return Result{}, err
				}
				defer out.MustDrop()
				if out.DType() == gotch.BFloat16 {
					saw++
				}
				return Result{Loss: nn.CrossEntropyLoss{}.Forward(out, b.Target()), Samples: b.Len()}, nil
			}
			trainer, err := New(task, Options{Epochs: 1, Autocast: &amp.Options{}, ClipNorm: 0.5})
			if err != nil {
				return err
			}
			if err := trainer.Run(context.Background()); err != nil {
				return err
			}
			if saw != 5 {
				return fmt.Errorf("%d of 5 steps ran in bfloat16", saw)
			}
			return nil
		})
	})
	t.Run("clipping", func(t *testing.T) {
		group(t, 2, setup{}.each(func(r *rank) error {
			before := r.weights()
			if err := r.train(context.Background(), Options{MaxSteps: 1, ClipNorm: 1e-3}); err != nil {
				return err
			}
			norm := 0.0
			for i, w := range r.weights() {
				norm += (w - before[i]) * (w - before[i])
			}
			if norm = math.Sqrt(norm); math.Abs(norm-1e-4) > 1e-9 { // the rate is 0.1
				return fmt.Errorf("the weights moved by %v", norm)
			}
			return nil
		}))
	})
}

// TestEarlyStop: all ranks stop after the same epoch or step, whoever wanted it.
func TestEarlyStop(t *testing.T) {
	at := func(t *testing.T, evals int, options func(rank int, o *Options)) (where [2]Progress, note string) {
		var sink collect
		group(t, 2, setup{evals: evals}.each(func(r *rank) error {
			o := Options{Epochs: 9, LogEvery: 2, Sink: &sink, Logger: quiet}
			options(r.pg.Rank(), &o)
			trainer, err := New(r.task(), o)
			if err != nil {
				return err
			}
			err = trainer.Run(context.Background())
			where[r.pg.Rank()] = trainer.Progress()
			return err
		}))
		return where, sink.epochs[len(sink.epochs)-1].Note
	}
	t.Run("no progress", func(t *testing.T) {
		p, note := at(t, 6, func(_ int, o *Options) { o.EarlyStop = EarlyStop{Patience: 2, MinDelta: 10} })
		require.Equal(t, []int{3, 3}, []int{p[0].Epoch, p[1].Epoch}, "the first epoch is the best, and two more")
		require.Equal(t, "stopped early: no progress of loss for 2 epochs", note)
	})
	t.Run("of the accuracy", func(t *testing.T) {
		p, _ := at(t, 0, func(_ int, o *Options) {
			o.Monitor, o.EarlyStop = Monitor{"accuracy", true}, EarlyStop{Patience: 3, MinDelta: 1}
		})
		require.Equal(t, []int{4, 4}, []int{p[0].Epoch, p[1].Epoch})
	})
	t.Run("a callback of one rank, in an epoch", func(t *testing.T) {
		p, note := at(t, 0, func(rank int, o *Options) {
			o.Callbacks = []Callback{{AfterStep: func(p *Progress) error {
				if rank == 1 && p.GlobalStep == 8 {
					p.Stop("enough")
				}
				return nil
			}}}
		})
		require.Equal(t, []int64{9, 9}, []int64{p[0].GlobalStep, p[1].GlobalStep}, "they meet after step 4 of the second epoch")
		require.Equal(t, "stopped early: another rank asked for it", note)
	})
	t.Run("a callback of one rank, after an epoch", func(t *testing.T) {
		p, _ := at(t, 0, func(rank int, o *Options) {
			o.Callbacks = []Callback{{AfterEpoch: func(p *Progress, _, _ report.Epoch) error {
				if rank == 1 {
					p.Stop("")
				}
				return nil
			}}}
		})
		require.Equal(t, []int{1, 1}, []int{p[0].Epoch, p[1].Epoch})
	})
}

// TestErrorOfOneRank ends that rank with the error, and the other one without waiting for ever.
func TestErrorOfOneRank(t *testing.T) {
	bad := errors.New("bad luck")
	for name, change := range map[string]func(task *Task[*data.Batch], o *Options){
		"step": func(task *Task[*data.Batch], _ *Options) {
			plain, n := task.Step, 0
			task.Step = func(m Model, b *data.Batch) (Result, error) {
				if n++; n == 4 {
					return Result{}, bad
				}
				return plain(m, b)
			}
		},
		"panic in a step": func(task *Task[*data.Batch], _ *Options) {
			plain, n := task.Step, 0
			task.Step = func(m Model, b *data.Batch) (Result, error) {
				if n++; n == 4 {
					panic(bad)
				}
				return plain(m, b)
			}
		},
		"evaluation": func(task *Task[*data.Batch], _ *Options) {
			plain := task.Step
			task.Step = func(m Model, b *data.Batch) (Result, error) {
				if !m.Training() {
					return Result{}, bad
				}
				return plain(m, b)
			}
		},
		"BeforeStep": func(_ *Task[*data.Batch], o *Options) {
			o.Callbacks = []Callback{{BeforeStep: func(p *Progress) error {
				if p.Step == 2 {
					return bad
				}
				return nil
			}}}
		},
		"AfterLog": func(_ *Task[*data.Batch], o *Options) {
			o.Callbacks = []Callback{{AfterLog: func(p *Progress, _, _ report.Step) error { return bad }}}
		},
		"BeforeEpoch": func(_ *Task[*data.Batch], o *Options) {
			o.Callbacks = []Callback{{BeforeEpoch: func(*Progress) error { return bad }}}
		},
	} {
		t.Run(name, func(t *testing.T) {
			var ended error
			errs := ranks(t, 2, setup{evals: 4}.each(func(r *rank) error {
				task, o := r.task(), Options{Epochs: 2, LogEvery: 2}
				if r.pg.Rank() == 1 {
					change(&task, &o)
					o.Callbacks = append(o.Callbacks, Callback{End: func(_ *Progress, err error) error { ended = err; return nil }})
				}
				trainer, err := New(task, o)
				if err != nil {
					return err
				}
				return trainer.Run(context.Background())
			}))
			require.ErrorIs(t, errs[1], bad)
			require.ErrorIs(t, ended, bad)
			require.ErrorContains(t, errs[1], "train: rank 1: epoch 0, step ")
			require.ErrorIs(t, errs[0], torchddp.ErrPeer, "the other rank lost its peer")
		})
	}
}

// TestRanksThatDiffer: what would hang is the same error everywhere.
func TestRanksThatDiffer(t *testing.T) {
	errs := ranks(t, 2, func(pg *torchddp.ProcessGroup) error {
		return setup{samples: 40}.each(func(r *rank) error {
			return r.train(context.Background(), Options{Epochs: 1, LogEvery: 2 + pg.Rank()})
		})(pg)
	})
	for _, err := range errs {
		require.ErrorContains(t, err, "not about to do the same")
		require.ErrorContains(t, err, "LogEvery 3")
	}
	errs = ranks(t, 2, setup{evals: 5, evalSampler: func(n int, o data.DistributedOptions) (data.Sampler, error) {
		return data.NewDistributedSampler(n, o)
	}}.each(func(r *rank) error { return r.train(context.Background(), Options{Epochs: 1}) }))
	for _, err := range errs {
		require.ErrorContains(t, err, "6 samples were seen of 5: some were counted twice; share them out by data.NewEvalSampler")
	}
	// Figures that change their names in the middle.
	group(t, 1, setup{}.each(func(r *rank) error {
		task, n := r.task(), 0
		task.Step = func(m Model, b *data.Batch) (Result, error) {
			res, err := Supervised(nn.CrossEntropyLoss{}, Metric{[]string{"a", "b"}[min(n, 1)], Accuracy().Sum})(m, b)
			n++
			return res, err
		}
		trainer, err := New(task, Options{Epochs: 1})
		if err != nil {
			return err
		}
		if err := trainer.Run(context.Background()); err == nil || !strings.Contains(err.Error(), `["loss" "b"], and before gave ["loss" "a"]`) {
			return fmt.Errorf("got %w", err)
		}
		return nil
	}))
}

func TestNewRefuses(t *testing.T) {
	group(t, 1, setup{}.each(func(r *rank) error {
		for _, c := range []struct {
			change func(task *Task[*data.Batch], o *Options)
			text   string
		}{
			{func(task *Task[*data.Batch], _ *Options) { task.Model = nil }, "Task.Model is nil"},
			{func(task *Task[*data.Batch], _ *Options) { task.Optimizer = nil }, "Task.Optimizer is nil"},
			{func(task *Task[*data.Batch], _ *Options) { task.Train = nil }, "there is no loader"},
			{func(task *Task[*data.Batch], _ *Options) { task.Train = (*data.DataLoader[*data.Batch])(nil) }, "there is no loader"},
			{func(task *Task[*data.Batch], _ *Options) { task.Step = nil }, "there is no loss"},
			{func(_ *Task[*data.Batch], o *Options) { o.Accumulate = -1 }, "Accumulate must not be negative, got -1"},
			{func(_ *Task[*data.Batch], o *Options) { o.LogEvery = -2 }, "LogEvery must not be negative"},
			{func(_ *Task[*data.Batch], o *Options) { o.Epochs = 0 }, "must say how long to train"},
			{func(_ *Task[*data.Batch], o *Options) { o.MaxSteps = -1 }, "MaxSteps must not be negative"},
			{func(_ *Task[*data.Batch], o *Options) { o.ClipNorm = math.NaN() }, "ClipNorm must not be negative"},
			{func(_ *Task[*data.Batch], o *Options) { o.EarlyStop.MinDelta = -1 }, "MinDelta must not be negative"},
			{func(_ *Task[*data.Batch], o *Options) { o.Snapshots.Resume = true }, "Snapshots needs Dir"},
			{func(_ *Task[*data.Batch], o *Options) { o.SchedulePerStep = true }, "needs a Scheduler"},
		} {
			task, o := r.task(), Options{Epochs: 1}
			c.change(&task, &o)
			if _, err := New(task, o); err == nil || !strings.Contains(err.Error(), c.text) {
				return fmt.Errorf("got %v, want %q", err, c.text)
			}
		}
		trainer, err := New(r.task(), Options{Epochs: 1})
		if err != nil {
			return err
		}
		if _, err := trainer.Evaluate(context.Background()); err == nil || !strings.Contains(err.Error(), "nothing to evaluate") {
			return fmt.Errorf("got %v", err)
		}
		err = r.train(context.Background(), Options{Epochs: 2, Monitor: Monitor{Name: "f1"}})
		if err == nil || !strings.Contains(err.Error(), `"f1", which the step function does not give`) {
			return fmt.Errorf("got %w", err)
		}
		return nil
	}))
}

// failing is a sink that fails from the first step on.
type failing struct {
	collect
	calls int
}

func (f *failing) Step(report.Step) error { f.calls++; return errors.New("disk full") }

func TestSinkThatFailsIsDropped(t *testing.T) {
	var log bytes.Buffer
	sink := &failing{}
	group(t, 1, setup{}.each(func(r *rank) error {
		return r.train(context.Background(), Options{Epochs: 3, Sink: sink, Logger: slog.New(slog.NewTextHandler(&log, nil))})
	}))
	require.Equal(t, 1, sink.calls)
	require.Equal(t, 1, strings.Count(log.String(), "disk full"))
}

func TestFreesWhatItMakes(t *testing.T) {
	live := func(epochs int) int64 {
		before := ts.LiveTensors()
		group(t, 1, setup{evals: 5}.each(func(r *rank) error {
			return r.train(context.Background(), Options{Epochs: epochs, Accumulate: 2, ClipNorm: 1,
				Snapshots: Snapshots{Dir: filepath.Join(t.TempDir(), "s"), EverySteps: 2}})
		}))
		return int64(ts.LiveTensors()) - int64(before)
	}
	live(1)
	require.Equal(t, live(1), live(5))
	require.Zero(t, live(2))
}
