package tdp

/*
#include <stdlib.h>
#include "../../csrc/tdp/tdp.h"
*/
import "C"

import (
	"runtime"

	"github.com/sugarme/gotch"
	"github.com/sugarme/gotch/ts"
)

// ManualSeed seeds the default generators of every device, as torch.manual_seed does.
func ManualSeed(seed uint64) error { return done("manual_seed", C.tdp_manual_seed(C.uint64_t(seed))) }

// Generator is torch.Generator.
type Generator struct{ h *C.tdp_generator }

func newGenerator(h *C.tdp_generator, err error) (*Generator, error) {
	if err != nil {
		return nil, err
	}
	g := &Generator{h: h}
	runtime.AddCleanup(g, func(h *C.tdp_generator) { C.tdp_error_free(C.tdp_generator_free(h)) }, h)
	return g, nil
}

// NewGenerator makes a generator of its own on a device.
func NewGenerator(dev gotch.Device) (*Generator, error) {
	var h *C.tdp_generator
	rec := C.tdp_generator_new(device(dev), &h)
	return newGenerator(h, done("new generator", rec))
}

// DefaultGenerator is the generator that operations without one draw from.
func DefaultGenerator(dev gotch.Device) (*Generator, error) {
	var h *C.tdp_generator
	rec := C.tdp_generator_default(device(dev), &h)
	return newGenerator(h, done("default generator", rec))
}

// ManualSeed restarts the generator from a seed.
func (g *Generator) ManualSeed(seed uint64) error {
	return done("generator seed", C.tdp_generator_manual_seed(g.h, C.uint64_t(seed)), g)
}

// InitialSeed is the seed the generator was last started from.
func (g *Generator) InitialSeed() (uint64, error) {
	var out C.uint64_t
	rec := C.tdp_generator_initial_seed(g.h, &out)
	return uint64(out), done("generator seed", rec, g)
}

// State is the generator's whole state, in the bytes that torch.Generator.get_state gives.
func (g *Generator) State() (*ts.Tensor, error) {
	var out C.tdp_tensor
	rec := C.tdp_generator_get_state(g.h, &out)
	return tensor(out), done("generator state", rec, g)
}

// SetState continues from a state that State, or Python's get_state, gave.
func (g *Generator) SetState(state *ts.Tensor) error {
	return done("generator set_state", C.tdp_generator_set_state(g.h, handle(state)), g, state)
}

// Random64 draws one int64 as torch.empty((), dtype=torch.int64).random_() does.
func (g *Generator) Random64() (int64, error) {
	var out C.int64_t
	rec := C.tdp_generator_random64(g.h, &out)
	return int64(out), done("random", rec, g)
}

// Multinomial draws n indices by weight, as torch.multinomial does with a generator.
func (g *Generator) Multinomial(weights *ts.Tensor, n int64, replacement bool) (*ts.Tensor, error) {
	var out C.tdp_tensor
	rec := C.tdp_generator_multinomial(g.h, handle(weights), C.int64_t(n), flag(replacement), &out)
	return tensor(out), done("multinomial", rec, g, weights)
}

// SetNumThreads sets how many threads one operation may use.
func SetNumThreads(n int) error { return done("set_num_threads", C.tdp_set_num_threads(C.int32_t(n))) }

// NumThreads tells how many threads one operation may use.
func NumThreads() (int, error) {
	var out C.int32_t
	rec := C.tdp_get_num_threads(&out)
	return int(out), done("get_num_threads", rec)
}
