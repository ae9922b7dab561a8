package data

import (
	"context"
	"iter"
	"math/rand/v2"
)

// Iterable is a data set that can only be read from front to back: a log, a socket, shards of records.
type Iterable[T any] interface {
	Iter(ctx context.Context) iter.Seq2[T, error]
}

// IterFunc makes an Iterable of a function.
type IterFunc[T any] func(ctx context.Context) iter.Seq2[T, error]

// Iter implements Iterable.
func (f IterFunc[T]) Iter(ctx context.Context) iter.Seq2[T, error] { return f(ctx) }

// Shard is one rank's share of a stream that every rank can read: each world-th sample from the rank-th on. A tail
// that does not reach all ranks is left out, so that all have equally many.
func Shard[T any](it Iterable[T], world, rank int) Iterable[T] {
	return IterFunc[T](func(ctx context.Context) iter.Seq2[T, error] {
		return func(yield func(T, error) bool) {
			k := 0
			var mine T
			for item, err := range it.Iter(ctx) {
				if err != nil {
					yield(item, err)
					return
				}
				if k == rank {
					mine = item
				}
				if k++; k == world {
					k = 0
					if !yield(mine, nil) {
						return
					}
				}
			}
		}
	})
}

// NewStreamLoader makes a loader of tensors for a stream. One goroutine reads the stream, workers write the samples
// into batches. Where the stream has a method Len() int, so has the loader a length; otherwise its Len is -1.
func NewStreamLoader[T any](it Iterable[T], enc Encoder[T], opts Options) (*DataLoader[*Batch], error) {
	l, err := newStream[T, *Batch](it, opts)
	if err != nil {
		return nil, err
	}
	fields, err := enc.Fields()
	if err != nil {
		return nil, err
	}
	write := func(_ context.Context, _ int, item any, dst Row, rng *rand.Rand) error {
		return enc.Encode(item.(T), dst, rng)
	}
	maker, err := newTensorMaker(fields, write, l.opts)
	if err != nil {
		return nil, err
	}
	l.maker = maker
	return l, nil
}

// NewCollatedStream is NewCollated for a stream.
func NewCollatedStream[T, B any](it Iterable[T], collate func(samples []T, rng *rand.Rand) (B, error), opts Options) (*DataLoader[B], error) {
	l, err := newStream[T, B](it, opts)
	if err != nil {
		return nil, err
	}
	l.maker = &collatedMaker[T, B]{collate: collate}
	return l, nil
}

func newStream[T, B any](it Iterable[T], opts Options) (*DataLoader[B], error) {
	if opts.Sampler != nil || opts.Shuffle || opts.Batches != nil {
		return nil, bad("an iterable data set has an order of its own: expected unspecified shuffle, sampler and batch_sampler")
	}
	place := &streamPlace{length: -1}
	if s, ok := it.(interface{ Len() int }); ok {
		place.length = s.Len()
	}
	opts.Sampler = place
	l, err := newLoader[B](0, opts)
	if err != nil {
		return nil, err
	}
	size, drop := l.opts.BatchSize, l.opts.DropLast
	if place.length < 0 {
		l.opts.Batches = unknown{}
	}
	l.groups = func(ctx context.Context) iter.Seq2[group, error] {
		return func(yield func(group, error) bool) {
			place.begin()
			g := group{make([]int, 0, size), make([]any, 0, size)}
			k := 0
			for item, err := range it.Iter(ctx) {
				if err != nil {
					yield(group{}, &ItemError{Index: k, Batch: (k - place.start) / size, Err: err})
					return
				}
				if k++; k <= place.start {
					continue
				}
				g.indices, g.items = append(g.indices, k-1), append(g.items, any(item))
				if len(g.indices) == size {
					if !yield(g, nil) {
						return
					}
					g.indices, g.items = g.indices[:0], g.items[:0]
				}
			}
			if len(g.indices) > 0 && !drop {
				yield(g, nil)
			}
		}
	}
	return l, nil
}

// streamPlace is how far a stream was read. Going on means reading it again and passing over what was consumed.
type streamPlace struct {
	length  int
	start   int
	pending bool
}

func (s *streamPlace) begin() {
	if !s.pending {
		s.start = 0
	}
	s.pending = false
}

// Len implements Sampler.
func (s *streamPlace) Len() int {
	if s.pending {
		return max(s.length-s.start, 0)
	}
	return s.length
}

// All implements Sampler; the loader reads the stream instead.
func (s *streamPlace) All() iter.Seq[int] { return func(func(int) bool) {} }

// State implements Resumable.
func (s *streamPlace) State(consumed int) SamplerState {
	return SamplerState{Kind: "stream", Length: s.length, Cursor: s.start + consumed}
}

// Restore implements Resumable.
func (s *streamPlace) Restore(st SamplerState) error {
	if err := st.check("stream", s.length, max(st.Cursor, 0)); err != nil {
		return err
	}
	s.start, s.pending = st.Cursor, true
	return nil
}

// Position implements Resumable.
func (s *streamPlace) Position(k int) int { return s.start + k }

// unknown is the batch count of a stream without a length.
type unknown struct{}

func (unknown) Len() int             { return -1 }
func (unknown) All() iter.Seq[[]int] { return func(func([]int) bool) {} }
