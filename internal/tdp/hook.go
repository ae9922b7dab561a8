package tdp

/*
#include <stdlib.h>
#include "../../csrc/tdp/tdp.h"

char *goddpRunHook(uintptr_t state, tdp_bucket *bucket, tdp_future **out);
char *goddpRunThen(uintptr_t state, tdp_tensor value, tdp_tensor *out);
*/
import "C"

import (
	"fmt"
	"runtime/cgo"
	"runtime/debug"
	"unsafe"

	"github.com/sugarme/gotch/ts"
)

// BuiltinHook is a communication hook in C++.
type BuiltinHook int32

// The hooks in C++.
const (
	HookAllReduce BuiltinHook = C.TDP_HOOK_ALLREDUCE
	HookFP16      BuiltinHook = C.TDP_HOOK_FP16
	HookBF16      BuiltinHook = C.TDP_HOOK_BF16
)

// Bucket is a bucket of gradients that a hook is to reduce. It is valid during the hook's call only.
type Bucket struct {
	Index  int
	Last   bool
	n      int
	h      *C.tdp_bucket
	buffer *ts.Tensor
}

// Future is a tensor that will be there later.
type Future struct{ h *C.tdp_future }

// Hook is called on autograd's thread for each bucket.
type Hook func(b *Bucket) (*Future, error)

// BuiltinHook lets a hook of C++ reduce the buckets.
func (r *Reducer) BuiltinHook(pg *ProcessGroup, hook BuiltinHook, name string) error {
	n := C.CString(name)
	defer C.free(unsafe.Pointer(n))
	return done("register communication hook", C.tdp_reducer_builtin_hook(r.h, pg.h, C.int32_t(hook), n), r, pg)
}

// Hook lets a Go function reduce the buckets.
func (r *Reducer) Hook(hook Hook, name string) error {
	n := C.CString(name)
	defer C.free(unsafe.Pointer(n))
	state := cgo.NewHandle(hook)
	err := done("register communication hook", C.tdp_reducer_hook(r.h, C.tdp_hook_fn(C.goddpRunHook), C.uintptr_t(state), n), r)
	if err != nil {
		state.Delete()
		return err
	}
	r.hooks = append(r.hooks, state)
	return nil
}

// errorText gives C the text of an error, or NULL.
func errorText(err error) *C.char {
	if err == nil {
		return nil
	}
	return C.CString(err.Error())
}

// recovered turns a panic into an error: on a thread of C++ it would end the process.
func recovered(what string, err *error) {
	if v := recover(); v != nil {
		*err = fmt.Errorf("%s panicked: %v\n%s", what, v, debug.Stack())
	}
}

//export goddpRunHook
func goddpRunHook(state C.uintptr_t, bucket *C.tdp_bucket, out **C.tdp_future) *C.char {
	return errorText(func() (err error) {
		defer recovered("the communication hook", &err)
		var index, last, n C.int32_t
		if err := done("bucket", C.tdp_bucket_info(bucket, &index, &last, &n)); err != nil {
			return err
		}
		b := &Bucket{Index: int(index), Last: last != 0, n: int(n), h: bucket}
		defer func() { b.h = nil }()
		f, err := cgo.Handle(state).Value().(Hook)(b)
		if err != nil {
			return err
		}
		if f == nil || f.h == nil {
			return &Error{Op: "communication hook", Message: "the hook gave no future", kind: ErrValue}
		}
		*out = f.h
		f.h = nil // C++ frees it
		return nil
	}())
}

// Buffer is the bucket's gradients as one flat tensor.
func (b *Bucket) Buffer() (*ts.Tensor, error) {
	if b.buffer != nil {
		return b.buffer, nil
	}
	var out C.tdp_tensor
	if err := done("bucket", C.tdp_bucket_buffer(b.h, &out), b); err != nil {
		return nil, err
	}
	b.buffer = tensor(out)
	return b.buffer, nil
}

// Gradients are the bucket's gradients, as views of the buffer, with their parameters.
func (b *Bucket) Gradients() (gradients, parameters []*ts.Tensor, err error) {
	g, p := make([]C.tdp_tensor, b.n), make([]C.tdp_tensor, b.n)
	if b.n == 0 {
		return nil, nil, nil
	}
	if err := done("bucket", C.tdp_bucket_gradients(b.h, &g[0], &p[0]), b); err != nil {
		return nil, nil, err
	}
	for i := range b.n {
		gradients = append(gradients, tensor(g[i]))
		parameters = append(parameters, tensor(p[i]))
	}
	return gradients, parameters, nil
}

// ReadyFuture is a future that is there already.
func ReadyFuture(value *ts.Tensor) (*Future, error) {
	var h *C.tdp_future
	rec := C.tdp_future_ready(handle(value), &h)
	if err := done("future", rec, value); err != nil {
		return nil, err
	}
	return &Future{h}, nil
}

// Future is the collective's tensor when it is done.
func (w *Work) Future() (*Future, error) {
	var h *C.tdp_future
	rec := C.tdp_future_of_work(w.h, &h)
	if err := done("future", rec, w); err != nil {
		return nil, err
	}
	return &Future{h}, nil
}

// Then is the future of fn's result. fn is called once, on the thread that completes f. It uses f up.
func (f *Future) Then(fn func(*ts.Tensor) (*ts.Tensor, error)) (*Future, error) {
	state := cgo.NewHandle(fn)
	var h *C.tdp_future
	rec := C.tdp_future_then(f.h, C.tdp_then_fn(C.goddpRunThen), C.uintptr_t(state), &h)
	if err := done("future", rec, f); err != nil {
		state.Delete()
		return nil, err
	}
	if err := f.Close(); err != nil {
		return nil, err
	}
	return &Future{h}, nil
}

//export goddpRunThen
func goddpRunThen(state C.uintptr_t, value C.tdp_tensor, out *C.tdp_tensor) *C.char {
	return errorText(func() (err error) {
		defer recovered("a step of the communication hook", &err)
		h := cgo.Handle(state)
		fn := h.Value().(func(*ts.Tensor) (*ts.Tensor, error))
		h.Delete()
		result, err := fn(tensor(value))
		if err != nil {
			return err
		}
		// C++ gets a handle of its own: result stays Go's.
		return done("future", C.tdp_tensor_share(handle(result), out), result)
	}())
}

// Close lets go of a future that was not handed to a hook.
func (f *Future) Close() error {
	h := f.h
	f.h = nil
	return done("close future", C.tdp_future_free(h), f)
}
