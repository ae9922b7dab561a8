package tdp

/*
#include <stdlib.h>
#include "../../csrc/tdp/tdp.h"
*/
import "C"

import (
	"bytes"
	"unsafe"

	"github.com/sugarme/gotch"
	"github.com/sugarme/gotch/ts"
)

// LoggingData is c10d's DDP logging data by name.
func (r *Reducer) LoggingData() (map[string]string, error) {
	var b C.tdp_bytes
	if err := done("DDP logging data", C.tdp_reducer_logging_data(r.h, &b), r); err != nil {
		return nil, err
	}
	data := map[string]string{}
	fields := bytes.Split(take(&b), []byte{0})
	for i := 0; i+1 < len(fields); i += 2 {
		data[string(fields[i])] = string(fields[i+1])
	}
	return data, nil
}

// SetSampleRate says how often times are taken after the first 10 iterations.
func (r *Reducer) SetSampleRate(rate int) error {
	return done("DDP sample rate", C.tdp_reducer_set_sample_rate(r.h, C.int32_t(rate)), r)
}

// UpdateGroup goes on with another group and forgets what was begun.
func (r *Reducer) UpdateGroup(pg *ProcessGroup) error {
	return done("DDP new group", C.tdp_reducer_update_group(r.h, pg.h), r, pg)
}

// Shadow makes the collectives of one backward with zeros.
func (r *Reducer) Shadow(pg *ProcessGroup, findUnused bool) error {
	return done("join", C.tdp_reducer_shadow(r.h, pg.h, flag(findUnused)), r, pg)
}

// Rebuild cuts the buckets anew where that is due.
func (r *Reducer) Rebuild() error { return done("join", C.tdp_reducer_rebuild(r.h), r) }

// SyncBuffers gives all ranks root's buffers, or, with average, the mean of those with fractions.
func (p *ProcessGroup) SyncBuffers(buffers *Handles, average bool, bucketBytes, root int) error {
	mode := C.int32_t(C.TDP_BUFFERS_BROADCAST)
	if average {
		mode = C.TDP_BUFFERS_AVERAGE
	}
	rec := C.tdp_sync_buffers(p.h, buffers.ptr(), buffers.n(), mode, C.uint64_t(bucketBytes), C.int32_t(root))
	return done("buffers", rec, p, buffers)
}

// HashTensors gives a hash of each tensor's elements.
func HashTensors(tensors *Handles) ([]uint64, error) {
	out := make([]uint64, len(tensors.c))
	rec := C.tdp_hash_tensors(tensors.ptr(), tensors.n(), (*C.uint64_t)(unsafe.SliceData(out)))
	return out, done("hash", rec, tensors)
}

// ScaleGradients multiplies gradients in place.
func ScaleGradients(params *Handles, factor float64) error {
	return done("scale gradients", C.tdp_scale_gradients(params.ptr(), params.n(), C.double(factor)), params)
}

// SyncBatchNorm is batch norm in training mode over the group's whole batch. All but input may be nil.
func (p *ProcessGroup) SyncBatchNorm(input, weight, bias, runningMean, runningVar *ts.Tensor, momentum, eps float64) (*ts.Tensor, error) {
	var out C.tdp_tensor
	rec := C.tdp_sync_batch_norm(p.h, handle(input), handle(weight), handle(bias), handle(runningMean), handle(runningVar),
		C.double(momentum), C.double(eps), &out)
	return tensor(out), done("sync_batch_norm", rec, p, input, weight, bias, runningMean, runningVar)
}

// RegisterSyncBatchNorm synchronises the batch norm layers whose running mean (or, without one, weight) is key. A nil
// group takes it back.
func RegisterSyncBatchNorm(key *ts.Tensor, pg *ProcessGroup) error {
	var h *C.tdp_pg
	if pg != nil {
		h = pg.h
	}
	return done("convert_sync_batchnorm", C.tdp_sync_batch_norm_register(handle(key), h), key, pg)
}

// IsSyncBatchNorm tells whether key was registered.
func IsSyncBatchNorm(key *ts.Tensor) bool {
	var out C.int32_t
	err := done("sync_batch_norm", C.tdp_sync_batch_norm_registered(handle(key), &out), key)
	return err == nil && out != 0
}

// EndBackward fails when gradients of the last backward were not reduced, and does what the reducer's modes have to do
// after a backward.
func (r *Reducer) EndBackward() error {
	return done("backward", C.tdp_reducer_end_backward(r.h), r)
}

// Mixed lowers parameters to a smaller type between each forward and the end of its backward.
func (r *Reducer) Mixed(frozen []*ts.Tensor, param, reduce gotch.DType) error {
	list := NewHandles(frozen)
	return done("mixed precision", C.tdp_reducer_mixed(r.h, list.ptr(), list.n(), C.int32_t(param), C.int32_t(reduce)), r, list)
}

// Restore gives parameters their own type back, where a forward is not followed by a backward.
func (r *Reducer) Restore() error { return done("mixed precision", C.tdp_reducer_restore(r.h), r) }

// Delay reduces parameters that the reducer does not have when the gradient of trigger is there.
func (r *Reducer) Delay(list *Handles, names []string, trigger *ts.Tensor, triggerName string) error {
	text, free := cstrings(names)
	defer free()
	name := C.CString(triggerName)
	defer C.free(unsafe.Pointer(name))
	rec := C.tdp_reducer_delay(r.h, list.ptr(), text, list.n(), handle(trigger), name)
	return done("delayed reduction", rec, r, list, trigger)
}

// Optim lets an optimizer step each bucket's parameters when the bucket is reduced.
func (r *Reducer) Optim(o *Optim) error {
	if err := done("optimizer in backward", C.tdp_reducer_optim(r.h, o.h), r, o); err != nil {
		return err
	}
	r.optim = o
	return nil
}

// SetDType gives tensors another dtype in place.
func SetDType(tensors []*ts.Tensor, dtype gotch.DType) error {
	list := NewHandles(tensors)
	return done("set dtype", C.tdp_set_dtype(list.ptr(), list.n(), C.int32_t(dtype)), list)
}
