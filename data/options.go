package data

import (
	"errors"
	"fmt"
	"time"

	"github.com/sugarme/gotch"
)

// Options tune a DataLoader. The zero value loads sample by sample, in order, on the caller's goroutine, to the CPU.
type Options struct {
	BatchSize int // 0 is 1
	Shuffle   bool
	Sampler   Sampler      // instead of Shuffle
	Batches   BatchSampler // instead of BatchSize, Shuffle, Sampler and DropLast
	DropLast  bool         // leave out a last batch that is not full

	// Workers is how many goroutines write samples; 0 writes them inline, in the loop's own goroutine. Workers share the
	// rows of a batch, so that many of them need no more memory than few.
	Workers int
	// Prefetch is how many batches are in the making or waiting; 0 is 2 with workers. The loader's memory never exceeds
	// Prefetch+1 batches: these, and the one in the loop's hands.
	Prefetch int
	// Unordered hands batches over as they get ready: in_order=False in Python.
	Unordered bool
	// Timeout is how long the loop waits for one batch; 0 is for ever. A sample that hangs must heed its context: one
	// that does not keeps its goroutine until it returns.
	Timeout time.Duration

	Device    gotch.Device // where the batches' tensors are to be; the zero value is the CPU
	PinMemory bool         // page-locked CPU tensors; batches for a GPU are always staged in such memory
	// Reuse writes batches into the memory of former ones. Faster, but a view of an old batch changes its contents.
	Reuse bool

	// Generator draws the seeds of each pass and, with Shuffle, the order; nil is the default generator.
	Generator *Generator
}

// ErrOptions is wrapped by errors about options that exclude each other or make no sense.
var ErrOptions = errors.New("invalid loader options")

func bad(format string, args ...any) error {
	return fmt.Errorf("data: %w: %s", ErrOptions, fmt.Sprintf(format, args...))
}

// check fills in defaults.
func (o *Options) check() error {
	switch {
	case o.Workers < 0:
		return bad("num_workers option should be non-negative; use Workers 0 to load inline, got %d", o.Workers)
	case o.Timeout < 0:
		return bad("timeout option should be non-negative, got %v", o.Timeout)
	case o.Prefetch < 0 || o.Prefetch > 0 && o.Workers == 0:
		return bad("Prefetch %d needs Workers > 0, got %d", o.Prefetch, o.Workers)
	case o.Unordered && o.Workers == 0, o.Timeout > 0 && o.Workers == 0:
		return bad("Unordered and Timeout need Workers > 0")
	case o.Sampler != nil && o.Shuffle:
		return bad("sampler option is mutually exclusive with shuffle")
	case o.Batches != nil && (o.BatchSize > 1 || o.Shuffle || o.Sampler != nil || o.DropLast):
		return bad("batch_sampler option is mutually exclusive with batch_size, shuffle, sampler, and drop_last")
	case o.BatchSize < 0:
		return bad("batch_size should be a positive integer value, but got batch_size=%d", o.BatchSize)
	}
	if o.BatchSize == 0 {
		o.BatchSize = 1
	}
	if o.Workers > 0 && o.Prefetch == 0 {
		o.Prefetch = 2
	}
	switch o.Device.Name {
	case "", "CPU":
		o.Device = gotch.CPU
	case "CUDA":
	default:
		return bad("batches for the device %q: the CPU and CUDA are known", o.Device.Name)
	}
	return nil
}
