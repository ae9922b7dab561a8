package models

import (
	"fmt"
	"maps"
	"slices"

	gotchnn "github.com/sugarme/gotch/nn"
	"github.com/sugarme/gotch/ts"

	"github.com/goddp/goddp/internal/tdp"
	"github.com/goddp/goddp/models/nn"
)

// VarStoreModule is a gotch model: a VarStore with its variables, and what computes with them.
type VarStoreModule struct {
	nn.Base
	vars    *gotchnn.VarStore
	model   ts.ModuleT
	tensors []*ts.Tensor
}

// FromVarStore wraps a gotch model without changing it. model is gotch's ts.ModuleT; gotch's nn.NewFuncT makes one of a
// closure.
//
// A VarStore keeps no order, so variables are taken in the order of their names, which is the same on every rank.
// Those that require a gradient are parameters, the others are buffers: freeze variables after wrapping. Move the model
// with To of the result; the VarStore's own ToDevice would leave DDP and optimizers with the old tensors.
func FromVarStore(vars *gotchnn.VarStore, model ts.ModuleT) (*VarStoreModule, error) {
	if vars == nil || model == nil {
		return nil, fmt.Errorf("FromVarStore: %w: it needs a VarStore and a model", tdp.ErrValue)
	}
	m := &VarStoreModule{vars: vars, model: model}
	all := vars.Variables()
	m.tensors = make([]*ts.Tensor, len(all))
	for i, name := range slices.Sorted(maps.Keys(all)) {
		v := all[name]
		info, err := tdp.Describe(&v)
		if err == nil {
			m.tensors[i], err = tdp.Share(&v)
		}
		if err == nil {
			err = m.RegisterForeign(name, &m.tensors[i], !info.RequiresGrad)
		}
		if err != nil {
			return nil, fmt.Errorf("variable %s: %w", name, err)
		}
	}
	return m, nil
}

// VarStore gives the wrapped store.
func (m *VarStoreModule) VarStore() *gotchnn.VarStore { return m.vars }

// ForwardT runs the model.
func (m *VarStoreModule) ForwardT(x *ts.Tensor, train bool) *ts.Tensor {
	return m.model.ForwardT(x, train && m.Training())
}

// ExtraRepr names the Go type of the model.
func (m *VarStoreModule) ExtraRepr() string { return fmt.Sprintf("%T", m.model) }

func (m *VarStoreModule) String() string { return nn.Repr(m) }
