package nn

import (
	"fmt"

	"github.com/sugarme/gotch/ts"

	"github.com/goddp/goddp/internal/tdp"
)

// Reduction tells what a loss makes of its elements.
type Reduction int

// The reductions.
const (
	Mean Reduction = iota
	Sum
	None // one loss an element
)

func (r Reduction) of() (tdp.Reduction, error) {
	switch r {
	case Mean:
		return tdp.ReduceMean, nil
	case Sum:
		return tdp.ReduceSum, nil
	case None:
		return tdp.ReduceNone, nil
	}
	return 0, fmt.Errorf("%w: unknown reduction %d", tdp.ErrValue, int(r))
}

// Loss is what every loss of this package is. Forward leaves both tensors to the caller, gives a new one, and panics
// with an error value when it fails, as a module's forward does.
type Loss interface {
	Forward(input, target *ts.Tensor) *ts.Tensor
}

// LossError is a loss that could not be computed.
type LossError struct {
	Loss          string
	Input, Target []int64 // the shapes
	Err           error
}

func (e *LossError) Error() string {
	return fmt.Sprintf("%s of input %v and target %v: %v", e.Loss, e.Input, e.Target, e.Err)
}

// Unwrap gives what failed.
func (e *LossError) Unwrap() error { return e.Err }

func loss(name string, kind tdp.LossKind, input, target *ts.Tensor, r Reduction, s tdp.LossSpec) *ts.Tensor {
	var y *ts.Tensor
	var err error
	if s.Reduction, err = r.of(); err == nil {
		y, err = tdp.Loss(kind, input, target, &s)
	}
	if err != nil {
		panic(&LossError{Loss: name, Input: shapeOf(input), Target: shapeOf(target), Err: err})
	}
	return y
}

// CrossEntropyLoss is the loss of class scores against class indices (int64), or class probabilities (floating point).
type CrossEntropyLoss struct {
	Weight         *ts.Tensor // one factor a class, or nil
	IgnoreIndex    *int64     // targets of this class do not count; nil: -100
	Reduction      Reduction
	LabelSmoothing float64 // in [0, 1]
}

// Forward computes the loss.
func (l CrossEntropyLoss) Forward(input, target *ts.Tensor) *ts.Tensor {
	return loss("CrossEntropyLoss", tdp.CrossEntropyLoss, input, target, l.Reduction,
		tdp.LossSpec{Weight: l.Weight, IgnoreIndex: ignored(l.IgnoreIndex), Parameter: l.LabelSmoothing})
}

func ignored(index *int64) int64 {
	if index == nil {
		return -100
	}
	return *index
}

// NLLLoss is the negative log likelihood of log probabilities against class indices.
type NLLLoss struct {
	Weight      *ts.Tensor // one factor a class, or nil
	IgnoreIndex *int64     // targets of this class do not count; nil: -100
	Reduction   Reduction
}

// Forward computes the loss.
func (l NLLLoss) Forward(input, target *ts.Tensor) *ts.Tensor {
	return loss("NLLLoss", tdp.NLLLoss, input, target, l.Reduction,
		tdp.LossSpec{Weight: l.Weight, IgnoreIndex: ignored(l.IgnoreIndex)})
}

// MSELoss is the squared difference. Unlike Python's, it refuses to broadcast one shape to the other.
type MSELoss struct{ Reduction Reduction }

// Forward computes the loss.
func (l MSELoss) Forward(input, target *ts.Tensor) *ts.Tensor {
	return loss("MSELoss", tdp.MSELoss, input, target, l.Reduction, tdp.LossSpec{})
}

// L1Loss is the absolute difference. Unlike Python's, it refuses to broadcast one shape to the other.
type L1Loss struct{ Reduction Reduction }

// Forward computes the loss.
func (l L1Loss) Forward(input, target *ts.Tensor) *ts.Tensor {
	return loss("L1Loss", tdp.L1Loss, input, target, l.Reduction, tdp.LossSpec{})
}

// SmoothL1Loss is squared below Beta and linear above. Unlike Python's, it refuses to broadcast one shape to the other.
type SmoothL1Loss struct {
	Reduction Reduction
	Beta      float64 // 0: 1.0, Python's default. For beta 0 take L1Loss, which is the same
}

// Forward computes the loss.
func (l SmoothL1Loss) Forward(input, target *ts.Tensor) *ts.Tensor {
	beta := l.Beta
	if beta == 0 {
		beta = 1
	}
	return loss("SmoothL1Loss", tdp.SmoothL1Loss, input, target, l.Reduction, tdp.LossSpec{Parameter: beta})
}

// BCEWithLogitsLoss is binary cross entropy of scores before the sigmoid.
type BCEWithLogitsLoss struct {
	Weight    *ts.Tensor // a factor an element, or nil
	PosWeight *ts.Tensor // a factor for positive targets, or nil
	Reduction Reduction
}

// Forward computes the loss.
func (l BCEWithLogitsLoss) Forward(input, target *ts.Tensor) *ts.Tensor {
	return loss("BCEWithLogitsLoss", tdp.BCELogitsLoss, input, target, l.Reduction,
		tdp.LossSpec{Weight: l.Weight, PosWeight: l.PosWeight})
}
