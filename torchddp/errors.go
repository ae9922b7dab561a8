package torchddp

import (
	"fmt"
	"strings"

	"github.com/goddp/goddp/internal/tdp"
)

// What went wrong, for errors.Is.
var (
	ErrTimeout     = tdp.ErrTimeout     // an operation took longer than its timeout
	ErrPeer        = tdp.ErrPeer        // a peer closed its connection or cannot be reached
	ErrStore       = tdp.ErrStore       // the rendezvous store failed
	ErrBackend     = tdp.ErrBackend     // NCCL or another backend failed
	ErrOutOfMemory = tdp.ErrOutOfMemory // the device or host has no memory left
	ErrValue       = tdp.ErrValue       // a rank, shape, dtype, device or option does not fit
	ErrUnsupported = tdp.ErrUnsupported // this backend, device or build does not offer it
	ErrCancelled   = tdp.ErrCancelled   // the context ended first
	ErrDesync      = tdp.ErrDesync      // ranks ran different collectives at the same time
)

// ErrNotMember: this rank is not in the group that it asked for something. It is also an ErrValue.
var ErrNotMember = fmt.Errorf("%w: this rank does not belong to the group", ErrValue)

// ErrDestroyed: the group was destroyed before. It is also an ErrValue.
var ErrDestroyed = fmt.Errorf("%w: the process group was destroyed", ErrValue)

// RankError is an error of one rank.
type RankError struct {
	Rank int
	Op   string // what the rank was doing
	Err  error
}

func (e *RankError) Error() string { return fmt.Sprintf("rank %d: %s: %v", e.Rank, e.Op, e.Err) }

// Unwrap gives the cause.
func (e *RankError) Unwrap() error { return e.Err }

// MismatchError says that ranks do not hold the same model. Every Go rank gets the same one.
type MismatchError struct {
	// Parameter is the name of the first parameter or buffer that differs, as the first rank calls it, or "" where
	// the difference is not in one parameter.
	Parameter string
	// What differs: "count", "name", "shape", "stride", "dtype", "requires_grad", "options" or "error".
	What string
	// Detail tells what each group of ranks has.
	Detail string
}

func (e *MismatchError) Error() string {
	if e.Parameter == "" {
		return fmt.Sprintf("DDP expects the same model on all ranks, but they differ in %s: %s", e.What, e.Detail)
	}
	if e.What == "count" {
		return fmt.Sprintf("DDP expects the same model on all ranks, but they differ in the number of parameters, from %q on: %s", e.Parameter, e.Detail)
	}
	return fmt.Sprintf("DDP expects the same model on all ranks, but they differ in the %s of %q: %s", e.What, e.Parameter, e.Detail)
}

// Unwrap makes errors.Is(err, ErrValue) true.
func (e *MismatchError) Unwrap() error { return ErrValue }

// UnusedParametersError says that a backward left parameters without a gradient, so that DDP could not average the
// gradients of this iteration. Do not step the optimizer after it.
type UnusedParametersError struct {
	Rank       int
	Names      []string
	FindUnused bool // FindUnusedParameters was set: an output did not take part in the loss
}

func (e *UnusedParametersError) Error() string {
	if e.FindUnused {
		return fmt.Sprintf("rank %d: backward left %d parameters without a gradient: %s. The gradients of this iteration were not averaged. "+
			"FindUnusedParameters looks at what the outputs depend on: give all outputs that the loss uses to DDP (see Run), and only those",
			e.Rank, len(e.Names), strings.Join(e.Names, ", "))
	}
	return fmt.Sprintf("rank %d: backward left %d parameters without a gradient: %s. The gradients of this iteration were not averaged. "+
		"Let every parameter take part in the loss, freeze these with requires_grad=false, or set DDPOptions.FindUnusedParameters",
		e.Rank, len(e.Names), strings.Join(e.Names, ", "))
}

// Unwrap makes errors.Is(err, ErrReduction) true.
func (e *UnusedParametersError) Unwrap() error { return ErrReduction }

// ErrReduction: the bookkeeping of the gradient reduction failed.
var ErrReduction = tdp.ErrReduction

func valueErrorf(format string, args ...any) error {
	return fmt.Errorf("%w: "+format, append([]any{ErrValue}, args...)...)
}
