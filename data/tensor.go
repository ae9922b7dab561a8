package data

import (
	"context"
	"fmt"
	"math/rand/v2"

	"github.com/goddp/goddp/internal/tdp"
	"github.com/sugarme/gotch"
	"github.com/sugarme/gotch/ts"
)

// TensorDataset is torch.utils.data.TensorDataset: sample i is row i of each tensor.
type TensorDataset struct {
	tensors []*ts.Tensor
	fields  []Field
	mem     memory
	n       int
}

// NewTensorDataset makes a data set of CPU tensors with equally many rows. It shares their memory and takes them over:
// Close drops them.
func NewTensorDataset(tensors ...*ts.Tensor) (*TensorDataset, error) {
	if len(tensors) == 0 {
		return nil, fmt.Errorf("data: a tensor data set needs at least one tensor")
	}
	d := &TensorDataset{tensors: tensors}
	for i, t := range tensors {
		info, err := tdp.Describe(t)
		if err != nil {
			return nil, err
		}
		if len(info.Shape) == 0 {
			return nil, fmt.Errorf("data: tensor %d of the data set is a scalar: it has no rows", i)
		}
		n := int(info.Shape[0])
		if i == 0 {
			d.n = n
		} else if n != d.n {
			return nil, fmt.Errorf("data: Size mismatch between tensors: tensor 0 has %d rows, tensor %d has %d", d.n, i, n)
		}
		bytes, err := tdp.HostBytes(t)
		if err != nil {
			return nil, fmt.Errorf("data: tensor %d of the data set: %w: move it to the CPU and call contiguous first", i, err)
		}
		m := fieldMemory{bytes: bytes, dtype: info.DType}
		if n > 0 {
			m.row = len(bytes) / n
		}
		d.mem.fields = append(d.mem.fields, m)
		d.fields = append(d.fields, Field{Name: fmt.Sprintf("tensor%d", i), DType: info.DType, Shape: info.Shape[1:]})
	}
	return d, nil
}

// Len implements Dataset.
func (d *TensorDataset) Len() int { return d.n }

// Tensors are the whole tensors. They stay the data set's.
func (d *TensorDataset) Tensors() []*ts.Tensor { return d.tensors }

// Item gives sample i as new tensors, which the caller drops.
func (d *TensorDataset) Item(_ context.Context, i int) ([]*ts.Tensor, error) {
	if i < 0 || i >= d.n {
		return nil, &IndexError{i, d.n}
	}
	out := make([]*ts.Tensor, 0, len(d.tensors))
	for f, field := range d.fields {
		t, err := tdp.FromBytes(Row{&d.mem, i}.Bytes(f), field.Shape, field.DType, gotch.CPU)
		if err != nil {
			drop(out...)
			return nil, err
		}
		out = append(out, t)
	}
	return out, nil
}

// Fields implements Source.
func (d *TensorDataset) Fields() ([]Field, error) { return d.fields, nil }

// Write implements Source.
func (d *TensorDataset) Write(_ context.Context, i int, dst Row, _ *rand.Rand) error {
	if uint(i) >= uint(d.n) {
		return &IndexError{i, d.n}
	}
	src := Row{&d.mem, i}
	for f := range d.mem.fields {
		copy(dst.Bytes(f), src.Bytes(f))
	}
	return nil
}

func (d *TensorDataset) copyRows(indices []int, dst *memory, lo int) (int, error) {
	for k, i := range indices {
		if uint(i) >= uint(d.n) {
			return k, &IndexError{i, d.n}
		}
	}
	for f := range d.mem.fields {
		src, to, row := d.mem.fields[f].bytes, dst.fields[f].bytes, d.mem.fields[f].row
		to = to[lo*row:]
		for _, i := range indices {
			copy(to[:row], src[i*row:i*row+row])
			to = to[row:]
		}
	}
	return len(indices), nil
}

// Close drops the tensors.
func (d *TensorDataset) Close() error {
	drop(d.tensors...)
	d.tensors, d.mem.fields, d.n = nil, nil, 0
	return nil
}

// NewRandomToy is the tutorial's MyTrainDataset: size samples of 20 random inputs and one random target.
//
// It draws what Python's `[(torch.rand(20), torch.rand(1)) for _ in range(size)]` draws from the default generator, and
// leaves that one in the same state.
func NewRandomToy(size int) (*TensorDataset, error) {
	if size < 0 {
		return nil, fmt.Errorf("data: a toy data set of %d samples", size)
	}
	const in, out = 20, 1
	x, y := make([]float32, 0, size*in), make([]float32, 0, size*out)
	err := onDefault(func(g *Generator) error {
		for range size {
			for range in {
				x = append(x, g.Rand())
			}
			y = append(y, g.Rand())
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	tx, err := tdp.FromSlice(x, []int64{int64(size), in}, gotch.CPU)
	if err != nil {
		return nil, err
	}
	ty, err := tdp.FromSlice(y, []int64{int64(size), out}, gotch.CPU)
	if err != nil {
		drop(tx)
		return nil, err
	}
	d, err := NewTensorDataset(tx, ty)
	if err != nil {
		drop(tx, ty)
		return nil, err
	}
	d.fields[0].Name, d.fields[1].Name = "input", "target"
	return d, nil
}
