package torchddp

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/goddp/goddp/internal/tdp"
	"github.com/stretchr/testify/require"
	"github.com/sugarme/gotch"
	"github.com/sugarme/gotch/ts"
)

// group runs fn for every rank of a Gloo group in this process, each rank on a thread of its own. An error that fn
// returns fails the test. On a GPU the ranks are processes.
func group(t *testing.T, size int, fn func(pg *ProcessGroup) error) {
	t.Helper()
	if place != gotch.CPU {
		processes(t, size, Gloo, fn)
		return
	}
	store, err := NewHashStore()
	require.NoError(t, err)
	t.Cleanup(func() { _ = store.Close() })
	var wg sync.WaitGroup
	for rank := range size {
		wg.Go(func() {
			runtime.LockOSThread()
			pg, err := InitProcessGroup(context.Background(), InitOptions{
				Backend: Gloo, Store: store, Rank: rank, WorldSize: size, Timeout: 20 * time.Second, GlooInterfaces: []string{"lo"},
			})
			if err == nil {
				err = fn(pg)
				err = errors.Join(err, pg.Destroy())
			}
			if err != nil {
				t.Errorf("rank %d: %v", rank, err)
			}
		})
	}
	wg.Wait()
}

// toy is a module of named tensors with a forward of the test's own.
type toy struct {
	params, buffers []Named
	forward         func(x *ts.Tensor) *ts.Tensor
}

func (m *toy) NamedParameters() iter.Seq2[string, *ts.Tensor] { return pairs(m.params) }
func (m *toy) NamedBuffers() iter.Seq2[string, *ts.Tensor]    { return pairs(m.buffers) }
func (m *toy) ForwardT(x *ts.Tensor, train bool) *ts.Tensor   { return m.forward(x) }

func pairs(list []Named) iter.Seq2[string, *ts.Tensor] {
	return func(yield func(string, *ts.Tensor) bool) {
		for _, n := range list {
			if !yield(n.Name, n.Tensor) {
				return
			}
		}
	}
}

func param(name string, shape []int64, values ...float32) Named {
	n := int64(1)
	for _, s := range shape {
		n *= s
	}
	data := make([]float32, n)
	for i := range data {
		data[i] = values[i%len(values)]
	}
	t, err := tdp.FromSlice(data, shape, place)
	if err == nil {
		err = tdp.SetRequiresGrad(t, true)
	}
	if err != nil {
		panic(err)
	}
	return Named{name, t}
}

func values(t *ts.Tensor) []float32 {
	v, err := tdp.ToSlice[float32](t)
	if err != nil {
		panic(err)
	}
	return v
}

// product is x * w, summed: its gradient for w is x.
func product(w float32) *toy {
	m := &toy{params: []Named{param("w", []int64{2}, w)}}
	m.forward = func(x *ts.Tensor) *ts.Tensor { return x.MustMul(m.params[0].Tensor, false) }
	return m
}

func TestGradientsAreAveraged(t *testing.T) {
	for _, size := range []int{1, 2, 3} {
		t.Run(fmt.Sprint(size), func(t *testing.T) {
			group(t, size, func(pg *ProcessGroup) error {
				m := product(float32(pg.Rank() + 1)) // unequal weights: rank 0's count
				d, err := NewDDP(m, pg, DDPOptions{})
				if err != nil {
					return err
				}
				defer d.Close()
				if got := values(m.params[0].Tensor)[0]; got != 1 {
					return fmt.Errorf("weight %v after construction, want rank 0's 1", got)
				}
				for step := range 3 {
					x := ts.MustOfSlice([]float32{float32(pg.Rank()), float32(step)})
					out, err := d.Forward(x)
					if err != nil {
						return err
					}
					if err := tdp.SetGrad(m.params[0].Tensor, nil); err != nil {
						return err
					}
					if err := d.Backward(out.MustSum(gotch.Float, true)); err != nil {
						return err
					}
					g, err := tdp.Grad(m.params[0].Tensor)
					if err != nil {
						return err
					}
					want := float32(size-1) / 2
					if v := values(g); v[0] != want || v[1] != float32(step) {
						return fmt.Errorf("step %d: gradient %v, want [%v %v]", step, v, want, step)
					}
				}
				return nil
			})
		})
	}
}

func TestMismatchIsTheSameErrorEverywhere(t *testing.T) {
	build := map[string]struct {
		what, param string
		make        func(rank int) *toy
	}{
		"shape": {"shape", "b", func(r int) *toy {
			return &toy{params: []Named{param("a", []int64{2}, 1), param("b", []int64{int64(2 + r/2)}, 1)}}
		}},
		"name": {"name", "a", func(r int) *toy {
			return &toy{params: []Named{param([]string{"a", "a", "c"}[r], []int64{2}, 1)}}
		}},
		"count": {"count", "b", func(r int) *toy {
			return &toy{params: []Named{param("a", []int64{2}, 1), param("b", []int64{2}, 1)}[:2-r/2]}
		}},
		"requires_grad": {"requires_grad", "b", func(r int) *toy {
			m := &toy{params: []Named{param("a", []int64{2}, 1), param("b", []int64{2}, 1)}}
			if r == 1 {
				_ = tdp.SetRequiresGrad(m.params[1].Tensor, false)
			}
			return m
		}},
		"dtype": {"dtype", "a", func(r int) *toy {
			p := param("a", []int64{2}, 1)
			if r == 2 {
				p.Tensor = p.Tensor.MustDetach(false).MustTotype(gotch.Double, false)
				_ = tdp.SetRequiresGrad(p.Tensor, true)
			}
			return &toy{params: []Named{p}}
		}},
		"buffer": {"shape", "mean", func(r int) *toy {
			return &toy{params: []Named{param("a", []int64{2}, 1)}, buffers: []Named{param("mean", []int64{int64(2 + r)}, 1)}}
		}},
		"problem on one rank": {"error", "", func(r int) *toy {
			m := &toy{params: []Named{param("a", []int64{2}, 1)}}
			if r == 1 {
				_ = tdp.SetRequiresGrad(m.params[0].Tensor, false)
			}
			return m
		}},
	}
	for name, c := range build {
		t.Run(name, func(t *testing.T) {
			var mu sync.Mutex
			texts := map[string]int{}
			start := time.Now()
			group(t, 3, func(pg *ProcessGroup) error {
				_, err := NewDDP(c.make(pg.Rank()), pg, DDPOptions{})
				var m *MismatchError
				if !errors.As(err, &m) {
					return fmt.Errorf("want a MismatchError, got %v", err)
				}
				if m.What != c.what || m.Parameter != c.param {
					return fmt.Errorf("got a mismatch in %s of %q: %v", m.What, m.Parameter, m)
				}
				mu.Lock()
				texts[m.Error()]++
				mu.Unlock()
				return nil
			})
			require.Len(t, texts, 1, "all ranks report the same")
			require.Less(t, time.Since(start), 10*time.Second)
			for text := range texts {
				t.Log(text)
			}
		})
	}
}

func TestUnusedParameterIsNamedRightAfterBackward(t *testing.T) {
	group(t, 2, func(pg *ProcessGroup) error {
		m := product(1)
		m.params = append(m.params, param("forgotten", []int64{3}, 1))
		d, err := NewDDP(m, pg, DDPOptions{})
		if err != nil {
			return err
		}
		defer d.Close()
		out, err := d.Forward(ts.MustOfSlice([]float32{1, 2}))
		if err != nil {
			return err
		}
		err = d.Backward(out.MustSum(gotch.Float, true))
		var unused *UnusedParametersError
		if !errors.As(err, &unused) || len(unused.Names) != 1 || unused.Names[0] != "forgotten" {
			return fmt.Errorf("want the unused parameter named, got %v", err)
		}
		return nil
	})
}

func TestBuffersFollowRankZero(t *testing.T) {
	group(t, 2, func(pg *ProcessGroup) error {
		m := product(1)
		m.buffers = []Named{param("mean", []int64{1}, float32(pg.Rank()+5))}
		_ = tdp.SetRequiresGrad(m.buffers[0].Tensor, false)
		d, err := NewDDP(m, pg, DDPOptions{})
		if err != nil {
			return err
		}
		defer d.Close()
		for range 2 {
			out, err := d.Forward(ts.MustOfSlice([]float32{1, 2}))
			if err != nil {
				return err
			}
			if v := values(m.buffers[0].Tensor); v[0] != 5 {
				return fmt.Errorf("buffer %v, want rank 0's 5", v)
			}
			if err := d.Backward(out.MustSum(gotch.Float, true)); err != nil {
				return err
			}
			// A rank's own forward would have moved it.
			other := ts.MustOfSlice([]float32{5 + float32(pg.Rank())})
			if err := tdp.Copy(m.buffers[0].Tensor, other, false); err != nil {
				return err
			}
		}
		return nil
	})
}

func TestNoSyncKeepsGradientsLocal(t *testing.T) {
	group(t, 2, func(pg *ProcessGroup) error {
		m := product(1)
		d, err := NewDDP(m, pg, DDPOptions{})
		if err != nil {
			return err
		}
		defer d.Close()
		step := func() error {
			out, err := d.Forward(ts.MustOfSlice([]float32{float32(pg.Rank()), 1}))
			if err != nil {
				return err
			}
			return d.Backward(out.MustSum(gotch.Float, true))
		}
		expect := func(want float32) error {
			g, err := tdp.Grad(m.params[0].Tensor)
			if err != nil {
				return err
			}
			if v := values(g); v[0] != want {
				return fmt.Errorf("gradient %v, want %v", v[0], want)
			}
			return nil
		}
		if err := d.NoSync(step); err != nil {
			return err
		}
		if err := expect(float32(pg.Rank())); err != nil {
			return err
		}
		if err := step(); err != nil { // the mean of (0+0) and (1+1)
			return err
		}
		return expect(1)
	})
}

func TestModelPanicIsAnError(t *testing.T) {
	group(t, 1, func(pg *ProcessGroup) error {
		m := product(1)
		d, err := NewDDP(m, pg, DDPOptions{})
		if err != nil {
			return err
		}
		cause := errors.New("boom")
		m.forward = func(*ts.Tensor) *ts.Tensor { panic(cause) }
		if _, err := d.Forward(ts.MustOfSlice([]float32{1, 2})); !errors.Is(err, cause) {
			return fmt.Errorf("got %v", err)
		}
		if err := d.Close(); err != nil {
			return err
		}
		if _, err := d.Forward(nil); !errors.Is(err, ErrValue) {
			return fmt.Errorf("forward after close: %v", err)
		}
		return d.Close()
	})
}
