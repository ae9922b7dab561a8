package data

import (
	"fmt"

	"github.com/goddp/goddp/internal/tdp"
	"github.com/sugarme/gotch"
	"github.com/sugarme/gotch/ts"
)

// stager brings a batch from pinned memory to a GPU. It returns when src may be written again. join, unless nil, runs on
// the loop's own thread before the loop gets the batch: there the loop's stream learns to wait for the copy.
type stager func(dev gotch.Device, src []*ts.Tensor) (moved []*ts.Tensor, join func() error, err error)

// stageInStep copies on the device's current stream and waits for it, on the worker's thread: the loop is not held up,
// since a worker does it ahead of time, and no stream can see a half-copied batch.
func stageInStep(dev gotch.Device, src []*ts.Tensor) ([]*ts.Tensor, func() error, error) {
	moved := make([]*ts.Tensor, 0, len(src))
	for i, s := range src {
		info, err := tdp.Describe(s)
		if err != nil {
			drop(moved...)
			return nil, nil, err
		}
		dst, err := tdp.Empty(info.Shape, info.DType, dev, false)
		if err == nil {
			moved = append(moved, dst)
			err = tdp.Copy(dst, s, false)
		}
		if err != nil {
			drop(moved...)
			return nil, nil, fmt.Errorf("field %d to %s %d: %w", i, dev.Name, dev.Value, err)
		}
	}
	return moved, nil, nil
}
