package optim

import (
	"github.com/sugarme/gotch/ts"

	"github.com/goddp/goddp/internal/tdp"
)

// ClipOptions are for [ClipGradNormWith]. The zero value is what Python does by default.
type ClipOptions struct {
	// NormType is the p of the norm; 0 stands for 2. Use math.Inf(1) for the largest absolute value.
	NormType float64
	// ErrorIfNonfinite makes a total norm that is NaN or infinite an error, and leaves the gradients alone.
	ErrorIfNonfinite bool
	// Implementation is ForLoop, or Foreach, which is also Auto.
	Implementation Implementation
}

// ClipGradNorm scales the gradients of params together, so that the norm of all of them as one vector is at most
// maxNorm. It returns the norm that they had, a tensor on the device of the first gradient, so that nobody waits for
// the device who does not want to know. It is torch.nn.utils.clip_grad_norm_.
//
// Under a gradient scaler, unscale the gradients first.
func ClipGradNorm(params []*ts.Tensor, maxNorm float64) (*ts.Tensor, error) {
	return ClipGradNormWith(params, maxNorm, ClipOptions{})
}

// ClipGradNormWith is ClipGradNorm with options.
func ClipGradNormWith(params []*ts.Tensor, maxNorm float64, o ClipOptions) (*ts.Tensor, error) {
	if o.NormType == 0 {
		o.NormType = 2
	}
	if err := o.Implementation.check(); err != nil {
		return nil, err
	}
	return tdp.ClipGradNorm(params, maxNorm, o.NormType, o.ErrorIfNonfinite, native[o.Implementation])
}

// ClipGradValue brings every element of the gradients of params into [-value, value]. It is
// torch.nn.utils.clip_grad_value_.
func ClipGradValue(params []*ts.Tensor, value float64) error {
	return tdp.ClipGradValue(params, value, tdp.ImplDefault)
}
