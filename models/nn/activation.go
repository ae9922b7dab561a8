package nn

import (
	"fmt"

	"github.com/sugarme/gotch/ts"

	"github.com/goddp/goddp/internal/tdp"
)

// Activation is a layer of one elementwise function.
type Activation struct {
	Base
	kind    tdp.Activation
	inplace bool
}

// NewReLU is max(x, 0).
func NewReLU() *Activation { return &Activation{kind: tdp.ReLU} }

// NewReLUInplace is a ReLU that writes over its input, which saves memory where nobody else needs the input.
func NewReLUInplace() *Activation { return &Activation{kind: tdp.ReLU, inplace: true} }

// NewGELU is x Φ(x).
func NewGELU() *Activation { return &Activation{kind: tdp.GELU} }

// NewGELUTanh is the approximation of GELU by tanh.
func NewGELUTanh() *Activation { return &Activation{kind: tdp.GELUTanh} }

// NewSiLU is x sigmoid(x).
func NewSiLU() *Activation { return &Activation{kind: tdp.SiLU} }

// NewSiLUInplace is a SiLU that writes over its input.
func NewSiLUInplace() *Activation { return &Activation{kind: tdp.SiLU, inplace: true} }

// NewSigmoid is 1 / (1 + exp(-x)).
func NewSigmoid() *Activation { return &Activation{kind: tdp.Sigmoid} }

// NewTanh is tanh(x).
func NewTanh() *Activation { return &Activation{kind: tdp.Tanh} }

// ForwardT computes the layer.
func (a *Activation) ForwardT(x *ts.Tensor, train bool) *ts.Tensor {
	y, err := tdp.Activate(a.kind, x, a.inplace)
	return result(a, x, nil, y, err)
}

// ExtraRepr is what stands between the parentheses when the layer prints.
func (a *Activation) ExtraRepr() string {
	switch {
	case a.kind == tdp.GELU:
		return "approximate='none'"
	case a.kind == tdp.GELUTanh:
		return "approximate='tanh'"
	case a.inplace:
		return "inplace=True"
	}
	return ""
}

// TypeName is what Python calls the layer.
func (a *Activation) TypeName() string {
	switch a.kind {
	case tdp.ReLU:
		return "ReLU"
	case tdp.GELU, tdp.GELUTanh:
		return "GELU"
	case tdp.SiLU:
		return "SiLU"
	case tdp.Sigmoid:
		return "Sigmoid"
	}
	return "Tanh"
}

func (a *Activation) String() string { return Repr(a) }

// Softmax makes probabilities along a dimension.
type Softmax struct {
	Base
	dim int64
	log bool
}

// NewSoftmax makes probabilities along dim; negative counts from the end.
func NewSoftmax(dim int64) *Softmax { return &Softmax{dim: dim} }

// NewLogSoftmax makes log probabilities along dim; negative counts from the end.
func NewLogSoftmax(dim int64) *Softmax { return &Softmax{dim: dim, log: true} }

// ForwardT computes the layer.
func (s *Softmax) ForwardT(x *ts.Tensor, train bool) *ts.Tensor {
	y, err := tdp.Softmax(x, s.dim, s.log)
	return result(s, x, nil, y, err)
}

// ExtraRepr is what stands between the parentheses when the layer prints.
func (s *Softmax) ExtraRepr() string { return fmt.Sprintf("dim=%d", s.dim) }

// TypeName is what Python calls the layer.
func (s *Softmax) TypeName() string {
	if s.log {
		return "LogSoftmax"
	}
	return "Softmax"
}

func (s *Softmax) String() string { return Repr(s) }

// Dropout zeroes elements at random in training and scales the others up.
type Dropout struct {
	Base
	p       float64
	inplace bool
}

// NewDropout zeroes elements with probability p.
func NewDropout(p float64) (*Dropout, error) {
	if !(p >= 0 && p <= 1) {
		return nil, fmt.Errorf("nn.Dropout: %w: the probability must be between 0 and 1, not %v", tdp.ErrValue, p)
	}
	return &Dropout{p: p}, nil
}

// NewDropoutInplace is a Dropout that writes over its input.
func NewDropoutInplace(p float64) (*Dropout, error) {
	d, err := NewDropout(p)
	if err != nil {
		return nil, err
	}
	d.inplace = true
	return d, nil
}

// ForwardT computes the layer.
func (d *Dropout) ForwardT(x *ts.Tensor, train bool) *ts.Tensor {
	y, err := tdp.Dropout(x, d.p, train && !d.eval, d.inplace)
	return result(d, x, nil, y, err)
}

// ExtraRepr is what stands between the parentheses when the layer prints.
func (d *Dropout) ExtraRepr() string {
	return fmt.Sprintf("p=%s, inplace=%s", pyFloat(d.p), pyBool(d.inplace))
}

func (d *Dropout) String() string { return Repr(d) }

// Flatten makes one dimension of several.
type Flatten struct {
	Base
	start, end int64
}

// NewFlatten flattens everything but the batch.
func NewFlatten() *Flatten { return &Flatten{start: 1, end: -1} }

// NewFlattenDims flattens the dimensions from start to end, both included; negative counts from the end.
func NewFlattenDims(start, end int64) *Flatten { return &Flatten{start: start, end: end} }

// ForwardT computes the layer.
func (f *Flatten) ForwardT(x *ts.Tensor, train bool) *ts.Tensor {
	y, err := tdp.Flatten(x, f.start, f.end)
	return result(f, x, nil, y, err)
}

// ExtraRepr is what stands between the parentheses when the layer prints.
func (f *Flatten) ExtraRepr() string { return fmt.Sprintf("start_dim=%d, end_dim=%d", f.start, f.end) }

func (f *Flatten) String() string { return Repr(f) }

// Identity gives its input.
type Identity struct{ Base }

// NewIdentity gives its input: what takes the place of a layer that is not wanted.
func NewIdentity() *Identity { return &Identity{} }

// ForwardT gives a second handle on x.
func (i *Identity) ForwardT(x *ts.Tensor, train bool) *ts.Tensor {
	y, err := tdp.Share(x)
	return result(i, x, nil, y, err)
}

func (i *Identity) String() string { return Repr(i) }
