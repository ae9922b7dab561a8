package amp

import (
	"errors"
	"fmt"
	"log/slog"
	"runtime"

	"github.com/sugarme/gotch"

	"github.com/goddp/goddp/internal/tdp"
)

// Options say what [Autocast] does.
type Options struct {
	// Device is the kind of device whose operations are meant; its index does not matter. The zero value is the CPU.
	Device gotch.Device
	// DType is gotch.Half or gotch.BFloat16. Unset, it is the one in force, to begin with float16 on CUDA and bfloat16 on
	// the CPU. (gotch's zero DType is uint8, which autocast never uses.)
	DType gotch.DType
	// Disabled runs the function without autocast, inside a scope that has it. Inputs from outside are not cast back.
	Disabled bool
	// NoCache does not keep the cast copies of weights until the outermost scope ends. Keeping them is right as long as
	// weights do not change inside.
	NoCache bool
}

func isCUDA(d gotch.Device) bool { return d.Name == "CUDA" }

// Autocast runs f with autocast for operations on a kind of device, on the calling goroutine, which stays on its
// thread meanwhile. Scopes nest. The state before is restored when f returns or panics, and when the outermost scope
// ends the cast copies of weights are dropped.
//
// Autocast on CUDA where there is none does nothing but warn, as in Python.
func Autocast(o Options, f func() error) (err error) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	cuda := isCUDA(o.Device)
	state, err := tdp.Autocast(cuda)
	if err != nil {
		return err
	}
	state.Enabled = !o.Disabled
	if o.DType != 0 {
		state.DType = o.DType
	}
	if o.NoCache {
		state.CacheEnabled = false
	}
	if state.Enabled {
		if state.DType != gotch.Half && state.DType != gotch.BFloat16 {
			return fmt.Errorf("autocast supports float16 and bfloat16, not dtype %v", state.DType)
		}
		if cuda {
			ok, err := tdp.CUDAAvailable()
			if err != nil {
				return err
			}
			if !ok {
				slog.Warn("autocast for CUDA, but CUDA is not available: disabled")
				state.Enabled = false
			}
		}
	}
	previous, err := tdp.EnterAutocast(cuda, state)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, tdp.ExitAutocast(cuda, previous)) }()
	return f()
}

// Enabled tells whether autocast is in force for operations on a kind of device, and for which dtype, on the calling
// goroutine's thread: inside [Autocast] on the same goroutine.
func Enabled(device gotch.Device) (bool, gotch.DType, error) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	s, err := tdp.Autocast(isCUDA(device))
	return s.Enabled, s.DType, err
}
