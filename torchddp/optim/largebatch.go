package optim

import (
	"errors"

	"github.com/goddp/goddp/internal/tdp"
)

// LARSOptions are the options of [LARS].
type LARSOptions struct {
	LR          float64 // 0 stands for 1e-3
	Momentum    float64
	Dampening   float64
	WeightDecay float64
	Nesterov    bool
	Trust       float64 // the trust coefficient; 0 stands for 1e-3
	Eps         float64 // added to the denominator of the trust ratio; 0 stands for 1e-8
	// NoAdapt makes a group's update that of SGD. It is usual for biases and normalisation layers, together with no
	// weight decay; SplitDecay finds them.
	NoAdapt        bool
	Maximize       bool
	Implementation Implementation // Fused is not available
}

func (o *LARSOptions) fill() {
	orDefault(&o.LR, 1e-3)
	orDefault(&o.Trust, 1e-3)
	orDefault(&o.Eps, 1e-8)
}

func (o *LARSOptions) check() error {
	if o.Nesterov && (o.Momentum <= 0 || o.Dampening != 0) {
		return errors.New("nesterov momentum requires a momentum and zero dampening")
	}
	return errors.Join(notNegative(o.LR, "invalid learning rate: %s"), notNegative(o.Momentum, "invalid momentum value: %s"),
		notNegative(o.WeightDecay, "invalid weight_decay value: %s"), notNegative(o.Trust, "invalid trust coefficient: %s"),
		notNegative(o.Eps, "invalid epsilon value: %s"), o.Implementation.check(), noFused("LARS", o.Implementation))
}

func (o *LARSOptions) fields() []field {
	return []field{
		{key: "lr", value: &o.LR}, {key: "momentum", value: &o.Momentum, zeroIsInt: true},
		{key: "dampening", value: &o.Dampening, zeroIsInt: true}, {key: "weight_decay", value: &o.WeightDecay, zeroIsInt: true},
		{key: "nesterov", value: &o.Nesterov}, {key: "trust_coefficient", value: &o.Trust}, {key: "eps", value: &o.Eps},
		{key: "no_adapt", value: &o.NoAdapt}, {key: "maximize", value: &o.Maximize}, {key: "foreach", value: &o.Implementation},
	}
}

func (o *LARSOptions) native() tdp.OptimOptions {
	return tdp.OptimOptions{LR: o.LR, Momentum: o.Momentum, Dampening: o.Dampening, WeightDecay: o.WeightDecay,
		Nesterov: o.Nesterov, Trust: o.Trust, Eps: o.Eps, NoAdapt: o.NoAdapt, Maximize: o.Maximize,
		Implementation: native[o.Implementation]}
}

func (o *LARSOptions) slots() []slot {
	if o.Momentum == 0 {
		return nil
	}
	return []slot{{"momentum_buffer", tdp.Slot1}}
}

func (o *LARSOptions) implementation() *Implementation { return &o.Implementation }

// LAMBOptions are the options of [LAMB].
type LAMBOptions struct {
	LR          float64    // 0 stands for 1e-3
	Betas       [2]float64 // both 0 stand for 0.9 and 0.999
	Eps         float64    // 0 stands for 1e-6
	WeightDecay float64
	// NoAdapt makes a group's update that of AdamW with the decay inside the update. It is usual for biases and
	// normalisation layers, together with no weight decay; SplitDecay finds them.
	NoAdapt        bool
	Maximize       bool
	Implementation Implementation // Fused is not available
}

func (o *LAMBOptions) fill() {
	orDefault(&o.LR, 1e-3)
	orDefault(&o.Eps, 1e-6)
	if o.Betas == [2]float64{} {
		o.Betas = [2]float64{0.9, 0.999}
	}
}

func (o *LAMBOptions) check() error {
	return errors.Join(notNegative(o.LR, "invalid learning rate: %s"), notNegative(o.Eps, "invalid epsilon value: %s"),
		checkBetas(o.Betas), notNegative(o.WeightDecay, "invalid weight_decay value: %s"), o.Implementation.check(),
		noFused("LAMB", o.Implementation))
}

func (o *LAMBOptions) fields() []field {
	return []field{
		{key: "lr", value: &o.LR}, {key: "betas", value: &o.Betas}, {key: "eps", value: &o.Eps},
		{key: "weight_decay", value: &o.WeightDecay, zeroIsInt: true}, {key: "no_adapt", value: &o.NoAdapt},
		{key: "maximize", value: &o.Maximize}, {key: "foreach", value: &o.Implementation},
	}
}

func (o *LAMBOptions) native() tdp.OptimOptions {
	return tdp.OptimOptions{LR: o.LR, Beta1: o.Betas[0], Beta2: o.Betas[1], Eps: o.Eps, WeightDecay: o.WeightDecay,
		NoAdapt: o.NoAdapt, Maximize: o.Maximize, Implementation: native[o.Implementation]}
}

func (o *LAMBOptions) slots() []slot { return adamSlots(false) }

func (o *LAMBOptions) implementation() *Implementation { return &o.Implementation }
