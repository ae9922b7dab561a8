package nn

import (
	"fmt"
	"math"

	"github.com/sugarme/gotch/ts"

	"github.com/goddp/goddp/internal/tdp"
)

// The functions of this file are torch.nn.init: they fill a tensor in place, unseen by autograd, and draw the same
// numbers from the default generator of the tensor's device as Python's do.

// Constant sets every element.
func Constant(t *ts.Tensor, value float64) error { return tdp.Fill(t, value) }

// Uniform draws from [lo, hi).
func Uniform(t *ts.Tensor, lo, hi float64) error { return tdp.Uniform(t, lo, hi) }

// Normal draws from a normal distribution.
func Normal(t *ts.Tensor, mean, std float64) error { return tdp.Normal(t, mean, std) }

// TruncNormal draws from a normal distribution cut to [lo, hi].
func TruncNormal(t *ts.Tensor, mean, std, lo, hi float64) error {
	return tdp.TruncNormal(t, mean, std, lo, hi)
}

// Eye makes a matrix the identity.
func Eye(t *ts.Tensor) error {
	if shape := shapeOf(t); len(shape) != 2 {
		return fmt.Errorf("%w: Eye needs a tensor of 2 dimensions, not %v", tdp.ErrValue, shape)
	}
	return tdp.Eye(t)
}

// Fans counts the inputs and outputs that each element of a weight meets.
func Fans(weight *ts.Tensor) (in, out int64, err error) {
	info, err := tdp.Describe(weight)
	if err != nil {
		return 0, 0, err
	}
	if len(info.Shape) < 2 {
		return 0, 0, fmt.Errorf("%w: fan in and fan out need a tensor of at least 2 dimensions, not %v", tdp.ErrValue, info.Shape)
	}
	field := int64(1)
	for _, n := range info.Shape[2:] {
		field *= n
	}
	return info.Shape[1] * field, info.Shape[0] * field, nil
}

// KaimingOptions choose a variant of He initialisation. The zero value is fan in with the gain of ReLU.
type KaimingOptions struct {
	FanOut    bool    // count outputs instead of inputs
	LeakyReLU bool    // the gain of leaky ReLU with negative slope A; Python's default nonlinearity
	Linear    bool    // gain 1
	A         float64 // negative slope
}

func (o KaimingOptions) std(t *ts.Tensor) (float64, error) {
	in, out, err := Fans(t)
	if err != nil {
		return 0, err
	}
	fan := in
	if o.FanOut {
		fan = out
	}
	gain := math.Sqrt2
	switch {
	case o.Linear:
		gain = 1
	case o.LeakyReLU:
		square := o.A * o.A // a statement of its own: no fused multiply-add, which would round otherwise
		gain = math.Sqrt(2 / (1 + square))
	}
	return gain / math.Sqrt(float64(fan)), nil
}

// KaimingUniform is torch.nn.init.kaiming_uniform_.
func KaimingUniform(t *ts.Tensor, o KaimingOptions) error {
	std, err := o.std(t)
	if err != nil {
		return err
	}
	bound := math.Sqrt(3) * std
	return tdp.Uniform(t, -bound, bound)
}

// KaimingNormal is torch.nn.init.kaiming_normal_.
func KaimingNormal(t *ts.Tensor, o KaimingOptions) error {
	std, err := o.std(t)
	if err != nil {
		return err
	}
	return tdp.Normal(t, 0, std)
}

// XavierUniform is torch.nn.init.xavier_uniform_.
func XavierUniform(t *ts.Tensor, gain float64) error {
	std, err := xavier(t, gain)
	if err != nil {
		return err
	}
	bound := math.Sqrt(3) * std
	return tdp.Uniform(t, -bound, bound)
}

// XavierNormal is torch.nn.init.xavier_normal_.
func XavierNormal(t *ts.Tensor, gain float64) error {
	std, err := xavier(t, gain)
	if err != nil {
		return err
	}
	return tdp.Normal(t, 0, std)
}

func xavier(t *ts.Tensor, gain float64) (float64, error) {
	in, out, err := Fans(t)
	return gain * math.Sqrt(2/float64(in+out)), err
}
