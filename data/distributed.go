package data

import (
	"errors"
	"fmt"
	"iter"
	"os"
	"slices"
	"strconv"
)

// DistributedOptions say which share of the samples a rank visits. The zero value is Python's default: shuffled, seed
// 0, the rank and the number of ranks from the launcher's environment.
type DistributedOptions struct {
	Replicas  int // ranks; 0 takes Replicas and Rank from WORLD_SIZE and RANK, or one rank where they are not set
	Rank      int
	NoShuffle bool
	Seed      int64 // the same on every rank
	DropLast  bool  // leave out the tail instead of repeating samples, so that every rank has the same number
}

// place gives the number of ranks and this rank.
func (o DistributedOptions) place() (world, rank int, err error) {
	world, rank = o.Replicas, o.Rank
	if world == 0 {
		w, r := os.Getenv("WORLD_SIZE"), os.Getenv("RANK")
		if w == "" && r == "" {
			world = 1
		} else if world, err = strconv.Atoi(w); err != nil {
			return 0, 0, fmt.Errorf("data: WORLD_SIZE=%q is not a number: launch all ranks with one, or set Replicas and Rank", w)
		} else if rank, err = strconv.Atoi(r); err != nil {
			return 0, 0, fmt.Errorf("data: RANK=%q is not a number: launch all ranks with one, or set Replicas and Rank", r)
		}
	}
	if world < 1 {
		return 0, 0, fmt.Errorf("data: %d replicas: at least one rank must visit the samples", world)
	}
	if rank < 0 || rank >= world {
		return 0, 0, fmt.Errorf("data: Invalid rank %d, rank should be in the interval [0, %d]", rank, world-1)
	}
	return world, rank, nil
}

// shard deals an epoch's order out to the ranks: rank r gets the places r, r+world, r+2*world, … counted from start.
type shard struct {
	kind        string
	n           int
	world, rank int
	seed        int64
	epoch       int
	start       int // where the latest pass began in the epoch, or the next will after Restore
	pending     bool
	pad, drop   bool         // repeat samples, or leave some out, so that all ranks get equally many
	length      func() int   // of the epoch's order
	order       func() []int // the epoch's order; nil is 0 to length-1
}

// Len implements Sampler.
func (s *shard) Len() int {
	start := 0
	if s.pending {
		start = s.start
	}
	return s.count(start)
}

// count is how many indices this rank gets of the places from start on.
func (s *shard) count(start int) int {
	left := max(s.length()-start, 0)
	switch {
	case s.drop:
		return left / s.world
	case s.pad:
		return (left + s.world - 1) / s.world
	}
	return max(left-s.rank+s.world-1, 0) / s.world
}

// All implements Sampler.
func (s *shard) All() iter.Seq[int] {
	return func(yield func(int) bool) {
		if !s.pending {
			s.start = 0
		}
		s.pending = false
		start, count := s.start, s.count(s.start)
		if count == 0 {
			return
		}
		var order []int
		if s.order != nil {
			order = s.order()
		}
		length := s.length()
		for k := range count {
			// Places beyond the end repeat the order from its beginning: the padding.
			i := (start + k*s.world + s.rank) % length
			if order != nil {
				i = order[i]
			}
			if !yield(i) {
				return
			}
		}
	}
}

// SetEpoch chooses the order of the next pass. The epoch that Restore set keeps the place it stopped at.
func (s *shard) SetEpoch(epoch int) {
	if epoch != s.epoch {
		s.start, s.pending = 0, false
	}
	s.epoch = epoch
}

// Epoch tells what SetEpoch, or Restore, set.
func (s *shard) Epoch() int { return s.epoch }

// State implements Resumable. It may be restored with another number of ranks: what no rank has consumed yet is then
// dealt out anew. All ranks must have consumed equally many, as they have after a training step.
func (s *shard) State(consumed int) SamplerState {
	return SamplerState{Kind: s.kind, Length: s.n, Epoch: s.epoch, Seed: s.seed, Cursor: s.start + consumed*s.world}
}

// Restore implements Resumable.
func (s *shard) Restore(st SamplerState) error {
	if st.Cursor < 0 {
		return fmt.Errorf("data: %w: position %d", ErrState, st.Cursor)
	}
	// Padding may have taken the cursor past the end, by less than one round of the former ranks.
	if err := st.check(s.kind, s.n, st.Cursor); err != nil {
		return err
	}
	if st.Seed != s.seed {
		return fmt.Errorf("data: %w: it has seed %d, this sampler %d, which orders the samples otherwise", ErrState, st.Seed, s.seed)
	}
	s.epoch, s.start, s.pending = st.Epoch, st.Cursor, true
	return nil
}

// Position implements Resumable.
func (s *shard) Position(k int) int { return s.start + k*s.world + s.rank }

// DistributedSampler is torch.utils.data.distributed.DistributedSampler: every rank visits its own share of the
// samples, and all ranks visit equally many. The indices are Python's, to the last one.
//
// Call SetEpoch before each epoch, or all epochs have the same order.
type DistributedSampler struct{ shard }

// NewDistributedSampler shares out n samples.
func NewDistributedSampler(n int, opts DistributedOptions) (*DistributedSampler, error) {
	world, rank, err := opts.place()
	if err != nil {
		return nil, err
	}
	if n < 0 {
		return nil, fmt.Errorf("data: a data set of %d samples", n)
	}
	s := &DistributedSampler{shard{kind: "distributed", n: n, world: world, rank: rank, seed: opts.Seed,
		pad: !opts.DropLast, drop: opts.DropLast, length: func() int { return n }}}
	if !opts.NoShuffle {
		s.order = func() []int { return NewGenerator(s.seed + int64(s.epoch)).Perm(n) }
	}
	return s, nil
}

// EvalSampler shares out samples for evaluation: every sample is visited exactly once, in order, so that a metric over
// all ranks is exact. Ranks may get one sample more or less than others: weight a rank's mean by its count.
type EvalSampler struct{ shard }

// NewEvalSampler shares out n samples. Of opts only Replicas and Rank count.
func NewEvalSampler(n int, opts DistributedOptions) (*EvalSampler, error) {
	world, rank, err := opts.place()
	if err != nil {
		return nil, err
	}
	if n < 0 {
		return nil, fmt.Errorf("data: a data set of %d samples", n)
	}
	return &EvalSampler{shard{kind: "eval", n: n, world: world, rank: rank, length: func() int { return n }}}, nil
}

// Pace tells which fraction of the samples, the easiest ones, an epoch visits.
type Pace func(epoch int) float64

// LinearPace starts with a fraction of the samples and reaches all of them at epoch full.
func LinearPace(start float64, full int) Pace {
	return func(epoch int) float64 {
		if epoch >= full {
			return 1
		}
		return start + (1-start)*float64(max(epoch, 0))/float64(full)
	}
}

// StepPace adds step to the starting fraction once every so many epochs.
func StepPace(start, step float64, every int) Pace {
	return func(epoch int) float64 { return min(1, start+step*float64(max(epoch, 0)/max(every, 1))) }
}

// CurriculumSampler goes from easy to hard: an epoch visits the easiest samples by score, as many as the pace says,
// shuffled and shared out to the ranks like DistributedSampler's.
type CurriculumSampler struct {
	shard
	easy []int // all samples, by rising score
	pace Pace
}

// NewCurriculumSampler orders samples by score, low is easy; equal scores keep the data set's order. pace nil is
// LinearPace(0.25, 10).
func NewCurriculumSampler(scores []float64, pace Pace, opts DistributedOptions) (*CurriculumSampler, error) {
	world, rank, err := opts.place()
	if err != nil {
		return nil, err
	}
	for i, v := range scores {
		if v != v {
			return nil, fmt.Errorf("data: the score of sample %d is not a number", i)
		}
	}
	if pace == nil {
		pace = LinearPace(0.25, 10)
	}
	if len(scores) == 0 {
		return nil, errors.New("data: a curriculum needs the score of every sample, got none")
	}
	n := len(scores)
	s := &CurriculumSampler{easy: make([]int, n), pace: pace}
	for i := range s.easy {
		s.easy[i] = i
	}
	slices.SortStableFunc(s.easy, func(a, b int) int {
		switch {
		case scores[a] < scores[b]:
			return -1
		case scores[a] > scores[b]:
			return 1
		}
		return 0
	})
	s.shard = shard{kind: "curriculum", n: n, world: world, rank: rank, seed: opts.Seed,
		pad: !opts.DropLast, drop: opts.DropLast, length: s.Pool}
	s.order = func() []int {
		pool := s.easy[:s.Pool()]
		if opts.NoShuffle {
			return pool
		}
		p := NewGenerator(s.seed + int64(s.epoch)).Perm(len(pool))
		for k, i := range p {
			p[k] = pool[i]
		}
		return p
	}
	return s, nil
}

// Pool is how many samples the epoch visits, over all ranks.
func (s *CurriculumSampler) Pool() int {
	f := s.pace(s.epoch)
	if !(f > 0) { // a NaN or a negative pace: still one sample
		return 1
	}
	return max(1, min(s.n, int(f*float64(s.n)+0.5)))
}
