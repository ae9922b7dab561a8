package data

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"sort"

	"github.com/sugarme/gotch"
)

// Dataset is a map-style data set: samples that can be asked for by index, by several goroutines at once.
type Dataset[T any] interface {
	Len() int
	Item(ctx context.Context, i int) (T, error)
}

// Field describes one tensor of a sample: a batch of n samples has the shape [n, Shape...].
type Field struct {
	Name  string
	DType gotch.DType
	Shape []int64
}

// Source is what a DataLoader of tensors reads: samples that write themselves into a batch.
type Source interface {
	Len() int
	// Fields describes the tensors of every sample.
	Fields() ([]Field, error)
	// Write puts sample i into its row. rng is seeded for this sample and this pass. Several goroutines call Write at once.
	Write(ctx context.Context, i int, dst Row, rng *rand.Rand) error
}

// Encoder writes samples of type T into batches.
type Encoder[T any] interface {
	Fields() ([]Field, error)
	Encode(sample T, dst Row, rng *rand.Rand) error
}

// Encoded makes a Source of a data set whose samples enc writes.
type Encoded[T any] struct {
	Dataset[T]
	Enc Encoder[T]
}

// Fields implements Source.
func (e Encoded[T]) Fields() ([]Field, error) { return e.Enc.Fields() }

// Write implements Source.
func (e Encoded[T]) Write(ctx context.Context, i int, dst Row, rng *rand.Rand) error {
	sample, err := e.Item(ctx, i)
	if err != nil {
		return err
	}
	return e.Enc.Encode(sample, dst, rng)
}

// IndexError is an index outside a data set.
type IndexError struct{ Index, Len int }

func (e *IndexError) Error() string {
	return fmt.Sprintf("data: index %d is outside a data set of %d samples", e.Index, e.Len)
}

// sourceOf finds how a data set's samples are written into batches.
func sourceOf[T any](d Dataset[T]) (Source, error) {
	if s, ok := d.(Source); ok {
		return s, nil
	}
	return nil, fmt.Errorf("data: %T does not write its samples into batches: wrap it in data.Encoded, or use NewCollated", d)
}

// Subset is a part of a data set.
type Subset[T any] struct {
	inner   Dataset[T]
	source  Source // nil where inner is none
	indices []int
}

// NewSubset is the samples of d at indices, in that order.
func NewSubset[T any](d Dataset[T], indices []int) (*Subset[T], error) {
	for _, i := range indices {
		if i < 0 || i >= d.Len() {
			return nil, &IndexError{i, d.Len()}
		}
	}
	return newSubset(d, slices.Clone(indices)), nil
}

func newSubset[T any](d Dataset[T], indices []int) *Subset[T] {
	s := &Subset[T]{inner: d, indices: indices}
	s.source, _ = d.(Source)
	return s
}

// Len implements Dataset.
func (s *Subset[T]) Len() int { return len(s.indices) }

// Indices are the places in the whole data set.
func (s *Subset[T]) Indices() []int { return slices.Clone(s.indices) }

// Item implements Dataset.
func (s *Subset[T]) Item(ctx context.Context, i int) (T, error) {
	if uint(i) >= uint(len(s.indices)) {
		return *new(T), &IndexError{i, len(s.indices)}
	}
	return s.inner.Item(ctx, s.indices[i])
}

// Fields implements Source where the whole data set does.
func (s *Subset[T]) Fields() ([]Field, error) {
	src, err := sourceOf(s.inner)
	if err != nil {
		return nil, err
	}
	return src.Fields()
}

// Write implements Source where the whole data set does.
func (s *Subset[T]) Write(ctx context.Context, i int, dst Row, rng *rand.Rand) error {
	if uint(i) >= uint(len(s.indices)) {
		return &IndexError{i, len(s.indices)}
	}
	if s.source == nil {
		_, err := sourceOf(s.inner)
		return err
	}
	return s.source.Write(ctx, s.indices[i], dst, rng)
}

// Concat is several data sets one after the other.
type Concat[T any] struct {
	parts []Dataset[T]
	ends  []int
}

// NewConcat joins data sets.
func NewConcat[T any](parts ...Dataset[T]) (*Concat[T], error) {
	if len(parts) == 0 {
		return nil, errors.New("data: nothing to concatenate: at least one data set is needed")
	}
	c := &Concat[T]{parts: slices.Clone(parts)}
	end := 0
	for _, p := range parts {
		end += p.Len()
		c.ends = append(c.ends, end)
	}
	return c, nil
}

// Len implements Dataset.
func (c *Concat[T]) Len() int { return c.ends[len(c.ends)-1] }

// find gives the part that holds sample i, and its place there.
func (c *Concat[T]) find(i int) (Dataset[T], int, error) {
	if i < 0 || i >= c.Len() {
		return nil, 0, &IndexError{i, c.Len()}
	}
	k := sort.SearchInts(c.ends, i+1)
	if k > 0 {
		i -= c.ends[k-1]
	}
	return c.parts[k], i, nil
}

// Item implements Dataset.
func (c *Concat[T]) Item(ctx context.Context, i int) (T, error) {
	part, at, err := c.find(i)
	if err != nil {
		return *new(T), err
	}
	return part.Item(ctx, at)
}

// Fields implements Source where all parts do and agree.
func (c *Concat[T]) Fields() ([]Field, error) {
	var all []Field
	for k, p := range c.parts {
		src, err := sourceOf(p)
		if err != nil {
			return nil, err
		}
		f, err := src.Fields()
		if err != nil {
			return nil, err
		}
		if k == 0 {
			all = f
		} else if !sameFields(all, f) {
			return nil, fmt.Errorf("data: part %d of a concatenation has samples of another kind (%v) than part 0 (%v)", k, f, all)
		}
	}
	return all, nil
}

func sameFields(a, b []Field) bool {
	return slices.EqualFunc(a, b, func(x, y Field) bool { return x.DType == y.DType && slices.Equal(x.Shape, y.Shape) })
}

// Write implements Source where all parts do.
func (c *Concat[T]) Write(ctx context.Context, i int, dst Row, rng *rand.Rand) error {
	part, at, err := c.find(i)
	if err != nil {
		return err
	}
	src, err := sourceOf(part)
	if err != nil {
		return err
	}
	return src.Write(ctx, at, dst, rng)
}

// RandomSplit deals a data set out at random into parts of given lengths, which must sum to its length. The same
// generator state gives Python's split; g nil draws from the default generator.
func RandomSplit[T any](d Dataset[T], lengths []int, g *Generator) ([]*Subset[T], error) {
	sum := 0
	for i, n := range lengths {
		if n < 0 {
			return nil, fmt.Errorf("data: part %d of the split has the length %d", i, n)
		}
		sum += n
	}
	if sum != d.Len() {
		return nil, fmt.Errorf("data: Sum of input lengths (%d) does not equal the length of the input dataset (%d)", sum, d.Len())
	}
	p, err := permFrom(g, sum)
	if err != nil {
		return nil, err
	}
	parts := make([]*Subset[T], len(lengths))
	for i, n := range lengths {
		parts[i] = newSubset(d, p[:n:n])
		p = p[n:]
	}
	return parts, nil
}

// RandomSplitFractions is RandomSplit with fractions that sum to 1. What rounding down leaves over goes to the parts in
// turn, one sample each.
func RandomSplitFractions[T any](d Dataset[T], fractions []float64, g *Generator) ([]*Subset[T], error) {
	sum, left := 0.0, d.Len()
	lengths := make([]int, len(fractions))
	for i, f := range fractions {
		if !(f >= 0 && f <= 1) {
			return nil, fmt.Errorf("data: Fraction at index %d is not between 0 and 1: %v", i, f)
		}
		sum += f
		lengths[i] = int(math.Floor(float64(d.Len()) * f))
		left -= lengths[i]
	}
	if sum > 1 || sum < 1-1e-9 {
		return nil, fmt.Errorf("data: the fractions of a split must sum to 1, these sum to %v", sum)
	}
	for i := range left {
		lengths[i%len(lengths)]++
	}
	return RandomSplit(d, lengths, g)
}
