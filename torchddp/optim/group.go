package optim

import (
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"

	"github.com/sugarme/gotch/ts"

	"github.com/goddp/goddp/checkpoint/pickle"
)

// ParamGroup is a group of an optimizer's parameters with their options. Like the dict that it is in Python it can
// carry entries beside the options; schedulers keep theirs there.
type ParamGroup struct {
	params  []*ts.Tensor
	names   []string
	options options
	first   int // number of the first parameter over all groups

	// keys are Python's keys of the group, in order and without "params". extra has the values of those that are not
	// options, loaded the values of options as a state dict gave them: 1 and 1.0 are one number but two pickles.
	keys   []string
	extra  map[string]any
	loaded map[string]any
}

func newParamGroup(params []*ts.Tensor, names []string, o options, first int) *ParamGroup {
	g := &ParamGroup{params: slices.Clone(params), names: names, options: o, first: first, extra: map[string]any{}, loaded: map[string]any{}}
	if names != nil {
		g.keys = append(g.keys, "param_names")
	}
	for _, f := range o.fields() {
		g.keys = append(g.keys, f.key)
	}
	return g
}

// Params are the group's parameters in order.
func (g *ParamGroup) Params() []*ts.Tensor { return slices.Clone(g.params) }

// Names are the parameters' names, or nil where they were given without.
func (g *ParamGroup) Names() []string { return slices.Clone(g.names) }

// LR is the group's learning rate.
func (g *ParamGroup) LR() float64 { return *g.float("lr") }

// SetLR changes the learning rate.
func (g *ParamGroup) SetLR(lr float64) { *g.float("lr") = lr }

func (g *ParamGroup) field(key string) (field, bool) {
	for _, f := range g.options.fields() {
		if f.key == key {
			return f, true
		}
	}
	return field{}, false
}

// float gives an option that is a number. Every group has "lr".
func (g *ParamGroup) float(key string) *float64 {
	f, _ := g.field(key)
	p, _ := f.value.(*float64)
	return p
}

// momentum gives where the momentum, or Adam's first beta, is kept, or nil.
func (g *ParamGroup) momentum() *float64 {
	if f, ok := g.field("betas"); ok {
		return &f.value.(*[2]float64)[0]
	}
	return g.float("momentum")
}

// Value gives an entry of the group by Python's key, as a Python value: an option or an entry beside them.
func (g *ParamGroup) Value(key string) (any, bool) {
	if key == "param_names" && g.names != nil {
		l := pickle.NewList()
		for _, n := range g.names {
			l.Items = append(l.Items, n)
		}
		return l, true
	}
	if f, ok := g.field(key); ok {
		return f.python(g.loaded[key], *g.options.implementation()), true
	}
	v, ok := g.extra[key]
	return v, ok
}

// SetValue changes an entry of the group by Python's key, or adds one beside the options.
func (g *ParamGroup) SetValue(key string, value any) error {
	if f, ok := g.field(key); ok {
		return f.set(value)
	}
	if key == "params" || key == "param_names" {
		return fmt.Errorf("%s of a parameter group cannot be changed", key)
	}
	if !slices.Contains(g.keys, key) {
		g.keys = append(g.keys, key)
	}
	g.extra[key] = value
	return nil
}

func (g *ParamGroup) setExtra(key string, value float64) {
	if !slices.Contains(g.keys, key) {
		g.keys = append(g.keys, key)
	}
	g.extra[key] = value
}

func (g *ParamGroup) extraFloat(key string) (float64, bool) {
	x, ok := number(g.extra[key])
	return x, ok
}

// dict is the group as a state dict has it.
func (g *ParamGroup) dict() *pickle.Dict {
	d := pickle.NewDict()
	for _, k := range g.keys {
		if v, ok := g.Value(k); ok {
			d.Set(k, v)
		}
	}
	ids := pickle.NewList()
	for i := range g.params {
		ids.Items = append(ids.Items, int64(g.first+i))
	}
	return d.Set("params", ids)
}

// python gives a field's value. was is what a state dict had there, and impl is the group's implementation.
func (f field) python(was any, impl Implementation) any {
	switch p := f.value.(type) {
	case *float64:
		if x, ok := number(was); ok && x == *p {
			return was
		}
		if *p == 0 && f.zeroIsInt {
			return int64(0)
		}
		return *p
	case *[2]float64:
		if t, ok := was.(*pickle.Tuple); ok {
			if b, err := pair(t); err == nil && b == *p {
				return t
			}
		}
		return pickle.NewTuple(p[0], p[1])
	case *bool:
		return *p
	case bool:
		return p
	case *Implementation:
		if was == false && impl != implementationOf(f.key) {
			return false
		}
		switch {
		case impl == implementationOf(f.key):
			return true
		case impl == ForLoop && f.key == "foreach":
			return false
		}
		return nil
	}
	return nil
}

// implementationOf gives the implementation that a key of Python's switches on.
func implementationOf(key string) Implementation {
	if key == "fused" {
		return Fused
	}
	return Foreach
}

// set takes a Python value.
func (f field) set(value any) error {
	wrong := func() error { return fmt.Errorf("%s cannot be %v (%T)", f.key, value, value) }
	switch p := f.value.(type) {
	case *float64:
		x, ok := number(value)
		if !ok {
			return wrong()
		}
		*p = x
	case *[2]float64:
		t, ok := value.(*pickle.Tuple)
		if l, isList := value.(*pickle.List); isList {
			t, ok = &pickle.Tuple{Items: l.Items}, true
		}
		if !ok {
			return wrong()
		}
		b, err := pair(t)
		if err != nil {
			return err
		}
		*p = b
	case *bool:
		b, ok := value.(bool)
		if !ok {
			return wrong()
		}
		*p = b
	case bool:
		// AdamW decays decoupled whatever a file says, as in Python.
		if b, ok := value.(bool); !ok || b && !p {
			return fmt.Errorf("%s=%v is not supported: goddp has no CUDA graphs and no differentiable steps; "+
				"set the entry to false before loading", f.key, value)
		}
	case *Implementation:
		b, ok := value.(bool)
		switch {
		case value == nil:
		case !ok:
			return wrong()
		case b:
			*p = implementationOf(f.key)
		case *p == Auto:
			*p = ForLoop
		}
	}
	return nil
}

func pair(t *pickle.Tuple) ([2]float64, error) {
	if len(t.Items) != 2 {
		return [2]float64{}, fmt.Errorf("betas must be two numbers, not %d", len(t.Items))
	}
	a, ok1 := number(t.Items[0])
	b, ok2 := number(t.Items[1])
	if !ok1 || !ok2 {
		return [2]float64{}, fmt.Errorf("betas must be numbers")
	}
	return [2]float64{a, b}, nil
}

// number reads a Python number, or a tensor of one element.
func number(v any) (float64, bool) {
	switch x := v.(type) {
	case float64:
		return x, true
	case int64:
		return float64(x), true
	case int:
		return float64(x), true
	case *ts.Tensor:
		f, err := scalar(x)
		return f, err == nil
	}
	return 0, false
}

// pyFloat writes a float as Python's repr does.
func pyFloat(x float64) string {
	switch {
	case math.IsNaN(x):
		return "nan"
	case math.IsInf(x, 1):
		return "inf"
	case math.IsInf(x, -1):
		return "-inf"
	}
	if a := math.Abs(x); a != 0 && (a < 1e-4 || a >= 1e16) {
		return strconv.FormatFloat(x, 'e', -1, 64)
	}
	s := strconv.FormatFloat(x, 'f', -1, 64)
	if !strings.Contains(s, ".") {
		s += ".0"
	}
	return s
}
