package checkpoint

import (
	"fmt"
	"io"
	"runtime"
	"slices"
	"sync"

	"github.com/sugarme/gotch/ts"

	"github.com/goddp/goddp/checkpoint/internal/atomicfile"
	"github.com/goddp/goddp/checkpoint/ptfile"
	"github.com/goddp/goddp/internal/tdp"
)

// AsyncSaver saves while training goes on: Save copies the tensors to host memory (page-locked where there is a GPU)
// and returns, a goroutine writes the copy. One save is under way at most; the next waits for it.
//
// An error of a save that is under way comes back from the next call of Save, Wait or Close. The copies' memory is
// kept for the next save.
type AsyncSaver struct {
	Options SaveOptions

	mu      sync.Mutex
	buffers []hostCopy
	flight  chan error // nil when none is under way
	closed  bool
}

// hostCopy is host memory that one storage is copied to.
type hostCopy struct {
	t *ts.Tensor
	n int64
}

// Save copies v's tensors and starts writing them to path. The returned error may be that of the save before; then
// this one was not started.
func (s *AsyncSaver) Save(path string, v any) error { return s.save(path, v, nil) }

// save runs after, if not nil, when the file is in place.
func (s *AsyncSaver) save(path string, v any, after func() error) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return fmt.Errorf("saving %s: the saver is closed", path)
	}
	if err := s.wait(); err != nil {
		return err
	}
	if err := CheckWritable(path); err != nil {
		return err
	}
	a := newAdapter()
	e, err := ptfile.Encode(v, ptfile.WriteOptions{Adapt: a.adapt})
	if err != nil {
		return fmt.Errorf("saving %s: %w", path, err)
	}
	if err := s.freeze(e.Storages); err != nil {
		return fmt.Errorf("saving %s: copying tensors: %w", path, err)
	}
	flight := make(chan error, 1)
	s.flight = flight
	opt := atomicfile.Options{Perm: s.Options.Perm, NoSync: s.Options.NoSync}
	copies := slices.Clone(s.buffers) // the writer's own hold on them: a saver can be forgotten without Close
	go func() {
		defer runtime.KeepAlive(copies)
		err := atomicfile.Write(path, opt, func(w io.Writer) error { return e.Write(w, ptfile.Stem(path)) })
		if err != nil {
			err = fmt.Errorf("saving %s: %w", path, err)
		} else if after != nil {
			err = after()
		}
		flight <- err
	}()
	return nil
}

// freeze copies every storage into a buffer of the saver's.
func (s *AsyncSaver) freeze(storages []*ptfile.Storage) error {
	for i, x := range storages {
		if i == len(s.buffers) {
			s.buffers = append(s.buffers, hostCopy{})
		}
		if b := s.buffers[i]; b.t == nil || b.n != x.Bytes {
			drop(b.t)
			s.buffers[i] = hostCopy{}
			fresh, err := hostBuffer(x.Bytes)
			if err != nil {
				return err
			}
			s.buffers[i] = hostCopy{fresh, x.Bytes}
		}
		data, err := tdp.HostBytes(s.buffers[i].t)
		if err != nil {
			return err
		}
		if err := x.ReadInto(data); err != nil {
			return err
		}
		x.Freeze(data)
	}
	for _, b := range s.buffers[len(storages):] {
		drop(b.t)
	}
	s.buffers = s.buffers[:len(storages)]
	return nil
}

// wait is called with the lock held.
func (s *AsyncSaver) wait() error {
	if s.flight == nil {
		return nil
	}
	err := <-s.flight
	s.flight = nil
	return err
}

// Wait waits for the save that is under way and gives its error.
func (s *AsyncSaver) Wait() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.wait()
}

// Close waits for the save that is under way, gives its error and frees the copies.
func (s *AsyncSaver) Close() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	err := s.wait()
	for _, b := range s.buffers {
		drop(b.t)
	}
	s.buffers, s.closed = nil, true
	return err
}
