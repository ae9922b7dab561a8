package optim

import (
	"errors"
	"fmt"
	"log/slog"
	"slices"

	"github.com/goddp/goddp/checkpoint/pickle"
)

// Scheduler changes the learning rate of an optimizer's groups from step to step. As in Python, call Step after the
// optimizer's, once an epoch or once a batch, whatever the schedule counts.
type Scheduler interface {
	// Step moves on to the next learning rate.
	Step() error
	// LastLR are the learning rates that the last step set, one a group.
	LastLR() []float64
	// StateDict is the schedule's state in Python's layout.
	StateDict() (*pickle.Dict, error)
	// LoadStateDict continues from such a state. It does not change the optimizer, whose own state has the rate.
	LoadStateDict(state *pickle.Dict) error

	optimizer() Optimizer
	state() *pickle.Dict
	initialStep() error
	undo()
	updateTo(epoch int64) error
}

// rates is a rule: it gives the learning rates for s.lastEpoch, one a group.
type rates func() ([]float64, error)

// schedule is what the simple schedules have in common.
type schedule struct {
	opt       Optimizer
	baseLRs   []float64
	lastEpoch int64
	stepCount int64
	lastLR    []float64
	initial   bool // the step that the constructor takes
	next      rates
	closed    rates // as a function of the epoch alone, where Python has one
	head      []entry
}

// start finishes a schedule's construction: it remembers the rates to begin with, and takes the first step.
func (s *schedule) start(o Optimizer) error {
	s.opt = o
	for _, g := range o.ParamGroups() {
		if _, ok := g.extra["initial_lr"]; !ok {
			v, _ := g.Value("lr")
			if err := g.SetValue("initial_lr", v); err != nil {
				return err
			}
		}
		base, _ := g.extraFloat("initial_lr")
		s.baseLRs = append(s.baseLRs, base)
	}
	s.lastEpoch = -1
	o.base().stepped = false
	return s.initialStep()
}

func (s *schedule) optimizer() Optimizer { return s.opt }
func (s *schedule) undo()                { s.lastEpoch-- }

func (s *schedule) initialStep() error {
	s.stepCount = 0
	s.initial = true
	defer func() { s.initial = false }()
	return s.Step()
}

// Step moves on to the next learning rate.
func (s *schedule) Step() error {
	if s.stepCount == 1 && !s.opt.base().stepped {
		slog.Warn("the scheduler's Step was called before the optimizer's: the first value of the learning rate schedule is skipped")
	}
	s.stepCount++
	s.lastEpoch++
	return s.apply(s.next)
}

func (s *schedule) updateTo(epoch int64) error {
	s.lastEpoch = epoch
	if s.closed != nil {
		return s.apply(s.closed)
	}
	return s.apply(s.next)
}

func (s *schedule) apply(rule rates) error {
	values, err := rule()
	if err != nil {
		return err
	}
	groups := s.opt.ParamGroups()
	if len(values) != len(groups) {
		return fmt.Errorf("the optimizer has %d parameter groups, the schedule was made for %d", len(groups), len(values))
	}
	for i, g := range groups {
		g.SetLR(values[i])
	}
	s.lastLR = currentLRs(s.opt)
	return nil
}

func currentLRs(o Optimizer) []float64 {
	var out []float64
	for _, g := range o.ParamGroups() {
		out = append(out, g.LR())
	}
	return out
}

// LastLR are the learning rates that the last step set, one a group.
func (s *schedule) LastLR() []float64 { return slices.Clone(s.lastLR) }

// each maps the current rates.
func (s *schedule) each(f func(lr float64) float64) ([]float64, error) {
	out := currentLRs(s.opt)
	for i, lr := range out {
		out[i] = f(lr)
	}
	return out, nil
}

// keep leaves the rates as they are.
func (s *schedule) keep() ([]float64, error) { return currentLRs(s.opt), nil }

// eachBase maps the rates to begin with.
func (s *schedule) eachBase(f func(base float64) float64) ([]float64, error) {
	out := slices.Clone(s.baseLRs)
	for i, lr := range out {
		out[i] = f(lr)
	}
	return out, nil
}

func (s *schedule) entries() []entry {
	return append(slices.Clone(s.head),
		entryOf("base_lrs", &s.baseLRs), entryOf("last_epoch", &s.lastEpoch), entryOf("_step_count", &s.stepCount),
		constant("_is_initial", false), constant("_get_lr_called_within_step", false), entryOf("_last_lr", &s.lastLR))
}

// StateDict is the schedule's state in Python's layout.
func (s *schedule) StateDict() (*pickle.Dict, error) { return s.state(), nil }

func (s *schedule) state() *pickle.Dict { return dictOf(s.entries()) }

// LoadStateDict continues from a state that StateDict, here or in Python, gave.
func (s *schedule) LoadStateDict(d *pickle.Dict) error { return load(s.entries(), d) }

// entry is one key of a schedule's state.
type entry struct {
	key string
	get func() any
	set func(v any) error
}

func constant(key string, value any) entry {
	return entry{key, func() any { return value }, func(any) error { return nil }}
}

// entryOf connects a key with a variable.
func entryOf(key string, p any) entry {
	wrong := func(v any) error { return misfit("%s is a %T", key, v) }
	switch p := p.(type) {
	case *int64:
		return entry{key, func() any { return *p }, func(v any) error {
			x, ok := number(v)
			if !ok {
				return wrong(v)
			}
			*p = int64(x)
			return nil
		}}
	case *float64:
		return entry{key, func() any { return *p }, func(v any) error {
			x, ok := number(v)
			if !ok {
				return wrong(v)
			}
			*p = x
			return nil
		}}
	case *bool:
		return entry{key, func() any { return *p }, func(v any) error {
			x, ok := v.(bool)
			if !ok {
				return wrong(v)
			}
			*p = x
			return nil
		}}
	case *string:
		return entry{key, func() any { return *p }, func(v any) error {
			x, ok := v.(string)
			if !ok {
				return wrong(v)
			}
			*p = x
			return nil
		}}
	case *[]float64:
		return entry{key, func() any {
			l := pickle.NewList()
			for _, x := range *p {
				l.Items = append(l.Items, x)
			}
			return l
		}, func(v any) error {
			l, ok := v.(*pickle.List)
			if !ok {
				return wrong(v)
			}
			var out []float64
			for _, item := range l.Items {
				x, ok := number(item)
				if !ok {
					return wrong(item)
				}
				out = append(out, x)
			}
			*p = out
			return nil
		}}
	case *[]int64:
		return entry{key, func() any {
			l := pickle.NewList()
			for _, x := range *p {
				l.Items = append(l.Items, x)
			}
			return l
		}, func(v any) error {
			l, ok := v.(*pickle.List)
			if !ok {
				return wrong(v)
			}
			var out []int64
			for _, item := range l.Items {
				x, ok := item.(int64)
				if !ok {
					return wrong(item)
				}
				out = append(out, x)
			}
			*p = out
			return nil
		}}
	}
	panic(fmt.Sprintf("optim: no entry for a %T", p))
}

func dictOf(entries []entry) *pickle.Dict {
	d := pickle.NewDict()
	for _, e := range entries {
		d.Set(e.key, e.get())
	}
	return d
}

func load(entries []entry, d *pickle.Dict) error {
	var errs []error
	for _, e := range entries {
		v, ok := d.Get(e.key)
		if !ok {
			if len(e.key) > 0 && e.key[0] != '_' {
				errs = append(errs, misfit("the scheduler's state has no %s", e.key))
			}
			continue
		}
		errs = append(errs, e.set(v))
	}
	return errors.Join(errs...)
}
