package nn

import (
	"fmt"
	"strings"

	"github.com/sugarme/gotch/ts"

	"github.com/goddp/goddp/internal/tdp"
)

// Size is a length for each spatial dimension. A single number stands for all of them.
type Size []int64

// expand gives dims numbers, or fill for an empty Size.
func (s Size) expand(dims int, fill int64) ([]int64, error) {
	out := make([]int64, dims)
	switch len(s) {
	case 0:
		for i := range out {
			out[i] = fill
		}
	case 1:
		for i := range out {
			out[i] = s[0]
		}
	case dims:
		copy(out, s)
	default:
		return nil, fmt.Errorf("%w: %v needs 1 or %d numbers", tdp.ErrValue, []int64(s), dims)
	}
	return out, nil
}

// repr prints a number as a number, several as a tuple.
func (s Size) repr() string {
	if len(s) == 1 {
		return fmt.Sprint(s[0])
	}
	return pyTuple(s)
}

// PaddingMode tells what a convolution sees beyond the border.
type PaddingMode string

// The padding modes.
const (
	Zeros     PaddingMode = "" // the default
	Reflect   PaddingMode = "reflect"
	Replicate PaddingMode = "replicate"
	Circular  PaddingMode = "circular"
)

// Conv is Conv1d, Conv2d or Conv3d.
type Conv struct {
	Base
	Weight *ts.Tensor // [out, in/groups, kernel...]
	Bias   *ts.Tensor // [out], or nil

	in, out int64
	dims    int
	kernel  []int64
	padding []int64 // nil: same
	outside []int64 // what is padded before the convolution, for a mode other than zeros
	mode    PaddingMode
	spec    tdp.ConvSpec
}

// ConvOptions change a convolution from Python's defaults.
type ConvOptions struct {
	Stride      Size // 1
	Padding     Size // 0
	Dilation    Size // 1
	Groups      int64
	Same        bool // pad so that the output is as large as the input: Python's padding="same"
	NoBias      bool
	PaddingMode PaddingMode
}

// NewConv1d makes a convolution over [N, C, L] or [C, L], on the CPU, with the weights that Python's would draw.
func NewConv1d(in, out int64, kernel Size, o ConvOptions) (*Conv, error) {
	return newConv(1, in, out, kernel, o)
}

// NewConv2d makes a convolution over [N, C, H, W] or [C, H, W], on the CPU, with the weights that Python's would draw.
func NewConv2d(in, out int64, kernel Size, o ConvOptions) (*Conv, error) {
	return newConv(2, in, out, kernel, o)
}

// NewConv3d makes a convolution over [N, C, D, H, W] or [C, D, H, W], on the CPU, with the weights that Python's would
// draw.
func NewConv3d(in, out int64, kernel Size, o ConvOptions) (*Conv, error) {
	return newConv(3, in, out, kernel, o)
}

func newConv(dims int, in, out int64, kernel Size, o ConvOptions) (*Conv, error) {
	c := &Conv{in: in, out: out, dims: dims, mode: o.PaddingMode}
	if err := c.configure(kernel, o); err != nil {
		return nil, fmt.Errorf("nn.Conv%dd(%d, %d): %w", dims, in, out, err)
	}
	shape := append([]int64{out, in / c.spec.Groups}, c.kernel...)
	return c, firstError(
		func() error { return newParameter(&c.Base, "weight", &c.Weight, shape...) },
		func() error {
			if o.NoBias {
				return c.RegisterParameter("bias", &c.Bias)
			}
			return newParameter(&c.Base, "bias", &c.Bias, out)
		},
		c.ResetParameters,
	)
}

func (c *Conv) configure(kernel Size, o ConvOptions) (err error) {
	if len(kernel) == 0 {
		return fmt.Errorf("%w: a convolution needs a kernel size", tdp.ErrValue)
	}
	s := &c.spec
	s.Groups = max(o.Groups, 1)
	switch {
	case o.Groups < 0:
		return fmt.Errorf("%w: groups must be positive, not %d", tdp.ErrValue, o.Groups)
	case c.in < 0 || c.out < 0:
		return fmt.Errorf("%w: negative number of channels", tdp.ErrValue)
	case c.in%s.Groups != 0 || c.out%s.Groups != 0:
		return fmt.Errorf("%w: channels must be divisible by groups (%d)", tdp.ErrValue, s.Groups)
	}
	if c.kernel, err = kernel.expand(c.dims, 0); err != nil {
		return fmt.Errorf("kernel size: %w", err)
	}
	for _, k := range c.kernel {
		if k < 0 {
			return fmt.Errorf("%w: negative kernel size %v", tdp.ErrValue, c.kernel)
		}
	}
	if s.Stride, err = o.Stride.expand(c.dims, 1); err != nil {
		return fmt.Errorf("stride: %w", err)
	}
	if s.Dilation, err = o.Dilation.expand(c.dims, 1); err != nil {
		return fmt.Errorf("dilation: %w", err)
	}
	if o.Same {
		if len(o.Padding) > 0 {
			return fmt.Errorf("%w: give either Padding or Same", tdp.ErrValue)
		}
		for _, n := range s.Stride {
			if n != 1 {
				return fmt.Errorf("%w: Same does not go with strides", tdp.ErrValue)
			}
		}
	} else if c.padding, err = o.Padding.expand(c.dims, 0); err != nil {
		return fmt.Errorf("padding: %w", err)
	}
	s.Padding = c.padding
	switch c.mode {
	case Zeros, "zeros":
		c.mode = Zeros
		return nil
	case Reflect, Replicate, Circular:
	default:
		return fmt.Errorf("%w: unknown padding mode %q; there are zeros, reflect, replicate and circular", tdp.ErrValue, c.mode)
	}
	for i := c.dims - 1; i >= 0; i-- { // the last dimension's pair comes first
		before, after := int64(0), int64(0)
		if o.Same {
			total := s.Dilation[i] * (c.kernel[i] - 1)
			before = total / 2
			after = total - before
		} else {
			before, after = c.padding[i], c.padding[i]
		}
		c.outside = append(c.outside, before, after)
	}
	s.Padding = make([]int64, c.dims)
	return nil
}

// ResetParameters draws the weights anew.
func (c *Conv) ResetParameters() error { return resetWeightAndBias(c.Weight, c.Bias) }

// ForwardT computes the layer.
func (c *Conv) ForwardT(x *ts.Tensor, train bool) *ts.Tensor {
	if c.outside == nil {
		y, err := tdp.Conv(x, c.Weight, c.Bias, &c.spec)
		return result(c, x, c.Weight, y, err)
	}
	padded, err := tdp.Pad(x, c.outside, string(c.mode), 0)
	if err != nil {
		return result(c, x, c.Weight, nil, err)
	}
	y, err := tdp.Conv(padded, c.Weight, c.Bias, &c.spec)
	padded.MustDrop()
	return result(c, x, c.Weight, y, err)
}

// ExtraRepr is what stands between the parentheses when the layer prints.
func (c *Conv) ExtraRepr() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%d, %d, kernel_size=%s, stride=%s", c.in, c.out, pyTuple(c.kernel), pyTuple(c.spec.Stride))
	if c.padding == nil {
		b.WriteString(", padding=same")
	} else if !all(c.padding, 0) {
		fmt.Fprintf(&b, ", padding=%s", pyTuple(c.padding))
	}
	if !all(c.spec.Dilation, 1) {
		fmt.Fprintf(&b, ", dilation=%s", pyTuple(c.spec.Dilation))
	}
	if c.spec.Groups != 1 {
		fmt.Fprintf(&b, ", groups=%d", c.spec.Groups)
	}
	if c.Bias == nil {
		b.WriteString(", bias=False")
	}
	if c.mode != Zeros {
		fmt.Fprintf(&b, ", padding_mode=%s", c.mode)
	}
	return b.String()
}

func all(v []int64, n int64) bool {
	for _, x := range v {
		if x != n {
			return false
		}
	}
	return true
}

// TypeName is what Python calls the layer.
func (c *Conv) TypeName() string { return fmt.Sprintf("Conv%dd", c.dims) }

func (c *Conv) String() string { return Repr(c) }
