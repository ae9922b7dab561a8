package tdp

/*
#include <stdlib.h>
#include <math.h>
#include "../../csrc/tdp/tdp.h"

#cgo noescape tdp_optim_step
#cgo nocallback tdp_optim_step
#cgo noescape tdp_optim_zero_grad
#cgo nocallback tdp_optim_zero_grad
#cgo noescape cos
#cgo nocallback cos
#cgo noescape pow
#cgo nocallback pow
#cgo noescape log
#cgo nocallback log
*/
import "C"

import (
	"runtime"
	"unsafe"

	"github.com/sugarme/gotch/ts"
)

// OptimAlgorithm names an optimizer's arithmetic.
type OptimAlgorithm int32

// The algorithms of csrc/tdp/optim_step.cpp.
const (
	SGD     OptimAlgorithm = C.TDP_OPTIM_SGD
	Adam    OptimAlgorithm = C.TDP_OPTIM_ADAM
	RMSprop OptimAlgorithm = C.TDP_OPTIM_RMSPROP
	Adagrad OptimAlgorithm = C.TDP_OPTIM_ADAGRAD
	LARS    OptimAlgorithm = C.TDP_OPTIM_LARS
	LAMB    OptimAlgorithm = C.TDP_OPTIM_LAMB
)

// Implementation says how an optimizer, or clipping, does its work.
type Implementation int32

// The implementations, as in Python.
const (
	ImplDefault Implementation = C.TDP_IMPL_DEFAULT
	ImplSingle  Implementation = C.TDP_IMPL_SINGLE
	ImplForeach Implementation = C.TDP_IMPL_FOREACH
	ImplFused   Implementation = C.TDP_IMPL_FUSED
)

// StateSlot is one of a parameter's state tensors.
type StateSlot int32

// The slots. What lies in 1 to 3 depends on the algorithm.
const (
	SlotStep StateSlot = C.TDP_SLOT_STEP
	Slot1    StateSlot = C.TDP_SLOT_1
	Slot2    StateSlot = C.TDP_SLOT_2
	Slot3    StateSlot = C.TDP_SLOT_3
)

// OptimOptions are a parameter group's options for one step.
type OptimOptions struct {
	LR, WeightDecay, Momentum, Dampening, Beta1, Beta2, Eps, Alpha, LRDecay, Initial, Trust float64

	Implementation                                            Implementation
	Nesterov, Maximize, AMSGrad, Decoupled, Centered, NoAdapt bool
}

func (o *OptimOptions) fill(c *C.tdp_optim_options) {
	c.lr, c.weight_decay, c.momentum, c.dampening = C.double(o.LR), C.double(o.WeightDecay), C.double(o.Momentum), C.double(o.Dampening)
	c.beta1, c.beta2, c.eps, c.alpha = C.double(o.Beta1), C.double(o.Beta2), C.double(o.Eps), C.double(o.Alpha)
	c.lr_decay, c.initial, c.trust = C.double(o.LRDecay), C.double(o.Initial), C.double(o.Trust)
	c.implementation = C.int32_t(o.Implementation)
	c.flags = 0
	for _, f := range [...]struct {
		on  bool
		bit C.int32_t
	}{
		{o.Nesterov, C.TDP_OPTIM_NESTEROV}, {o.Maximize, C.TDP_OPTIM_MAXIMIZE}, {o.AMSGrad, C.TDP_OPTIM_AMSGRAD},
		{o.Decoupled, C.TDP_OPTIM_DECOUPLED}, {o.Centered, C.TDP_OPTIM_CENTERED}, {o.NoAdapt, C.TDP_OPTIM_NO_ADAPT},
	} {
		if f.on {
			c.flags |= f.bit
		}
	}
}

// Optim is an optimizer on the C++ side: parameters, state and the step. It holds references on its parameters, so they
// outlive the Go handles they came from. It is not safe for use by several goroutines at once.
type Optim struct {
	h       *C.tdp_optim
	options []C.tdp_optim_options // one a group, filled before every step
}

// NewOptim makes an optimizer without parameters. Close frees it.
func NewOptim(a OptimAlgorithm) (*Optim, error) {
	o := &Optim{}
	return o, done("new optimizer", C.tdp_optim_new(C.int32_t(a), &o.h))
}

// AddGroup adds parameters.
func (o *Optim) AddGroup(params []*ts.Tensor, options OptimOptions) error {
	var c C.tdp_optim_options
	options.fill(&c)
	list := NewHandles(params)
	rec := C.tdp_optim_add_group(o.h, list.ptr(), list.n(), &c)
	if err := done("optimizer add group", rec, params); err != nil {
		return err
	}
	o.options = append(o.options, c)
	return nil
}

// SetOptions gives the options that group uses from the next step on.
func (o *Optim) SetOptions(group int, options *OptimOptions) { options.fill(&o.options[group]) }

// Step changes every parameter that has a gradient. gradScale and foundInf are nil, except for fused kernels driven by
// a gradient scaler.
func (o *Optim) Step(gradScale, foundInf *ts.Tensor) error {
	rec := C.tdp_optim_step(o.h, unsafe.SliceData(o.options), handle(gradScale), handle(foundInf))
	runtime.KeepAlive(gradScale)
	runtime.KeepAlive(foundInf)
	if rec == nil {
		return nil
	}
	return done("optimizer step", rec)
}

// ZeroGrad drops the gradients of all parameters, or fills them with zeros.
func (o *Optim) ZeroGrad(setToNone bool) error {
	rec := C.tdp_optim_zero_grad(o.h, flag(setToNone))
	if rec == nil {
		return nil
	}
	return done("zero_grad", rec)
}

// State gives a second handle on a state tensor, or nil where there is none.
func (o *Optim) State(group, param int, slot StateSlot) (*ts.Tensor, error) {
	var out C.tdp_tensor
	rec := C.tdp_optim_state(o.h, C.int32_t(group), C.int32_t(param), C.int32_t(slot), &out)
	return tensor(out), done("optimizer state", rec)
}

// SetState copies value into a state tensor; nil drops it. stepOnDevice puts the step count beside the parameter.
func (o *Optim) SetState(group, param int, slot StateSlot, value *ts.Tensor, stepOnDevice bool) error {
	rec := C.tdp_optim_set_state(o.h, C.int32_t(group), C.int32_t(param), C.int32_t(slot), handle(value), flag(stepOnDevice))
	return done("optimizer state", rec, value)
}

// InBackward says who steps in backward, with the options last set.
type InBackward int32

// The ways.
const (
	InBackwardOff     InBackward = C.TDP_IN_BACKWARD_OFF
	InBackwardHooks   InBackward = C.TDP_IN_BACKWARD_HOOKS   // a hook on each parameter's gradient
	InBackwardOptions InBackward = C.TDP_IN_BACKWARD_OPTIONS // a reducer, which finds the options here
)

// InBackward makes backward step parameters as soon as their gradients are complete.
func (o *Optim) InBackward(mode InBackward) error {
	return done("optimizer in backward", C.tdp_optim_in_backward(o.h, unsafe.SliceData(o.options), C.int32_t(mode)))
}

// Close frees the optimizer and its state. Closing twice is allowed.
func (o *Optim) Close() error {
	h := o.h
	o.h = nil
	return done("optimizer close", C.tdp_optim_free(h))
}

// ZeroGrad drops the gradients of tensors, or fills them with zeros.
func ZeroGrad(tensors []*ts.Tensor, setToNone bool) error {
	list := NewHandles(tensors)
	return done("zero_grad", C.tdp_zero_grad(list.ptr(), list.n(), flag(setToNone)), tensors)
}

// ClipGradNorm scales the gradients of params so that their total norm is at most maxNorm, and gives the norm they had.
func ClipGradNorm(params []*ts.Tensor, maxNorm, normType float64, errorIfNonfinite bool, impl Implementation) (*ts.Tensor, error) {
	var out C.tdp_tensor
	list := NewHandles(params)
	rec := C.tdp_clip_grad_norm(list.ptr(), list.n(), C.double(maxNorm), C.double(normType),
		flag(errorIfNonfinite), C.int32_t(impl), &out)
	return tensor(out), done("clip_grad_norm_", rec, params)
}

// ClipGradValue clamps every element of the gradients of params to [-value, value].
func ClipGradValue(params []*ts.Tensor, value float64, impl Implementation) error {
	list := NewHandles(params)
	rec := C.tdp_clip_grad_value(list.ptr(), list.n(), C.double(value), C.int32_t(impl))
	return done("clip_grad_value_", rec, params)
}

// AverageMode says what Average does.
type AverageMode int32

// The modes of Average.
const (
	AverageCopy  AverageMode = C.TDP_AVERAGE_COPY
	AverageEMA   AverageMode = C.TDP_AVERAGE_EMA
	AverageEqual AverageMode = C.TDP_AVERAGE_EQUAL
	AverageSwap  AverageMode = C.TDP_AVERAGE_SWAP
)

// Average updates averages from values, pair by pair. count is the number of updates before this one.
func Average(averages, values []*ts.Tensor, mode AverageMode, decay float64, count int64) error {
	if len(averages) != len(values) {
		return &Error{Op: "average of weights", Message: "the two lists have different lengths", kind: ErrValue}
	}
	a, v := NewHandles(averages), NewHandles(values)
	rec := C.tdp_average(a.ptr(), v.ptr(), a.n(), C.int32_t(mode), C.double(decay), C.int64_t(count))
	return done("average of weights", rec, averages, values)
}

// Cos, Pow and Log are the C library's. Go's own differ from them in the last bit, and a schedule must not.
func Cos(x float64) float64    { return float64(C.cos(C.double(x))) }
func Pow(x, y float64) float64 { return float64(C.pow(C.double(x), C.double(y))) }
func Log(x float64) float64    { return float64(C.log(C.double(x))) }
