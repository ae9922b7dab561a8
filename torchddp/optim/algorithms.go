package optim

import "github.com/goddp/goddp/internal/tdp"

// SGD is torch.optim.SGD: stochastic gradient descent with momentum.
type SGD struct {
	*Base
	defaults SGDOptions
}

// NewSGD makes an SGD optimizer. Close frees it.
func NewSGD[P Params[SGDOptions]](params P, o SGDOptions) (*SGD, error) {
	o.fill()
	b, err := build("SGD", tdp.SGD, toGroups[SGDOptions](params), o)
	if err != nil {
		return nil, err
	}
	return &SGD{b, o}, nil
}

// Options are the options of a group. What is set in them counts from the next step on.
func (s *SGD) Options(group int) *SGDOptions { return s.groups[group].options.(*SGDOptions) }

// AddParamGroup adds parameters, with the options that the optimizer was made with, changed by the group's Set.
func (s *SGD) AddParamGroup(g Group[SGDOptions]) error { return add(s.Base, &g, s.defaults) }

// Adam is torch.optim.Adam.
type Adam struct {
	*Base
	defaults AdamOptions
}

// NewAdam makes an Adam optimizer. Close frees it.
func NewAdam[P Params[AdamOptions]](params P, o AdamOptions) (*Adam, error) {
	o.fill()
	b, err := build("Adam", tdp.Adam, toGroups[AdamOptions](params), o)
	if err != nil {
		return nil, err
	}
	return &Adam{b, o}, nil
}

// Options are the options of a group. What is set in them counts from the next step on.
func (s *Adam) Options(group int) *AdamOptions { return s.groups[group].options.(*AdamOptions) }

// AddParamGroup adds parameters, with the options that the optimizer was made with, changed by the group's Set.
func (s *Adam) AddParamGroup(g Group[AdamOptions]) error { return add(s.Base, &g, s.defaults) }

// AdamW is torch.optim.AdamW: Adam with weight decay outside the gradient.
type AdamW struct {
	*Base
	defaults AdamWOptions
}

// NewAdamW makes an AdamW optimizer. Close frees it.
func NewAdamW[P Params[AdamWOptions]](params P, o AdamWOptions) (*AdamW, error) {
	o.fill()
	b, err := build("AdamW", tdp.Adam, toGroups[AdamWOptions](params), o)
	if err != nil {
		return nil, err
	}
	return &AdamW{b, o}, nil
}

// Options are the options of a group. What is set in them counts from the next step on.
func (s *AdamW) Options(group int) *AdamWOptions { return s.groups[group].options.(*AdamWOptions) }

// AddParamGroup adds parameters, with the options that the optimizer was made with, changed by the group's Set.
func (s *AdamW) AddParamGroup(g Group[AdamWOptions]) error { return add(s.Base, &g, s.defaults) }

// RMSprop is torch.optim.RMSprop.
type RMSprop struct {
	*Base
	defaults RMSpropOptions
}

// NewRMSprop makes an RMSprop optimizer. Close frees it.
func NewRMSprop[P Params[RMSpropOptions]](params P, o RMSpropOptions) (*RMSprop, error) {
	o.fill()
	b, err := build("RMSprop", tdp.RMSprop, toGroups[RMSpropOptions](params), o)
	if err != nil {
		return nil, err
	}
	return &RMSprop{b, o}, nil
}

// Options are the options of a group. What is set in them counts from the next step on.
func (s *RMSprop) Options(group int) *RMSpropOptions {
	return s.groups[group].options.(*RMSpropOptions)
}

// AddParamGroup adds parameters, with the options that the optimizer was made with, changed by the group's Set.
func (s *RMSprop) AddParamGroup(g Group[RMSpropOptions]) error { return add(s.Base, &g, s.defaults) }

// Adagrad is torch.optim.Adagrad.
type Adagrad struct {
	*Base
	defaults AdagradOptions
}

// NewAdagrad makes an Adagrad optimizer. Close frees it.
func NewAdagrad[P Params[AdagradOptions]](params P, o AdagradOptions) (*Adagrad, error) {
	o.fill()
	b, err := build("Adagrad", tdp.Adagrad, toGroups[AdagradOptions](params), o)
	if err != nil {
		return nil, err
	}
	return &Adagrad{b, o}, nil
}

// Options are the options of a group. What is set in them counts from the next step on.
func (s *Adagrad) Options(group int) *AdagradOptions {
	return s.groups[group].options.(*AdagradOptions)
}

// AddParamGroup adds parameters, with the options that the optimizer was made with, changed by the group's Set.
func (s *Adagrad) AddParamGroup(g Group[AdagradOptions]) error { return add(s.Base, &g, s.defaults) }

// LARS is SGD with a learning rate per parameter tensor, for large batches (You, Gitman, Ginsburg 2017):
//
//	ratio = trust * |w| / (|g| + weight_decay * |w| + eps), or 1 where a norm is zero
//	d     = ratio * (g + weight_decay * w)
//
// and then SGD's momentum and step with d.
type LARS struct {
	*Base
	defaults LARSOptions
}

// NewLARS makes a LARS optimizer. Close frees it.
func NewLARS[P Params[LARSOptions]](params P, o LARSOptions) (*LARS, error) {
	o.fill()
	b, err := build("LARS", tdp.LARS, toGroups[LARSOptions](params), o)
	if err != nil {
		return nil, err
	}
	return &LARS{b, o}, nil
}

// Options are the options of a group. What is set in them counts from the next step on.
func (s *LARS) Options(group int) *LARSOptions { return s.groups[group].options.(*LARSOptions) }

// AddParamGroup adds parameters, with the options that the optimizer was made with, changed by the group's Set.
func (s *LARS) AddParamGroup(g Group[LARSOptions]) error { return add(s.Base, &g, s.defaults) }

// LAMB is Adam with a learning rate per parameter tensor, for large batches (You et al. 2020):
//
//	u     = m̂ / (√v̂ + eps) + weight_decay * w
//	ratio = |w| / |u|, or 1 where a norm is zero
//	w    -= lr * ratio * u
type LAMB struct {
	*Base
	defaults LAMBOptions
}

// NewLAMB makes a LAMB optimizer. Close frees it.
func NewLAMB[P Params[LAMBOptions]](params P, o LAMBOptions) (*LAMB, error) {
	o.fill()
	b, err := build("LAMB", tdp.LAMB, toGroups[LAMBOptions](params), o)
	if err != nil {
		return nil, err
	}
	return &LAMB{b, o}, nil
}

// Options are the options of a group. What is set in them counts from the next step on.
func (s *LAMB) Options(group int) *LAMBOptions { return s.groups[group].options.(*LAMBOptions) }

// AddParamGroup adds parameters, with the options that the optimizer was made with, changed by the group's Set.
func (s *LAMB) AddParamGroup(g Group[LAMBOptions]) error { return add(s.Base, &g, s.defaults) }
