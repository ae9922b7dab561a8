package checkpoint

import (
	"context"
	"os"
	"os/signal"
	"sync/atomic"
	"syscall"
)

// Preemption notes the signal with which cluster managers announce the end of a job, so that the training loop can
// save a snapshot between two steps:
//
//	stop := checkpoint.WatchPreemption()
//	defer stop.Stop()
//	for step := start; step < steps; step++ {
//		train(step)
//		if over, err := stop.Agreed(ctx, anyRank); err != nil || over {
//			return errors.Join(err, manager.Save(ctx, step, snapshot.Value()))
//		}
//	}
//
// A second signal ends the process at once.
type Preemption struct {
	ch   chan os.Signal
	done chan struct{}
	got  atomic.Bool
	stop atomic.Bool
}

// WatchPreemption notes the given signals, or SIGTERM.
func WatchPreemption(signals ...os.Signal) *Preemption {
	if len(signals) == 0 {
		signals = []os.Signal{syscall.SIGTERM}
	}
	p := &Preemption{ch: make(chan os.Signal, 1), done: make(chan struct{})}
	signal.Notify(p.ch, signals...)
	go func() {
		if _, ok := <-p.ch; ok {
			p.got.Store(true)
			signal.Stop(p.ch) // the next one acts as it would without us
			close(p.done)
		}
	}()
	return p
}

// Requested tells whether this process got the signal.
func (p *Preemption) Requested() bool { return p.got.Load() }

// Done is closed when the signal comes.
func (p *Preemption) Done() <-chan struct{} { return p.done }

// Agreed tells whether any rank got the signal, the same on all ranks: they must save at the same step, and the signal
// does not reach them in the same one. anyRank is a logical or over the ranks, such as an all-reduce with MAX; nil
// stands for a single process.
func (p *Preemption) Agreed(ctx context.Context, anyRank func(ctx context.Context, mine bool) (bool, error)) (bool, error) {
	if anyRank == nil {
		return p.Requested(), nil
	}
	return anyRank(ctx, p.Requested())
}

// Stop lets the signals act as they would without p.
func (p *Preemption) Stop() {
	if p.stop.Swap(true) {
		return
	}
	signal.Stop(p.ch)
	close(p.ch)
}
