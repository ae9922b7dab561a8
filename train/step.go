package train

import (
	"github.com/sugarme/gotch"
	"github.com/sugarme/gotch/ts"

	"github.com/goddp/goddp/data"
	"github.com/goddp/goddp/models/nn"
	"github.com/goddp/goddp/torchddp"
)

// StepFunc computes the loss of one batch, in training and in evaluation. What it returns is the Trainer's to drop, what
// it makes beside that its own. A panic of it, such as one of gotch's Must functions, ends the run with an error.
type StepFunc[B any] func(m Model, batch B) (Result, error)

// Result is what a batch gave.
type Result struct {
	Loss    *ts.Tensor // a scalar, the mean over the batch
	Samples int        // in the batch: the weight of its loss
	Sums    []Sum      // figures beside the loss, the same ones in the same order for every batch
}

// Sum is a figure of a batch: a scalar, summed over its samples. It is reported as a mean over samples.
type Sum struct {
	Name  string
	Total *ts.Tensor
}

func (r Result) drop() {
	for _, s := range r.Sums {
		drop(s.Total)
	}
	drop(r.Loss)
}

func drop(t *ts.Tensor) {
	if t != nil {
		t.MustDrop()
	}
}

// Model is what a step function computes with: the model under DDP in training, the model alone in evaluation.
type Model struct {
	ddp   *torchddp.DDP
	train bool
}

// Training tells whether gradients will be wanted.
func (m Model) Training() bool { return m.train }

// Module is the model itself.
func (m Model) Module() torchddp.Module { return m.ddp.Module() }

// Forward computes the model's output, which the caller drops.
func (m Model) Forward(x *ts.Tensor) (*ts.Tensor, error) {
	if m.train {
		return m.ddp.Forward(x)
	}
	return nn.Forward(m.ddp.Module(), x, false)
}

// Run is Forward for models with several inputs or outputs: fn computes the outputs that the loss will use, by whatever
// methods the model has.
func (m Model) Run(fn func() ([]*ts.Tensor, error)) ([]*ts.Tensor, error) {
	if m.train {
		return m.ddp.Run(fn)
	}
	return fn()
}

// Metric is a figure beside the loss. Sum gives it summed over the samples of a batch, as a scalar.
type Metric struct {
	Name string
	Sum  func(output, target *ts.Tensor) (*ts.Tensor, error)
}

// Supervised is the usual step function: the model's output for a batch's first tensor is held against its second one.
func Supervised(loss nn.Loss, metrics ...Metric) StepFunc[*data.Batch] {
	return func(m Model, b *data.Batch) (r Result, err error) {
		output, err := m.Forward(b.Input())
		if err != nil {
			return r, err
		}
		defer output.MustDrop()
		defer func() {
			if err != nil {
				r.drop()
			}
		}()
		r.Samples = b.Len()
		if r.Loss, err = nn.Try(func() *ts.Tensor { return loss.Forward(output, b.Target()) }); err != nil {
			return r, err
		}
		for _, metric := range metrics {
			sum, err := metric.Sum(output, b.Target())
			if err != nil {
				return r, err
			}
			r.Sums = append(r.Sums, Sum{metric.Name, sum})
		}
		return r, nil
	}
}

// Accuracy is the share of samples whose highest score is that of the target class.
func Accuracy() Metric {
	return Metric{"accuracy", func(output, target *ts.Tensor) (*ts.Tensor, error) {
		class, err := output.Argmax([]int64{1}, false, false)
		if err != nil {
			return nil, err
		}
		right, err := class.EqTensor(target, true)
		if err != nil {
			class.MustDrop()
			return nil, err
		}
		defer right.MustDrop()
		return right.Sum(gotch.Int64, false)
	}}
}
