package optim

import (
	"fmt"
	"math"
	"slices"

	"github.com/goddp/goddp/checkpoint/pickle"
	"github.com/goddp/goddp/internal/tdp"
)

// OneCycleOptions are the options of [OneCycleLR]. Zeros stand for Python's defaults.
type OneCycleOptions struct {
	MaxLR      []float64 // one for all groups, or one for each
	TotalSteps int
	// PctStart is the part of the cycle in which the rate rises; 0 stands for 0.3.
	PctStart float64
	// Linear anneals along a line instead of a cosine.
	Linear bool
	// KeepMomentum leaves the momentum alone. Otherwise it, or Adam's first beta, moves against the rate, between
	// BaseMomentum (0 stands for 0.85) and MaxMomentum (0 stands for 0.95).
	KeepMomentum              bool
	BaseMomentum, MaxMomentum float64
	DivFactor                 float64 // first rate = MaxLR / DivFactor; 0 stands for 25
	FinalDivFactor            float64 // last rate = first rate / FinalDivFactor; 0 stands for 1e4
	ThreePhase                bool    // down to the first rate before it goes to the last one
}

// OneCycleLR is the 1cycle policy: one rise of the rate and one long fall, step by step over the whole training.
type OneCycleLR struct {
	schedule
	total  int64
	phases []phase
}

type phase struct {
	end                          float64
	endIsInt                     bool
	startLR, endLR               string
	startMomentum, finalMomentum string
}

// NewOneCycleLR makes a OneCycleLR.
func NewOneCycleLR(o Optimizer, opt OneCycleOptions) (*OneCycleLR, error) {
	orDefault(&opt.PctStart, 0.3)
	orDefault(&opt.BaseMomentum, 0.85)
	orDefault(&opt.MaxMomentum, 0.95)
	orDefault(&opt.DivFactor, 25)
	orDefault(&opt.FinalDivFactor, 1e4)
	groups := o.ParamGroups()
	if opt.TotalSteps <= 0 {
		return nil, fmt.Errorf("expected positive integer total_steps, but got %d", opt.TotalSteps)
	}
	if !(opt.PctStart >= 0 && opt.PctStart <= 1) {
		return nil, fmt.Errorf("expected float between 0 and 1 pct_start, but got %s", pyFloat(opt.PctStart))
	}
	maxLR := opt.MaxLR
	if len(maxLR) == 1 {
		maxLR = slices.Repeat(maxLR, len(groups))
	}
	if len(maxLR) != len(groups) {
		return nil, fmt.Errorf("max_lr must have the same length as optimizer.param_groups. max_lr has %d values, param_groups has %d",
			len(maxLR), len(groups))
	}
	s := &OneCycleLR{total: int64(opt.TotalSteps)}
	end := float64(opt.PctStart*float64(s.total)) - 1
	last := phase{end: float64(s.total - 1), endIsInt: true}
	s.phases = []phase{{end: end, startLR: "initial_lr", endLR: "max_lr", startMomentum: "max_momentum", finalMomentum: "base_momentum"}}
	if opt.ThreePhase {
		s.phases = append(s.phases, phase{end: float64(2*opt.PctStart*float64(s.total)) - 2, startLR: "max_lr", endLR: "initial_lr",
			startMomentum: "base_momentum", finalMomentum: "max_momentum"})
		last.startLR, last.endLR, last.startMomentum, last.finalMomentum = "initial_lr", "min_lr", "max_momentum", "max_momentum"
	} else {
		last.startLR, last.endLR, last.startMomentum, last.finalMomentum = "max_lr", "min_lr", "base_momentum", "max_momentum"
	}
	s.phases = append(s.phases, last)
	cycle := !opt.KeepMomentum
	_, beta1 := groups[0].field("betas")
	if cycle && groups[0].momentum() == nil {
		return nil, fmt.Errorf("optimizer must support momentum or beta1 with `cycle_momentum` option enabled")
	}
	for i, g := range groups {
		initial := maxLR[i] / opt.DivFactor
		g.setExtra("initial_lr", initial)
		g.setExtra("max_lr", maxLR[i])
		g.setExtra("min_lr", initial/opt.FinalDivFactor)
		if cycle {
			*g.momentum() = opt.MaxMomentum
			g.setExtra("max_momentum", opt.MaxMomentum)
			g.setExtra("base_momentum", opt.BaseMomentum)
		}
	}
	kind := "cos"
	if opt.Linear {
		kind = "linear"
	}
	s.head = []entry{entryOf("total_steps", &s.total), s.phasesEntry(), entryOf("_anneal_func_type", &kind), entryOf("cycle_momentum", &cycle)}
	if cycle {
		s.head = append(s.head, entryOf("use_beta1", &beta1))
	}
	s.next = func() ([]float64, error) { return s.anneal(kind == "linear", cycle) }
	return s, s.start(o)
}

func (s *OneCycleLR) anneal(linear, cycle bool) ([]float64, error) {
	if s.lastEpoch > s.total {
		return nil, fmt.Errorf("tried to step %d times. The specified number of total steps is %d", s.lastEpoch, s.total)
	}
	step := float64(s.lastEpoch)
	between := func(start, end, pct float64) float64 {
		if linear {
			return float64((end-start)*pct) + start
		}
		cos := tdp.Cos(math.Pi*pct) + 1
		return end + float64((start-end)/2*cos)
	}
	var out []float64
	for _, g := range s.opt.ParamGroups() {
		value := func(key string) float64 { x, _ := g.extraFloat(key); return x }
		start := 0.0
		for i, p := range s.phases {
			if step <= p.end || i == len(s.phases)-1 {
				pct := (step - start) / (p.end - start)
				out = append(out, between(value(p.startLR), value(p.endLR), pct))
				if cycle {
					*g.momentum() = between(value(p.startMomentum), value(p.finalMomentum), pct)
				}
				break
			}
			start = p.end
		}
	}
	return out, nil
}

func (s *OneCycleLR) phasesEntry() entry {
	return entry{"_schedule_phases", func() any {
		l := pickle.NewList()
		for _, p := range s.phases {
			d := pickle.NewDict().Set("end_step", p.end)
			if p.endIsInt {
				d.Set("end_step", int64(p.end))
			}
			l.Items = append(l.Items, d.Set("start_lr", p.startLR).Set("end_lr", p.endLR).
				Set("start_momentum", p.startMomentum).Set("end_momentum", p.finalMomentum))
		}
		return l
	}, func(v any) error {
		l, ok := v.(*pickle.List)
		if !ok {
			return misfit("_schedule_phases is a %T", v)
		}
		var phases []phase
		for _, item := range l.Items {
			d, ok := item.(*pickle.Dict)
			if !ok {
				return misfit("a phase is a %T", item)
			}
			var p phase
			end, _ := d.Get("end_step")
			if p.end, ok = number(end); !ok {
				return misfit("end_step is a %T", end)
			}
			_, p.endIsInt = end.(int64)
			for key, to := range map[string]*string{"start_lr": &p.startLR, "end_lr": &p.endLR,
				"start_momentum": &p.startMomentum, "end_momentum": &p.finalMomentum} {
				text, _ := d.Get(key)
				if *to, ok = text.(string); !ok {
					return misfit("%s is a %T", key, text)
				}
			}
			phases = append(phases, p)
		}
		s.phases = phases
		return nil
	}}
}
