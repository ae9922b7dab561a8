package train

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"log/slog"
	"math"
	"os"
	"runtime/debug"
	"strconv"
	"strings"
	"time"

	"github.com/sugarme/gotch"

	"github.com/goddp/goddp/checkpoint"
	"github.com/goddp/goddp/data"
	"github.com/goddp/goddp/torchddp"
	"github.com/goddp/goddp/torchddp/optim"
	"github.com/goddp/goddp/train/report"
)

// Loader gives the batches of an epoch. [data.DataLoader] is one.
type Loader[B any] interface {
	All(ctx context.Context) iter.Seq2[B, error]
	// Len is how many batches the next pass gives, the same on every rank; -1: not known.
	Len() int
	SetEpoch(epoch int)
	// State names the next batch, and Restore makes the next pass begin with it.
	State() (data.State, error)
	Restore(data.State) error
}

// Task is what to train: this rank's share of the job. What it is made of stays the caller's to close.
type Task[B any] struct {
	Model     *torchddp.DDP
	Optimizer optim.Optimizer
	Train     Loader[B]
	// Eval gives the samples to evaluate with, each to one rank: use data.EvalSampler. It may be nil.
	Eval Loader[B]
	// Step computes the loss of a batch; see Supervised.
	Step StepFunc[B]
}

// Trainer trains a model on one rank of a job.
type Trainer[B any] struct {
	Task[B]
	opts     Options
	pg       *torchddp.ProcessGroup
	log      *slog.Logger
	progress Progress
	meter    meter // since the ranks met last
	evals    meter
	watch    stopwatch
	epoch    totals // so far
	begun    bool
	trained  bool // the epoch's batches are done, its evaluation is not
	early    patience
	saver    *checkpoint.Manager
	saved    string // the latest snapshot that no report has told of
	sink     report.Sink
}

// totals are figures of an epoch: this rank's own, and those of all.
type totals struct {
	own, all figures
	taken    time.Duration
}

// New checks what it is given. It does not communicate.
func New[B any](task Task[B], opts Options) (*Trainer[B], error) {
	fail := func(format string, a ...any) (*Trainer[B], error) { return nil, fmt.Errorf("train: "+format, a...) }
	switch {
	case task.Model == nil:
		return fail("Task.Model is nil: wrap the model by torchddp.NewDDP")
	case task.Optimizer == nil:
		return fail("Task.Optimizer is nil: make one, such as optim.NewSGD(model.NamedParameters(), …)")
	case isNil(task.Train):
		return fail("Task.Train is nil: there is no loader to train with, make one by data.NewDataLoader")
	case task.Step == nil:
		return fail("Task.Step is nil: there is no loss, such as train.Supervised(nn.CrossEntropyLoss{})")
	}
	if isNil(task.Eval) {
		task.Eval = nil
	}
	opts, err := opts.withDefaults()
	if err != nil {
		return fail("%w", err)
	}
	pg := task.Model.ProcessGroup()
	if opts.Logger == nil {
		opts.Logger = slog.Default().With("rank", pg.Rank())
	}
	if opts.Accumulate > 1 && task.Train.Len() < 0 {
		opts.Logger.Warn("train: the loader does not know its length: batches that do not fill a step at its end are left out")
	}
	t := &Trainer[B]{
		Task: task, opts: opts, pg: pg, log: opts.Logger,
		progress: Progress{Rank: pg.Rank(), World: pg.Size(), Epochs: opts.Epochs},
		meter:    meter{device: pg.Device()}, evals: meter{device: pg.Device()},
	}
	t.early.best = math.Inf(1)
	if opts.Monitor.Max {
		t.early.best = math.Inf(-1)
	}
	if pg.Rank() == 0 {
		t.sink = opts.Sink
	}
	return t, nil
}

// isNil also knows an interface that holds a nil *data.DataLoader.
func isNil[B any](l Loader[B]) bool {
	d, ok := l.(*data.DataLoader[B])
	return l == nil || ok && d == nil
}

// Progress is where the run stands.
func (t *Trainer[B]) Progress() Progress { return t.progress }

// Run trains to the end. All ranks call it, on the goroutine that is locked to the rank's thread. It may be called once.
//
// When ctx ends on any rank, as by a signal under package launch, all ranks stop at the next step at which they meet. If
// Options.Snapshots has a folder they save, and the error matches launch.ErrResume: the program's exit status then tells
// that it is to be started again. Otherwise the error is the context's cause.
func (t *Trainer[B]) Run(ctx context.Context) (err error) {
	if t.begun {
		return errors.New("train: Run was called before; make another Trainer")
	}
	t.begun = true
	defer func() {
		if v := recover(); v != nil {
			err = t.wrap(&torchddp.PanicError{Value: v, Stack: debug.Stack()})
		}
		for _, c := range t.opts.Callbacks {
			if c.End != nil {
				err = errors.Join(err, t.guard(func() error { return c.End(&t.progress, err) }))
			}
		}
		if t.saver != nil {
			err = errors.Join(err, t.saver.Close())
		}
		for _, s := range []*report.Sink{&t.sink, &t.opts.OwnSink} {
			t.tell(s, report.Sink.Close)
		}
		t.meter.drop()
	}()
	if err := t.begin(ctx); err != nil {
		return t.wrap(err)
	}
	for t.progress.Epoch < t.opts.Epochs && !t.enough() {
		over, err := t.runEpoch(ctx)
		if err != nil {
			return t.wrap(err)
		}
		if over {
			break
		}
	}
	return nil
}

func (t *Trainer[B]) enough() bool {
	return t.opts.MaxSteps > 0 && t.progress.GlobalStep >= t.opts.MaxSteps
}

func (t *Trainer[B]) wrap(err error) error {
	return fmt.Errorf("train: rank %d: epoch %d, step %d: %w", t.progress.Rank, t.progress.Epoch, t.progress.Step, err)
}

// guard turns a panic of the program's code into an error.
func (t *Trainer[B]) guard(fn func() error) (err error) {
	defer func() {
		if v := recover(); v != nil {
			err = t.wrap(&torchddp.PanicError{Value: v, Stack: debug.Stack()})
		}
	}()
	return fn()
}

// hello is what the ranks tell each other before they begin: what has to be the same, and where they are.
type hello struct{ Plan, Host string }

// begin resumes, and makes sure that all ranks are about to do the same.
func (t *Trainer[B]) begin(ctx context.Context) error {
	if err := t.resume(ctx); err != nil {
		return err
	}
	if err := t.Model.SetLoggingSampleRate(min(t.opts.LogEvery, 100)); err != nil {
		return err
	}
	o, p := &t.opts, &t.progress
	t.Train.SetEpoch(p.Epoch)
	host, _ := os.Hostname()
	plan := fmt.Sprintf("%d batches from epoch %d step %d on, Epochs %d, MaxSteps %d, Accumulate %d, LogEvery %d, EvalEvery %d, evaluation %t, Snapshots %v, Stragglers %t",
		t.Train.Len(), p.Epoch, p.GlobalStep, o.Epochs, o.MaxSteps, o.Accumulate, o.LogEvery, o.EvalEvery, t.Eval != nil, o.Snapshots, o.Stragglers)
	all, err := torchddp.AllGatherObject(t.pg, hello{plan, host})
	if err != nil {
		return err
	}
	run := o.About
	for rank, h := range all {
		if h.Plan != all[0].Plan {
			return fmt.Errorf("the ranks are not about to do the same (do their samplers share out the data, do they see one folder of snapshots?):\nrank 0: %s\nrank %d: %s",
				all[0].Plan, rank, h.Plan)
		}
		run.Hosts = append(run.Hosts, h.Host)
	}
	if run.Model == "" {
		run.Model = strings.TrimPrefix(fmt.Sprintf("%T", t.Model.Module()), "*")
	}
	run.Device, run.Backend, run.World = deviceName(t.pg.Device()), t.pg.Backend(), t.pg.Size()
	run.Epochs, run.StepsPerEpoch, run.StartEpoch, run.StartStep = o.Epochs, t.stepsLeft()+p.Step, p.Epoch, p.Step
	if o.Epochs == maxEpochs && run.StepsPerEpoch > 0 {
		steps := int64(run.StepsPerEpoch)
		run.Epochs = int((o.MaxSteps + steps - 1) / steps)
		p.Epochs = run.Epochs
	}
	for _, parameter := range t.Model.NamedParameters() {
		run.Parameters += int64(parameter.Numel())
	}
	run.Started = time.Now()
	for _, s := range []*report.Sink{&t.sink, &t.opts.OwnSink} {
		t.tell(s, func(s report.Sink) error { return s.Begin(run) })
	}
	return nil
}

// tell lets a sink take something. A sink that fails is not worth a run: it is dropped.
func (t *Trainer[B]) tell(s *report.Sink, what func(report.Sink) error) {
	if *s == nil {
		return
	}
	if err := what(*s); err != nil {
		t.log.Warn("train: a report failed and is given up", "error", err)
		*s = nil
	}
}

// call calls one kind of callback.
func (t *Trainer[B]) call(pick func(Callback) func(*Progress) error) error {
	for _, c := range t.opts.Callbacks {
		if fn := pick(c); fn != nil {
			if err := fn(&t.progress); err != nil {
				return err
			}
		}
	}
	return nil
}

func deviceName(d gotch.Device) string {
	if d.Name == "CUDA" {
		return "cuda:" + strconv.Itoa(d.Value)
	}
	return "cpu"
}
