package data

import (
	"fmt"
	"sync"

	"github.com/goddp/goddp/internal/tdp"
	"github.com/sugarme/gotch"
	"github.com/sugarme/gotch/ts"
)

// random64 draws one int64 as Python's loader and samplers do: from g, or from libtorch's default CPU generator.
func random64(g *Generator) (int64, error) {
	if g != nil {
		return g.Random64(), nil
	}
	def, err := tdp.DefaultGenerator(gotch.CPU)
	if err != nil {
		return 0, err
	}
	return def.Random64()
}

// generatorState gives the state of g, or of the default generator.
func generatorState(g *Generator) ([]byte, error) {
	if g != nil {
		return g.State(), nil
	}
	def, err := tdp.DefaultGenerator(gotch.CPU)
	if err != nil {
		return nil, err
	}
	return stateOf(def)
}

func stateOf(g *tdp.Generator) ([]byte, error) {
	state, err := g.State()
	if err != nil {
		return nil, err
	}
	defer drop(state)
	return tdp.ToSlice[uint8](state)
}

// permFrom gives torch.randperm(n, generator=g); nil is the default generator.
func permFrom(g *Generator, n int) ([]int, error) {
	if g != nil {
		return g.Perm(n), nil
	}
	// The default generator's numbers, its state moved on: the engine here continues from it and hands it back.
	var p []int
	err := onDefault(func(own *Generator) error {
		p = own.Perm(n)
		return nil
	})
	return p, err
}

// The default generator is changed in three calls (read, draw, write back): one at a time.
var defaultMu sync.Mutex

// onDefault runs fn with a generator that stands where the default CPU generator stands, and moves that one on to
// where fn left it.
func onDefault(fn func(*Generator) error) error {
	defaultMu.Lock()
	defer defaultMu.Unlock()
	state, err := generatorState(nil)
	if err != nil {
		return err
	}
	own := &Generator{}
	if err := own.SetState(state); err != nil {
		return err
	}
	if err := fn(own); err != nil {
		return err
	}
	def, err := tdp.DefaultGenerator(gotch.CPU)
	if err != nil {
		return err
	}
	return setState(def, own.State())
}

func setState(g *tdp.Generator, state []byte) error {
	t, err := tdp.FromSlice(state, []int64{int64(len(state))}, gotch.CPU)
	if err != nil {
		return err
	}
	defer drop(t)
	return g.SetState(t)
}

// multinomial is torch.multinomial over double weights. g nil draws from the default generator; otherwise one of
// libtorch's takes g's place for the call.
func multinomial(weights []float64, n int, replacement bool, g *Generator) ([]int, error) {
	gen, err := tdp.DefaultGenerator(gotch.CPU)
	if g == nil {
		defaultMu.Lock()
		defer defaultMu.Unlock()
	} else {
		if gen, err = tdp.NewGenerator(gotch.CPU); err == nil {
			err = setState(gen, g.State())
		}
	}
	if err != nil {
		return nil, err
	}
	w, err := tdp.FromSlice(weights, []int64{int64(len(weights))}, gotch.CPU)
	if err != nil {
		return nil, err
	}
	defer drop(w)
	out, err := gen.Multinomial(w, int64(n), replacement)
	if err != nil {
		return nil, fmt.Errorf("data: multinomial: %w", err)
	}
	defer drop(out)
	if g != nil {
		moved, err := stateOf(gen)
		if err == nil {
			err = g.SetState(moved)
		}
		if err != nil {
			return nil, err
		}
	}
	drawn, err := tdp.ToSlice[int64](out)
	if err != nil {
		return nil, err
	}
	idx := make([]int, len(drawn))
	for i, v := range drawn {
		idx[i] = int(v)
	}
	return idx, nil
}

// drop frees tensors that may be nil.
func drop(tensors ...*ts.Tensor) {
	for _, t := range tensors {
		if t != nil {
			_ = t.Drop() // nothing can be done about a tensor that will not go
		}
	}
}
