package optim

import (
	"errors"
	"fmt"

	"github.com/goddp/goddp/internal/tdp"
)

// Implementation chooses between implementations of one algorithm that differ in speed and in the last bits.
type Implementation int

const (
	// Auto is what Python takes when neither foreach nor fused is given: Foreach on CUDA, ForLoop elsewhere.
	Auto Implementation = iota
	// ForLoop goes from parameter to parameter: foreach=False in Python. On the CPU goddp runs it in pieces that fit
	// the cache, on all threads, with the same results and in a fraction of the time.
	ForLoop
	// Foreach uses operations over lists of tensors: foreach=True.
	Foreach
	// Fused uses one kernel for the whole update: fused=True.
	Fused
)

func (i Implementation) String() string {
	switch i {
	case Auto:
		return "auto"
	case ForLoop:
		return "for-loop"
	case Foreach:
		return "foreach"
	case Fused:
		return "fused"
	}
	return fmt.Sprintf("Implementation(%d)", int(i))
}

var native = [...]tdp.Implementation{Auto: tdp.ImplDefault, ForLoop: tdp.ImplSingle, Foreach: tdp.ImplForeach, Fused: tdp.ImplFused}

// options is what every optimizer's options can do.
type options interface {
	// fill replaces zeros by Python's defaults, where those are not zero.
	fill()
	check() error
	// fields lists the options as Python's param_groups have them, in order.
	fields() []field
	native() tdp.OptimOptions
	// slots names the state tensors that these options call for.
	slots() []slot
	implementation() *Implementation
}

// field is one entry of a param group in Python.
type field struct {
	key string
	// One of: *float64, *[2]float64, *bool, *Implementation (for the keys foreach and fused), or a bool that cannot
	// be changed.
	value any
	// zeroIsInt: Python's default is the int 0, and so a zero is written.
	zeroIsInt bool
}

type slot struct {
	name string
	slot tdp.StateSlot
}

func (i Implementation) check() error {
	if i < Auto || i > Fused {
		return fmt.Errorf("unknown implementation %d", int(i))
	}
	return nil
}

func orDefault(p *float64, value float64) {
	if *p == 0 {
		*p = value
	}
}

// at least 0, and not NaN.
func notNegative(x float64, format string) error {
	if !(x >= 0) {
		return fmt.Errorf(format, pyFloat(x))
	}
	return nil
}

// SGDOptions are the options of [SGD].
type SGDOptions struct {
	LR             float64 // 0 stands for 1e-3
	Momentum       float64
	Dampening      float64
	WeightDecay    float64
	Nesterov       bool
	Maximize       bool
	Implementation Implementation
}

func (o *SGDOptions) fill() { orDefault(&o.LR, 1e-3) }

func (o *SGDOptions) check() error {
	if o.Nesterov && (o.Momentum <= 0 || o.Dampening != 0) {
		return errors.New("nesterov momentum requires a momentum and zero dampening")
	}
	return errors.Join(notNegative(o.LR, "invalid learning rate: %s"), notNegative(o.Momentum, "invalid momentum value: %s"),
		notNegative(o.WeightDecay, "invalid weight_decay value: %s"), o.Implementation.check())
}

func (o *SGDOptions) fields() []field {
	return []field{
		{key: "lr", value: &o.LR}, {key: "momentum", value: &o.Momentum, zeroIsInt: true},
		{key: "dampening", value: &o.Dampening, zeroIsInt: true}, {key: "weight_decay", value: &o.WeightDecay, zeroIsInt: true},
		{key: "nesterov", value: &o.Nesterov}, {key: "maximize", value: &o.Maximize},
		{key: "foreach", value: &o.Implementation}, {key: "differentiable", value: false}, {key: "fused", value: &o.Implementation},
	}
}

func (o *SGDOptions) native() tdp.OptimOptions {
	return tdp.OptimOptions{LR: o.LR, Momentum: o.Momentum, Dampening: o.Dampening, WeightDecay: o.WeightDecay,
		Nesterov: o.Nesterov, Maximize: o.Maximize, Implementation: native[o.Implementation]}
}

func (o *SGDOptions) slots() []slot {
	if o.Momentum == 0 {
		return nil
	}
	return []slot{{"momentum_buffer", tdp.Slot1}}
}

func (o *SGDOptions) implementation() *Implementation { return &o.Implementation }

// AdamOptions are the options of [Adam].
type AdamOptions struct {
	LR             float64    // 0 stands for 1e-3
	Betas          [2]float64 // both 0 stand for 0.9 and 0.999
	Eps            float64    // 0 stands for 1e-8
	WeightDecay    float64
	AMSGrad        bool
	Maximize       bool
	Decoupled      bool // decoupled_weight_decay: what AdamW does
	Implementation Implementation
}

func (o *AdamOptions) fill() {
	orDefault(&o.LR, 1e-3)
	orDefault(&o.Eps, 1e-8)
	if o.Betas == [2]float64{} {
		o.Betas = [2]float64{0.9, 0.999}
	}
}

func checkBetas(b [2]float64) error {
	for i, beta := range b {
		if !(beta >= 0 && beta < 1) {
			return fmt.Errorf("invalid beta parameter at index %d: %s", i, pyFloat(beta))
		}
	}
	return nil
}

func (o *AdamOptions) check() error {
	return errors.Join(notNegative(o.LR, "invalid learning rate: %s"), notNegative(o.Eps, "invalid epsilon value: %s"),
		checkBetas(o.Betas), notNegative(o.WeightDecay, "invalid weight_decay value: %s"), o.Implementation.check())
}

func (o *AdamOptions) fields() []field {
	return []field{
		{key: "lr", value: &o.LR}, {key: "betas", value: &o.Betas}, {key: "eps", value: &o.Eps},
		{key: "weight_decay", value: &o.WeightDecay, zeroIsInt: true}, {key: "amsgrad", value: &o.AMSGrad},
		{key: "maximize", value: &o.Maximize}, {key: "foreach", value: &o.Implementation}, {key: "capturable", value: false},
		{key: "differentiable", value: false}, {key: "fused", value: &o.Implementation},
		{key: "decoupled_weight_decay", value: &o.Decoupled},
	}
}

func (o *AdamOptions) native() tdp.OptimOptions {
	return tdp.OptimOptions{LR: o.LR, Beta1: o.Betas[0], Beta2: o.Betas[1], Eps: o.Eps, WeightDecay: o.WeightDecay,
		AMSGrad: o.AMSGrad, Maximize: o.Maximize, Decoupled: o.Decoupled, Implementation: native[o.Implementation]}
}

func (o *AdamOptions) slots() []slot { return adamSlots(o.AMSGrad) }

func adamSlots(amsgrad bool) []slot {
	s := []slot{{"step", tdp.SlotStep}, {"exp_avg", tdp.Slot1}, {"exp_avg_sq", tdp.Slot2}}
	if amsgrad {
		s = append(s, slot{"max_exp_avg_sq", tdp.Slot3})
	}
	return s
}

func (o *AdamOptions) implementation() *Implementation { return &o.Implementation }

// AdamWOptions are the options of [AdamW].
type AdamWOptions struct {
	LR             float64    // 0 stands for 1e-3
	Betas          [2]float64 // both 0 stand for 0.9 and 0.999
	Eps            float64    // 0 stands for 1e-8
	WeightDecay    float64    // 0 stands for 0.01; a group's Set, or Options, can make it zero
	AMSGrad        bool
	Maximize       bool
	Implementation Implementation
}

func (o *AdamWOptions) adam() AdamOptions {
	return AdamOptions{LR: o.LR, Betas: o.Betas, Eps: o.Eps, WeightDecay: o.WeightDecay, AMSGrad: o.AMSGrad,
		Maximize: o.Maximize, Decoupled: true, Implementation: o.Implementation}
}

func (o *AdamWOptions) fill() {
	orDefault(&o.WeightDecay, 1e-2)
	a := o.adam()
	a.fill()
	o.LR, o.Betas, o.Eps = a.LR, a.Betas, a.Eps
}

func (o *AdamWOptions) check() error { a := o.adam(); return a.check() }

func (o *AdamWOptions) fields() []field {
	return []field{
		{key: "lr", value: &o.LR}, {key: "betas", value: &o.Betas}, {key: "eps", value: &o.Eps},
		{key: "weight_decay", value: &o.WeightDecay, zeroIsInt: true}, {key: "amsgrad", value: &o.AMSGrad},
		{key: "maximize", value: &o.Maximize}, {key: "foreach", value: &o.Implementation}, {key: "capturable", value: false},
		{key: "differentiable", value: false}, {key: "fused", value: &o.Implementation},
		{key: "decoupled_weight_decay", value: true},
	}
}

func (o *AdamWOptions) native() tdp.OptimOptions        { a := o.adam(); return a.native() }
func (o *AdamWOptions) slots() []slot                   { return adamSlots(o.AMSGrad) }
func (o *AdamWOptions) implementation() *Implementation { return &o.Implementation }

// RMSpropOptions are the options of [RMSprop]. It has no fused implementation.
type RMSpropOptions struct {
	LR             float64 // 0 stands for 1e-2
	Alpha          float64 // 0 stands for 0.99
	Eps            float64 // 0 stands for 1e-8
	WeightDecay    float64
	Momentum       float64
	Centered       bool
	Maximize       bool
	Implementation Implementation
}

func (o *RMSpropOptions) fill() {
	orDefault(&o.LR, 1e-2)
	orDefault(&o.Alpha, 0.99)
	orDefault(&o.Eps, 1e-8)
}

func (o *RMSpropOptions) check() error {
	return errors.Join(notNegative(o.LR, "invalid learning rate: %s"), notNegative(o.Eps, "invalid epsilon value: %s"),
		notNegative(o.Momentum, "invalid momentum value: %s"), notNegative(o.WeightDecay, "invalid weight_decay value: %s"),
		notNegative(o.Alpha, "invalid alpha value: %s"), o.Implementation.check(), noFused("RMSprop", o.Implementation))
}

func noFused(name string, i Implementation) error {
	if i == Fused {
		return fmt.Errorf("%s has no fused implementation", name)
	}
	return nil
}

func (o *RMSpropOptions) fields() []field {
	return []field{
		{key: "lr", value: &o.LR}, {key: "momentum", value: &o.Momentum, zeroIsInt: true}, {key: "alpha", value: &o.Alpha},
		{key: "eps", value: &o.Eps}, {key: "centered", value: &o.Centered},
		{key: "weight_decay", value: &o.WeightDecay, zeroIsInt: true}, {key: "capturable", value: false},
		{key: "foreach", value: &o.Implementation}, {key: "maximize", value: &o.Maximize}, {key: "differentiable", value: false},
	}
}

func (o *RMSpropOptions) native() tdp.OptimOptions {
	return tdp.OptimOptions{LR: o.LR, Alpha: o.Alpha, Eps: o.Eps, WeightDecay: o.WeightDecay, Momentum: o.Momentum,
		Centered: o.Centered, Maximize: o.Maximize, Implementation: native[o.Implementation]}
}

func (o *RMSpropOptions) slots() []slot {
	s := []slot{{"step", tdp.SlotStep}, {"square_avg", tdp.Slot1}}
	if o.Momentum > 0 {
		s = append(s, slot{"momentum_buffer", tdp.Slot2})
	}
	if o.Centered {
		s = append(s, slot{"grad_avg", tdp.Slot3})
	}
	return s
}

func (o *RMSpropOptions) implementation() *Implementation { return &o.Implementation }

// AdagradOptions are the options of [Adagrad]. Its fused implementation is for the CPU only.
type AdagradOptions struct {
	LR                      float64 // 0 stands for 1e-2
	LRDecay                 float64
	WeightDecay             float64
	InitialAccumulatorValue float64
	Eps                     float64 // 0 stands for 1e-10
	Maximize                bool
	Implementation          Implementation
}

func (o *AdagradOptions) fill() {
	orDefault(&o.LR, 1e-2)
	orDefault(&o.Eps, 1e-10)
}

func (o *AdagradOptions) check() error {
	return errors.Join(notNegative(o.LR, "invalid learning rate: %s"), notNegative(o.LRDecay, "invalid lr_decay value: %s"),
		notNegative(o.WeightDecay, "invalid weight_decay value: %s"),
		notNegative(o.InitialAccumulatorValue, "invalid initial_accumulator_value value: %s"),
		notNegative(o.Eps, "invalid epsilon value: %s"), o.Implementation.check())
}

func (o *AdagradOptions) fields() []field {
	return []field{
		{key: "lr", value: &o.LR}, {key: "lr_decay", value: &o.LRDecay, zeroIsInt: true}, {key: "eps", value: &o.Eps},
		{key: "weight_decay", value: &o.WeightDecay, zeroIsInt: true},
		{key: "initial_accumulator_value", value: &o.InitialAccumulatorValue, zeroIsInt: true},
		{key: "foreach", value: &o.Implementation}, {key: "maximize", value: &o.Maximize},
		{key: "differentiable", value: false}, {key: "fused", value: &o.Implementation},
	}
}

func (o *AdagradOptions) native() tdp.OptimOptions {
	return tdp.OptimOptions{LR: o.LR, LRDecay: o.LRDecay, WeightDecay: o.WeightDecay, Initial: o.InitialAccumulatorValue,
		Eps: o.Eps, Maximize: o.Maximize, Implementation: native[o.Implementation]}
}

func (o *AdagradOptions) slots() []slot {
	return []slot{{"step", tdp.SlotStep}, {"sum", tdp.Slot1}}
}

func (o *AdagradOptions) implementation() *Implementation { return &o.Implementation }
