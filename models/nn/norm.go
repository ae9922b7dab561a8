package nn

import (
	"fmt"

	"github.com/sugarme/gotch"
	"github.com/sugarme/gotch/ts"

	"github.com/goddp/goddp/internal/tdp"
)

// BatchNorm is BatchNorm1d, BatchNorm2d or BatchNorm3d. In training it normalises with the batch's statistics and keeps
// running ones, which evaluation uses.
type BatchNorm struct {
	Base
	Weight, Bias            *ts.Tensor // [features], or nil without affine
	RunningMean, RunningVar *ts.Tensor // [features], or nil without running statistics
	NumBatchesTracked       *ts.Tensor // int64, one element
	Momentum                float64    // the share of the new batch in the running statistics
	Cumulative              bool       // average over all batches instead: Python's momentum=None
	Eps                     float64

	features int64
	dims     int
	affine   bool
	track    bool
	group    *tdp.ProcessGroup // see BareBatchNorms
}

// BatchNormOptions change a batch norm from Python's defaults.
type BatchNormOptions struct {
	Eps            float64 // 0: 1e-5
	Momentum       float64 // 0: 0.1; for a momentum of 0 set the layer's field afterwards
	Cumulative     bool
	NoAffine       bool
	NoRunningStats bool
}

// NewBatchNorm1d normalises [N, C] or [N, C, L].
func NewBatchNorm1d(features int64, o BatchNormOptions) (*BatchNorm, error) {
	return newBatchNorm(1, features, o)
}

// NewBatchNorm2d normalises [N, C, H, W].
func NewBatchNorm2d(features int64, o BatchNormOptions) (*BatchNorm, error) {
	return newBatchNorm(2, features, o)
}

// NewBatchNorm3d normalises [N, C, D, H, W].
func NewBatchNorm3d(features int64, o BatchNormOptions) (*BatchNorm, error) {
	return newBatchNorm(3, features, o)
}

func newBatchNorm(dims int, features int64, o BatchNormOptions) (*BatchNorm, error) {
	if features < 0 {
		return nil, fmt.Errorf("nn.BatchNorm%dd(%d): %w: negative size", dims, features, tdp.ErrValue)
	}
	n := &BatchNorm{features: features, dims: dims, affine: !o.NoAffine, track: !o.NoRunningStats,
		Eps: or(o.Eps, 1e-5), Momentum: or(o.Momentum, 0.1), Cumulative: o.Cumulative}
	n.norm = n
	n.SetVersion(2) // the layout with num_batches_tracked
	if err := affine(&n.Base, &n.Weight, &n.Bias, n.affine, n.affine, features); err != nil {
		return nil, err
	}
	if !n.track {
		return n, firstError(
			func() error { return n.RegisterBuffer("running_mean", &n.RunningMean, true) },
			func() error { return n.RegisterBuffer("running_var", &n.RunningVar, true) },
			func() error { return n.RegisterBuffer("num_batches_tracked", &n.NumBatchesTracked, true) },
		)
	}
	return n, firstError(
		func() error { return newBuffer(&n.Base, "running_mean", &n.RunningMean, 0, gotch.Float, features) },
		func() error { return newBuffer(&n.Base, "running_var", &n.RunningVar, 1, gotch.Float, features) },
		func() error { return newBuffer(&n.Base, "num_batches_tracked", &n.NumBatchesTracked, 0, gotch.Int64) },
	)
}

// or gives v, or the default where v is zero.
func or(v, standard float64) float64 {
	if v == 0 {
		return standard
	}
	return v
}

// affine registers the ones and zeros that normalisations start from.
func affine(b *Base, weight, bias **ts.Tensor, withWeight, withBias bool, shape ...int64) error {
	one := func(name string, slot **ts.Tensor, with bool, value float64) error {
		if !with {
			return b.RegisterParameter(name, slot)
		}
		if err := newParameter(b, name, slot, shape...); err != nil {
			return err
		}
		return tdp.Fill(*slot, value)
	}
	if err := one("weight", weight, withWeight, 1); err != nil {
		return err
	}
	return one("bias", bias, withBias, 0)
}

// ResetParameters sets everything as it was made.
func (n *BatchNorm) ResetParameters() error {
	for _, s := range []struct {
		t     *ts.Tensor
		value float64
	}{{n.RunningMean, 0}, {n.RunningVar, 1}, {n.NumBatchesTracked, 0}, {n.Weight, 1}, {n.Bias, 0}} {
		if s.t == nil {
			continue
		}
		if err := tdp.Fill(s.t, s.value); err != nil {
			return err
		}
	}
	return nil
}

// ForwardT computes the layer.
func (n *BatchNorm) ForwardT(x *ts.Tensor, train bool) *ts.Tensor {
	if err := n.check(x); err != nil {
		return result(n, x, n.Weight, nil, err)
	}
	train = train && !n.eval
	s := tdp.BatchNormSpec{Weight: n.Weight, Bias: n.Bias, RunningMean: n.RunningMean, RunningVar: n.RunningVar,
		Momentum: n.Momentum, Eps: n.Eps, Training: train || n.RunningMean == nil}
	if train {
		s.Count = n.NumBatchesTracked
	}
	if n.Cumulative {
		s.Momentum = -1
	}
	if n.group != nil && train && n.RunningMean == nil {
		y, err := n.group.SyncBatchNorm(x, n.Weight, n.Bias, nil, nil, 0, n.Eps)
		return result(n, x, n.Weight, y, err)
	}
	y, err := tdp.BatchNorm(x, &s)
	return result(n, x, n.Weight, y, err)
}

func (n *BatchNorm) check(x *ts.Tensor) error {
	info, err := tdp.Describe(x)
	if err != nil {
		return err
	}
	d := len(info.Shape)
	if d != n.dims+2 && (n.dims != 1 || d != 2) {
		want := fmt.Sprintf("%dD", n.dims+2)
		if n.dims == 1 {
			want = "2D or 3D"
		}
		return fmt.Errorf("%w: expected %s input (got %dD input)", tdp.ErrValue, want, d)
	}
	if (n.RunningMean == nil) != (n.RunningVar == nil) {
		have, lack := "running_mean", "running_var"
		if n.RunningMean == nil {
			have, lack = lack, have
		}
		return fmt.Errorf("%w: the buffer %s is missing while %s is there: set both or neither", tdp.ErrValue, lack, have)
	}
	return nil
}

// ExtraRepr is what stands between the parentheses when the layer prints.
func (n *BatchNorm) ExtraRepr() string {
	momentum := pyFloat(n.Momentum)
	if n.Cumulative {
		momentum = "None"
	}
	return fmt.Sprintf("%d, eps=%s, momentum=%s, affine=%s, track_running_stats=%s", n.features, pyFloat(n.Eps), momentum,
		pyBool(n.affine), pyBool(n.track))
}

// TypeName is what Python calls the layer.
func (n *BatchNorm) TypeName() string { return fmt.Sprintf("BatchNorm%dd", n.dims) }

func (n *BatchNorm) String() string { return Repr(n) }

// LayerNorm normalises over the last dimensions.
type LayerNorm struct {
	Base
	Weight, Bias *ts.Tensor // of the normalised shape, or nil
	Eps          float64

	shape  []int64
	affine bool
}

// LayerNormOptions change a layer norm from Python's defaults.
type LayerNormOptions struct {
	Eps      float64 // 0: 1e-5
	NoAffine bool
	NoBias   bool
}

// NewLayerNorm normalises over the last len(shape) dimensions, which must have that shape.
func NewLayerNorm(shape []int64, o LayerNormOptions) (*LayerNorm, error) {
	if len(shape) == 0 {
		return nil, fmt.Errorf("nn.LayerNorm: %w: the normalised shape needs at least one dimension", tdp.ErrValue)
	}
	n := &LayerNorm{Eps: or(o.Eps, 1e-5), shape: append([]int64(nil), shape...), affine: !o.NoAffine}
	return n, affine(&n.Base, &n.Weight, &n.Bias, n.affine, n.affine && !o.NoBias, shape...)
}

// ForwardT computes the layer.
func (n *LayerNorm) ForwardT(x *ts.Tensor, train bool) *ts.Tensor {
	y, err := tdp.LayerNorm(x, n.shape, n.Weight, n.Bias, n.Eps)
	return result(n, x, n.Weight, y, err)
}

// ExtraRepr is what stands between the parentheses when the layer prints.
func (n *LayerNorm) ExtraRepr() string {
	return fmt.Sprintf("%s, eps=%s, elementwise_affine=%s", pyTuple(n.shape), pyFloat(n.Eps), pyBool(n.affine))
}

func (n *LayerNorm) String() string { return Repr(n) }

// GroupNorm normalises over groups of channels.
type GroupNorm struct {
	Base
	Weight, Bias *ts.Tensor // [channels], or nil
	Eps          float64

	groups, channels int64
	affine           bool
}

// GroupNormOptions change a group norm from Python's defaults.
type GroupNormOptions struct {
	Eps      float64 // 0: 1e-5
	NoAffine bool
}

// NewGroupNorm normalises [N, C, ...] over groups of C/groups channels.
func NewGroupNorm(groups, channels int64, o GroupNormOptions) (*GroupNorm, error) {
	if groups <= 0 || channels < 0 || channels%groups != 0 {
		return nil, fmt.Errorf("nn.GroupNorm(%d, %d): %w: the channels must be divisible by the groups", groups, channels, tdp.ErrValue)
	}
	n := &GroupNorm{Eps: or(o.Eps, 1e-5), groups: groups, channels: channels, affine: !o.NoAffine}
	return n, affine(&n.Base, &n.Weight, &n.Bias, n.affine, n.affine, channels)
}

// ForwardT computes the layer.
func (n *GroupNorm) ForwardT(x *ts.Tensor, train bool) *ts.Tensor {
	y, err := tdp.GroupNorm(x, n.groups, n.Weight, n.Bias, n.Eps)
	return result(n, x, n.Weight, y, err)
}

// ExtraRepr is what stands between the parentheses when the layer prints.
func (n *GroupNorm) ExtraRepr() string {
	return fmt.Sprintf("%d, %d, eps=%s, affine=%s", n.groups, n.channels, pyFloat(n.Eps), pyBool(n.affine))
}

func (n *GroupNorm) String() string { return Repr(n) }
