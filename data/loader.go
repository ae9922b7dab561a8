package data

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"math/rand/v2"
	"runtime/debug"
	"sync"
	"time"
)

// DataLoader gives the batches of a data set. B is what a batch is: *Batch for tensors, or whatever a collate function
// of NewCollated makes.
//
// One pass runs at a time, since its sampler holds one place: a second loop before the first one ended gets ErrBusy.
type DataLoader[B any] struct {
	opts   Options
	maker  maker[B]
	groups func(ctx context.Context) iter.Seq2[group, error] // valid until the next one

	mu      sync.Mutex
	closed  bool
	running *pass[B]
	last    *progress // of the pass that started last
	pending *State
}

// maker makes batches of one kind.
type maker[B any] interface {
	begin(n int) (work[B], error) // room for n samples
	deliver(b B) error            // on the loop's own goroutine, before it gets b
	release(b B)                  // the loop is done with b
	close()
}

// work is a batch in the making. Several goroutines may call fill at once.
type work[B any] interface {
	// fill puts sample index at place k. item is the sample itself where it came from a stream.
	fill(ctx context.Context, k, index int, item any, rng *rand.Rand) error
	// fillAll does so for samples lo to hi-1 at once, where that is faster and needs no random numbers; otherwise it
	// tells false. at is the place of the one that failed.
	fillAll(indices []int, lo, hi int) (at int, done bool, err error)
	// seal ends the work once all samples are in place.
	seal(ctx context.Context, indices []int) (B, error)
	// drop ends it otherwise, also after seal failed.
	drop()
}

// group is what a batch is made of.
type group struct {
	indices []int
	items   []any // from a stream; nil otherwise
}

// progress is how far a pass has come, in what the loop received.
type progress struct {
	finished bool
	baseSeed int64
	epoch    int
	consumed int // samples
}

// ItemError is a sample that could not be loaded.
type ItemError struct {
	Index int // in the data set
	Batch int // of the pass
	Err   error
}

func (e *ItemError) Error() string {
	return fmt.Sprintf("data: sample %d (batch %d): %v", e.Index, e.Batch, e.Err)
}

// Unwrap gives the cause.
func (e *ItemError) Unwrap() error { return e.Err }

// PanicError is a panic of a data set, transform or collate function, caught where it would have ended the process.
type PanicError struct {
	Value any
	Stack []byte
}

func (e *PanicError) Error() string { return fmt.Sprintf("panic: %v\n%s", e.Value, e.Stack) }

var (
	// ErrClosed is what a loop over a closed loader gets.
	ErrClosed = errors.New("data: the loader is closed")
	// ErrBusy is what a second loop gets while one runs.
	ErrBusy = errors.New("data: a loop over this loader is running: end it first, or make a second loader")
	// ErrTimeout is a batch that took longer than Options.Timeout.
	ErrTimeout = errors.New("data: DataLoader timed out")
	// ErrNotResumable is wrapped by errors of State and Restore where the sampler has no state.
	ErrNotResumable = errors.New("not resumable")
)

// newLoader checks what all kinds of loaders have in common. n is the data set's length.
func newLoader[B any](n int, opts Options) (*DataLoader[B], error) {
	if err := opts.check(); err != nil {
		return nil, err
	}
	l := &DataLoader[B]{}
	if opts.Batches == nil && opts.Sampler == nil {
		if opts.Shuffle && n > 0 {
			s, err := NewRandomSampler(n, RandomOptions{Generator: opts.Generator})
			if err != nil {
				return nil, err
			}
			opts.Sampler = s
		} else {
			opts.Sampler = NewSequentialSampler(n)
		}
	}
	if opts.Batches == nil {
		b, err := NewBatchSampler(opts.Sampler, opts.BatchSize, opts.DropLast)
		if err != nil {
			return nil, err
		}
		opts.Batches = b
	}
	l.opts = opts
	l.groups = l.sampled
	return l, nil
}

// NewDataLoader makes a loader of tensors.
func NewDataLoader(src Source, opts Options) (*DataLoader[*Batch], error) {
	l, err := newLoader[*Batch](src.Len(), opts)
	if err != nil {
		return nil, err
	}
	fields, err := src.Fields()
	if err != nil {
		return nil, err
	}
	write := func(ctx context.Context, i int, _ any, dst Row, rng *rand.Rand) error {
		return src.Write(ctx, i, dst, rng)
	}
	maker, err := newTensorMaker(fields, write, l.opts)
	if err != nil {
		return nil, err
	}
	maker.rows, _ = src.(rowCopier)
	l.maker = maker
	return l, nil
}

// NewCollated makes a loader for samples of any type: collate makes a batch of them, as collate_fn does in Python. What
// collate returns is the loop's own.
func NewCollated[T, B any](d Dataset[T], collate func(samples []T, rng *rand.Rand) (B, error), opts Options) (*DataLoader[B], error) {
	l, err := newLoader[B](d.Len(), opts)
	if err != nil {
		return nil, err
	}
	l.maker = &collatedMaker[T, B]{item: d.Item, collate: collate}
	return l, nil
}

// sampled groups indices as the sampler gives them.
func (l *DataLoader[B]) sampled(context.Context) iter.Seq2[group, error] {
	return func(yield func(group, error) bool) {
		for indices := range l.opts.Batches.All() {
			if !yield(group{indices: indices}, nil) {
				return
			}
		}
		if s, ok := l.opts.Sampler.(interface{ Err() error }); ok && s.Err() != nil {
			yield(group{}, fmt.Errorf("data: sampler: %w", s.Err()))
		}
	}
}

// Len is how many batches the next pass gives, as far as the sampler can tell.
func (l *DataLoader[B]) Len() int { return l.opts.Batches.Len() }

// SetEpoch tells the sampler, where its order follows from the epoch.
func (l *DataLoader[B]) SetEpoch(epoch int) {
	if s, ok := l.opts.Sampler.(EpochSetter); ok {
		s.SetEpoch(epoch)
	}
}

// epoch is what the sampler's order follows from, 0 where it does not.
func (l *DataLoader[B]) epoch() int {
	if s, ok := l.opts.Sampler.(interface{ Epoch() int }); ok {
		return s.Epoch()
	}
	return 0
}

// Close ends a running pass, whose loop gets ErrClosed, and frees what the loader keeps for reuse. It must not be
// called from inside the loop of a pass.
func (l *DataLoader[B]) Close() error {
	l.mu.Lock()
	l.closed = true
	p := l.running
	l.mu.Unlock()
	if p != nil {
		p.cancel(ErrClosed)
		<-p.ended
	}
	l.maker.close()
	return nil
}

// All starts a pass and gives its batches. An error ends the pass: it comes in place of the batch it belongs to.
// However the loop ends, no goroutine of the pass is left behind.
func (l *DataLoader[B]) All(ctx context.Context) iter.Seq2[B, error] {
	return func(yield func(B, error) bool) {
		p, err := l.start(ctx)
		if err != nil {
			yield(*new(B), err)
			return
		}
		defer p.finish()
		run := p.inline
		if l.opts.Workers > 0 {
			run = p.parallel
		}
		if err := run(yield); err != nil && err != errStopped {
			yield(*new(B), err)
		}
	}
}

// errStopped is a loop that was left by break.
var errStopped = errors.New("stopped")

// pass is one loop over All.
type pass[B any] struct {
	*DataLoader[B]
	ctx      context.Context
	cancel   context.CancelCauseFunc
	ended    chan struct{}
	baseSeed int64
	place    func(k int) int
	progress *progress
	wait     func() // until the workers ended
	late     bool   // a batch timed out: a worker may be stuck
}

func (l *DataLoader[B]) start(ctx context.Context) (*pass[B], error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return nil, ErrClosed
	}
	if l.running != nil {
		return nil, ErrBusy
	}
	if err := ctx.Err(); err != nil {
		return nil, context.Cause(ctx)
	}
	p := &pass[B]{DataLoader: l, ended: make(chan struct{}), place: func(k int) int { return k }}
	epoch := l.epoch()
	if l.pending != nil && l.pending.Sampler.Epoch == epoch {
		p.baseSeed = l.pending.BaseSeed
	} else {
		// Python draws it also without workers, and before the sampler draws.
		seed, err := random64(l.opts.Generator)
		if err != nil {
			return nil, err
		}
		p.baseSeed = seed
	}
	if s, ok := l.opts.Sampler.(Resumable); ok {
		p.place = s.Position
	}
	p.ctx, p.cancel = context.WithCancelCause(ctx)
	l.running = p
	l.pending = nil
	p.progress = &progress{baseSeed: p.baseSeed, epoch: epoch}
	l.last = p.progress
	return p, nil
}

func (p *pass[B]) finish() {
	p.cancel(errStopped)
	if p.wait != nil {
		gone := make(chan struct{})
		go func() {
			defer close(gone)
			p.wait()
		}()
		if p.late {
			// Something does not answer, nor maybe to the context. It is left to end on its own.
			select {
			case <-gone:
			case <-time.After(p.opts.Timeout):
			}
		} else {
			<-gone
		}
	}
	p.mu.Lock()
	p.DataLoader.running = nil
	p.mu.Unlock()
	close(p.ended)
}

// hand gives a batch to the loop and takes it back.
func (p *pass[B]) hand(yield func(B, error) bool, b B, n int) error {
	defer p.maker.release(b)
	if err := p.maker.deliver(b); err != nil {
		return fmt.Errorf("data: %w", err)
	}
	p.mu.Lock()
	p.progress.consumed += n
	p.mu.Unlock()
	if !yield(b, nil) {
		return errStopped
	}
	return nil
}

// complete notes that the loop has seen every batch.
func (p *pass[B]) complete() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.progress.finished = true
}

// sampleRand is a generator that can be set to the numbers of one sample.
type sampleRand struct {
	pcg *rand.PCG
	rng *rand.Rand
}

func newSampleRand() sampleRand {
	pcg := &rand.PCG{}
	return sampleRand{pcg, rand.New(pcg)}
}

// at gives the numbers of the sample at a place of the epoch: they follow from the pass's seed and the place alone.
func (s sampleRand) at(baseSeed int64, place int) *rand.Rand {
	x := uint64(place) + 0x9e3779b97f4a7c15 // neighbouring places get distant seeds
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	s.pcg.Seed(uint64(baseSeed), x^x>>31)
	return s.rng
}

// inline loads on the loop's own goroutine.
func (p *pass[B]) inline(yield func(B, error) bool) error {
	rnd := newSampleRand()
	seq, first := 0, 0
	for g, err := range p.groups(p.ctx) {
		if err != nil {
			return err
		}
		if p.ctx.Err() != nil {
			return context.Cause(p.ctx)
		}
		b, err := p.load(g, seq, first, rnd)
		if err != nil {
			return err
		}
		first += len(g.indices)
		seq++
		if err := p.hand(yield, b, len(g.indices)); err != nil {
			return err
		}
	}
	if p.ctx.Err() != nil {
		return context.Cause(p.ctx)
	}
	p.complete()
	return nil
}

// load makes one batch.
func (p *pass[B]) load(g group, seq, first int, rnd sampleRand) (b B, err error) {
	w, err := p.maker.begin(len(g.indices))
	if err != nil {
		return b, err
	}
	if at, err := p.fill(w, g, 0, len(g.indices), first, rnd); err != nil {
		w.drop()
		return b, &ItemError{Index: g.indices[at], Batch: seq, Err: err}
	}
	return p.seal(w, g, seq)
}

// fill writes the samples lo to hi-1 of a batch and gives the place of the one that failed.
func (p *pass[B]) fill(w work[B], g group, lo, hi, first int, rnd sampleRand) (at int, err error) {
	defer func() {
		if v := recover(); v != nil {
			err = &PanicError{v, debug.Stack()}
		}
	}()
	if at, done, err := w.fillAll(g.indices, lo, hi); done {
		return at, err
	}
	var item any
	for at = lo; at < hi; at++ {
		if g.items != nil {
			item = g.items[at]
		}
		if err := w.fill(p.ctx, at, g.indices[at], item, rnd.at(p.baseSeed, p.place(first+at))); err != nil {
			return at, err
		}
	}
	return at, nil
}

func (p *pass[B]) seal(w work[B], g group, seq int) (b B, err error) {
	defer func() {
		if v := recover(); v != nil {
			err = &PanicError{v, debug.Stack()}
		}
		if err != nil {
			w.drop()
			err = fmt.Errorf("data: batch %d: %w", seq, err)
		}
	}()
	return w.seal(p.ctx, g.indices)
}
