package torchddp

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/goddp/goddp/internal/tdp"
)

// DefaultStoreTimeout bounds waits on a store where nothing else is said. It is c10d's.
const DefaultStoreTimeout = 5 * time.Minute

// Store is a key-value store that the ranks of a job share: PyTorch's TCPStore, FileStore, HashStore or PrefixStore.
// Its methods may be called from several goroutines; a TCP store serves one at a time.
type Store struct {
	mu      sync.RWMutex
	s       *tdp.Store
	timeout atomic.Int64 // a time.Duration
}

func newStore(s *tdp.Store, timeout time.Duration) *Store {
	out := &Store{s: s}
	out.timeout.Store(int64(timeout))
	return out
}

// TCPStoreOptions say how to reach or serve a TCP store.
type TCPStoreOptions struct {
	// Host and Port are where the store listens. Port 0 with Serve picks a free one: see [Store.Port].
	Host string
	Port int
	// Serve makes this process the server. It is its own client as well.
	Serve bool
	// WorldSize is the number of clients the server waits for; 0 for not known.
	WorldSize int
	// NoWait lets the server return before all WorldSize clients are there.
	NoWait bool
	// Timeout bounds connecting, and later waits. 0 is DefaultStoreTimeout.
	Timeout time.Duration
	// MultiTenant lets several stores of this process share one server on the same port.
	MultiTenant bool
	// ListenFD is a bound socket to serve on, which the store takes over; 0 for none. It saves the race for a port.
	ListenFD int
}

// NewTCPStore connects to a TCP store or serves one. The context bounds the wait.
func NewTCPStore(ctx context.Context, o TCPStoreOptions) (*Store, error) {
	if o.Host == "" {
		o.Host = "localhost"
	}
	if o.Port < 0 || o.Port > 65535 {
		return nil, valueErrorf("port must have value from 0 to 65535 but was %d", o.Port)
	}
	timeout := orDefault(o.Timeout, DefaultStoreTimeout)
	if d, ok := ctx.Deadline(); ok {
		timeout = max(time.Millisecond, min(timeout, time.Until(d)))
	}
	workers := o.WorldSize
	if workers == 0 {
		workers = -1
	}
	fd := o.ListenFD
	if fd == 0 {
		fd = -1
	}
	s, err := cancellable(ctx, "connecting to the store", func() (*tdp.Store, error) {
		return tdp.NewTCPStore(tdp.TCPStoreOptions{
			Host: o.Host, Port: uint16(o.Port), Server: o.Serve, Workers: workers, WaitForWorkers: !o.NoWait,
			Timeout: timeout, MultiTenant: o.MultiTenant, ListenFD: fd,
		})
	}, func(s *tdp.Store) { _ = s.Close() })
	if err != nil {
		return nil, explainTCP(err, o, timeout)
	}
	return newStore(s, timeout), nil
}

// explainTCP adds what a person can do about the usual failures.
func explainTCP(err error, o TCPStoreOptions, timeout time.Duration) error {
	addr := net.JoinHostPort(o.Host, strconv.Itoa(o.Port))
	msg := err.Error()
	switch {
	case strings.Contains(msg, "EADDRINUSE") || strings.Contains(msg, "address already in use"):
		return fmt.Errorf("cannot serve the store on %s: the port is taken by another process; choose another MASTER_PORT, or 0 for a free one: %w", addr, err)
	case o.Serve:
		return fmt.Errorf("serving the store on %s: %w", addr, err)
	case errors.Is(err, ErrTimeout) || errors.Is(err, ErrPeer):
		return fmt.Errorf("cannot reach the master at %s within %v: is rank 0 running there, and is the port open? %w", addr, timeout.Round(time.Millisecond), err)
	}
	return fmt.Errorf("connecting to the store at %s: %w", addr, err)
}

// NewFileStore keeps the keys in a file on a file system that all ranks see. worldSize 0: not known.
func NewFileStore(path string, worldSize int) (*Store, error) {
	s, err := tdp.NewFileStore(path, orDefault(worldSize, -1))
	if err != nil {
		return nil, fmt.Errorf("file store %s: %w", path, err)
	}
	return newStore(s, DefaultStoreTimeout), nil
}

// NewHashStore keeps the keys in this process, for ranks that are goroutines.
func NewHashStore() (*Store, error) {
	s, err := tdp.NewHashStore()
	if err != nil {
		return nil, err
	}
	return newStore(s, DefaultStoreTimeout), nil
}

// Prefix gives a store whose key k is this one's "prefix/k". Closing one leaves the other open.
func (s *Store) Prefix(prefix string) (*Store, error) {
	var out *Store
	err := s.use(func(h *tdp.Store) error {
		p, err := h.Prefix(prefix)
		out = newStore(p, time.Duration(s.timeout.Load()))
		return err
	})
	return out, err
}

// clone gives a second connection to the same keys.
func (s *Store) clone() (*Store, error) {
	var out *Store
	err := s.use(func(h *tdp.Store) error {
		c, err := h.Clone()
		out = newStore(c, time.Duration(s.timeout.Load()))
		return err
	})
	return out, err
}

func (s *Store) use(fn func(*tdp.Store) error) error {
	s.mu.RLock()
	defer s.mu.RUnlock()
	if s.s == nil {
		return valueErrorf("the store is closed")
	}
	return fn(s.s)
}

// Close lets go of the store, and ends its server if it is one and no process group uses it.
func (s *Store) Close() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.s == nil {
		return nil
	}
	h := s.s
	s.s = nil
	return h.Close()
}

// Port is the port of a TCP store.
func (s *Store) Port() (port int, err error) {
	err = s.use(func(h *tdp.Store) error { port, err = h.Port(); return err })
	return port, err
}

// SetTimeout changes how long Get waits for a key.
func (s *Store) SetTimeout(d time.Duration) error {
	return s.use(func(h *tdp.Store) error {
		s.timeout.Store(int64(d))
		return h.SetTimeout(d)
	})
}

// Set writes a value.
func (s *Store) Set(key string, value []byte) error {
	return s.use(func(h *tdp.Store) error { return h.Set(key, value) })
}

// Get waits until the key is there, at most the store's timeout, and gives its value.
func (s *Store) Get(ctx context.Context, key string) (value []byte, err error) {
	if err := s.Wait(ctx, 0, key); err != nil {
		return nil, err
	}
	err = s.use(func(h *tdp.Store) error { value, err = h.Get(key); return err })
	return value, err
}

// MultiGet gives the values of keys that are there, in one round trip where the store can.
func (s *Store) MultiGet(keys ...string) (values [][]byte, err error) {
	err = s.use(func(h *tdp.Store) error { values, err = h.MultiGet(keys); return err })
	return values, err
}

// Add adds to a counter, which starts at 0, and gives its new value.
func (s *Store) Add(key string, delta int64) (value int64, err error) {
	err = s.use(func(h *tdp.Store) error { value, err = h.Add(key, delta); return err })
	return value, err
}

// CompareSet writes desired if the value is expected, or if there is none and expected is empty. It gives the value
// that stands afterwards.
func (s *Store) CompareSet(key string, expected, desired []byte) (value []byte, err error) {
	err = s.use(func(h *tdp.Store) error { value, err = h.CompareSet(key, expected, desired); return err })
	return value, err
}

// Check tells whether all keys are there, without waiting.
func (s *Store) Check(keys ...string) (ok bool, err error) {
	err = s.use(func(h *tdp.Store) error { ok, err = h.Check(keys...); return err })
	return ok, err
}

// Wait blocks until all keys are there, at most timeout (0: the store's). A context that ends makes it return soon.
func (s *Store) Wait(ctx context.Context, timeout time.Duration, keys ...string) error {
	// A blocked wait holds the store's one connection and cannot be interrupted, so it is cut in slices.
	const slice = 250 * time.Millisecond
	timeout = orDefault(timeout, orDefault(time.Duration(s.timeout.Load()), DefaultStoreTimeout))
	deadline := time.Now().Add(timeout)
	for {
		if err := ctx.Err(); err != nil {
			return fmt.Errorf("%w: waiting for store keys %v: %w", ErrCancelled, keys, context.Cause(ctx))
		}
		left := time.Until(deadline)
		wait := left
		if ctx.Done() != nil {
			wait = min(wait, slice)
		}
		err := s.use(func(h *tdp.Store) error { return h.Wait(max(wait, time.Millisecond), keys...) })
		if err == nil || !errors.Is(err, ErrTimeout) {
			return err
		}
		if left <= wait {
			return fmt.Errorf("store keys %v did not appear within %v: %w", keys, timeout, err)
		}
	}
}

// Delete removes a key and tells whether it was there. A file store cannot.
func (s *Store) Delete(key string) (deleted bool, err error) {
	err = s.use(func(h *tdp.Store) error { deleted, err = h.Delete(key); return err })
	return deleted, err
}

// NumKeys counts the keys.
func (s *Store) NumKeys() (n int64, err error) {
	err = s.use(func(h *tdp.Store) error { n, err = h.NumKeys(); return err })
	return n, err
}

// MultiSet writes keys, in one round trip where the store can.
func (s *Store) MultiSet(keys []string, values [][]byte) error {
	return s.use(func(h *tdp.Store) error { return h.MultiSet(keys, values) })
}

// Append writes value behind what the key has.
func (s *Store) Append(key string, value []byte) error {
	return s.use(func(h *tdp.Store) error { return h.Append(key, value) })
}

// Keys lists all keys, in no order. A file store cannot.
func (s *Store) Keys() (keys []string, err error) {
	err = s.use(func(h *tdp.Store) error { keys, err = h.ListKeys(); return err })
	return keys, err
}

// QueuePush puts a value at the end of the queue of that name. A file store has none.
func (s *Store) QueuePush(queue string, value []byte) error {
	return s.use(func(h *tdp.Store) error { return h.QueuePush(queue, value) })
}

// QueuePop takes the first value of a queue. With block it waits for one, at most the store's timeout; otherwise an
// empty queue is an error.
func (s *Store) QueuePop(queue string, block bool) (value []byte, err error) {
	err = s.use(func(h *tdp.Store) error { value, err = h.QueuePop(queue, block); return err })
	return value, err
}

// QueueLen is the number of values in a queue.
func (s *Store) QueueLen(queue string) (n int64, err error) {
	err = s.use(func(h *tdp.Store) error { n, err = h.QueueLen(queue); return err })
	return n, err
}

func orDefault[T comparable](v, otherwise T) T {
	var zero T
	if v == zero {
		return otherwise
	}
	return v
}

// cancellable runs a call into C that cannot be interrupted and returns early when ctx ends. What the call gives
// later goes to discard.
func cancellable[T any](ctx context.Context, what string, call func() (T, error), discard func(T)) (T, error) {
	if ctx.Done() == nil {
		return call()
	}
	var zero T
	if ctx.Err() != nil {
		return zero, fmt.Errorf("%w: %s: %w", ErrCancelled, what, context.Cause(ctx))
	}
	type outcome struct {
		v   T
		err error
	}
	ch := make(chan outcome, 1)
	go func() {
		v, err := call()
		ch <- outcome{v, err}
	}()
	select {
	case o := <-ch:
		return o.v, o.err
	case <-ctx.Done():
		go func() {
			if o := <-ch; o.err == nil {
				discard(o.v)
			}
		}()
		return zero, fmt.Errorf("%w: %s: %w", ErrCancelled, what, context.Cause(ctx))
	}
}
