package nn

import (
	"fmt"
	"strconv"
	"strings"

	"github.com/sugarme/gotch/ts"

	"github.com/goddp/goddp/internal/tdp"
)

// Sequential runs modules one after the other.
type Sequential struct {
	Base
	modules []*Module
}

// Named is a module with a name of its own in a Sequential.
type Named struct {
	Name   string
	Module Module
}

// NewSequential makes a chain whose members are called "0", "1", and so on. A nil module is a mistake of the program
// and panics with an error value.
func NewSequential(modules ...Module) *Sequential {
	s := &Sequential{}
	for _, m := range modules {
		Check(s.Append(strconv.Itoa(len(s.modules)), m))
	}
	return s
}

// NewNamedSequential makes a chain whose members have names, as Python's Sequential(OrderedDict(...)).
func NewNamedSequential(modules ...Named) (*Sequential, error) {
	s := &Sequential{}
	for _, m := range modules {
		if err := s.Append(m.Name, m.Module); err != nil {
			return nil, err
		}
	}
	return s, nil
}

// Append adds a module at the end.
func (s *Sequential) Append(name string, m Module) error {
	return appendTo(&s.Base, &s.modules, name, m)
}

func appendTo(b *Base, list *[]*Module, name string, m Module) error {
	if m == nil {
		return fmt.Errorf("%w: module %q is nil", ErrTree, name)
	}
	slot := &m
	if err := b.adopt(name, func() Module { return *slot }); err != nil {
		return err
	}
	*list = append(*list, slot)
	return nil
}

// Len is the number of modules.
func (s *Sequential) Len() int { return len(s.modules) }

// At gives the i-th module.
func (s *Sequential) At(i int) Module { return *s.modules[i] }

// Set replaces the i-th module.
func (s *Sequential) Set(i int, m Module) error { return setIn(s.modules, &s.Base, i, m) }

func setIn(list []*Module, b *Base, i int, m Module) error {
	if m == nil {
		return fmt.Errorf("%w: module %d is nil", ErrTree, i)
	}
	if i < 0 || i >= len(list) {
		return fmt.Errorf("%w: there is no module %d among %d", ErrTree, i, len(list))
	}
	*list[i] = m
	m.base().parent, m.base().name = b, b.children[i].name
	return nil
}

// ForwardT runs the chain.
func (s *Sequential) ForwardT(x *ts.Tensor, train bool) *ts.Tensor {
	y := x
	for _, m := range s.modules {
		next := (*m).ForwardT(y, train && !s.eval)
		if y != x && y != next {
			y.MustDrop()
		}
		y = next
	}
	if y == x {
		return Must(tdp.Share(x))
	}
	return y
}

func (s *Sequential) String() string { return Repr(s) }

// ModuleList holds modules for a model that runs them itself.
type ModuleList struct {
	Base
	modules []*Module
}

// NewModuleList makes a list whose members are called "0", "1", and so on. A nil module is a mistake of the program and
// panics with an error value.
func NewModuleList(modules ...Module) *ModuleList {
	l := &ModuleList{}
	for _, m := range modules {
		Check(l.Append(m))
	}
	return l
}

// Append adds a module at the end.
func (l *ModuleList) Append(m Module) error {
	return appendTo(&l.Base, &l.modules, strconv.Itoa(len(l.modules)), m)
}

// Len is the number of modules.
func (l *ModuleList) Len() int { return len(l.modules) }

// At gives the i-th module.
func (l *ModuleList) At(i int) Module { return *l.modules[i] }

// Set replaces the i-th module.
func (l *ModuleList) Set(i int, m Module) error { return setIn(l.modules, &l.Base, i, m) }

// ForwardT panics with an error: a list has no forward, the model that holds it calls its members.
func (l *ModuleList) ForwardT(x *ts.Tensor, train bool) *ts.Tensor {
	return result(l, x, nil, nil, fmt.Errorf("%w: a ModuleList has no forward: call its members, or use a Sequential", tdp.ErrUnsupported))
}

func (l *ModuleList) String() string { return Repr(l) }

// repr prints equal neighbours once, as Python does.
func (l *ModuleList) repr() string {
	if len(l.modules) == 0 {
		return "ModuleList()"
	}
	var lines []string
	for i := 0; i < len(l.modules); {
		text := Repr(*l.modules[i])
		j := i + 1
		for j < len(l.modules) && Repr(*l.modules[j]) == text {
			j++
		}
		line := fmt.Sprintf("(%d): %s", i, text)
		if j-i > 1 {
			line = fmt.Sprintf("(%d-%d): %d x %s", i, j-1, j-i, text)
		}
		lines = append(lines, indent(line))
		i = j
	}
	return "ModuleList(\n  " + strings.Join(lines, "\n  ") + "\n)"
}
