package nn

import (
	"fmt"
	"runtime"
	"strings"

	"github.com/sugarme/gotch/ts"

	"github.com/goddp/goddp/internal/tdp"
)

// Error is a forward that failed in a layer.
type Error struct {
	Path   string  // where the layer stands, such as "layer1.0.conv1"; "" for a layer that is nobody's child
	Module string  // the layer as it prints
	Input  []int64 // the shape of what it got
	Weight []int64 // the shape of its weight; nil for layers without one
	Err    error   // what failed
}

func (e *Error) Error() string {
	var b strings.Builder
	if e.Path != "" {
		fmt.Fprintf(&b, "%s: ", e.Path)
	}
	fmt.Fprintf(&b, "%s got an input of shape %v", e.Module, e.Input)
	if e.Weight != nil {
		fmt.Fprintf(&b, ", its weight has shape %v", e.Weight)
	}
	fmt.Fprintf(&b, ": %v", e.Err)
	return b.String()
}

// Unwrap gives what failed, so that errors.Is tells an out of memory from a wrong shape.
func (e *Error) Unwrap() error { return e.Err }

func shapeOf(t *ts.Tensor) []int64 {
	if t == nil {
		return nil
	}
	info, err := tdp.Describe(t)
	if err != nil {
		return nil
	}
	return info.Shape
}

// result ends a layer's forward: it gives y, or panics with an Error that names the layer.
func result(m Module, x, weight, y *ts.Tensor, err error) *ts.Tensor {
	if err != nil {
		panic(&Error{Path: m.base().Path(), Module: head(m), Input: shapeOf(x), Weight: shapeOf(weight), Err: err})
	}
	return y
}

// Must gives v, or panics with err. It is for code whose caller recovers, such as a function given to Try and a
// module's ForwardT.
func Must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

// Check panics with err unless it is nil. Like Must, it is for code whose caller recovers.
func Check(err error) {
	if err != nil {
		panic(err)
	}
}

// Try runs fn and gives what it panicked with, where that is an error value. Bugs of the program, such as an index
// out of range, go on panicking.
func Try[T any](fn func() T) (v T, err error) {
	defer func() {
		switch r := recover().(type) {
		case nil:
		case runtime.Error:
			panic(r)
		case error:
			err = r
		default:
			panic(r)
		}
	}()
	return fn(), nil
}

// Forward is m.ForwardT with an error for what goes wrong.
func Forward(m ts.ModuleT, x *ts.Tensor, train bool) (*ts.Tensor, error) {
	return Try(func() *ts.Tensor { return m.ForwardT(x, train) })
}

// NoGrad runs fn without recording for autograd, and restores what was before, also when fn panics. It keeps its
// goroutine on its OS thread, whose mode it is; fn must not hand tensor work to other goroutines.
func NoGrad(fn func()) (err error) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	before, err := tdp.SetGradMode(false)
	if err != nil {
		return err
	}
	defer func() {
		if _, e := tdp.SetGradMode(before); e != nil && err == nil {
			err = e
		}
	}()
	fn()
	return nil
}

// Evaluate is a forward in evaluation, unseen by autograd.
func Evaluate(m ts.ModuleT, x *ts.Tensor) (*ts.Tensor, error) {
	return Try(func() (y *ts.Tensor) {
		Check(NoGrad(func() { y = m.ForwardT(x, false) }))
		return y
	})
}
