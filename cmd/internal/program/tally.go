package program

import (
	"errors"
	"strconv"
	"strings"

	"github.com/goddp/goddp/data"
	"github.com/goddp/goddp/models/nn"
	"github.com/goddp/goddp/train"
	"github.com/sugarme/gotch"
	"github.com/sugarme/gotch/ts"
)

// Tally adds up what a rank's own batches gave since its epoch began, as the tutorials' loops do. Its sums stay on the
// device: only reading them waits for it.
type Tally struct {
	Batches, Samples int

	sums [2]*ts.Tensor // the batches' losses; correct samples
}

// Watch gives a step function that also tells the tally, in training.
func (t *Tally) Watch(step train.StepFunc[*data.Batch]) train.StepFunc[*data.Batch] {
	return func(m train.Model, b *data.Batch) (train.Result, error) {
		r, err := step(m, b)
		if err == nil && m.Training() {
			err = t.add(r)
		}
		return r, err
	}
}

func (t *Tally) add(r train.Result) error {
	if len(r.Sums) != 1 {
		return errors.New("program: the tally wants the accuracy beside the loss")
	}
	t.Batches++
	t.Samples += r.Samples
	for i, v := range []*ts.Tensor{r.Loss, r.Sums[0].Total} {
		sum, err := nn.Try(func() *ts.Tensor {
			wide := v.MustDetach(false).MustTotype(gotch.Double, true)
			if t.sums[i] == nil {
				return wide
			}
			defer wide.MustDrop()
			return t.sums[i].MustAdd(wide, true)
		})
		if err != nil {
			return err
		}
		t.sums[i] = sum
	}
	return nil
}

// Read gives the mean of the batches' losses, and the percentage of correct samples.
func (t *Tally) Read() (loss, accuracy float64) {
	if t.Batches == 0 {
		return 0, 0
	}
	loss = t.sums[0].Float64Values()[0] / float64(t.Batches)
	return loss, 100 * t.sums[1].Float64Values()[0] / float64(t.Samples)
}

// Reset begins anew.
func (t *Tally) Reset() {
	for _, s := range t.sums {
		if s != nil {
			s.MustDrop()
		}
	}
	*t = Tally{}
}

// Float writes a number as Python's print does: with all its digits, and with a point.
func Float(v float64) string {
	s := strconv.FormatFloat(v, 'f', -1, 64)
	if strings.Trim(s, "-0123456789") == "" {
		s += ".0"
	}
	return s
}
