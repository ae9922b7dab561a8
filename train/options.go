package train

import (
	"fmt"
	"log/slog"

	"github.com/goddp/goddp/torchddp/amp"
	"github.com/goddp/goddp/torchddp/optim"
	"github.com/goddp/goddp/train/report"
)

// Options say how to train. Only Epochs or MaxSteps is needed. All ranks give the same, but Sink, OwnSink and Logger.
type Options struct {
	// Epochs is how many passes over the data the whole run has, those before a resume included.
	Epochs int
	// MaxSteps ends the run after so many optimizer steps, if that is sooner; 0 is no limit.
	MaxSteps int64

	// Accumulate is how many batches make one optimizer step; 0 is 1. Gradients are averaged over the ranks with the last
	// of them only. Where fewer are left at the end of an epoch, those make the last step.
	Accumulate int
	// WeightBySamples gives every sample the same weight where batches differ in size, between ranks and within a step:
	// gradients are then exactly those of one big batch. It costs one small collective a step.
	WeightBySamples bool
	// ClipNorm bounds the norm of all gradients together; 0 is no bound.
	ClipNorm float64
	// Autocast runs the step function in mixed precision, in training and evaluation.
	Autocast *amp.Options
	// Scaler keeps small gradients of float16 from vanishing. It is saved in snapshots.
	Scaler *amp.GradScaler

	// Scheduler changes the learning rate after every epoch, or with SchedulePerStep after every optimizer step.
	Scheduler       optim.Scheduler
	SchedulePerStep bool
	// Plateau lowers the learning rate when Monitor's figure has stopped improving.
	Plateau *optim.ReduceLROnPlateau
	// Average is an average of the weights, such as an exponential one. It is brought up to date after every step, used
	// in evaluation, and saved in snapshots.
	Average *optim.AveragedModel

	// LogEvery is after how many steps of an epoch the ranks meet: figures are averaged and reported, and it is agreed
	// whether to stop. 0 is 10. In between no rank waits for its device. A job that is told to end has only the launcher's
	// grace time (10 s) to come to such a step and save.
	LogEvery int
	// EvalEvery is after how many epochs, and after the last, the model is evaluated; 0 is 1.
	EvalEvery int
	// KeepBuffers evaluates with each rank's own buffers, such as the running means of batch norm. Otherwise all ranks
	// take rank 0's, which are those in a snapshot.
	KeepBuffers bool

	// Monitor is the figure by which the best epoch, EarlyStop and Plateau go. The zero value is the loss, of the
	// evaluation if there is one.
	Monitor   Monitor
	EarlyStop EarlyStop

	// Snapshots says where the state of the run is saved.
	Snapshots Snapshots

	// Callbacks are called in their order, on every rank.
	Callbacks []Callback

	// Sink gets the figures of the whole job. It is used on rank 0 and ignored elsewhere. OwnSink gets this rank's own
	// figures. Run closes both.
	Sink, OwnSink report.Sink
	// Stragglers reports the times of every rank too, which costs one more collective at every LogEvery-th step.
	Stragglers bool
	// About has what the reports are to say of the run: Name, Model, BatchSize and Hyper. The rest is filled in.
	About report.Run
	// Logger takes what happens beside figures; nil is slog's default, with the rank. See report.Logger.
	Logger *slog.Logger
}

// Monitor is a figure to go by.
type Monitor struct {
	Name string // "" is "loss"
	Max  bool   // larger is better, as for an accuracy
}

// EarlyStop ends a run that makes no progress. The zero value never does.
type EarlyStop struct {
	Patience int     // epochs without progress that end the run; 0 is never
	MinDelta float64 // what counts as progress
}

// Snapshots say where, when and how the state of a run is saved. The zero value saves nothing.
type Snapshots struct {
	// Dir is a folder for snapshots, which all ranks can read.
	Dir string
	// Resume goes on from the newest snapshot in Dir; where there is none the run begins at the beginning.
	Resume bool
	// EveryEpochs is after how many epochs one is saved; 0 is 1. The last epoch and an early end are saved in any case.
	EveryEpochs int
	// EverySteps is after how many steps of an epoch one is saved; 0 is never.
	EverySteps int
	// Keep is how many of the newest stay, beside the best one; 0 is 3, a negative number keeps all.
	Keep int
	// Async writes beside training.
	Async bool
}

// Callback has functions that a run calls at its turning points. Each may be nil. An error, or a panic, ends the run on
// this rank, and so the job.
type Callback struct {
	BeforeEpoch func(*Progress) error
	BeforeStep  func(*Progress) error
	AfterStep   func(*Progress) error
	// AfterLog has the figures since the last one: this rank's own, and the means over all ranks.
	AfterLog func(p *Progress, own, all report.Step) error
	// AfterEpoch has the whole epoch and its evaluation.
	AfterEpoch func(p *Progress, own, all report.Epoch) error
	// End is called once, also after an error, which it is given.
	End func(p *Progress, err error) error
}

// Progress is where a run stands.
type Progress struct {
	Rank, World int
	Epoch       int   // counted from 0
	Step        int   // optimizer steps done in the epoch
	Steps       int   // those that the epoch has; 0: not known, the data set is a stream
	GlobalStep  int64 // optimizer steps done in the run
	Epochs      int   // that the run has
	LR          float64

	stop string
}

// Stop asks for an end of the run. One rank is enough: all of them stop at the next step at which they meet (see
// Options.LogEvery), or after the epoch. The run ends without an error, after a snapshot.
func (p *Progress) Stop(reason string) {
	if reason == "" {
		reason = "a callback stopped the run"
	}
	p.stop = reason
}

// withDefaults checks the options and fills in what was left to the default.
func (o Options) withDefaults() (Options, error) {
	for _, f := range []struct {
		name string
		v    *int
		def  int
	}{
		{"Accumulate", &o.Accumulate, 1}, {"LogEvery", &o.LogEvery, 10}, {"EvalEvery", &o.EvalEvery, 1},
		{"EarlyStop.Patience", &o.EarlyStop.Patience, 0}, {"Epochs", &o.Epochs, 0},
		{"Snapshots.EveryEpochs", &o.Snapshots.EveryEpochs, 1}, {"Snapshots.EverySteps", &o.Snapshots.EverySteps, 0},
	} {
		if *f.v < 0 {
			return o, fmt.Errorf("%s must not be negative, got %d", "Options."+f.name, *f.v)
		}
		if *f.v == 0 {
			*f.v = f.def
		}
	}
	switch s := o.Snapshots; {
	case o.MaxSteps < 0:
		return o, fmt.Errorf("Options.MaxSteps must not be negative, got %d", o.MaxSteps)
	case o.Epochs == 0 && o.MaxSteps == 0:
		return o, fmt.Errorf("no end is set: Options.Epochs, or MaxSteps, must say how long to train")
	case !(o.ClipNorm >= 0):
		return o, fmt.Errorf("Options.ClipNorm must not be negative, got %v", o.ClipNorm)
	case !(o.EarlyStop.MinDelta >= 0):
		return o, fmt.Errorf("Options.EarlyStop.MinDelta must not be negative, got %v", o.EarlyStop.MinDelta)
	case s.Dir == "" && (s.Resume || s.EverySteps > 0):
		return o, fmt.Errorf("Options.Snapshots needs Dir, the folder to resume from and to save in")
	case o.SchedulePerStep && o.Scheduler == nil:
		return o, fmt.Errorf("Options.SchedulePerStep needs a Scheduler")
	}
	if o.Epochs == 0 {
		o.Epochs = maxEpochs
	}
	if o.Snapshots.Keep == 0 {
		o.Snapshots.Keep = 3
	}
	if o.Monitor.Name == "" {
		o.Monitor.Name = lossName
	}
	return o, nil
}

const (
	maxEpochs = 1 << 30 // where only MaxSteps ends the run
	lossName  = "loss"
)
