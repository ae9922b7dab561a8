package torchddp

import (
	"slices"

	"github.com/goddp/goddp/internal/tdp"
	"github.com/sugarme/gotch"
	"github.com/sugarme/gotch/ts"
)

// MixedPrecision lets DDP compute in a smaller type: from a training forward to the end of its backward the parameters
// are of type Param, their gradients are reduced as type Reduce, and between steps parameters and gradients have their
// own type again, for the optimizer and for checkpoints. It is PyTorch's _MixedPrecision.
//
// Package amp's autocast is the other way: it picks the type by operation, and gradients are reduced in full precision.
type MixedPrecision struct {
	Param  gotch.DType // gotch.BFloat16 or gotch.Half
	Reduce gotch.DType // 0: Param
	// Buffer is the type that buffers with fractions, such as batch norm's statistics, get once and keep. 0 leaves them.
	Buffer gotch.DType
	// KeepInputs leaves Forward's input as it is; otherwise it becomes of type Param if it has fractions. Inputs of
	// [DDP.Run] are the caller's.
	KeepInputs bool
}

func (m *MixedPrecision) check(o DDPOptions) error {
	if m == nil {
		return nil
	}
	small := []gotch.DType{gotch.Half, gotch.BFloat16}
	switch {
	case !slices.Contains(small, m.Param):
		return valueErrorf("MixedPrecision.Param must be gotch.Half or gotch.BFloat16, got %v", m.Param)
	case m.Reduce != 0 && m.Reduce != gotch.Float && !slices.Contains(small, m.Reduce):
		return valueErrorf("MixedPrecision.Reduce must be gotch.Half, gotch.BFloat16, gotch.Float or 0, got %v", m.Reduce)
	case m.Buffer != 0 && m.Buffer != gotch.Float && !slices.Contains(small, m.Buffer):
		return valueErrorf("MixedPrecision.Buffer must be gotch.Half, gotch.BFloat16, gotch.Float or 0, got %v", m.Buffer)
	case o.GradientAsBucketView:
		return valueErrorf("with MixedPrecision buckets and gradients are of different types: leave GradientAsBucketView off")
	case o.FindUnusedParameters && !o.StaticGraph:
		return valueErrorf("MixedPrecision cannot look for unused parameters: use StaticGraph instead of FindUnusedParameters")
	}
	return nil
}

func (m *MixedPrecision) reduce() gotch.DType {
	if m.Reduce == 0 {
		return m.Param
	}
	return m.Reduce
}

// startMixed lowers the buffers for good and tells the reducer about the parameters.
func (d *DDP) startMixed() error {
	m := d.options.MixedPrecision
	if m == nil {
		return nil
	}
	if m.Buffer != 0 {
		var buffers []*ts.Tensor
		for _, t := range d.buffers() {
			if isFloating(t.DType()) {
				buffers = append(buffers, t)
			}
		}
		if err := tdp.SetDType(buffers, m.Buffer); err != nil {
			return err
		}
	}
	var others []*ts.Tensor
	for name, t := range d.parameters() {
		if !slices.ContainsFunc(d.params, func(p Named) bool { return p.Name == name }) {
			others = append(others, t)
		}
	}
	return d.reducer.Mixed(others, m.Param, m.reduce())
}

// lowered gives x in the type that the model computes in, and what frees it.
func (d *DDP) lowered(x *ts.Tensor) (*ts.Tensor, func(), error) {
	m := d.options.MixedPrecision
	if m == nil || m.KeepInputs || x == nil || !isFloating(x.DType()) || x.DType() == m.Param {
		return x, func() {}, nil
	}
	low, err := x.Totype(m.Param, false)
	if err != nil {
		return nil, nil, d.errorf("forward", err)
	}
	return low, low.MustDrop, nil
}

func isFloating(t gotch.DType) bool {
	return slices.Contains([]gotch.DType{gotch.Float, gotch.Double, gotch.Half, gotch.BFloat16}, t)
}

// checkDelay looks whether the options about a delayed reduction fit the model.
func (d *DDP) checkDelay(known map[string]bool) error {
	o := d.options
	switch {
	case len(o.DelayAllReduce) == 0 && o.DelayUntil == "":
		return nil
	case len(o.DelayAllReduce) == 0 || o.DelayUntil == "":
		return valueErrorf("DelayAllReduce and DelayUntil go together: the names of parameters, and the one whose gradient starts their reduction")
	case o.MixedPrecision != nil:
		return valueErrorf("DelayAllReduce cannot be combined with MixedPrecision")
	case len(d.params) == 0:
		return valueErrorf("DelayAllReduce names every parameter that is trained: leave at least one to DDP's buckets")
	}
	for _, name := range o.DelayAllReduce {
		switch {
		case !known[name]:
			return valueErrorf("DelayAllReduce names %q, which the model does not have", name)
		case d.ignored(name):
			return valueErrorf("DelayAllReduce and Ignore both name %q", name)
		case !slices.ContainsFunc(d.delayed, func(p Named) bool { return p.Name == name }):
			return valueErrorf("DelayAllReduce names %q, which is not a parameter that requires a gradient", name)
		}
	}
	return nil
}

// startDelay tells the reducer which parameters are reduced together, and when.
func (d *DDP) startDelay() error {
	if len(d.delayed) == 0 {
		return nil
	}
	var trigger *ts.Tensor
	for name, t := range d.module.NamedParameters() {
		if name == d.options.DelayUntil {
			trigger = t
		}
	}
	if trigger == nil || !trigger.MustRequiresGrad() {
		return valueErrorf("DelayUntil names %q, which is not a parameter that requires a gradient", d.options.DelayUntil)
	}
	names := make([]string, len(d.delayed))
	for i, p := range d.delayed {
		names[i] = p.Name
	}
	return d.reducer.Delay(d.delayedHandles, names, trigger, d.options.DelayUntil)
}

// BackwardOptimizer is an optimizer that can step some of its parameters at a time: those of package optim.
type BackwardOptimizer interface {
	// ForReducer prepares the steps of one backward.
	ForReducer() (*tdp.Optim, error)
}

// StepInBackward makes each synchronised backward step the optimizer too: every bucket's parameters as soon as the
// bucket is reduced, while the backward goes on. Afterwards their gradients are gone, so Step and ZeroGrad have nothing
// to do; what a scheduler changes counts from the next backward on. Inside NoSync gradients are accumulated as ever.
//
// It takes the place of a communication hook, can be done once, before the first backward, and leaves no moment for
// clipping, for a gradient scaler or for BackwardWeighted. Keep the optimizer open as long as d trains.
func (d *DDP) StepInBackward(o BackwardOptimizer) error {
	const op = "step in backward"
	switch {
	case d.reducer == nil:
		return d.errorf(op, errClosedDDP)
	case o == nil:
		return d.errorf(op, valueErrorf("the optimizer is nil"))
	case len(d.delayed) > 0:
		return d.errorf(op, valueErrorf("it cannot be combined with DelayAllReduce"))
	}
	native, err := o.ForReducer()
	if err == nil {
		err = d.reducer.Optim(native)
	}
	if err != nil {
		return d.errorf(op, err)
	}
	d.optimizer = o
	return nil
}
