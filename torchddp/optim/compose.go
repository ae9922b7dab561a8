package optim

import (
	"errors"
	"fmt"
	"slices"

	"github.com/goddp/goddp/checkpoint/pickle"
)

// composite is what schedules made of others have in common.
type composite struct {
	opt    Optimizer
	parts  []Scheduler
	lastLR []float64
	inner  bool // the first part of a SequentialLR: Python keeps two more entries then
}

func (c *composite) innerEntries() []entry {
	if !c.inner {
		return nil
	}
	return []entry{constant("_step_count", int64(0)), constant("_is_initial", false)}
}

func (c *composite) check(name string) error {
	if len(c.parts) < 1 {
		return fmt.Errorf("%s expects at least one scheduler, but got no scheduler", name)
	}
	for i, p := range c.parts {
		if p.optimizer().base() != c.opt.base() {
			return fmt.Errorf("%s expects all schedulers to belong to the same optimizer, but the one at index %d does not", name, i)
		}
	}
	return nil
}

func (c *composite) optimizer() Optimizer { return c.opt }

func (c *composite) undo() {
	for _, p := range c.parts {
		p.undo()
	}
}

// LastLR are the learning rates that the last step set, one a group.
func (c *composite) LastLR() []float64 { return slices.Clone(c.lastLR) }

func (c *composite) partsEntry() entry {
	return entry{"_schedulers", func() any {
		l := pickle.NewList()
		for _, p := range c.parts {
			l.Items = append(l.Items, p.state())
		}
		return l
	}, func(v any) error {
		l, ok := v.(*pickle.List)
		if !ok || len(l.Items) != len(c.parts) {
			return misfit("_schedulers is no list of %d", len(c.parts))
		}
		var errs []error
		for i, item := range l.Items {
			d, ok := item.(*pickle.Dict)
			if !ok {
				return misfit("the state of scheduler %d is a %T", i, item)
			}
			errs = append(errs, c.parts[i].LoadStateDict(d))
		}
		return errors.Join(errs...)
	}}
}

// SequentialLR runs one schedule after another.
type SequentialLR struct {
	composite
	milestones []int64
	lastEpoch  int64
}

// NewSequentialLR makes a SequentialLR: the second schedule begins at step milestones[0], and so on.
func NewSequentialLR(o Optimizer, parts []Scheduler, milestones []int) (*SequentialLR, error) {
	s := &SequentialLR{composite: composite{opt: o, parts: slices.Clone(parts)}}
	if err := s.check("SequentialLR"); err != nil {
		return nil, err
	}
	if len(milestones) != len(parts)-1 {
		return nil, fmt.Errorf("sequential Schedulers expects number of schedulers provided to be one more than the number of milestone "+
			"points, but got number of schedulers %d and the number of milestones to be equal to %d", len(parts), len(milestones))
	}
	for _, m := range milestones {
		s.milestones = append(s.milestones, int64(m))
	}
	// Every part took its first step when it was made. Those are undone, and only the first part's is taken again.
	for _, g := range o.ParamGroups() {
		if lr, ok := g.extraFloat("initial_lr"); ok {
			g.SetLR(lr)
		}
	}
	s.undo()
	if err := s.parts[0].initialStep(); err != nil {
		return nil, err
	}
	s.lastLR = s.parts[0].LastLR()
	return s, nil
}

func (s *SequentialLR) initialStep() error {
	s.inner = true
	return s.Step()
}

func (s *SequentialLR) updateTo(epoch int64) error {
	s.lastEpoch = epoch - 1
	return s.Step()
}

// Step moves on to the next learning rate.
func (s *SequentialLR) Step() error {
	s.lastEpoch++
	i := 0
	for i < len(s.milestones) && s.milestones[i] <= s.lastEpoch {
		i++
	}
	part := s.parts[i]
	var err error
	if i > 0 && s.milestones[i-1] == s.lastEpoch {
		err = part.updateTo(0)
	} else {
		err = part.Step()
	}
	s.lastLR = part.LastLR()
	return err
}

func (s *SequentialLR) entries() []entry {
	e := []entry{entryOf("_milestones", &s.milestones), entryOf("last_epoch", &s.lastEpoch), entryOf("_last_lr", &s.lastLR)}
	return append(append(e, s.innerEntries()...), s.partsEntry())
}

// StateDict is the schedule's state in Python's layout.
func (s *SequentialLR) StateDict() (*pickle.Dict, error) { return s.state(), nil }

func (s *SequentialLR) state() *pickle.Dict { return dictOf(s.entries()) }

// LoadStateDict continues from a state that StateDict, here or in Python, gave.
func (s *SequentialLR) LoadStateDict(d *pickle.Dict) error { return load(s.entries(), d) }

// ChainedScheduler steps several schedules at once; their factors multiply.
type ChainedScheduler struct{ composite }

// NewChainedScheduler makes a ChainedScheduler.
func NewChainedScheduler(parts ...Scheduler) (*ChainedScheduler, error) {
	s := &ChainedScheduler{composite{parts: slices.Clone(parts)}}
	if len(parts) > 0 {
		s.opt = parts[0].optimizer()
	}
	if err := s.check("ChainedScheduler"); err != nil {
		return nil, err
	}
	s.lastLR = currentLRs(s.opt)
	return s, nil
}

func (s *ChainedScheduler) initialStep() error {
	s.inner = true
	return s.Step()
}

func (s *ChainedScheduler) updateTo(epoch int64) error {
	for _, p := range s.parts {
		if err := p.updateTo(epoch); err != nil {
			return err
		}
	}
	s.lastLR = currentLRs(s.opt)
	return nil
}

// Step moves all parts on.
func (s *ChainedScheduler) Step() error {
	for _, p := range s.parts {
		if err := p.Step(); err != nil {
			return err
		}
	}
	s.lastLR = currentLRs(s.opt)
	return nil
}

func (s *ChainedScheduler) entries() []entry {
	return append(append([]entry{entryOf("_last_lr", &s.lastLR)}, s.innerEntries()...), s.partsEntry())
}

// StateDict is the schedule's state in Python's layout.
func (s *ChainedScheduler) StateDict() (*pickle.Dict, error) { return s.state(), nil }

func (s *ChainedScheduler) state() *pickle.Dict { return dictOf(s.entries()) }

// LoadStateDict continues from a state that StateDict, here or in Python, gave.
func (s *ChainedScheduler) LoadStateDict(d *pickle.Dict) error { return load(s.entries(), d) }

// LargeBatchOptions are for [NewLargeBatch].
type LargeBatchOptions struct {
	Batch     int // samples in one step over all ranks
	BaseBatch int // samples in one step that the optimizer's learning rates are meant for
	// WarmupSteps is how many steps the rate takes from its old value to the scaled one.
	WarmupSteps int
	// After makes the schedule for the steps after the warm-up. nil keeps the scaled rate.
	After func(o Optimizer) (Scheduler, error)
}

// NewLargeBatch applies the linear scaling rule (Goyal et al. 2017): the learning rate of every group grows as the batch
// did, and it grows there step by step, because a network that has just begun does not stand the large one. The result
// is a [SequentialLR] of a [LinearLR] and the schedule after it. Step it once a batch.
func NewLargeBatch(o Optimizer, l LargeBatchOptions) (*SequentialLR, error) {
	if l.Batch < 1 || l.BaseBatch < 1 || l.WarmupSteps < 1 {
		return nil, errors.New("batch, BaseBatch and WarmupSteps must be positive")
	}
	k := float64(l.Batch) / float64(l.BaseBatch)
	for _, g := range o.ParamGroups() {
		if _, ok := g.extra["initial_lr"]; ok {
			return nil, errors.New("the optimizer has a scheduler already: its learning rates cannot be scaled any more")
		}
	}
	for _, g := range o.ParamGroups() {
		g.SetLR(g.LR() * k)
	}
	// A smaller batch scales down at once.
	warm, err := NewLinearLR(o, min(1, 1/k), 1, l.WarmupSteps)
	if err != nil {
		return nil, err
	}
	after := Scheduler(nil)
	if l.After != nil {
		after, err = l.After(o)
	} else {
		after, err = NewConstantLR(o, 1, 0)
	}
	if err != nil {
		return nil, err
	}
	return NewSequentialLR(o, []Scheduler{warm, after}, []int{l.WarmupSteps})
}
