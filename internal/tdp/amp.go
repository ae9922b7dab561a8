package tdp

/*
#include "../../csrc/tdp/tdp.h"
*/
import "C"

import (
	"github.com/sugarme/gotch"
	"github.com/sugarme/gotch/ts"
)

// AutocastState is a thread's autocast for one kind of device.
type AutocastState struct {
	Enabled      bool
	DType        gotch.DType
	CacheEnabled bool
}

func (s AutocastState) c() C.tdp_autocast_state {
	return C.tdp_autocast_state{enabled: flag(s.Enabled), dtype: C.int32_t(s.DType), cache_enabled: flag(s.CacheEnabled)}
}

func goAutocast(c C.tdp_autocast_state) AutocastState {
	return AutocastState{Enabled: c.enabled != 0, DType: gotch.DType(c.dtype), CacheEnabled: c.cache_enabled != 0}
}

func autocastDevice(cuda bool) C.int32_t { return flag(cuda) }

// Autocast tells the calling thread's autocast. The goroutine must be locked to its thread.
func Autocast(cuda bool) (AutocastState, error) {
	var c C.tdp_autocast_state
	rec := C.tdp_autocast_get(autocastDevice(cuda), &c)
	return goAutocast(c), done("autocast", rec)
}

// EnterAutocast sets the calling thread's autocast, one level deeper, and gives what it was. The goroutine must be locked
// to its thread until ExitAutocast.
func EnterAutocast(cuda bool, s AutocastState) (AutocastState, error) {
	c := s.c()
	var previous C.tdp_autocast_state
	rec := C.tdp_autocast_enter(autocastDevice(cuda), &c, &previous)
	return goAutocast(previous), done("autocast", rec)
}

// ExitAutocast leaves a level and restores what EnterAutocast gave.
func ExitAutocast(cuda bool, previous AutocastState) error {
	c := previous.c()
	return done("autocast", C.tdp_autocast_exit(autocastDevice(cuda), &c))
}

// CUDAAvailable tells whether this process can use a GPU.
func CUDAAvailable() (bool, error) {
	var out C.int32_t
	rec := C.tdp_amp_cuda_available(&out)
	return out != 0, done("cuda available", rec)
}

// AMPScale gives value * scale, recorded for autograd.
func AMPScale(value, scale *ts.Tensor) (*ts.Tensor, error) {
	var out C.tdp_tensor
	rec := C.tdp_amp_scale(handle(value), handle(scale), &out)
	return tensor(out), done("scale", rec, value, scale)
}

// AMPUnscale divides the gradients of o's parameters by scale, or with checkOnly leaves them, and looks for infinities
// and NaNs. The result is positive where there were any, and nil when no parameter has a gradient.
func AMPUnscale(o *Optim, scale *ts.Tensor, checkOnly, allowFP16 bool) (*ts.Tensor, error) {
	var out C.tdp_tensor
	rec := C.tdp_amp_unscale(o.h, handle(scale), flag(checkOnly), flag(allowFP16), &out)
	return tensor(out), done("unscale", rec, o, scale)
}

// AMPUpdate is torch._amp_update_scale_ with the sum of what was found.
func AMPUpdate(scale, growthTracker *ts.Tensor, found []*ts.Tensor, growth, backoff float64, interval int64) error {
	list := NewHandles(found)
	rec := C.tdp_amp_update(handle(scale), handle(growthTracker), list.ptr(), list.n(),
		C.double(growth), C.double(backoff), C.int64_t(interval))
	return done("update scale", rec, scale, growthTracker, found)
}
