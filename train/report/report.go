// Package report shows how a training run goes: on a terminal, as lines, as JSON, in TensorBoard, as a CSV file, to
// Prometheus, and in one HTML page at the end. Each of these is a [Sink]; package train feeds them with figures that
// are already averaged over the ranks.
package report

import (
	"io"
	"time"
)

// Sink takes what a run reports. Calls come from one goroutine, in the order Begin, then Step and Epoch as they happen,
// then Close. An error ends neither the run nor the other sinks: train logs it once and drops the sink.
type Sink interface {
	Begin(Run) error
	Step(Step) error
	Epoch(Epoch) error
	io.Closer
}

// Run is what is known before the first step.
type Run struct {
	Name          string
	Model         string
	Device        string // of rank 0, such as "cuda:0"
	Backend       string
	World         int
	Hosts         []string // by rank
	Epochs        int
	StepsPerEpoch int // 0: not known, the data set is a stream
	StartEpoch    int // greater than 0 after a resume
	StartStep     int // the first step of StartEpoch
	BatchSize     int // of one rank
	Parameters    int64
	Hyper         []Param // in the order to show them
	Started       time.Time
}

// Param is one setting of the run.
type Param struct {
	Name, Value string
}

// Times is how long the parts of a step took.
type Times struct {
	Data          time.Duration // waiting for the batch
	Forward       time.Duration
	Backward      time.Duration // with the communication that it hides
	Communication time.Duration // what of the reduction backward did not hide
	Optimizer     time.Duration
	Total         time.Duration
}

// Value is a named figure: "loss", "accuracy", or one of the program's own.
type Value struct {
	Name  string
	Value float64
}

// Step is what happened since the last Step: a mean over the steps in between and over all ranks.
type Step struct {
	Time       time.Time
	Epoch      int
	Step       int // in the epoch, counted from 1: how many are done
	GlobalStep int64
	Steps      int // how many steps this is the mean of
	Values     []Value
	LR         float64
	Throughput float64 // samples a second of the whole job
	Times      Times
	Bytes      int64         // reduced by one rank in one step
	Buckets    []Bucket      // of rank 0
	Ranks      []RankFigures // by rank; empty where the program did not ask for them
}

// Bucket is one bucket of DDP's gradients.
type Bucket struct {
	Bytes int64
	Time  time.Duration // from ready to reduced
}

// RankFigures is one rank's own mean, for finding the slow one.
type RankFigures struct {
	Rank  int
	Times Times
}

// Epoch is a whole epoch, averaged over all ranks and samples.
type Epoch struct {
	Time     time.Time
	Epoch    int
	Step     int64 // the global step at its end
	Duration time.Duration
	Train    []Value
	Eval     []Value // empty: there was no evaluation
	// Throughput is in samples a second of the whole job.
	Throughput float64
	LR         float64
	Note       string // such as "saved as snapshot.pt" or "stopped early: no progress for 5 epochs"
}
