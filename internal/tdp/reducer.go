package tdp

/*
#include <stdlib.h>
#include "../../csrc/tdp/tdp.h"
*/
import "C"

import (
	"runtime"
	"runtime/cgo"
	"unsafe"

	"github.com/sugarme/gotch"
	"github.com/sugarme/gotch/ts"
)

// Reducer is c10d::Reducer with its Logger: it reduces gradients during backward.
type Reducer struct {
	h      *C.tdp_reducer
	params *Handles
	hooks  []cgo.Handle // Go functions that C++ holds
	optim  *Optim       // whose memory C++ holds
}

// ReducerOptions are what Python's DDP passes on to its reducer.
type ReducerOptions struct {
	Names            []string // one a parameter
	ExpectSparse     []bool   // one a parameter, or nil
	BucketLimits     []int64
	BucketBytes      int64
	FirstBucketBytes int64
	FindUnused       bool
	BucketView       bool
	StaticGraph      bool
	ModuleName       string
	DeviceIndex      int // -1 on CPU
	BroadcastBuffers bool
	HasSyncBN        bool
}

// VerifyParamCounts gives every rank's number of parameters, by the collective that Python's DDP makes first.
// This rank has n; dev is where the group's tensors lie.
func (p *ProcessGroup) VerifyParamCounts(dev gotch.Device, n, worldSize int) ([]int64, error) {
	counts := make([]int64, worldSize)
	rec := C.tdp_verify_param_counts(p.h, device(dev), C.int32_t(n), (*C.int64_t)(unsafe.SliceData(counts)))
	return counts, done("comparing parameter counts", rec, p)
}

// VerifyParamShapes compares sizes and strides with rank 0's, by the collective that Python's DDP makes next. It
// gives the first parameter that differs, or -1.
func (p *ProcessGroup) VerifyParamShapes(params *Handles) (int, error) {
	var out C.int32_t
	rec := C.tdp_verify_param_shapes(p.h, params.ptr(), params.n(), &out)
	return int(out), done("comparing parameter shapes", rec, p, params)
}

// NewReducer hooks a reducer to the parameters' gradients.
func NewReducer(pg *ProcessGroup, params *Handles, o ReducerOptions) (*Reducer, error) {
	module := C.CString(o.ModuleName)
	defer C.free(unsafe.Pointer(module))
	names, free := cstrings(o.Names)
	defer free()
	limits := make([]C.int64_t, len(o.BucketLimits))
	for i, l := range o.BucketLimits {
		limits[i] = C.int64_t(l)
	}
	sparse := make([]C.uint8_t, len(o.ExpectSparse))
	for i, s := range o.ExpectSparse {
		sparse[i] = C.uint8_t(flag(s))
	}
	// The options point to Go memory: it must not move while C reads it.
	var pin runtime.Pinner
	defer pin.Unpin()
	opts := C.tdp_reducer_options{
		names: names, expect_sparse: pinned(&pin, sparse), bucket_limits: pinned(&pin, limits),
		num_bucket_limits: C.int32_t(len(limits)),
		bucket_bytes:      C.int64_t(o.BucketBytes), first_bucket_bytes: C.int64_t(o.FirstBucketBytes),
		find_unused: flag(o.FindUnused), gradient_as_bucket_view: flag(o.BucketView), static_graph: flag(o.StaticGraph),
		module_name: module, device_index: C.int32_t(o.DeviceIndex), broadcast_buffers: flag(o.BroadcastBuffers),
		has_sync_bn: flag(o.HasSyncBN),
	}
	if names != nil {
		pin.Pin(names)
	}
	var h *C.tdp_reducer
	rec := C.tdp_reducer_new(pg.h, params.ptr(), params.n(), &opts, &h)
	if err := done("reducer", rec, pg, params); err != nil {
		return nil, err
	}
	return &Reducer{h: h, params: params}, nil
}

func pinned[T any](pin *runtime.Pinner, s []T) *T {
	if len(s) == 0 {
		return nil
	}
	pin.Pin(&s[0])
	return &s[0]
}

// Join says that ranks whose data has ended are to be told that this one still trains.
type Join struct {
	Group        *ProcessGroup // nil: no rank ends early
	Device       gotch.Device
	DivideBySize bool // divide gradients by the group's size, also when fewer ranks train
}

// PreForward prepares a forward. sync is false inside no_sync. It tells whether the calling thread records gradients
// and whether the buckets were cut anew.
func (r *Reducer) PreForward(sync bool, join Join) (gradEnabled, rebuilt bool, err error) {
	var grad, re C.int32_t
	var pg *C.tdp_pg
	if join.Group != nil {
		pg = join.Group.h
	}
	rec := C.tdp_reducer_pre_forward(r.h, flag(sync), pg, device(join.Device), flag(join.DivideBySize), &grad, &re)
	return grad != 0, re != 0, done("DDP before forward", rec, r, join.Group)
}

// PostForward arms the reducer for the backward. With find_unused or a static graph, the outputs' handles are given
// tensors that tell the reducer about the backward.
func (r *Reducer) PostForward(outputs []*ts.Tensor) error {
	out := NewHandles(outputs)
	return done("DDP after forward", C.tdp_reducer_post_forward(r.h, out.ptr(), out.n()), r, out)
}

// Backward computes the gradients of loss, and checks that r (if any) reduced every one: see EndBackward. gradient may be nil.
func Backward(loss, gradient *ts.Tensor, retainGraph bool, r *Reducer) error {
	var h *C.tdp_reducer
	if r != nil {
		h = r.h
	}
	return done("backward", C.tdp_backward(handle(loss), handle(gradient), flag(retainGraph), h), loss, gradient, r)
}

// Close takes the hooks off the parameters.
func (r *Reducer) Close() error {
	h := r.h
	r.h = nil
	err := done("close reducer", C.tdp_reducer_free(h), r)
	for _, hook := range r.hooks {
		hook.Delete()
	}
	r.hooks = nil
	return err
}

// SetGradMode sets whether this thread records gradients, and tells whether it did. The goroutine must be locked to
// its thread until it has set the mode back.
func SetGradMode(on bool) (previous bool, err error) {
	var prev C.int32_t
	rec := C.tdp_grad_mode(flag(on), &prev)
	return prev != 0, done("grad mode", rec)
}

// GradEnabled tells the calling thread's grad mode.
func GradEnabled() (bool, error) {
	on, err := SetGradMode(true)
	if err == nil && !on {
		_, err = SetGradMode(false)
	}
	return on, err
}
