package data

import (
	"fmt"

	"github.com/goddp/goddp/internal/tdp"
	"github.com/sugarme/gotch"
	"github.com/sugarme/gotch/ts"
)

// stager brings a batch from pinned memory to a device. It returns when src may be written again. join, unless nil, runs
// on the loop's own thread before the loop gets the batch.
type stager func(dev gotch.Device, src []*ts.Tensor) (moved []*ts.Tensor, join func() error, err error)

// stageAside copies on a stream of its own and waits for it on the worker's thread: the loop's computations are not held
// up, the batch is whole when the loop gets it, and its memory is not used again before what the loop computes with it
// has run.
func stageAside(dev gotch.Device, src []*ts.Tensor) ([]*ts.Tensor, func() error, error) {
	moved, err := tdp.CopyAside(dev, src)
	if err != nil {
		return nil, nil, fmt.Errorf("to %s %d: %w", dev.Name, dev.Value, err)
	}
	return moved, func() error { return tdp.RecordStream(moved) }, nil
}
