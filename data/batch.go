package data

import (
	"fmt"
	"slices"
	"unsafe"

	"github.com/goddp/goddp/internal/tdp"
	"github.com/sugarme/gotch"
	"github.com/sugarme/gotch/ts"
)

// Batch is what a loader of tensors hands over: one tensor a field, the samples along dimension 0.
//
// Its tensors are the loader's: they are valid inside the loop body that received the batch. Keep takes them over.
type Batch struct {
	tensors []*ts.Tensor
	indices []int
	mem     *memory
	kept    bool
	join    func() error // see stager
}

// Tensors are the batch's tensors in the order of Source.Fields.
func (b *Batch) Tensors() []*ts.Tensor { return b.tensors }

// Tensor is the tensor of field i, or nil where there is none or the batch is no longer valid.
func (b *Batch) Tensor(i int) *ts.Tensor {
	if i < 0 || i >= len(b.tensors) {
		return nil
	}
	return b.tensors[i]
}

// Input is the first tensor.
func (b *Batch) Input() *ts.Tensor { return b.Tensor(0) }

// Target is the second tensor, or nil.
func (b *Batch) Target() *ts.Tensor { return b.Tensor(1) }

// Len is the number of samples.
func (b *Batch) Len() int { return len(b.indices) }

// Indices are the samples' places in the data set.
func (b *Batch) Indices() []int { return b.indices }

// Keep makes the tensors, and the duty to drop them, the caller's.
func (b *Batch) Keep() []*ts.Tensor {
	b.kept = true
	b.indices = slices.Clone(b.indices) // the loader writes the next batch's there
	return b.tensors
}

// Row is one sample's place in the memory of a batch.
type Row struct {
	mem *memory
	k   int
}

// Fields is how many tensors a sample has.
func (r Row) Fields() int { return len(r.mem.fields) }

// Bytes is the sample's part of field f, elements in native byte order.
func (r Row) Bytes(f int) []byte {
	m := &r.mem.fields[f]
	return m.bytes[r.k*m.row : (r.k+1)*m.row : (r.k+1)*m.row]
}

// Elements is the sample's part of field f as elements of type E, which must be the field's dtype.
func Elements[E tdp.Element](r Row, f int) ([]E, error) {
	m := &r.mem.fields[f]
	if want := tdp.DTypeOf[E](); m.dtype != want {
		return nil, fmt.Errorf("data: field %d holds dtype %d, not %d", f, m.dtype, want)
	}
	b := r.Bytes(f)
	return unsafe.Slice((*E)(unsafe.Pointer(unsafe.SliceData(b))), len(b)/int(unsafe.Sizeof(*new(E)))), nil
}

// memory is a batch's tensors on the host, and where their bytes lie.
type memory struct {
	tensors []*ts.Tensor
	fields  []fieldMemory
	rows    int
}

type fieldMemory struct {
	bytes []byte
	row   int // bytes of a row
	dtype gotch.DType
}

// newMemory allocates tensors of n rows.
func newMemory(fields []Field, n int, pinned bool) (*memory, error) {
	m := &memory{tensors: make([]*ts.Tensor, 0, len(fields)), fields: make([]fieldMemory, len(fields)), rows: n}
	for i, f := range fields {
		t, err := tdp.Empty(withRows(f.Shape, n), f.DType, gotch.CPU, pinned)
		if err != nil {
			m.free()
			return nil, fmt.Errorf("data: a batch of %d for field %q: %w", n, f.Name, err)
		}
		m.tensors = append(m.tensors, t)
		b, err := tdp.HostBytes(t)
		if err != nil {
			m.free()
			return nil, err
		}
		m.fields[i] = fieldMemory{bytes: b, dtype: f.DType}
		if n > 0 {
			m.fields[i].row = len(b) / n
		}
	}
	return m, nil
}

func withRows(shape []int64, n int) []int64 {
	s := make([]int64, 0, 4)
	return append(append(s, int64(n)), shape...)
}

func (m *memory) free() {
	drop(m.tensors...)
	m.tensors, m.fields = nil, nil
}

// head gives tensors of the first n rows, which share the memory.
func (m *memory) head(fields []Field, n int) ([]*ts.Tensor, error) {
	out := make([]*ts.Tensor, 0, len(fields))
	for i, f := range fields {
		shape := withRows(f.Shape, n)
		stride := make([]int64, len(shape))
		step := int64(1)
		for d := len(shape) - 1; d >= 0; d-- {
			stride[d] = step
			step *= shape[d]
		}
		t, err := tdp.ViewStorage(m.tensors[i], f.DType, shape, stride, 0)
		if err != nil {
			drop(out...)
			return nil, err
		}
		out = append(out, t)
	}
	return out, nil
}

// checkFields refuses what no batch can be made of.
func checkFields(fields []Field) error {
	if len(fields) == 0 {
		return fmt.Errorf("data: a sample needs at least one field")
	}
	for _, f := range fields {
		if slices.ContainsFunc(f.Shape, func(d int64) bool { return d < 0 }) {
			return fmt.Errorf("data: field %q has the shape %v: every sample must have the same, known size", f.Name, f.Shape)
		}
	}
	return nil
}
