package optim

import (
	"errors"
	"fmt"
	"math"
	"slices"

	"github.com/sugarme/gotch"
	"github.com/sugarme/gotch/ts"

	"github.com/goddp/goddp/checkpoint/pickle"
	"github.com/goddp/goddp/internal/tdp"
)

// ErrStateDict is the kind of error of a state dict that does not fit the optimizer, scheduler or scaler.
var ErrStateDict = errors.New("state dict does not fit")

// allSlots names every state tensor an optimizer can have, in Python's order.
func (b *Base) allSlots() []slot {
	switch b.name {
	case "SGD", "LARS":
		return []slot{{"momentum_buffer", tdp.Slot1}}
	case "RMSprop":
		return []slot{{"step", tdp.SlotStep}, {"square_avg", tdp.Slot1}, {"momentum_buffer", tdp.Slot2}, {"grad_avg", tdp.Slot3}}
	case "Adagrad":
		return []slot{{"step", tdp.SlotStep}, {"sum", tdp.Slot1}}
	case "LAMB":
		return adamSlots(false)
	}
	return adamSlots(true)
}

// StateDict is the optimizer's state as Python lays it out:
//
//	{"state": {parameter number: {name: tensor}}, "param_groups": [{option: value, ..., "params": [numbers]}]}
//
// The tensors are the optimizer's own, not copies: the next step changes them. The handles on them are the caller's, to
// drop when they are no longer needed. Package checkpoint writes the result
// so that torch.load and torch.optim's load_state_dict read it.
func (b *Base) StateDict() (*pickle.Dict, error) {
	if b.native == nil {
		return nil, ErrClosed
	}
	state, groups := pickle.NewDict(), pickle.NewList()
	for gi, g := range b.groups {
		groups.Items = append(groups.Items, g.dict())
		for pi := range g.params {
			entry := pickle.NewDict()
			for _, s := range b.allSlots() {
				t, err := b.native.State(gi, pi, s.slot)
				if err != nil {
					return nil, err
				}
				if t != nil {
					entry.Set(s.name, t)
				}
			}
			if entry.Len() > 0 {
				state.Set(int64(g.first+pi), entry)
			}
		}
	}
	return pickle.NewDict().Set("state", state).Set("param_groups", groups), nil
}

// State gives one of a parameter's state tensors by Python's name, such as "exp_avg", or nil where it has none yet.
// It is the optimizer's own tensor.
func (b *Base) State(group, param int, name string) (*ts.Tensor, error) {
	if b.native == nil {
		return nil, ErrClosed
	}
	for _, s := range b.allSlots() {
		if s.name == name {
			return b.native.State(group, param, s.slot)
		}
	}
	return nil, fmt.Errorf("%s has no state named %q", b.name, name)
}

// LoadStateDict continues from a state that StateDict gave, or Python's state_dict after package checkpoint read it.
// As in Python the options come with it, learning rate and implementation included, and tensors are copied to the
// parameters' devices and dtypes. On error nothing has changed, unless it says that memory ran out.
func (b *Base) LoadStateDict(d *pickle.Dict) error {
	if b.native == nil {
		return ErrClosed
	}
	if err := b.loadStateDict(d); err != nil {
		return fmt.Errorf("%s: %w", b.name, err)
	}
	return nil
}

func misfit(format string, args ...any) error {
	return fmt.Errorf("%w: "+format, append([]any{ErrStateDict}, args...)...)
}

// where a saved parameter number leads.
type place struct{ group, param int }

func (b *Base) loadStateDict(d *pickle.Dict) error {
	v, _ := d.Get("param_groups")
	saved, ok := v.(*pickle.List)
	if !ok {
		return misfit("it has no param_groups")
	}
	v, _ = d.Get("state")
	state, ok := v.(*pickle.Dict)
	if !ok {
		return misfit("it has no state")
	}
	if len(saved.Items) != len(b.groups) {
		return misfit("loaded state dict has a different number of parameter groups: %d, the optimizer has %d",
			len(saved.Items), len(b.groups))
	}
	loaded := make([]*loadedGroup, len(b.groups))
	places := map[int64]place{}
	for i, g := range b.groups {
		var err error
		if loaded[i], err = g.readGroup(saved.Items[i], b.name, i, places); err != nil {
			return err
		}
	}
	var values []stateValue
	for k, v := range state.All() {
		id, isInt := k.(int64)
		at, known := places[id]
		entry, isDict := v.(*pickle.Dict)
		if !isInt || !known || !isDict {
			continue // state of something that is no parameter: Python carries it along, nothing reads it
		}
		more, err := b.readState(id, at, entry, loaded[at.group].options)
		if err != nil {
			return err
		}
		values = append(values, more...)
	}
	// From here on things change.
	for gi, g := range b.groups {
		for pi := range g.params {
			for _, s := range b.allSlots() {
				if err := b.native.SetState(gi, pi, s.slot, nil, false); err != nil {
					return err
				}
			}
		}
		g.take(loaded[gi])
	}
	for _, x := range values {
		onDevice := *b.groups[x.at.group].options.implementation() == Fused
		if err := b.native.SetState(x.at.group, x.at.param, x.slot, x.value, onDevice); err != nil {
			return err
		}
	}
	return nil
}

// loadedGroup is a group's entry of a state dict, checked and ready to be taken over.
type loadedGroup struct {
	options options
	keys    []string
	extra   map[string]any
	loaded  map[string]any
	names   []string
}

func (g *ParamGroup) readGroup(v any, optimizer string, index int, places map[int64]place) (*loadedGroup, error) {
	d, ok := v.(*pickle.Dict)
	if !ok {
		return nil, misfit("parameter group %d is no dict", index)
	}
	v, _ = d.Get("params")
	ids, ok := v.(*pickle.List)
	if !ok || len(ids.Items) != len(g.params) {
		n := -1
		if ok {
			n = len(ids.Items)
		}
		return nil, misfit("loaded state dict contains a parameter group that doesn't match the size of optimizer's group: "+
			"group %d has %d parameters, saved were %d", index, len(g.params), n)
	}
	for i, v := range ids.Items {
		id, ok := v.(int64)
		if !ok {
			return nil, misfit("a parameter number of group %d is %T", index, v)
		}
		places[id] = place{index, i}
	}
	l := &loadedGroup{options: cloneOptions(g.options), extra: map[string]any{}, loaded: map[string]any{}, names: g.names}
	*l.options.implementation() = Auto
	fields := l.options.fields()
	for k, v := range d.Strings() {
		if k == "params" {
			continue
		}
		l.keys = append(l.keys, k)
		if k == "param_names" {
			names, err := stringList(v)
			if err != nil || len(names) != len(g.params) {
				return nil, misfit("param_names of group %d are not %d names", index, len(g.params))
			}
			l.names = names
			continue
		}
		i := slices.IndexFunc(fields, func(f field) bool { return f.key == k })
		if i < 0 {
			l.extra[k] = v
			continue
		}
		if err := fields[i].set(v); err != nil {
			return nil, misfit("parameter group %d: %v", index, err)
		}
		l.loaded[k] = v
	}
	if g.names != nil && !slices.Contains(l.keys, "param_names") {
		l.keys = append(l.keys, "param_names")
	}
	for _, f := range fields {
		if slices.Contains(l.keys, f.key) {
			continue
		}
		l.keys = append(l.keys, f.key)
		if f.key == "fused" && optimizer == "SGD" {
			// Files from before SGD had a fused kernel mean the loop.
			if err := f.set(false); err != nil {
				return nil, err
			}
			l.loaded["fused"] = false
		}
	}
	if err := l.options.check(); err != nil {
		return nil, misfit("parameter group %d: %v", index, err)
	}
	return l, nil
}

func (g *ParamGroup) take(l *loadedGroup) {
	copyOptions(g.options, l.options)
	g.keys, g.extra, g.loaded, g.names = l.keys, l.extra, l.loaded, l.names
}

// cloneOptions copies options; copyOptions writes them into others of the same type, which the user holds a pointer to.
func cloneOptions(o options) options {
	switch p := o.(type) {
	case *SGDOptions:
		return ptrTo(*p)
	case *AdamOptions:
		return ptrTo(*p)
	case *AdamWOptions:
		return ptrTo(*p)
	case *RMSpropOptions:
		return ptrTo(*p)
	case *AdagradOptions:
		return ptrTo(*p)
	case *LARSOptions:
		return ptrTo(*p)
	case *LAMBOptions:
		return ptrTo(*p)
	}
	panic(fmt.Sprintf("optim: unknown options %T", o))
}

func ptrTo[T any](v T) *T { return &v }

func copyOptions(dst, src options) {
	switch p := dst.(type) {
	case *SGDOptions:
		*p = *src.(*SGDOptions)
	case *AdamOptions:
		*p = *src.(*AdamOptions)
	case *AdamWOptions:
		*p = *src.(*AdamWOptions)
	case *RMSpropOptions:
		*p = *src.(*RMSpropOptions)
	case *AdagradOptions:
		*p = *src.(*AdagradOptions)
	case *LARSOptions:
		*p = *src.(*LARSOptions)
	case *LAMBOptions:
		*p = *src.(*LAMBOptions)
	}
}

func stringList(v any) ([]string, error) {
	l, ok := v.(*pickle.List)
	if !ok {
		return nil, errors.New("not a list")
	}
	out := make([]string, len(l.Items))
	for i, item := range l.Items {
		if out[i], ok = item.(string); !ok {
			return nil, errors.New("not a string")
		}
	}
	return out, nil
}

type stateValue struct {
	at    place
	slot  tdp.StateSlot
	value *ts.Tensor
}

// readState checks one parameter's entry of a state dict.
func (b *Base) readState(id int64, at place, entry *pickle.Dict, o options) ([]stateValue, error) {
	info, err := tdp.Describe(b.groups[at.group].params[at.param])
	if err != nil {
		return nil, fmt.Errorf("parameter %d: %w", id, err)
	}
	var out []stateValue
	have := map[string]bool{}
	for name, v := range entry.Strings() {
		i := slices.IndexFunc(b.allSlots(), func(s slot) bool { return s.name == name })
		if i < 0 {
			return nil, misfit("the state of parameter %d has %q, which %s does not have: was it saved by another optimizer?",
				id, name, b.name)
		}
		if v == nil {
			continue // momentum_buffer=None of old files
		}
		t, ok := v.(*ts.Tensor)
		if !ok {
			step, isNumber := number(v)
			if name != "step" || !isNumber {
				return nil, misfit("%s of parameter %d is a %T, not a tensor", name, id, v)
			}
			// Files from before PyTorch 1.12 have plain numbers.
			if t, err = tdp.FromSlice([]float32{float32(step)}, nil, gotch.CPU); err != nil {
				return nil, err
			}
		}
		ti, err := tdp.Describe(t)
		if err != nil {
			return nil, err
		}
		if name == "step" && ti.Numel != 1 || name != "step" && !slices.Equal(ti.Shape, info.Shape) {
			return nil, misfit("%s of parameter %d has shape %v, the parameter %v", name, id, ti.Shape, info.Shape)
		}
		have[name] = true
		out = append(out, stateValue{at, b.allSlots()[i].slot, t})
	}
	if len(out) == 0 {
		return nil, nil
	}
	for _, s := range o.slots() {
		if !have[s.name] {
			return nil, misfit("the state of parameter %d has no %s, which the group's options call for", id, s.name)
		}
	}
	return out, nil
}

// scalar reads a tensor of one element.
func scalar(t *ts.Tensor) (float64, error) {
	info, err := tdp.Describe(t)
	if err != nil {
		return 0, err
	}
	if info.Numel != 1 {
		return 0, fmt.Errorf("a tensor of shape %v is no number", info.Shape)
	}
	switch info.DType {
	case gotch.Double:
		v, err := tdp.ToSlice[float64](t)
		return first(v), err
	case gotch.Float:
		v, err := tdp.ToSlice[float32](t)
		return float64(first(v)), err
	case gotch.Int64:
		v, err := tdp.ToSlice[int64](t)
		return float64(first(v)), err
	case gotch.Int:
		v, err := tdp.ToSlice[int32](t)
		return float64(first(v)), err
	}
	return math.NaN(), fmt.Errorf("a tensor of dtype %v is no number", info.DType)
}

func first[T any](v []T) (zero T) {
	if len(v) == 0 {
		return zero
	}
	return v[0]
}
