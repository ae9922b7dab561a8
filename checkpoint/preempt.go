package checkpoint

import (
	"context"
	"os"
	"os/signal"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
)

// Preemption notes the signal with which cluster managers announce the end of a job, so that the training loop can
// save a snapshot between two steps:
//
//	stop := checkpoint.WatchPreemption()
//	defer stop.Stop()
//	for step := start; step < steps; step++ {
//		train(step)
//		over, err := stop.Agreed(ctx, anyRank)
//		if err != nil {
//			return err
//		}
//		if over { // package launch has cancelled ctx by now
//			err := manager.Save(context.WithoutCancel(ctx), step, snapshot.Value())
//			return errors.Join(err, launch.ErrResume)
//		}
//	}
//
// A second signal ends the process at once, but not within a quarter of a second of the first one: launchers send it to
// a rank and to the group of processes that the rank leads, so that it comes twice.
type Preemption struct {
	ch    chan os.Signal
	done  chan struct{}
	armed chan struct{} // closed when the next signal acts as it would without us
	quit  chan struct{}
	got   atomic.Bool
	stop  sync.Once
}

// echo is how long after the first signal another one is taken for the same. Tests choose another time.
var echo = 250 * time.Millisecond

// WatchPreemption notes the given signals, or SIGTERM.
func WatchPreemption(signals ...os.Signal) *Preemption {
	if len(signals) == 0 {
		signals = []os.Signal{syscall.SIGTERM}
	}
	p := &Preemption{
		ch: make(chan os.Signal, 1), done: make(chan struct{}), armed: make(chan struct{}), quit: make(chan struct{}),
	}
	signal.Notify(p.ch, signals...)
	go func() {
		defer close(p.armed)
		defer signal.Stop(p.ch)
		select {
		case <-p.ch:
		case <-p.quit:
			return
		}
		p.got.Store(true)
		close(p.done)
		select {
		case <-time.After(echo): // what comes until then stays in the channel, or finds it full
		case <-p.quit:
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
	p.stop.Do(func() { close(p.quit) })
	<-p.armed
}
