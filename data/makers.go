package data

import (
	"context"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"slices"
	"sync"

	"github.com/goddp/goddp/internal/tdp"
	"github.com/sugarme/gotch"
)

// writer puts a sample into its row: by index, or the item itself.
type writer func(ctx context.Context, index int, item any, dst Row, rng *rand.Rand) error

// rowCopier is a source whose samples are rows of memory: they are gathered without a call for each of them.
type rowCopier interface {
	// copyRows puts sample indices[k] at place lo+k and gives the k of an index that is none.
	copyRows(indices []int, dst *memory, lo int) (k int, err error)
}

// tensorMaker makes batches of tensors.
type tensorMaker struct {
	fields []Field
	write  writer
	rows   rowCopier // or nil
	device gotch.Device
	stage  stager
	pinned bool
	reuse  bool // keep host memory: batches for a GPU leave it behind once copied
	full   int  // rows of the memory that is kept

	mu   sync.Mutex
	free []*memory
}

func newTensorMaker(fields []Field, write writer, opts Options) (*tensorMaker, error) {
	if err := checkFields(fields); err != nil {
		return nil, err
	}
	gpu := opts.Device != gotch.CPU
	m := &tensorMaker{fields: slices.Clone(fields), write: write, device: opts.Device, stage: stageAside, full: opts.BatchSize,
		pinned: gpu || opts.PinMemory, reuse: gpu || opts.Reuse}
	if m.pinned {
		t, err := tdp.Empty([]int64{1}, gotch.Uint8, gotch.CPU, true)
		if err != nil && gpu {
			return nil, fmt.Errorf("data: batches for %s %d need a GPU and a build for it: %w", opts.Device.Name, opts.Device.Value, err)
		}
		if err != nil {
			// As Python: pinned memory without an accelerator is ordinary memory, and a warning.
			slog.Warn("data: PinMemory is set but no accelerator is found, so batches lie in ordinary memory")
			m.pinned = false
		}
		drop(t)
	}
	return m, nil
}

// tensorWork is a batch of tensors in the making.
type tensorWork struct {
	maker *tensorMaker
	mem   *memory
	n     int
}

func (m *tensorMaker) begin(n int) (work[*Batch], error) {
	mem, err := m.memory(n)
	if err != nil {
		return nil, err
	}
	return &tensorWork{m, mem, n}, nil
}

// memory gives room for n rows, which may be more.
func (m *tensorMaker) memory(n int) (*memory, error) {
	if !m.reuse {
		return newMemory(m.fields, n, m.pinned)
	}
	m.mu.Lock()
	var mem *memory
	if k := len(m.free) - 1; k >= 0 {
		mem = m.free[k]
		m.free = m.free[:k]
	}
	m.mu.Unlock()
	if mem != nil && mem.rows < n {
		mem.free()
		mem = nil
	}
	if mem != nil {
		return mem, nil
	}
	return newMemory(m.fields, max(n, m.full), m.pinned)
}

// recycle keeps memory that nobody looks at any more.
func (m *tensorMaker) recycle(mem *memory) {
	if !m.reuse {
		mem.free()
		return
	}
	m.mu.Lock()
	m.free = append(m.free, mem)
	m.mu.Unlock()
}

func (w *tensorWork) fill(ctx context.Context, k, index int, item any, rng *rand.Rand) error {
	return w.maker.write(ctx, index, item, Row{w.mem, k}, rng)
}

func (w *tensorWork) fillAll(indices []int, lo, hi int) (int, bool, error) {
	if w.maker.rows == nil {
		return 0, false, nil
	}
	k, err := w.maker.rows.copyRows(indices[lo:hi], w.mem, lo)
	return lo + k, true, err
}

func (w *tensorWork) drop() { w.maker.recycle(w.mem) }

func (w *tensorWork) seal(_ context.Context, indices []int) (*Batch, error) {
	b := &Batch{indices: indices, mem: w.mem}
	if w.n == w.mem.rows {
		b.tensors = w.mem.tensors
	} else {
		head, err := w.mem.head(w.maker.fields, w.n)
		if err != nil {
			return nil, err
		}
		b.tensors = head
	}
	if w.maker.device == gotch.CPU {
		return b, nil
	}
	defer func() {
		if w.n != w.mem.rows {
			drop(b.tensors...)
		}
	}()
	moved, join, err := w.maker.stage(w.maker.device, b.tensors)
	if err != nil {
		return nil, err
	}
	w.maker.recycle(w.mem)
	return &Batch{tensors: moved, indices: indices, join: join}, nil
}

func (m *tensorMaker) deliver(b *Batch) error {
	if b.join == nil {
		return nil
	}
	return b.join()
}

func (m *tensorMaker) release(b *Batch) {
	switch {
	case b.kept:
		if b.mem != nil && b.mem.rows != len(b.indices) {
			b.mem.free() // the kept tensors are views that hold the storage
		}
	case b.mem == nil:
		drop(b.tensors...)
	default:
		if b.mem.rows != len(b.indices) {
			drop(b.tensors...)
		}
		m.recycle(b.mem)
	}
	b.tensors, b.mem = nil, nil
}

func (m *tensorMaker) close() {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, mem := range m.free {
		mem.free()
	}
	m.free = nil
}

// collatedMaker makes batches with a function of the user's.
type collatedMaker[T, B any] struct {
	item    func(ctx context.Context, i int) (T, error)
	collate func([]T, *rand.Rand) (B, error)
}

type collatedWork[T, B any] struct {
	maker *collatedMaker[T, B]
	items []T
	rng   *rand.Rand
}

func (m *collatedMaker[T, B]) begin(n int) (work[B], error) {
	return &collatedWork[T, B]{maker: m, items: make([]T, n)}, nil
}

func (m *collatedMaker[T, B]) deliver(B) error { return nil }
func (m *collatedMaker[T, B]) release(B)       {}
func (m *collatedMaker[T, B]) close()          {}

func (w *collatedWork[T, B]) fill(ctx context.Context, k, index int, item any, rng *rand.Rand) error {
	if k == 0 { // the first sample's numbers are the batch's
		w.rng = rand.New(rand.NewPCG(rng.Uint64(), rng.Uint64()))
	}
	if item != nil {
		w.items[k] = item.(T)
		return nil
	}
	var err error
	w.items[k], err = w.maker.item(ctx, index)
	return err
}

func (w *collatedWork[T, B]) fillAll([]int, int, int) (int, bool, error) { return 0, false, nil }

func (w *collatedWork[T, B]) seal(context.Context, []int) (B, error) {
	return w.maker.collate(w.items, w.rng)
}

func (w *collatedWork[T, B]) drop() {}
