package libtorch

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"
)

var errBusy = errors.New("busy")

// tryLock is lock, or errBusy when another process has it.
func (s *setup) tryLock(name string) (unlock func(), err error) {
	f, err := os.OpenFile(filepath.Join(s.cfg.Cache, "locks", name), os.O_RDWR|os.O_CREATE, 0o644)
	if err != nil {
		return nil, err
	}
	if syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB) != nil {
		f.Close()
		return nil, errBusy
	}
	return func() { f.Close() }, nil
}

// lock takes one of the cache's locks and returns what gives it back. The kernel gives it back when the process
// dies, however that happens.
func (s *setup) lock(ctx context.Context, name, what string) (unlock func(), err error) {
	dir := filepath.Join(s.cfg.Cache, "locks")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, err
	}
	path := filepath.Join(dir, name)
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o644) // never removed: another may hold the same file open
	if err != nil {
		return nil, err
	}
	for told := false; ; {
		err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
		if err == nil {
			break
		}
		if !errors.Is(err, syscall.EWOULDBLOCK) && !errors.Is(err, syscall.EINTR) {
			f.Close()
			return nil, fmt.Errorf("lock %s: %w (a network file system without locks? set %s to a local folder)", path, err, EnvCache)
		}
		if !told {
			owner, _ := os.ReadFile(path)
			s.ui.say("waiting for another set-up (process %s), which is at %s", strings.TrimSpace(string(owner)), what)
			told = true
		}
		select {
		case <-ctx.Done():
			f.Close()
			return nil, context.Cause(ctx)
		case <-time.After(100 * time.Millisecond):
		}
	}
	if err := f.Truncate(0); err == nil {
		fmt.Fprintf(f, "%d\n", os.Getpid())
	}
	return func() { f.Close() }, nil
}
