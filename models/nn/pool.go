package nn

import (
	"fmt"
	"strconv"
	"strings"

	"github.com/sugarme/gotch/ts"

	"github.com/goddp/goddp/internal/tdp"
)

// Pool is MaxPool or AvgPool over 1, 2 or 3 dimensions.
type Pool struct {
	Base
	dims                              int
	max                               bool
	kernel, stride, padding, dilation Size // as they were given, for printing
	spec                              tdp.PoolSpec
}

// MaxPoolOptions change a max pooling from Python's defaults.
type MaxPoolOptions struct {
	Stride   Size // the kernel's size
	Padding  Size // 0
	Dilation Size // 1
	CeilMode bool
}

// AvgPoolOptions change an average pooling from Python's defaults.
type AvgPoolOptions struct {
	Stride          Size // the kernel's size
	Padding         Size // 0
	CeilMode        bool
	ExcludePad      bool  // leave the padding out of the average: Python's count_include_pad=False
	DivisorOverride int64 // 0: the size of the window; not for AvgPool1d
}

// NewMaxPool1d takes the maximum of windows of [N, C, L] or [C, L].
func NewMaxPool1d(kernel Size, o MaxPoolOptions) (*Pool, error) { return newMaxPool(1, kernel, o) }

// NewMaxPool2d takes the maximum of windows of [N, C, H, W] or [C, H, W].
func NewMaxPool2d(kernel Size, o MaxPoolOptions) (*Pool, error) { return newMaxPool(2, kernel, o) }

// NewMaxPool3d takes the maximum of windows of [N, C, D, H, W] or [C, D, H, W].
func NewMaxPool3d(kernel Size, o MaxPoolOptions) (*Pool, error) { return newMaxPool(3, kernel, o) }

// NewAvgPool1d averages windows of [N, C, L] or [C, L].
func NewAvgPool1d(kernel Size, o AvgPoolOptions) (*Pool, error) { return newAvgPool(1, kernel, o) }

// NewAvgPool2d averages windows of [N, C, H, W] or [C, H, W].
func NewAvgPool2d(kernel Size, o AvgPoolOptions) (*Pool, error) { return newAvgPool(2, kernel, o) }

// NewAvgPool3d averages windows of [N, C, D, H, W] or [C, D, H, W].
func NewAvgPool3d(kernel Size, o AvgPoolOptions) (*Pool, error) { return newAvgPool(3, kernel, o) }

func newMaxPool(dims int, kernel Size, o MaxPoolOptions) (*Pool, error) {
	p := &Pool{dims: dims, max: true, kernel: kernel, stride: o.Stride, padding: o.Padding, dilation: o.Dilation}
	p.spec.CeilMode = o.CeilMode
	return p.configure()
}

func newAvgPool(dims int, kernel Size, o AvgPoolOptions) (*Pool, error) {
	p := &Pool{dims: dims, kernel: kernel, stride: o.Stride, padding: o.Padding}
	p.spec.CeilMode, p.spec.CountIncludePad, p.spec.Divisor = o.CeilMode, !o.ExcludePad, o.DivisorOverride
	if dims == 1 && o.DivisorOverride != 0 {
		return nil, fmt.Errorf("nn.AvgPool1d: %w: it has no divisor override", tdp.ErrValue)
	}
	return p.configure()
}

func (p *Pool) configure() (*Pool, error) {
	fail := func(what string, err error) (*Pool, error) {
		return nil, fmt.Errorf("nn.%s: %s: %w", p.TypeName(), what, err)
	}
	if len(p.kernel) == 0 {
		return fail("kernel size", fmt.Errorf("%w: it is missing", tdp.ErrValue))
	}
	if len(p.stride) == 0 {
		p.stride = p.kernel
	}
	if len(p.padding) == 0 {
		p.padding = Size{0}
	}
	if len(p.dilation) == 0 {
		p.dilation = Size{1}
	}
	var err error
	if p.spec.Kernel, err = p.kernel.expand(p.dims, 0); err != nil {
		return fail("kernel size", err)
	}
	if p.spec.Stride, err = p.stride.expand(p.dims, 0); err != nil {
		return fail("stride", err)
	}
	if p.spec.Padding, err = p.padding.expand(p.dims, 0); err != nil {
		return fail("padding", err)
	}
	if p.spec.Dilation, err = p.dilation.expand(p.dims, 1); err != nil {
		return fail("dilation", err)
	}
	return p, nil
}

// ForwardT computes the layer.
func (p *Pool) ForwardT(x *ts.Tensor, train bool) *ts.Tensor {
	pool := tdp.AvgPool
	if p.max {
		pool = tdp.MaxPool
	}
	y, err := pool(x, &p.spec)
	return result(p, x, nil, y, err)
}

// ExtraRepr is what stands between the parentheses when the layer prints.
func (p *Pool) ExtraRepr() string {
	kernel, stride, padding := p.kernel, p.stride, p.padding
	if !p.max && p.dims == 1 { // Python turns these into tuples
		return fmt.Sprintf("kernel_size=%s, stride=%s, padding=%s", pyTuple(kernel), pyTuple(stride), pyTuple(padding))
	}
	s := fmt.Sprintf("kernel_size=%s, stride=%s, padding=%s", kernel.repr(), stride.repr(), padding.repr())
	if p.max {
		s += fmt.Sprintf(", dilation=%s, ceil_mode=%s", p.dilation.repr(), pyBool(p.spec.CeilMode))
	}
	return s
}

// TypeName is what Python calls the layer.
func (p *Pool) TypeName() string {
	if p.max {
		return fmt.Sprintf("MaxPool%dd", p.dims)
	}
	return fmt.Sprintf("AvgPool%dd", p.dims)
}

func (p *Pool) String() string { return Repr(p) }

// AdaptiveAvgPool averages so that the output has a given size.
type AdaptiveAvgPool struct {
	Base
	dims  int
	given Size
	size  []int64
}

// NewAdaptiveAvgPool1d averages [N, C, L] to [N, C, size]. A negative size keeps the input's.
func NewAdaptiveAvgPool1d(size Size) (*AdaptiveAvgPool, error) { return newAdaptiveAvgPool(1, size) }

// NewAdaptiveAvgPool2d averages [N, C, H, W] to [N, C, size...]. A negative size keeps the input's.
func NewAdaptiveAvgPool2d(size Size) (*AdaptiveAvgPool, error) { return newAdaptiveAvgPool(2, size) }

// NewAdaptiveAvgPool3d averages [N, C, D, H, W] to [N, C, size...]. A negative size keeps the input's.
func NewAdaptiveAvgPool3d(size Size) (*AdaptiveAvgPool, error) { return newAdaptiveAvgPool(3, size) }

func newAdaptiveAvgPool(dims int, size Size) (*AdaptiveAvgPool, error) {
	p := &AdaptiveAvgPool{dims: dims, given: size}
	if len(size) == 0 {
		return nil, fmt.Errorf("nn.%s: %w: the output size is missing", p.TypeName(), tdp.ErrValue)
	}
	var err error
	if p.size, err = size.expand(dims, 1); err != nil {
		return nil, fmt.Errorf("nn.%s: output size: %w", p.TypeName(), err)
	}
	return p, nil
}

// ForwardT computes the layer.
func (p *AdaptiveAvgPool) ForwardT(x *ts.Tensor, train bool) *ts.Tensor {
	y, err := tdp.AdaptiveAvgPool(x, p.size)
	return result(p, x, nil, y, err)
}

// ExtraRepr is what stands between the parentheses when the layer prints.
func (p *AdaptiveAvgPool) ExtraRepr() string {
	parts := make([]string, len(p.given))
	for i, n := range p.given {
		parts[i] = "None"
		if n >= 0 {
			parts[i] = strconv.FormatInt(n, 10)
		}
	}
	if len(parts) == 1 {
		return "output_size=" + parts[0]
	}
	return "output_size=(" + strings.Join(parts, ", ") + ")"
}

// TypeName is what Python calls the layer.
func (p *AdaptiveAvgPool) TypeName() string { return fmt.Sprintf("AdaptiveAvgPool%dd", p.dims) }

func (p *AdaptiveAvgPool) String() string { return Repr(p) }
