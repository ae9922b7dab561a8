package optim

import (
	"errors"
	"fmt"
	"math"
	"slices"

	"github.com/goddp/goddp/checkpoint/pickle"
)

// PlateauOptions are the options of [ReduceLROnPlateau]. Zeros stand for Python's defaults, except where noted.
type PlateauOptions struct {
	Max       bool      // the metric should rise instead of fall
	Factor    float64   // 0 stands for 0.1
	Patience  int       // epochs without improvement that are tolerated; 0 stands for 10, a negative one for none
	Threshold float64   // what counts as an improvement; 0 stands for 1e-4
	Absolute  bool      // the threshold is absolute instead of relative
	Cooldown  int       // epochs to wait after a reduction
	MinLR     []float64 // none: 0; one for all groups; or one for each
	Eps       float64   // smaller changes are not made; 0 stands for 1e-8
}

// ReduceLROnPlateau lowers the rate when a metric has stopped improving. It is no [Scheduler], because its step needs
// the metric.
type ReduceLROnPlateau struct {
	opt                                                   Optimizer
	factor, eps, threshold, best, worse                   float64
	minLRs                                                []float64
	defaultMin                                            *float64
	patience, cooldown, lastEpoch, cooldownCounter, badEp int64
	mode, thresholdMode                                   string
	lastLR                                                []float64
}

// NewReduceLROnPlateau makes a ReduceLROnPlateau.
func NewReduceLROnPlateau(o Optimizer, opt PlateauOptions) (*ReduceLROnPlateau, error) {
	orDefault(&opt.Factor, 0.1)
	orDefault(&opt.Threshold, 1e-4)
	orDefault(&opt.Eps, 1e-8)
	if opt.Factor >= 1 {
		return nil, errors.New("factor should be < 1.0")
	}
	switch {
	case opt.Patience == 0:
		opt.Patience = 10
	case opt.Patience < 0:
		opt.Patience = 0
	}
	n := len(o.ParamGroups())
	s := &ReduceLROnPlateau{opt: o, factor: opt.Factor, eps: opt.Eps, threshold: opt.Threshold, patience: int64(opt.Patience),
		cooldown: int64(opt.Cooldown), mode: "min", thresholdMode: "rel", lastLR: currentLRs(o)}
	switch {
	case len(opt.MinLR) == 0:
		s.defaultMin = ptrTo(0.0)
	case len(opt.MinLR) == 1:
		s.defaultMin = ptrTo(opt.MinLR[0])
	case len(opt.MinLR) != n:
		return nil, fmt.Errorf("expected %d min_lrs, got %d", n, len(opt.MinLR))
	default:
		s.minLRs = slices.Clone(opt.MinLR)
	}
	if s.defaultMin != nil {
		s.minLRs = slices.Repeat([]float64{*s.defaultMin}, n)
	}
	if opt.Max {
		s.mode = "max"
	}
	if opt.Absolute {
		s.thresholdMode = "abs"
	}
	s.setWorse()
	s.best = s.worse
	return s, nil
}

func (s *ReduceLROnPlateau) setWorse() {
	s.worse = math.Inf(1)
	if s.mode == "max" {
		s.worse = math.Inf(-1)
	}
}

func (s *ReduceLROnPlateau) better(a float64) bool {
	switch {
	case s.mode == "min" && s.thresholdMode == "rel":
		return a < s.best*(1-s.threshold)
	case s.mode == "min":
		return a < s.best-s.threshold
	case s.thresholdMode == "rel":
		return a > s.best*(s.threshold+1)
	}
	return a > s.best+s.threshold
}

// Step takes an epoch's metric, the same on every rank, and lowers the rate if it is time.
func (s *ReduceLROnPlateau) Step(metric float64) error {
	s.lastEpoch++
	if s.better(metric) {
		s.best, s.badEp = metric, 0
	} else {
		s.badEp++
	}
	if s.cooldownCounter > 0 {
		s.cooldownCounter--
		s.badEp = 0
	}
	if s.badEp > s.patience {
		if err := s.reduce(); err != nil {
			return err
		}
		s.cooldownCounter, s.badEp = s.cooldown, 0
	}
	s.lastLR = currentLRs(s.opt)
	return nil
}

func (s *ReduceLROnPlateau) reduce() error {
	groups := s.opt.ParamGroups()
	if len(groups) != len(s.minLRs) {
		if s.defaultMin == nil {
			return fmt.Errorf("the optimizer has %d parameter groups, the schedule %d minimal rates", len(groups), len(s.minLRs))
		}
		s.minLRs = slices.Repeat([]float64{*s.defaultMin}, len(groups))
	}
	for i, g := range groups {
		old := g.LR()
		if lr := max(old*s.factor, s.minLRs[i]); old-lr > s.eps {
			g.SetLR(lr)
		}
	}
	return nil
}

// LastLR are the learning rates after the last step, one a group.
func (s *ReduceLROnPlateau) LastLR() []float64 { return slices.Clone(s.lastLR) }

func (s *ReduceLROnPlateau) entries() []entry {
	zeroInt := func(x float64) any {
		if x == 0 {
			return int64(0)
		}
		return x
	}
	return []entry{
		entryOf("factor", &s.factor),
		{"default_min_lr", func() any {
			if s.defaultMin == nil {
				return nil
			}
			return zeroInt(*s.defaultMin)
		}, func(v any) error {
			s.defaultMin = nil
			if x, ok := number(v); ok {
				s.defaultMin = &x
			}
			return nil
		}},
		{"min_lrs", func() any {
			l := pickle.NewList()
			for _, x := range s.minLRs {
				l.Items = append(l.Items, zeroInt(x))
			}
			return l
		}, entryOf("min_lrs", &s.minLRs).set},
		entryOf("patience", &s.patience), entryOf("cooldown", &s.cooldown), entryOf("eps", &s.eps),
		entryOf("last_epoch", &s.lastEpoch), entryOf("_last_lr", &s.lastLR), entryOf("mode_worse", &s.worse),
		entryOf("mode", &s.mode), entryOf("threshold", &s.threshold), entryOf("threshold_mode", &s.thresholdMode),
		entryOf("best", &s.best), entryOf("cooldown_counter", &s.cooldownCounter), entryOf("num_bad_epochs", &s.badEp),
	}
}

// StateDict is the schedule's state in Python's layout.
func (s *ReduceLROnPlateau) StateDict() (*pickle.Dict, error) { return s.state(), nil }

func (s *ReduceLROnPlateau) state() *pickle.Dict { return dictOf(s.entries()) }

// LoadStateDict continues from a state that StateDict, here or in Python, gave.
func (s *ReduceLROnPlateau) LoadStateDict(d *pickle.Dict) error {
	if err := load(s.entries(), d); err != nil {
		return err
	}
	s.setWorse()
	return nil
}
