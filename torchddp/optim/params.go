package optim

import (
	"errors"
	"fmt"
	"iter"

	"github.com/sugarme/gotch/ts"

	"github.com/goddp/goddp/internal/tdp"
)

// Params is what an optimizer with options of type O can be made for:
//
//   - a slice of parameters,
//   - parameters with their names, as a model's NamedParameters gives them,
//   - groups of parameters that differ in their options.
//
// Parameters that do not require a gradient may be among them; without a gradient a parameter is left alone.
type Params[O any] interface {
	[]*ts.Tensor | iter.Seq2[string, *ts.Tensor] | func(yield func(string, *ts.Tensor) bool) | []Group[O]
}

// Group is a set of parameters with options of its own.
type Group[O any] struct {
	// Params are the parameters, or Named are, with their names. Names are saved in the state dict.
	Params []*ts.Tensor
	Named  iter.Seq2[string, *ts.Tensor]
	// Set changes the options of this group. It is given the optimizer's, with Python's defaults filled in, so a zero
	// written here is a zero. nil leaves them as they are.
	Set func(o *O)
}

// Model is what has parameters with names: every model of goddp.
type Model interface {
	NamedParameters() iter.Seq2[string, *ts.Tensor]
}

// Parameters collects a model's parameters in order, without their names: model.parameters() in Python.
func Parameters(m Model) []*ts.Tensor {
	var out []*ts.Tensor
	for _, p := range m.NamedParameters() {
		out = append(out, p)
	}
	return out
}

// SplitDecay sorts parameters into those that weight decay is usually meant for, with two dimensions or more, and the
// rest: biases and the weights of normalisation layers.
func SplitDecay(named iter.Seq2[string, *ts.Tensor]) (decay, rest []*ts.Tensor, err error) {
	for name, p := range named {
		info, err := tdp.Describe(p)
		if err != nil {
			return nil, nil, fmt.Errorf("parameter %s: %w", name, err)
		}
		if len(info.Shape) >= 2 {
			decay = append(decay, p)
		} else {
			rest = append(rest, p)
		}
	}
	return decay, rest, nil
}

func (g *Group[O]) collect() (params []*ts.Tensor, names []string, err error) {
	if g.Named == nil {
		return g.Params, nil, nil
	}
	if len(g.Params) > 0 {
		return nil, nil, errors.New("all optimizer params should be with/without names: a group has both Params and Named")
	}
	for name, p := range g.Named {
		params, names = append(params, p), append(names, name)
	}
	return params, names, nil
}

// toGroups brings every form of parameters into groups.
func toGroups[O any, P Params[O]](params P) []Group[O] {
	switch p := any(params).(type) {
	case []*ts.Tensor:
		return []Group[O]{{Params: p}}
	case iter.Seq2[string, *ts.Tensor]:
		return []Group[O]{{Named: p}}
	case func(yield func(string, *ts.Tensor) bool):
		return []Group[O]{{Named: p}}
	default:
		return p.([]Group[O])
	}
}
