package optim

import (
	"errors"
	"fmt"

	"github.com/sugarme/gotch/ts"

	"github.com/goddp/goddp/checkpoint/pickle"
	"github.com/goddp/goddp/internal/tdp"
)

// ErrClosed is the error of an optimizer that was closed.
var ErrClosed = errors.New("optimizer is closed")

// Optimizer is what every optimizer of this package is: an algorithm with its parameters and their state.
type Optimizer interface {
	// Step changes every parameter that has a gradient.
	Step() error
	// ZeroGrad drops the gradients (setToNone), or fills them with zeros in place.
	ZeroGrad(setToNone bool) error
	// ParamGroups are the groups in order. They are live: what is set in one counts from the next step on.
	ParamGroups() []*ParamGroup
	// StateDict is the state in Python's layout; package checkpoint writes it.
	StateDict() (*pickle.Dict, error)
	// LoadStateDict continues from a state that StateDict, here or in Python, gave.
	LoadStateDict(state *pickle.Dict) error
	// Close frees the state. The parameters stay.
	Close() error

	// Native is the C++ side, for other packages of goddp.
	Native() *tdp.Optim
	base() *Base
}

// Base is what all optimizers have in common. The optimizers embed it.
type Base struct {
	name   string // Python's class name
	native *tdp.Optim
	groups []*ParamGroup
	index  int // parameters in all groups

	// For fused kernels under a gradient scaler.
	gradScale, foundInf *ts.Tensor

	stepped bool // Step was called since a scheduler was made
}

func (b *Base) base() *Base { return b }

// Native is the C++ side, for other packages of goddp.
func (b *Base) Native() *tdp.Optim { return b.native }

// ParamGroups are the groups in order. They are live: what is set in one counts from the next step on.
func (b *Base) ParamGroups() []*ParamGroup { return b.groups }

// Step changes every parameter that has a gradient, in one call into C++.
func (b *Base) Step() error {
	if b.native == nil {
		return ErrClosed
	}
	b.pushOptions()
	b.stepped = true
	return b.native.Step(b.gradScale, b.foundInf)
}

func (b *Base) pushOptions() {
	for i, g := range b.groups {
		o := g.options.native()
		b.native.SetOptions(i, &o)
	}
}

// SetGradScaling hands the next steps what a gradient scaler knows: the scale of the gradients, nil if they are
// unscaled already, and whether infinities were found. Only fused implementations take them. nil, nil ends it.
func (b *Base) SetGradScaling(gradScale, foundInf *ts.Tensor) {
	b.gradScale, b.foundInf = gradScale, foundInf
}

// TakesGradScaling tells whether Step itself can unscale gradients and skip: fused=True was asked for.
func (b *Base) TakesGradScaling() bool {
	for _, g := range b.groups {
		if *g.options.implementation() != Fused {
			return false
		}
	}
	return len(b.groups) > 0
}

// ZeroGrad drops the gradients of all parameters, or fills them with zeros in place. Either is safe with gradients
// that are views of the reducer's buckets: zeros go into the bucket, and a dropped view is restored by the reducer.
func (b *Base) ZeroGrad(setToNone bool) error {
	if b.native == nil {
		return ErrClosed
	}
	return b.native.ZeroGrad(setToNone)
}

// StepInBackward makes backward do the steps: as soon as a parameter's gradient is complete, the parameter is changed
// and the gradient dropped, so that gradients of the whole model never exist at once. Step and ZeroGrad have nothing
// left to do then. Options are taken over at this call; call it again when they change, for instance after a
// scheduler's step. With enabled false the optimizer is an ordinary one again.
//
// It is for models without a reducer: under DistributedDataParallel, where a gradient is complete only when it was
// reduced, use the StepInBackward of DDP.
func (b *Base) StepInBackward(enabled bool) error {
	if b.native == nil {
		return ErrClosed
	}
	b.pushOptions()
	b.stepped = b.stepped || enabled
	mode := tdp.InBackwardOff
	if enabled {
		mode = tdp.InBackwardHooks
	}
	return b.native.InBackward(mode)
}

// ForReducer prepares steps in the next backward, with the options of now, for DDP's reducer.
func (b *Base) ForReducer() (*tdp.Optim, error) {
	if b.native == nil {
		return nil, ErrClosed
	}
	b.pushOptions()
	b.stepped = true
	return b.native, b.native.InBackward(tdp.InBackwardOptions)
}

// Close frees the optimizer's state. The parameters stay. Closing twice is allowed.
func (b *Base) Close() error {
	if b.native == nil {
		return nil
	}
	n := b.native
	b.native = nil
	return n.Close()
}

func (b *Base) addGroup(params []*ts.Tensor, names []string, o options) error {
	if err := o.check(); err != nil {
		return err
	}
	for _, g := range b.groups {
		if (g.names == nil) != (names == nil) {
			return errors.New("all optimizer param groups should be with/without names")
		}
	}
	if err := b.native.AddGroup(params, o.native()); err != nil {
		return err
	}
	b.groups = append(b.groups, newParamGroup(params, names, o, b.index))
	b.index += len(params)
	return nil
}

// build makes an optimizer of the given algorithm. PO is *O.
func build[O any, PO interface {
	*O
	options
}](name string, a tdp.OptimAlgorithm, groups []Group[O], o O) (*Base, error) {
	PO(&o).fill()
	if len(groups) == 0 {
		return nil, fmt.Errorf("%s: optimizer got an empty parameter list", name)
	}
	n, err := tdp.NewOptim(a)
	if err != nil {
		return nil, err
	}
	b := &Base{name: name, native: n}
	for i := range groups {
		if err := add[O, PO](b, &groups[i], o); err != nil {
			return nil, errors.Join(err, b.Close())
		}
	}
	if b.index == 0 {
		return nil, errors.Join(fmt.Errorf("%s: optimizer got an empty parameter list", name), b.Close())
	}
	return b, nil
}

func add[O any, PO interface {
	*O
	options
}](b *Base, g *Group[O], defaults O) error {
	if b.native == nil {
		return ErrClosed
	}
	own := new(O)
	*own = defaults
	if g.Set != nil {
		g.Set(own)
	}
	params, names, err := g.collect()
	if err == nil {
		err = b.addGroup(params, names, PO(own))
	}
	if err != nil {
		return fmt.Errorf("%s, parameter group %d: %w", b.name, len(b.groups), err)
	}
	return nil
}
