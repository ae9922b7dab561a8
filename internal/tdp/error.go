package tdp

/*
#include <stdlib.h>
#include "../../csrc/tdp/tdp.h"
*/
import "C"

import (
	"errors"
	"runtime"
)

// The kinds of failure that callers tell apart with errors.Is.
var (
	// ErrTimeout: an operation or a wait for a peer took longer than its timeout.
	ErrTimeout = errors.New("timeout")
	// ErrPeer: a peer closed its connection or cannot be reached.
	ErrPeer = errors.New("peer gone")
	// ErrStore: the rendezvous store answered with an error.
	ErrStore = errors.New("store failure")
	// ErrBackend: NCCL or another backend failed.
	ErrBackend = errors.New("backend failure")
	// ErrOutOfMemory: the device or the host has no memory left.
	ErrOutOfMemory = errors.New("out of memory")
	// ErrValue: a shape, dtype, device, rank or option does not fit.
	ErrValue = errors.New("invalid value")
	// ErrUnsupported: the backend, device or build does not offer this.
	ErrUnsupported = errors.New("unsupported")
	// ErrCancelled: the caller's context ended first.
	ErrCancelled = errors.New("cancelled")
	// ErrDesync: ranks ran different collectives at the same time.
	ErrDesync = errors.New("collectives differ between ranks")
	// ErrReduction: the reducer's bookkeeping failed, for instance over unused parameters.
	ErrReduction = errors.New("gradient reduction")
)

var kinds = map[C.int32_t]error{
	C.TDP_ERR_TIMEOUT:     ErrTimeout,
	C.TDP_ERR_PEER:        ErrPeer,
	C.TDP_ERR_STORE:       ErrStore,
	C.TDP_ERR_BACKEND:     ErrBackend,
	C.TDP_ERR_OOM:         ErrOutOfMemory,
	C.TDP_ERR_VALUE:       ErrValue,
	C.TDP_ERR_UNSUPPORTED: ErrUnsupported,
	C.TDP_ERR_CANCELLED:   ErrCancelled,
	C.TDP_ERR_REDUCTION:   ErrReduction,
	C.TDP_ERR_DESYNC:      ErrDesync,
}

// Error is a failure that C++ reported. errors.Is matches it with the sentinel of its kind.
type Error struct {
	Op      string // what was asked for, such as "allreduce"
	Message string // libtorch's text
	kind    error  // one of the sentinels above, or nil
}

func (e *Error) Error() string {
	if e.Op == "" {
		return e.Message
	}
	return e.Op + ": " + e.Message
}

// Unwrap gives the sentinel of the error's kind.
func (e *Error) Unwrap() error { return e.kind }

// done ends every call into C: it turns the record into a Go error and keeps the handles that the call used alive
// until here, so that no finalizer frees one while C++ still works on it.
func done(op string, rec *C.tdp_error, handles ...any) error {
	runtime.KeepAlive(handles)
	if rec == nil {
		return nil
	}
	err := &Error{Op: op, Message: C.GoString(rec.message), kind: kinds[rec.code]}
	C.tdp_error_free(rec)
	return err
}
