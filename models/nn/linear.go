package nn

import (
	"fmt"
	"math"

	"github.com/sugarme/gotch"
	"github.com/sugarme/gotch/ts"

	"github.com/goddp/goddp/internal/tdp"
)

// Linear is y = x Wᵀ + b over the last dimension.
type Linear struct {
	Base
	Weight *ts.Tensor // [out, in]
	Bias   *ts.Tensor // [out], or nil

	in, out int64
}

// LinearOptions change a Linear from Python's defaults.
type LinearOptions struct {
	NoBias bool
}

// NewLinear makes a linear layer on the CPU, with the weights that torch.nn.Linear would draw.
func NewLinear(in, out int64, o LinearOptions) (*Linear, error) {
	if in < 0 || out < 0 {
		return nil, fmt.Errorf("nn.Linear(%d, %d): %w: negative size", in, out, tdp.ErrValue)
	}
	l := &Linear{in: in, out: out}
	return l, firstError(
		func() error { return newParameter(&l.Base, "weight", &l.Weight, out, in) },
		func() error {
			if o.NoBias {
				return l.RegisterParameter("bias", &l.Bias)
			}
			return newParameter(&l.Base, "bias", &l.Bias, out)
		},
		l.ResetParameters,
	)
}

// ResetParameters draws the weights anew.
func (l *Linear) ResetParameters() error { return resetWeightAndBias(l.Weight, l.Bias) }

// ForwardT computes the layer.
func (l *Linear) ForwardT(x *ts.Tensor, train bool) *ts.Tensor {
	y, err := tdp.Linear(x, l.Weight, l.Bias)
	return result(l, x, l.Weight, y, err)
}

// ExtraRepr is what stands between the parentheses when the layer prints.
func (l *Linear) ExtraRepr() string {
	return fmt.Sprintf("in_features=%d, out_features=%d, bias=%s", l.in, l.out, pyBool(l.Bias != nil))
}

func (l *Linear) String() string { return Repr(l) }

// resetWeightAndBias is what linear layers and convolutions start from.
func resetWeightAndBias(weight, bias *ts.Tensor) error {
	if n, err := numel(weight); err != nil {
		return err
	} else if n > 0 { // Python draws nothing for a weight without elements
		if err := KaimingUniform(weight, KaimingOptions{A: math.Sqrt(5), LeakyReLU: true}); err != nil {
			return err
		}
	}
	if bias == nil {
		return nil
	}
	fanIn, _, err := Fans(weight)
	if err != nil {
		return err
	}
	bound := 0.0 // a layer without inputs starts with a bias of zeros
	if fanIn > 0 {
		bound = 1 / math.Sqrt(float64(fanIn))
	}
	return tdp.Uniform(bias, -bound, bound)
}

func numel(t *ts.Tensor) (int64, error) {
	info, err := tdp.Describe(t)
	return info.Numel, err
}

// newParameter makes a trainable tensor and registers it. Its elements are not set yet.
func newParameter(b *Base, name string, slot **ts.Tensor, shape ...int64) error {
	t, err := tdp.Empty(shape, gotch.Float, gotch.CPU, false)
	if err == nil {
		err = tdp.SetRequiresGrad(t, true)
	}
	if err != nil {
		return fmt.Errorf("parameter %s of shape %v: %w", name, shape, err)
	}
	*slot = t
	return b.RegisterParameter(name, slot)
}

// newBuffer makes a buffer filled with a value and registers it.
func newBuffer(b *Base, name string, slot **ts.Tensor, value float64, dtype gotch.DType, shape ...int64) error {
	t, err := tdp.Empty(shape, dtype, gotch.CPU, false)
	if err == nil {
		err = tdp.Fill(t, value)
	}
	if err != nil {
		return fmt.Errorf("buffer %s of shape %v: %w", name, shape, err)
	}
	*slot = t
	return b.RegisterBuffer(name, slot, true)
}

func firstError(steps ...func() error) error {
	for _, step := range steps {
		if err := step(); err != nil {
			return err
		}
	}
	return nil
}
