package nn

import (
	"fmt"

	"github.com/sugarme/gotch/ts"

	"github.com/goddp/goddp/internal/tdp"
)

// Embedding is a table of vectors, looked up by int64 indices.
type Embedding struct {
	Base
	Weight *ts.Tensor // [entries, dim]

	entries, dim int64
	padding      int64 // -1: none
	scale        bool
	sparse       bool
}

// EmbeddingOptions change an embedding from Python's defaults.
type EmbeddingOptions struct {
	PaddingIdx      *int64 // this entry starts as zeros and does not learn; negative counts from the end
	ScaleGradByFreq bool   // divide gradients by how often an index occurs in the batch
	Sparse          bool   // give sparse gradients
}

// NewEmbedding makes a table on the CPU with the vectors that torch.nn.Embedding would draw.
func NewEmbedding(entries, dim int64, o EmbeddingOptions) (*Embedding, error) {
	if entries < 0 || dim < 0 {
		return nil, fmt.Errorf("nn.Embedding(%d, %d): %w: negative size", entries, dim, tdp.ErrValue)
	}
	e := &Embedding{entries: entries, dim: dim, padding: -1, scale: o.ScaleGradByFreq, sparse: o.Sparse}
	if o.PaddingIdx != nil {
		e.padding = *o.PaddingIdx
		if e.padding < 0 {
			e.padding += entries
		}
		if e.padding < 0 || e.padding >= entries {
			return nil, fmt.Errorf("nn.Embedding(%d, %d): %w: padding index %d is not within the table", entries, dim, tdp.ErrValue, *o.PaddingIdx)
		}
	}
	return e, firstError(
		func() error { return newParameter(&e.Base, "weight", &e.Weight, entries, dim) },
		func() error { e.params[0].sparse = o.Sparse; return nil },
		e.ResetParameters,
	)
}

// ResetParameters draws the vectors anew.
func (e *Embedding) ResetParameters() error {
	if err := tdp.Normal(e.Weight, 0, 1); err != nil || e.padding < 0 {
		return err
	}
	return tdp.ZeroRow(e.Weight, e.padding)
}

// ForwardT looks the indices of x up.
func (e *Embedding) ForwardT(x *ts.Tensor, train bool) *ts.Tensor {
	y, err := tdp.Embedding(e.Weight, x, e.padding, e.scale, e.sparse)
	return result(e, x, e.Weight, y, err)
}

// ExtraRepr is what stands between the parentheses when the layer prints.
func (e *Embedding) ExtraRepr() string {
	s := fmt.Sprintf("%d, %d", e.entries, e.dim)
	if e.padding >= 0 {
		s += fmt.Sprintf(", padding_idx=%d", e.padding)
	}
	if e.scale {
		s += ", scale_grad_by_freq=True"
	}
	if e.sparse {
		s += ", sparse=True"
	}
	return s
}

func (e *Embedding) String() string { return Repr(e) }
