package data

import (
	"errors"
	"fmt"
	"iter"
	"math"
	"slices"
)

// Sampler chooses which samples of a data set one pass visits, and in which order.
type Sampler interface {
	// Len is how many indices the next pass gives.
	Len() int
	// All starts a pass and gives its indices. Random samplers draw their order here, when the loop begins.
	All() iter.Seq[int]
}

// EpochSetter is a sampler whose order follows from the epoch: without SetEpoch before each epoch, every epoch has the
// same order.
type EpochSetter interface{ SetEpoch(epoch int) }

// Resumable is a sampler that can go on in the middle of a pass.
type Resumable interface {
	Sampler
	// State tells where the latest pass stands after its first consumed indices. The caller counts, since a loader
	// that works ahead has taken more from All than was trained on.
	State(consumed int) SamplerState
	// Restore makes the next pass give what the pass that State saw had left.
	Restore(SamplerState) error
	// Position is the place in the epoch, counted over all ranks, of the k-th index of the latest pass.
	Position(k int) int
}

// SamplerState is where a pass stood. It is plain data: keep it in a checkpoint as JSON or gob.
type SamplerState struct {
	Kind      string `json:"kind"`
	Length    int    `json:"length"`              // of the data set
	Epoch     int    `json:"epoch,omitempty"`     //
	Seed      int64  `json:"seed,omitempty"`      //
	Cursor    int    `json:"cursor"`              // indices of the epoch consumed so far, over all ranks
	Generator []byte `json:"generator,omitempty"` // what the order was drawn from, as it was before
}

// ErrState is wrapped by the errors of Restore.
var ErrState = errors.New("state does not fit")

func (s SamplerState) check(kind string, length, limit int) error {
	switch {
	case s.Kind != kind:
		return fmt.Errorf("data: %w: it is of a %s sampler, this is a %s sampler", ErrState, s.Kind, kind)
	case s.Length != length:
		return fmt.Errorf("data: %w: it is of a data set of %d samples, this one has %d", ErrState, s.Length, length)
	case s.Cursor < 0 || s.Cursor > limit:
		return fmt.Errorf("data: %w: position %d is outside the epoch of %d", ErrState, s.Cursor, limit)
	}
	return nil
}

// replay is what the samplers on one process share: where the pass began and what its order was drawn from.
type replay struct {
	gen     *Generator // the user's, or nil
	drawn   []byte     // the generator's state before the order was drawn
	start   int        // where the latest pass began, or the next one will after Restore
	pending bool       // Restore was called and no pass began since
	err     error
}

// begin gives the generator for the order of a new pass (nil: the default one) and how much of it to skip.
func (r *replay) begin() (*Generator, int, error) {
	if r.pending {
		r.pending = false
		g := r.gen
		if g == nil {
			// A private one: the default generator has moved on since, and checkpoints restore it on their own.
			g = &Generator{}
		}
		return g, r.start, g.SetState(r.drawn)
	}
	r.start = 0
	var err error
	r.drawn, err = generatorState(r.gen)
	return r.gen, 0, err
}

func (r *replay) left(total int) int {
	if r.pending {
		return total - r.start
	}
	return total
}

func (r *replay) state(kind string, length, consumed int) SamplerState {
	s := SamplerState{Kind: kind, Length: length, Cursor: r.start + consumed}
	if r.pending || consumed > 0 || r.start > 0 {
		s.Generator = r.drawn
	}
	return s
}

func (r *replay) restore(s SamplerState, kind string, length, limit int) error {
	if err := s.check(kind, length, limit); err != nil {
		return err
	}
	if s.Generator == nil { // nothing of the pass was drawn: the next one is a fresh one
		*r = replay{gen: r.gen}
		return nil
	}
	if err := new(Generator).SetState(s.Generator); err != nil {
		return fmt.Errorf("%w: %w", ErrState, err)
	}
	r.drawn, r.start, r.pending, r.err = s.Generator, s.Cursor, true, nil
	return nil
}

// Err is why the latest pass could not be drawn, which ends it before its first index.
func (r *replay) Err() error { return r.err }

// Position implements Resumable.
func (r *replay) Position(k int) int { return r.start + k }

// SequentialSampler gives 0 to n-1.
type SequentialSampler struct {
	n       int
	start   int
	pending bool
}

// NewSequentialSampler visits n samples in order.
func NewSequentialSampler(n int) *SequentialSampler { return &SequentialSampler{n: max(n, 0)} }

// Len implements Sampler.
func (s *SequentialSampler) Len() int {
	if s.pending {
		return s.n - s.start
	}
	return s.n
}

// All implements Sampler.
func (s *SequentialSampler) All() iter.Seq[int] {
	return func(yield func(int) bool) {
		if !s.pending {
			s.start = 0
		}
		s.pending = false
		for i := s.start; i < s.n; i++ {
			if !yield(i) {
				return
			}
		}
	}
}

// State implements Resumable.
func (s *SequentialSampler) State(consumed int) SamplerState {
	return SamplerState{Kind: "sequential", Length: s.n, Cursor: s.start + consumed}
}

// Restore implements Resumable.
func (s *SequentialSampler) Restore(st SamplerState) error {
	if err := st.check("sequential", s.n, s.n); err != nil {
		return err
	}
	s.start, s.pending = st.Cursor, true
	return nil
}

// Position implements Resumable.
func (s *SequentialSampler) Position(k int) int { return s.start + k }

// RandomOptions tune a RandomSampler.
type RandomOptions struct {
	Replacement bool       // draw each index from all n, so that some come twice and some not at all
	NumSamples  int        // indices a pass; 0 is n
	Generator   *Generator // nil: each pass draws a seed from the default generator, as Python does
}

// RandomSampler is torch.utils.data.RandomSampler: a shuffle, or draws with replacement.
type RandomSampler struct {
	replay
	n       int
	samples int
	with    bool
}

// NewRandomSampler visits n samples in random order.
func NewRandomSampler(n int, opts RandomOptions) (*RandomSampler, error) {
	if opts.NumSamples < 0 {
		return nil, fmt.Errorf("data: num_samples should be a positive integer value, but got num_samples=%d", opts.NumSamples)
	}
	samples := opts.NumSamples
	if samples == 0 {
		samples = n
	}
	if n <= 0 && samples > 0 {
		return nil, fmt.Errorf("data: %d samples cannot be drawn from an empty data set", samples)
	}
	return &RandomSampler{replay: replay{gen: opts.Generator}, n: max(n, 0), samples: samples, with: opts.Replacement}, nil
}

// Len implements Sampler.
func (s *RandomSampler) Len() int { return s.left(s.samples) }

// All implements Sampler.
func (s *RandomSampler) All() iter.Seq[int] {
	return func(yield func(int) bool) {
		g, skip, err := s.order()
		if s.err = err; err != nil {
			return
		}
		give := func(idx []int) bool {
			for _, i := range idx {
				if skip > 0 {
					skip--
				} else if !yield(i) {
					return false
				}
			}
			return true
		}
		if s.n == 0 {
			return
		}
		if s.with {
			var block [32]int // Python draws 32 at a time
			for left := s.samples; left > 0; left -= len(block) {
				part := block[:min(left, len(block))]
				if s.err = g.Randint(int64(s.n), part); s.err != nil || !give(part) {
					return
				}
			}
			return
		}
		for range s.samples / s.n {
			if !give(g.Perm(s.n)) {
				return
			}
		}
		// Drawn also when nothing of it is used: it moves a user's generator on, as in Python.
		give(g.Perm(s.n)[:s.samples%s.n])
	}
}

// order gives the generator of a new pass. Without one of the user's it is a fresh one, whose seed is drawn.
func (s *RandomSampler) order() (*Generator, int, error) {
	if s.gen != nil || s.pending {
		return s.begin()
	}
	seed, err := random64(nil)
	if err != nil {
		return nil, 0, err
	}
	g := NewGenerator(seed)
	s.start, s.drawn = 0, g.State()
	return g, 0, nil
}

// State implements Resumable.
func (s *RandomSampler) State(consumed int) SamplerState { return s.state("random", s.n, consumed) }

// Restore implements Resumable.
func (s *RandomSampler) Restore(st SamplerState) error {
	return s.restore(st, "random", s.n, s.samples)
}

// SubsetRandomSampler is torch.utils.data.SubsetRandomSampler: given indices in random order.
type SubsetRandomSampler struct {
	replay
	indices []int
}

// NewSubsetRandomSampler shuffles indices in each pass. g nil draws from the default generator.
func NewSubsetRandomSampler(indices []int, g *Generator) *SubsetRandomSampler {
	return &SubsetRandomSampler{replay: replay{gen: g}, indices: slices.Clone(indices)}
}

// Len implements Sampler.
func (s *SubsetRandomSampler) Len() int { return s.left(len(s.indices)) }

// All implements Sampler.
func (s *SubsetRandomSampler) All() iter.Seq[int] {
	return func(yield func(int) bool) {
		g, skip, err := s.begin()
		var p []int
		if err == nil {
			p, err = permFrom(g, len(s.indices))
		}
		if s.err = err; err != nil {
			return
		}
		for _, i := range p[min(skip, len(p)):] {
			if !yield(s.indices[i]) {
				return
			}
		}
	}
}

// State implements Resumable.
func (s *SubsetRandomSampler) State(consumed int) SamplerState {
	return s.state("subset", len(s.indices), consumed)
}

// Restore implements Resumable.
func (s *SubsetRandomSampler) Restore(st SamplerState) error {
	return s.restore(st, "subset", len(s.indices), len(s.indices))
}

// WeightedOptions tune a WeightedRandomSampler.
type WeightedOptions struct {
	NumSamples int        // indices a pass; 0 is one for each weight
	NoRepeat   bool       // draw without replacement: replacement=False in Python
	Generator  *Generator // nil: the default generator
}

// WeightedRandomSampler is torch.utils.data.WeightedRandomSampler: index i is drawn in proportion to weights[i].
type WeightedRandomSampler struct {
	replay
	weights []float64
	samples int
	with    bool
}

// NewWeightedRandomSampler draws by weights, which need not sum to one.
func NewWeightedRandomSampler(weights []float64, opts WeightedOptions) (*WeightedRandomSampler, error) {
	samples := opts.NumSamples
	if samples == 0 {
		samples = len(weights)
	}
	if samples <= 0 {
		return nil, fmt.Errorf("data: num_samples should be a positive integer value, but got num_samples=%d", samples)
	}
	positive, sum := 0, 0.0
	for i, w := range weights {
		if w < 0 || math.IsNaN(w) || math.IsInf(w, 0) {
			return nil, fmt.Errorf("data: weight %d is %v: weights must be finite and not negative", i, w)
		}
		if w > 0 {
			positive++
		}
		sum += w
	}
	if positive == 0 || math.IsInf(sum, 0) {
		return nil, fmt.Errorf("data: the %d weights sum to %v: at least one must be positive and the sum finite", len(weights), sum)
	}
	if opts.NoRepeat && samples > len(weights) {
		return nil, fmt.Errorf("data: %d samples cannot be drawn without replacement from %d weights", samples, len(weights))
	}
	return &WeightedRandomSampler{replay: replay{gen: opts.Generator}, weights: slices.Clone(weights),
		samples: samples, with: !opts.NoRepeat}, nil
}

// Len implements Sampler.
func (s *WeightedRandomSampler) Len() int { return s.left(s.samples) }

// All implements Sampler.
func (s *WeightedRandomSampler) All() iter.Seq[int] {
	return func(yield func(int) bool) {
		g, skip, err := s.begin()
		var drawn []int
		if err == nil {
			drawn, err = multinomial(s.weights, s.samples, s.with, g)
		}
		if s.err = err; err != nil {
			return
		}
		for _, i := range drawn[min(skip, len(drawn)):] {
			if !yield(i) {
				return
			}
		}
	}
}

// State implements Resumable.
func (s *WeightedRandomSampler) State(consumed int) SamplerState {
	return s.state("weighted", len(s.weights), consumed)
}

// Restore implements Resumable.
func (s *WeightedRandomSampler) Restore(st SamplerState) error {
	return s.restore(st, "weighted", len(s.weights), s.samples)
}

// BatchSampler groups indices into batches. The slice that All gives is valid until the next one.
type BatchSampler interface {
	Len() int
	All() iter.Seq[[]int]
}

type batches struct {
	sampler Sampler
	size    int
	drop    bool
}

// NewBatchSampler is torch.utils.data.BatchSampler: size indices of sampler a batch, the last one shorter, or left out
// with dropLast.
func NewBatchSampler(sampler Sampler, size int, dropLast bool) (BatchSampler, error) {
	if size <= 0 {
		return nil, fmt.Errorf("data: batch_size should be a positive integer value, but got batch_size=%d", size)
	}
	return batches{sampler, size, dropLast}, nil
}

func (b batches) Len() int {
	if b.drop {
		return b.sampler.Len() / b.size
	}
	return (b.sampler.Len() + b.size - 1) / b.size
}

func (b batches) All() iter.Seq[[]int] {
	return func(yield func([]int) bool) {
		batch := make([]int, 0, b.size)
		for i := range b.sampler.All() {
			if batch = append(batch, i); len(batch) == b.size {
				if !yield(batch) {
					return
				}
				batch = batch[:0]
			}
		}
		if len(batch) > 0 && !b.drop {
			yield(batch)
		}
	}
}
