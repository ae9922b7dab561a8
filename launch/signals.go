package launch

import (
	"context"
	"os"
	"os/signal"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// signals turns the signals of this process into three steps, each a channel that is closed when it is reached.
type signals struct {
	preempt chan struct{} // SIGUSR1, SIGUSR2: save what can be saved, no hurry
	stopped chan struct{} // SIGINT, SIGTERM, SIGHUP: end in good order within the grace time
	force   chan struct{} // one more SIGINT or SIGTERM: end now

	ch   chan os.Signal
	done chan struct{}

	mu     sync.Mutex
	signal unix.Signal // the one that stopped
	users  int         // Spawns that will act on force
}

// sameSignal is the time within which a second signal is taken for the first one's echo: a terminal, a make and a shell may
// each pass on the same Ctrl-C.
const sameSignal = 250 * time.Millisecond

// mainSignals are those that Main watches.
var mainSignals = []unix.Signal{unix.SIGINT, unix.SIGTERM, unix.SIGHUP, unix.SIGUSR1}

func watchSignals(cancel context.CancelCauseFunc, c *child, which []unix.Signal) *signals {
	s := &signals{
		preempt: make(chan struct{}), stopped: make(chan struct{}), force: make(chan struct{}),
		ch: make(chan os.Signal, 8), done: make(chan struct{}),
	}
	for _, sig := range which {
		if !signal.Ignored(sig) { // nohup, and shells that start a job in the background
			signal.Notify(s.ch, sig)
		}
	}
	go s.loop(cancel, c)
	return s
}

func (s *signals) stop() {
	signal.Stop(s.ch)
	close(s.done)
}

func (s *signals) loop(cancel context.CancelCauseFunc, c *child) {
	var first time.Time
	preempted, forced := false, false
	for {
		var sig unix.Signal
		select {
		case x := <-s.ch:
			sig, _ = x.(unix.Signal)
		case <-s.done:
			return
		}
		if c != nil && c.orphaned() {
			c.endOrphan()
		}
		switch {
		case sig == unix.SIGUSR1 || sig == unix.SIGUSR2:
			if !preempted {
				preempted = true
				cancel(&SignalError{sig})
				close(s.preempt)
			}
		case first.IsZero():
			first = time.Now()
			s.mu.Lock()
			s.signal = sig
			s.mu.Unlock()
			cancel(&SignalError{sig})
			close(s.stopped)
		case sig == unix.SIGHUP || time.Since(first) < sameSignal:
		default:
			s.mu.Lock()
			users := s.users
			s.mu.Unlock()
			if forced || users == 0 {
				// Nobody here who could end things in order: let the signal do what it does by default.
				signal.Reset(sig)
				unix.Kill(os.Getpid(), sig)
				continue
			}
			forced = true
			close(s.force)
		}
	}
}

func (s *signals) which() unix.Signal {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.signal
}

func (s *signals) use(n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.users += n
}
