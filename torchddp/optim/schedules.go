package optim

import (
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"

	"github.com/goddp/goddp/checkpoint/pickle"
	"github.com/goddp/goddp/internal/tdp"
)

// The formulas are Python's, term by term: another order of the same operations has other last bits. A conversion
// float64(x*y) keeps the compiler from fusing a product with the sum around it.

// LambdaLR sets the rate to the first one times a function of the step.
type LambdaLR struct{ schedule }

// NewLambdaLR makes a LambdaLR of one function for all groups, or of one for each.
func NewLambdaLR(o Optimizer, lambdas ...func(epoch int) float64) (*LambdaLR, error) {
	n := len(o.ParamGroups())
	if len(lambdas) == 1 {
		lambdas = slices.Repeat(lambdas, n)
	}
	if len(lambdas) != n {
		return nil, fmt.Errorf("expected %d lr_lambdas, but got %d", n, len(lambdas))
	}
	s := &LambdaLR{}
	s.next = func() ([]float64, error) {
		out := slices.Clone(s.baseLRs)
		for i := range out {
			out[i] *= lambdas[i](int(s.lastEpoch))
		}
		return out, nil
	}
	return s, s.start(o)
}

// StateDict is the schedule's state in Python's layout. Functions are not saved.
func (s *LambdaLR) StateDict() (*pickle.Dict, error) { return s.state(), nil }

func (s *LambdaLR) state() *pickle.Dict {
	none := pickle.NewList(make([]any, len(s.baseLRs))...)
	return s.schedule.state().Set("lr_lambdas", none)
}

// StepLR multiplies the rate by Gamma every StepSize steps.
type StepLR struct{ schedule }

// NewStepLR makes a StepLR. Python's default for gamma is 0.1.
func NewStepLR(o Optimizer, stepSize int, gamma float64) (*StepLR, error) {
	if stepSize < 1 {
		return nil, fmt.Errorf("step_size must be positive, not %d", stepSize)
	}
	s, size := &StepLR{}, int64(stepSize)
	s.head = []entry{entryOf("step_size", &size), entryOf("gamma", &gamma)}
	s.next = func() ([]float64, error) {
		if s.lastEpoch == 0 || s.lastEpoch%size != 0 {
			return s.keep()
		}
		return s.each(func(lr float64) float64 { return lr * gamma })
	}
	s.closed = func() ([]float64, error) {
		return s.eachBase(func(b float64) float64 { return b * tdp.Pow(gamma, float64(s.lastEpoch/size)) })
	}
	return s, s.start(o)
}

// MultiStepLR multiplies the rate by gamma at every milestone.
type MultiStepLR struct{ schedule }

// NewMultiStepLR makes a MultiStepLR. Python's default for gamma is 0.1.
func NewMultiStepLR(o Optimizer, milestones []int, gamma float64) (*MultiStepLR, error) {
	s := &MultiStepLR{}
	// Python counts how often each milestone was given, in the order in which they came first.
	var order []int64
	count := map[int64]int64{}
	for _, m := range milestones {
		if count[int64(m)] == 0 {
			order = append(order, int64(m))
		}
		count[int64(m)]++
	}
	s.head = []entry{{"milestones", func() any {
		d := &pickle.Dict{Kind: pickle.Counter}
		for _, m := range order {
			d.Set(m, count[m])
		}
		return d
	}, func(v any) error {
		d, ok := v.(*pickle.Dict)
		if !ok {
			return misfit("milestones is a %T", v)
		}
		order, count = nil, map[int64]int64{}
		for k, n := range d.All() {
			m, ok1 := k.(int64)
			c, ok2 := n.(int64)
			if !ok1 || !ok2 {
				return misfit("milestones has the entry %v: %v", k, n)
			}
			order, count[m] = append(order, m), c
		}
		return nil
	}}, entryOf("gamma", &gamma)}
	s.next = func() ([]float64, error) {
		n, ok := count[s.lastEpoch]
		if !ok {
			return s.keep()
		}
		return s.each(func(lr float64) float64 { return lr * tdp.Pow(gamma, float64(n)) })
	}
	s.closed = func() ([]float64, error) {
		passed := int64(0)
		for _, m := range slices.Collect(maps.Keys(count)) {
			if m <= s.lastEpoch {
				passed += count[m]
			}
		}
		return s.eachBase(func(b float64) float64 { return b * tdp.Pow(gamma, float64(passed)) })
	}
	return s, s.start(o)
}

// ConstantLR multiplies the rate by a factor for the first steps.
type ConstantLR struct{ schedule }

// NewConstantLR makes a ConstantLR. Python's defaults are 1/3 and 5.
func NewConstantLR(o Optimizer, factor float64, totalIters int) (*ConstantLR, error) {
	if factor > 1 || factor < 0 {
		return nil, errors.New("constant multiplicative factor expected to be between 0 and 1")
	}
	s, total := &ConstantLR{}, int64(totalIters)
	s.head = []entry{entryOf("factor", &factor), entryOf("total_iters", &total)}
	s.next = func() ([]float64, error) {
		switch s.lastEpoch {
		case 0:
			return s.each(func(lr float64) float64 { return lr * factor })
		case total:
			return s.each(func(lr float64) float64 { return lr * (1 / factor) })
		}
		return s.keep()
	}
	s.closed = func() ([]float64, error) {
		after := 0.0
		if s.lastEpoch >= total {
			after = 1
		}
		return s.eachBase(func(b float64) float64 { return b * (factor + float64(after*(1-factor))) })
	}
	return s, s.start(o)
}

// LinearLR moves a factor on the rate linearly from one value to another over the first steps: a warm-up.
type LinearLR struct{ schedule }

// NewLinearLR makes a LinearLR. Python's defaults are 1/3, 1 and 5.
func NewLinearLR(o Optimizer, startFactor, endFactor float64, totalIters int) (*LinearLR, error) {
	if startFactor > 1 || startFactor <= 0 {
		return nil, errors.New("starting multiplicative factor expected to be greater than 0 and less or equal to 1")
	}
	if endFactor > 1 || endFactor < 0 {
		return nil, errors.New("ending multiplicative factor expected to be between 0 and 1")
	}
	s, total := &LinearLR{}, int64(totalIters)
	s.head = []entry{entryOf("start_factor", &startFactor), entryOf("end_factor", &endFactor), entryOf("total_iters", &total)}
	s.next = func() ([]float64, error) {
		if s.lastEpoch == 0 {
			return s.each(func(lr float64) float64 { return lr * startFactor })
		}
		if s.initial || s.lastEpoch > total {
			return s.keep()
		}
		slope := endFactor - startFactor
		f := 1 + slope/(float64(float64(total)*startFactor)+float64(float64(s.lastEpoch-1)*slope))
		return s.each(func(lr float64) float64 { return lr * f })
	}
	s.closed = func() ([]float64, error) {
		f := startFactor + float64((endFactor-startFactor)*float64(min(total, s.lastEpoch)))/float64(total)
		return s.eachBase(func(b float64) float64 { return b * f })
	}
	return s, s.start(o)
}

// ExponentialLR multiplies the rate by gamma every step.
type ExponentialLR struct{ schedule }

// NewExponentialLR makes an ExponentialLR.
func NewExponentialLR(o Optimizer, gamma float64) (*ExponentialLR, error) {
	s := &ExponentialLR{}
	s.head = []entry{entryOf("gamma", &gamma)}
	s.next = func() ([]float64, error) {
		if s.initial {
			return s.keep()
		}
		return s.each(func(lr float64) float64 { return lr * gamma })
	}
	s.closed = func() ([]float64, error) {
		return s.eachBase(func(b float64) float64 { return b * tdp.Pow(gamma, float64(s.lastEpoch)) })
	}
	return s, s.start(o)
}

// PolynomialLR brings the rate to zero along a power.
type PolynomialLR struct{ schedule }

// NewPolynomialLR makes a PolynomialLR. Python's defaults are 5 and 1.
func NewPolynomialLR(o Optimizer, totalIters int, power float64) (*PolynomialLR, error) {
	s, total := &PolynomialLR{}, int64(totalIters)
	s.head = []entry{entryOf("total_iters", &total), entryOf("power", &power)}
	s.next = func() ([]float64, error) {
		if s.initial || s.lastEpoch > total {
			return s.keep()
		}
		f := tdp.Pow((1-float64(s.lastEpoch)/float64(total))/(1-float64(s.lastEpoch-1)/float64(total)), power)
		return s.each(func(lr float64) float64 { return lr * f })
	}
	s.closed = func() ([]float64, error) {
		f := tdp.Pow(1-float64(min(total, s.lastEpoch))/float64(total), power)
		return s.eachBase(func(b float64) float64 { return b * f })
	}
	return s, s.start(o)
}

// CosineAnnealingLR moves the rate along half a cosine from its first value to etaMin in tMax steps, and back.
type CosineAnnealingLR struct{ schedule }

// NewCosineAnnealingLR makes a CosineAnnealingLR.
func NewCosineAnnealingLR(o Optimizer, tMax int, etaMin float64) (*CosineAnnealingLR, error) {
	if tMax < 1 {
		return nil, fmt.Errorf("t_max must be positive, not %d", tMax)
	}
	s, t := &CosineAnnealingLR{}, int64(tMax)
	s.head = []entry{entryOf("T_max", &t), entryOf("eta_min", &etaMin)}
	s.next = func() ([]float64, error) {
		e := float64(s.lastEpoch)
		switch {
		case s.initial:
			return s.keep()
		case s.stepCount == 1 && s.lastEpoch > 0:
			f := 1 + tdp.Cos(e*math.Pi/float64(t))
			return s.eachBase(func(b float64) float64 { return etaMin + float64((b-etaMin)*f)/2 })
		case floorMod(s.lastEpoch-1-t, 2*t) == 0:
			out := currentLRs(s.opt)
			f := 1 - tdp.Cos(math.Pi/float64(t))
			for i := range out {
				out[i] += float64((s.baseLRs[i]-etaMin)*f) / 2
			}
			return out, nil
		}
		f := (1 + tdp.Cos(math.Pi*e/float64(t))) / (1 + tdp.Cos(math.Pi*(e-1)/float64(t)))
		return s.each(func(lr float64) float64 { return float64(f*(lr-etaMin)) + etaMin })
	}
	s.closed = func() ([]float64, error) {
		f := 1 + tdp.Cos(math.Pi*float64(s.lastEpoch)/float64(t))
		return s.eachBase(func(b float64) float64 { return etaMin + float64((b-etaMin)*f)/2 })
	}
	return s, s.start(o)
}

// floorMod is Python's %.
func floorMod(a, b int64) int64 { return ((a % b) + b) % b }

// CosineAnnealingWarmRestarts moves the rate along half a cosine to etaMin, again and again, in periods that grow.
type CosineAnnealingWarmRestarts struct {
	schedule
	t0, ti, tMult, tCur int64
}

// NewCosineAnnealingWarmRestarts makes a CosineAnnealingWarmRestarts with a first period of t0 steps; every further one
// is tMult times as long.
func NewCosineAnnealingWarmRestarts(o Optimizer, t0, tMult int, etaMin float64) (*CosineAnnealingWarmRestarts, error) {
	if t0 <= 0 {
		return nil, fmt.Errorf("expected positive integer T_0, but got %d", t0)
	}
	if tMult < 1 {
		return nil, fmt.Errorf("expected integer T_mult >= 1, but got %d", tMult)
	}
	s := &CosineAnnealingWarmRestarts{t0: int64(t0), ti: int64(t0), tMult: int64(tMult), tCur: -1}
	s.head = []entry{entryOf("T_0", &s.t0), entryOf("T_i", &s.ti), entryOf("T_mult", &s.tMult), entryOf("eta_min", &etaMin),
		entryOf("T_cur", &s.tCur)}
	s.next = func() ([]float64, error) {
		f := 1 + tdp.Cos(math.Pi*float64(s.tCur)/float64(s.ti))
		return s.eachBase(func(b float64) float64 { return etaMin + float64((b-etaMin)*f)/2 })
	}
	s.opt = o
	if err := s.begin(o); err != nil {
		return nil, err
	}
	return s, nil
}

// begin is start with this schedule's own Step.
func (s *CosineAnnealingWarmRestarts) begin(o Optimizer) error {
	// The inner start would take the plain step; its effect on the counters is undone.
	if err := s.schedule.start(o); err != nil {
		return err
	}
	s.lastEpoch, s.tCur, s.ti = -1, -1, s.t0
	return s.initialStep()
}

func (s *CosineAnnealingWarmRestarts) initialStep() error {
	s.stepCount = 0 // and stays: Python's step of this class does not count
	return s.Step()
}

// Step moves on to the next learning rate.
func (s *CosineAnnealingWarmRestarts) Step() error {
	if s.lastEpoch < 0 {
		s.ti, s.tCur, s.lastEpoch = s.t0, 0, 0
		return s.apply(s.next)
	}
	s.lastEpoch++
	s.tCur++
	if s.tCur >= s.ti {
		s.tCur %= s.ti
		s.ti *= s.tMult
	}
	return s.apply(s.next)
}
