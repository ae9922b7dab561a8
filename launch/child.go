package launch

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"sync"

	"golang.org/x/sys/unix"
)

// child is this process as a rank that Spawn started.
type child struct {
	marker
	call    int           // calls of Spawn seen so far
	entered bool          // the rank's function was reached
	left    chan struct{} // closed when that function ended

	leftElsewhere chan struct{} // the same, if it ran on another goroutine than Main's

	mu  sync.Mutex
	err error
}

// attach ties this process to its parent. The parent-death signal is SIGTERM, which kills outright until signals are watched;
// afterwards it, or the end of the lifeline, makes the rank end its whole process group: SIGKILL would leave grandchildren behind.
func (c *child) attach() error {
	unix.CloseOnExec(c.Lifeline)
	if e, ok, err := FromEnv(); err == nil && ok && e.ListenFD > 0 {
		unix.CloseOnExec(e.ListenFD)
	}
	if c.Crash != "" {
		f, err := os.Create(c.Crash)
		if err != nil {
			return fmt.Errorf("launch: crash report: %w", err)
		}
		defer f.Close()
		if err := debug.SetCrashOutput(f, debug.CrashOptions{}); err != nil {
			return fmt.Errorf("launch: crash report: %w", err)
		}
	}
	lifeline := os.NewFile(uintptr(c.Lifeline), "lifeline")
	if lifeline == nil {
		return fmt.Errorf("launch: %s names lifeline %d, which is no open file", envSpawn, c.Lifeline)
	}
	go func() {
		// Blocks: nothing is ever written, and the parent closes its end only after it saw this process end.
		if _, err := lifeline.Read(make([]byte, 1)); errors.Is(err, io.EOF) {
			c.endOrphan()
		}
	}()
	return nil
}

func (c *child) orphaned() bool { return os.Getppid() != c.Parent }

// endOrphan ends this process and what it started, because the parent is gone and cannot. It does not return.
func (c *child) endOrphan() {
	if c.Crash != "" {
		os.RemoveAll(filepath.Dir(c.Crash)) // the parent's folder; every rank tries
	}
	pid := os.Getpid()
	if unix.Getpgrp() == pid {
		unix.Kill(-pid, unix.SIGKILL)
	}
	unix.Kill(pid, unix.SIGKILL)
}

// enter is Spawn in a rank. Calls before the one it was started for give what they gave in the parent.
func (c *child) enter(ctx context.Context, fn func(context.Context, Env) error) error {
	if c.entered {
		return ErrInRank
	}
	c.call++
	if c.call < c.Call && c.call <= len(c.Past) {
		return c.Past[c.call-1].asError()
	}
	c.run(ctx, fn)
	return nil // not reached
}

// run runs the rank's function and does not return.
func (c *child) run(ctx context.Context, fn func(context.Context, Env) error) {
	c.entered = true
	runtime.LockOSThread()
	onMain := process.onMainThread()
	ctx, cancel := process.watch(ctx)
	defer cancel()

	err := errors.New("the rank's function ended its goroutine by runtime.Goexit (was FailNow of a testing.T called?)")
	defer func() {
		if v := recover(); v != nil {
			err = &PanicError{Value: v, Stack: debug.Stack()}
		}
		c.setErr(err)
		close(c.left)
		if !onMain {
			close(c.leftElsewhere)
			select {} // Main ends the process now; what follows Spawn on this goroutine must not run
		}
		runtime.Goexit() // runs the deferred functions of Main's function, then Main returns
	}()
	env, ok, e := FromEnv()
	switch {
	case e != nil:
		err = e
	case !ok:
		err = errors.New("launch: the rank's environment variables are gone")
	default:
		err = fn(ctx, env)
	}
}

// setErr keeps the rank's outcome and records it for the parent.
func (c *child) setErr(err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	err = stoppedBySignal(err)
	c.err = err
	if err == nil {
		return
	}
	path := os.Getenv("TORCHELASTIC_ERROR_FILE")
	if path == "" {
		fmt.Fprintf(os.Stderr, "%+v\n", err)
		return
	}
	if e := WriteErrorFile(path, err); e != nil {
		fmt.Fprintf(os.Stderr, "%v; the error was: %+v\n", e, err)
	}
}

// stoppedBySignal gives the error of a cancelled context the status that tells which signal cancelled it, as shells do.
func stoppedBySignal(err error) error {
	var exit *ExitError
	var sig *SignalError
	s := stopSignal()
	if s == 0 || !errors.Is(err, context.Canceled) || errors.As(err, &exit) || errors.As(err, &sig) {
		return err // sig has its status already
	}
	return &ExitError{Code: 128 + int(s), Err: fmt.Errorf("%w (after %s)", err, signalName(s))}
}

// stopSignal is the signal that cancelled this process's context, or 0.
func stopSignal() unix.Signal {
	process.mu.Lock()
	ctx := process.ctx
	process.mu.Unlock()
	var s *SignalError
	if ctx != nil && ctx.Err() != nil && errors.As(context.Cause(ctx), &s) {
		return s.Signal
	}
	return 0
}
