package train

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/sugarme/gotch/ts"

	"github.com/goddp/goddp/torchddp"
	"github.com/goddp/goddp/torchddp/amp"
	"github.com/goddp/goddp/torchddp/optim"
	"github.com/goddp/goddp/train/report"
)

// runEpoch trains one epoch, evaluates, and tells whether the run is over.
func (t *Trainer[B]) runEpoch(ctx context.Context) (over bool, err error) {
	p := &t.progress
	p.stop, p.LR = "", t.lr()
	whole := true
	if !t.trained {
		if whole, err = t.trainEpoch(ctx); err != nil {
			return false, err
		}
	}
	if !whole {
		// The run ends in the middle of an epoch: a snapshot goes on right there.
		if err := t.save(ctx, nil); err != nil {
			return false, err
		}
	}
	own, all := t.epochReport(t.epoch.own, 1), t.epochReport(t.epoch.all, p.World)
	over = !whole || p.Epoch+1 >= t.opts.Epochs || t.enough()
	if t.Eval != nil && ((p.Epoch+1)%t.opts.EvalEvery == 0 || over) {
		if own.Eval, all.Eval, err = t.evaluate(ctx); err != nil {
			return false, err
		}
	}
	for _, c := range t.opts.Callbacks {
		if c.AfterEpoch != nil {
			if err := c.AfterEpoch(p, own, all); err != nil {
				return false, err
			}
		}
	}
	if whole {
		if over, err = t.endEpoch(ctx, over, all); err != nil {
			return false, err
		}
	}
	var notes []string
	if p.stop != "" {
		notes = append(notes, "stopped early: "+p.stop)
		t.log.Info("train: stopped early", "epoch", all.Epoch, "reason", p.stop)
	}
	if t.saved != "" {
		notes = append(notes, "saved as "+t.saved)
	}
	own.Note = strings.Join(notes, "; ")
	all.Note, t.saved = own.Note, ""
	t.tell(&t.sink, func(s report.Sink) error { return s.Epoch(all) })
	t.tell(&t.opts.OwnSink, func(s report.Sink) error { return s.Epoch(own) })
	return over, nil
}

// endEpoch does what follows a whole epoch. last says that it is the last one; others may turn out to be.
func (t *Trainer[B]) endEpoch(ctx context.Context, last bool, e report.Epoch) (over bool, err error) {
	p := &t.progress
	// A rank that was told to stop ends the run here, before the epoch counts: it is evaluated anew after a resume.
	if _, err := t.meet(ctx, make(figures, figSums)); err != nil {
		return false, err
	}
	score, err := t.judge(e)
	if err != nil {
		return false, err
	}
	// A snapshot goes on with the next epoch.
	p.Epoch, p.Step, t.trained, t.epoch = p.Epoch+1, 0, false, totals{}
	over = last || p.stop != ""
	if over || p.Epoch%t.opts.Snapshots.EveryEpochs == 0 {
		err = t.save(ctx, score)
	}
	return over, err
}

func (t *Trainer[B]) epochReport(f figures, ranks int) report.Epoch {
	p := &t.progress
	e := report.Epoch{Time: time.Now(), Epoch: p.Epoch, Step: p.GlobalStep, LR: p.LR, Duration: t.epoch.taken}
	e.Train, e.Throughput = f.values(t.meter.names), f.throughput(ranks)
	return e
}

// stepsLeft is how many optimizer steps the next pass of the loader has; 0: not known.
func (t *Trainer[B]) stepsLeft() int {
	return (max(t.Train.Len(), 0) + t.opts.Accumulate - 1) / t.opts.Accumulate
}

// trainEpoch makes the epoch's steps, from where it stands. It tells whether it came to the epoch's end; otherwise the
// run is to end.
func (t *Trainer[B]) trainEpoch(ctx context.Context) (whole bool, err error) {
	p := &t.progress
	t.Train.SetEpoch(p.Epoch)
	left := t.Train.Len() // batches
	if p.Steps = p.Step + t.stepsLeft(); left < 0 {
		p.Steps = 0
	}
	if err := t.call(func(c Callback) func(*Progress) error { return c.BeforeEpoch }); err != nil {
		return false, err
	}
	before, start := t.epoch.taken, time.Now()
	defer func() { t.epoch.taken = before + time.Since(start) }()
	begun, size := 0, 0 // batches of this step: those seen, and all
	since := p.Step     // where the ranks met last
	t.watch = stopwatch{last: start}
	// A rank that is told to stop must not leave the others in the middle of a step: see meet.
	for batch, err := range t.Train.All(context.WithoutCancel(ctx)) {
		if err != nil {
			return false, err
		}
		t.watch.lap(partData)
		if begun == 0 {
			if size = t.opts.Accumulate; left >= 0 {
				size = min(size, left)
			}
			if err := t.call(func(c Callback) func(*Progress) error { return c.BeforeStep }); err != nil {
				return false, err
			}
			t.watch.lap(partOther)
			if err := t.Optimizer.ZeroGrad(true); err != nil {
				return false, err
			}
		}
		begun, left = begun+1, left-1
		run := func() error { return t.batch(batch, size) }
		if begun < size {
			if err := t.Model.NoSync(run); err != nil {
				return false, err
			}
			continue
		}
		if err := run(); err != nil {
			return false, err
		}
		begun = 0
		if err := t.update(); err != nil {
			return false, err
		}
		p.Step++
		p.GlobalStep++
		p.LR = t.lr()
		t.watch.lap(partOptimizer)
		if err := t.call(func(c Callback) func(*Progress) error { return c.AfterStep }); err != nil {
			return false, err
		}
		t.watch.lap(partOther)
		every := t.opts.Snapshots.EverySteps
		due := every > 0 && p.Step%every == 0
		if due || p.Step%t.opts.LogEvery == 0 || t.enough() {
			stop, err := t.flush(ctx, p.Step-since)
			if err != nil || stop || t.enough() && left != 0 {
				return false, err
			}
			since = p.Step
			if due {
				if err := t.save(ctx, nil); err != nil {
					return false, err
				}
			}
			t.watch.last = time.Now()
		}
	}
	t.trained = true // a snapshot is not to begin the epoch anew
	if p.Step > since {
		// Who wants to stop is asked again after the evaluation.
		_, err = t.flush(ctx, p.Step-since)
	}
	return true, err
}

// batch computes the gradients of one batch of a step.
func (t *Trainer[B]) batch(batch B, size int) error {
	r, err := t.forward(true, batch)
	if err != nil {
		return err
	}
	defer r.drop()
	if err := t.meter.add(r); err != nil {
		return err
	}
	loss := r.Loss
	if size > 1 && !t.opts.WeightBySamples {
		if loss, err = loss.DivScalar(ts.IntScalar(int64(size)), false); err != nil {
			return err
		}
		defer loss.MustDrop()
	}
	if t.opts.Scaler != nil {
		if loss, err = t.opts.Scaler.Scale(loss); err != nil {
			return err
		}
		defer loss.MustDrop()
	}
	t.watch.lap(partForward)
	defer t.watch.lap(partBackward)
	if t.opts.WeightBySamples {
		return t.Model.BackwardWeighted(loss, float64(r.Samples))
	}
	return t.Model.Backward(loss)
}

func (t *Trainer[B]) forward(training bool, batch B) (r Result, err error) {
	run := func() (err error) {
		r, err = t.Step(Model{t.Model, training}, batch)
		return err
	}
	if t.opts.Autocast != nil {
		err = amp.Autocast(*t.opts.Autocast, run)
	} else {
		err = run()
	}
	return r, err
}

// update makes the optimizer's step, and what goes with it.
func (t *Trainer[B]) update() error {
	o, stepped := &t.opts, true
	if o.ClipNorm > 0 {
		if o.Scaler != nil {
			if err := o.Scaler.Unscale(t.Optimizer); err != nil {
				return err
			}
		}
		norm, err := optim.ClipGradNorm(optim.Parameters(t.Model), o.ClipNorm)
		if err != nil {
			return err
		}
		norm.MustDrop()
	}
	if o.Scaler != nil {
		var err error
		if stepped, err = o.Scaler.Step(t.Optimizer); err != nil {
			return err
		}
		if err := o.Scaler.Update(); err != nil {
			return err
		}
	} else if err := t.Optimizer.Step(); err != nil {
		return err
	}
	if !stepped {
		return nil // infinite gradients, on all ranks alike: this step does not count
	}
	if o.SchedulePerStep {
		if err := o.Scheduler.Step(); err != nil {
			return err
		}
	}
	if o.Average != nil {
		return o.Average.Update()
	}
	return nil
}

func (t *Trainer[B]) lr() float64 {
	if groups := t.Optimizer.ParamGroups(); len(groups) > 0 {
		return groups[0].LR()
	}
	return 0
}

// patience is how long a run has made no progress.
type patience struct {
	best   float64 // infinite to begin with
	epochs int     // since then
}

// judge steps what goes by the epoch, and gives the monitored figure; nil: there is none.
func (t *Trainer[B]) judge(e report.Epoch) (score *float64, err error) {
	o := &t.opts
	list := e.Eval
	if t.Eval == nil {
		list = e.Train
	}
	if i := slices.IndexFunc(list, func(v report.Value) bool { return v.Name == o.Monitor.Name }); i >= 0 {
		score = &list[i].Value
	} else if len(list) > 0 && (o.EarlyStop.Patience > 0 || o.Plateau != nil || o.Monitor.Name != lossName) {
		return nil, fmt.Errorf("Options.Monitor is %q, which the step function does not give: it gives %v", o.Monitor.Name, list)
	}
	if o.Scheduler != nil && !o.SchedulePerStep {
		if err := o.Scheduler.Step(); err != nil {
			return nil, err
		}
	}
	if score == nil {
		return nil, nil
	}
	if o.Plateau != nil {
		if err := o.Plateau.Step(*score); err != nil {
			return nil, err
		}
	}
	gain := t.early.best - *score
	if o.Monitor.Max {
		gain = -gain
	}
	if gain > o.EarlyStop.MinDelta {
		t.early = patience{best: *score}
	} else if t.early.epochs++; o.EarlyStop.Patience > 0 && t.early.epochs >= o.EarlyStop.Patience {
		t.progress.Stop(fmt.Sprintf("no progress of %s for %d epochs", o.Monitor.Name, t.early.epochs))
	}
	if o.EarlyStop.Patience > 0 {
		// The figures are the same on all ranks, down to the last bit if the backend does as it should. Rank 0 decides.
		if t.progress.stop, err = torchddp.BroadcastObject(t.pg, t.progress.stop, 0); err != nil {
			return nil, err
		}
	}
	return score, nil
}
