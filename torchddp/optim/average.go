package optim

import (
	"errors"
	"fmt"
	"iter"
	"slices"

	"github.com/sugarme/gotch"
	"github.com/sugarme/gotch/ts"

	"github.com/goddp/goddp/checkpoint/pickle"
	"github.com/goddp/goddp/internal/tdp"
)

// FullModel is a model with parameters and buffers that have names.
type FullModel interface {
	Model
	NamedBuffers() iter.Seq2[string, *ts.Tensor]
}

// AverageOptions are the options of an [AveragedModel].
type AverageOptions struct {
	// Decay makes the average exponential: average = Decay*average + (1-Decay)*weights. 0 weighs all updates equally:
	// stochastic weight averaging.
	Decay float64
	// UseBuffers averages buffers too. Otherwise they are copied from the model at every update.
	UseBuffers bool
}

// AveragedModel holds an average over time of a model's weights: torch.optim.swa_utils.AveragedModel. Evaluate with the
// averages by Swap.
type AveragedModel struct {
	options                   AverageOptions
	names                     []string
	live, average             []*ts.Tensor // parameters, then buffers
	params                    int          // how many are parameters
	count                     int64
	swapped                   bool
	followed, followedAverage []*ts.Tensor // what Update averages
	copied, copiedAverage     []*ts.Tensor // what it copies
}

// NewAveragedModel makes averages beside a model's weights, on the same devices. Close drops them.
func NewAveragedModel(m FullModel, o AverageOptions) (*AveragedModel, error) {
	if !(o.Decay >= 0 && o.Decay <= 1) {
		return nil, fmt.Errorf("invalid decay value %s provided. Please provide a value in [0,1] range", pyFloat(o.Decay))
	}
	a := &AveragedModel{options: o}
	for n, p := range m.NamedParameters() {
		a.names, a.live = append(a.names, n), append(a.live, p)
	}
	a.params = len(a.live)
	for n, b := range m.NamedBuffers() {
		a.names, a.live = append(a.names, n), append(a.live, b)
	}
	for i, t := range a.live {
		c, err := clone(t)
		if err != nil {
			return nil, errors.Join(fmt.Errorf("%s: %w", a.names[i], err), a.Close())
		}
		a.average = append(a.average, c)
	}
	n := a.params
	if o.UseBuffers {
		n = len(a.live)
	}
	a.followed, a.followedAverage = a.live[:n], a.average[:n]
	a.copied, a.copiedAverage = a.live[n:], a.average[n:]
	return a, nil
}

func clone(t *ts.Tensor) (*ts.Tensor, error) {
	info, err := tdp.Describe(t)
	if err != nil {
		return nil, err
	}
	c, err := tdp.Empty(info.Shape, info.DType, info.Device, false)
	if err != nil {
		return nil, err
	}
	return c, tdp.Copy(c, t, false)
}

// Update takes the model's weights into the average. The first update copies them.
func (a *AveragedModel) Update() error {
	if a.swapped {
		return errors.New("the model holds the averages: swap back before Update")
	}
	mode := tdp.AverageEqual
	switch {
	case a.count == 0:
		mode = tdp.AverageCopy
	case a.options.Decay != 0:
		mode = tdp.AverageEMA
	}
	if err := tdp.Average(a.followedAverage, a.followed, mode, a.options.Decay, a.count); err != nil {
		return err
	}
	if err := tdp.Average(a.copiedAverage, a.copied, tdp.AverageCopy, 0, 0); err != nil {
		return err
	}
	a.count++
	return nil
}

// Swap exchanges the model's weights with the averages, in place: evaluate with the averages, then Swap back.
func (a *AveragedModel) Swap() error {
	if err := tdp.Average(a.average, a.live, tdp.AverageSwap, 0, 0); err != nil {
		return err
	}
	a.swapped = !a.swapped
	return nil
}

// Count is the number of updates so far.
func (a *AveragedModel) Count() int { return int(a.count) }

// NamedParameters are the averages of the model's parameters.
func (a *AveragedModel) NamedParameters() iter.Seq2[string, *ts.Tensor] {
	return pairs(a.names[:a.params], a.average[:a.params])
}

// NamedBuffers are the averages, or copies, of the model's buffers.
func (a *AveragedModel) NamedBuffers() iter.Seq2[string, *ts.Tensor] {
	return pairs(a.names[a.params:], a.average[a.params:])
}

func pairs(names []string, tensors []*ts.Tensor) iter.Seq2[string, *ts.Tensor] {
	return func(yield func(string, *ts.Tensor) bool) {
		for i, n := range names {
			if !yield(n, tensors[i]) {
				return
			}
		}
	}
}

// StateDict has the averages under the names that Python's AveragedModel gives them.
func (a *AveragedModel) StateDict() (*pickle.Dict, error) {
	if a.swapped {
		return nil, errors.New("the model holds the averages: swap back before StateDict")
	}
	n, err := tdp.FromSlice([]int64{a.count}, nil, gotch.CPU)
	if err != nil {
		return nil, err
	}
	d := pickle.NewOrderedDict().Set("n_averaged", n)
	for i, name := range a.names {
		d.Set("module."+name, a.average[i])
	}
	return d, nil
}

// LoadStateDict continues from a state that StateDict, here or in Python, gave.
func (a *AveragedModel) LoadStateDict(d *pickle.Dict) error {
	if a.swapped {
		return errors.New("the model holds the averages: swap back before LoadStateDict")
	}
	v, _ := d.Get("n_averaged")
	count, ok := number(v)
	if !ok {
		return misfit("it has no n_averaged")
	}
	values := make([]*ts.Tensor, len(a.names))
	for i, name := range a.names {
		v, _ := d.Get("module." + name)
		if values[i], ok = v.(*ts.Tensor); !ok {
			return misfit("it has no module.%s", name)
		}
		have, err := tdp.Describe(values[i])
		if err != nil {
			return err
		}
		want, err := tdp.Describe(a.average[i])
		if err != nil {
			return err
		}
		if !slices.Equal(have.Shape, want.Shape) {
			return misfit("module.%s has shape %v, the model's %v", name, have.Shape, want.Shape)
		}
	}
	if err := tdp.Average(a.average, values, tdp.AverageCopy, 0, 0); err != nil {
		return err
	}
	a.count = int64(count)
	return nil
}

// Close drops the averages.
func (a *AveragedModel) Close() error {
	var errs []error
	for _, t := range a.average {
		errs = append(errs, t.Drop())
	}
	a.average = nil
	return errors.Join(errs...)
}
