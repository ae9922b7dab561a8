package torchddp

import (
	"errors"
	"fmt"
	"iter"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/goddp/goddp/internal/tdp"
	"github.com/goddp/goddp/torchddp/optim"
	"github.com/stretchr/testify/require"
	"github.com/sugarme/gotch"
	"github.com/sugarme/gotch/ts"
)

// step is one forward and backward of a module whose output is summed.
func step(d *DDP, x ...float32) error {
	in, err := tdp.FromSlice(x, []int64{int64(len(x))}, place)
	if err != nil {
		return err
	}
	out, err := d.Forward(in)
	if err != nil {
		return err
	}
	return d.Backward(out.MustSum(gotch.Float, true))
}

// gradient is the first element of a parameter's gradient, or an error where there is none.
func gradient(p Named) (float32, error) {
	g, err := tdp.Grad(p.Tensor)
	if err != nil {
		return 0, err
	}
	if g == nil {
		return 0, fmt.Errorf("%s has no gradient", p.Name)
	}
	return values(g)[0], nil
}

func expectGradient(p Named, want float32) error {
	got, err := gradient(p)
	if err == nil && got != want {
		err = fmt.Errorf("gradient of %s: %v, want %v", p.Name, got, want)
	}
	return err
}

// branches uses only one of two parameters.
func branches(use *int) *toy {
	m := &toy{params: []Named{param("a", []int64{2}, 1), param("b", []int64{2}, 1)}}
	m.forward = func(x *ts.Tensor) *ts.Tensor { return x.MustMul(m.params[*use].Tensor, false) }
	return m
}

func TestFindUnusedParameters(t *testing.T) {
	for _, size := range []int{2, 3} {
		group(t, size, func(pg *ProcessGroup) error {
			use := 0
			m := branches(&use)
			d, err := NewDDP(m, pg, DDPOptions{FindUnusedParameters: true})
			if err != nil {
				return err
			}
			defer d.Close()
			// All ranks leave out b: it keeps no gradient.
			if err := step(d, float32(pg.Rank()), 1); err != nil {
				return err
			}
			if err := expectGradient(m.params[0], float32(size-1)/2); err != nil {
				return err
			}
			if g, err := tdp.Grad(m.params[1].Tensor); err != nil || g != nil {
				return fmt.Errorf("an unused parameter has a gradient: %v %v", g, err)
			}
			// Rank 0 uses b, the others a: both get the mean with zeros.
			for _, p := range m.params {
				if err := tdp.SetGrad(p.Tensor, nil); err != nil {
					return err
				}
			}
			if pg.Rank() == 0 {
				use = 1
			}
			if err := step(d, 6, 1); err != nil {
				return err
			}
			return errors.Join(expectGradient(m.params[0], 6*float32(size-1)/float32(size)), expectGradient(m.params[1], 6/float32(size)))
		})
	}
}

func TestStaticGraph(t *testing.T) {
	group(t, 2, func(pg *ProcessGroup) error {
		m := &toy{params: []Named{param("w", []int64{2}, 1), param("unused", []int64{2}, 1)}}
		// w is used twice: without a static graph it would be marked ready twice in some graphs.
		m.forward = func(x *ts.Tensor) *ts.Tensor {
			y := x.MustMul(m.params[0].Tensor, false)
			return y.MustAdd(x.MustMul(m.params[0].Tensor, false), true)
		}
		d, err := NewDDP(m, pg, DDPOptions{StaticGraph: true})
		if err != nil {
			return err
		}
		defer d.Close()
		for range 4 {
			if err := tdp.SetGrad(m.params[0].Tensor, nil); err != nil {
				return err
			}
			if err := step(d, float32(pg.Rank()), 1); err != nil {
				return err
			}
			if err := expectGradient(m.params[0], 1); err != nil {
				return err
			}
		}
		data, err := d.LoggingData()
		if err != nil {
			return err
		}
		if !data.StaticGraph || !data.HasRebuiltBuckets {
			return fmt.Errorf("logging data: %+v", data)
		}
		return nil
	})
}

func TestOutputWithoutHistoryPasses(t *testing.T) {
	group(t, 2, func(pg *ProcessGroup) error {
		m := product(1)
		d, err := NewDDP(m, pg, DDPOptions{FindUnusedParameters: true})
		if err != nil {
			return err
		}
		defer d.Close()
		x := ts.MustOfSlice([]float32{1, 2})
		outs, err := d.Run(func() ([]*ts.Tensor, error) {
			return []*ts.Tensor{m.forward(x), ts.MustOfSlice([]float32{7})}, nil
		})
		if err != nil {
			return err
		}
		if v := values(outs[1]); v[0] != 7 {
			return fmt.Errorf("got %v", v)
		}
		return d.Backward(outs[0].MustSum(gotch.Float, false))
	})
}

func TestBackwardThatDoesNotBelongIsRefused(t *testing.T) {
	group(t, 2, func(pg *ProcessGroup) error {
		m := product(1)
		d, err := NewDDP(m, pg, DDPOptions{})
		if err != nil {
			return err
		}
		defer d.Close()
		forward := func() (*ts.Tensor, error) {
			out, err := d.Forward(ts.MustOfSlice([]float32{1, 2}))
			if err != nil {
				return nil, err
			}
			return out.MustSum(gotch.Float, true), nil
		}
		refuse := func(what string, err error) error {
			if !errors.Is(err, ErrSync) {
				return fmt.Errorf("%s: got %v", what, err)
			}
			return nil
		}
		// Two forwards, two backwards: the second would stay local.
		a, err := forward()
		if err != nil {
			return err
		}
		b, err := forward()
		if err != nil {
			return err
		}
		if err := d.Backward(a); err != nil {
			return err
		}
		if err := refuse("second backward", d.Backward(b)); err != nil {
			return err
		}
		// Forward outside NoSync, backward inside.
		if a, err = forward(); err != nil {
			return err
		}
		if err := refuse("backward inside", d.NoSync(func() error { return d.Backward(a) })); err != nil {
			return err
		}
		if err := d.Backward(a); err != nil {
			return err
		}
		// Forward inside, backward outside.
		if err := d.NoSync(func() error { a, err = forward(); return err }); err != nil {
			return err
		}
		return refuse("backward outside", d.Backward(a))
	})
}

func TestIgnoredParameters(t *testing.T) {
	group(t, 2, func(pg *ProcessGroup) error {
		m := product(1)
		m.params = append(m.params, param("mine", []int64{2}, float32(pg.Rank())))
		m.forward = func(x *ts.Tensor) *ts.Tensor {
			return x.MustMul(m.params[0].Tensor, false).MustMul(m.params[1].Tensor, true)
		}
		d, err := NewDDP(m, pg, DDPOptions{Ignore: []string{"mine"}})
		if err != nil {
			return err
		}
		defer d.Close()
		if v := values(m.params[1].Tensor)[0]; v != float32(pg.Rank()) {
			return fmt.Errorf("the ignored parameter was broadcast: %v", v)
		}
		if err := step(d, 4, 1); err != nil {
			return err
		}
		return errors.Join(expectGradient(m.params[0], 2), expectGradient(m.params[1], 4))
	})
}

func TestBadOptionsAreErrorsEverywhere(t *testing.T) {
	for name, c := range map[string]struct {
		o    DDPOptions
		text string
	}{
		"ignore":  {DDPOptions{Ignore: []string{"nope"}}, `Ignore names "nope"`},
		"buffers": {DDPOptions{BufferModes: map[string]BufferMode{"nope": BufferLocal}}, `BufferModes names "nope"`},
		"cap":     {DDPOptions{BucketCapMB: -1}, "BucketCapMB must not be negative"},
		"audit":   {DDPOptions{AuditEvery: -1}, "AuditEvery must not be negative"},
	} {
		t.Run(name, func(t *testing.T) {
			group(t, 2, func(pg *ProcessGroup) error {
				o := DDPOptions{}
				if pg.Rank() == 1 {
					o = c.o
				}
				_, err := NewDDP(product(1), pg, o)
				if err == nil || !strings.Contains(err.Error(), c.text) || !errors.Is(err, ErrValue) {
					return fmt.Errorf("got %v", err)
				}
				return nil
			})
		})
	}
	group(t, 2, func(pg *ProcessGroup) error {
		_, err := NewDDP(product(1), pg, DDPOptions{FindUnusedParameters: pg.Rank() == 1})
		var m *MismatchError
		if !errors.As(err, &m) || m.What != "options" {
			return fmt.Errorf("got %v", err)
		}
		return nil
	})
}

func TestCommHook(t *testing.T) {
	group(t, 2, func(pg *ProcessGroup) error {
		m := product(1)
		d, err := NewDDP(m, pg, DDPOptions{})
		if err != nil {
			return err
		}
		defer d.Close()
		var calls atomic.Int32
		hook := func(b *GradBucket) (Future, error) {
			calls.Add(1)
			buffer, err := b.Buffer()
			if err != nil {
				return Future{}, err
			}
			w, err := pg.AllReduceAsync(buffer, Sum)
			if err != nil {
				return Future{}, err
			}
			f, err := w.Future()
			if err != nil {
				return Future{}, err
			}
			return f.Then(func(sum *ts.Tensor) (*ts.Tensor, error) { return sum.DivScalar(ts.FloatScalar(8), false) })
		}
		if err := d.RegisterCommHook("eighths", hook); err != nil {
			return err
		}
		for range 3 {
			if err := tdp.SetGrad(m.params[0].Tensor, nil); err != nil {
				return err
			}
			if err := step(d, 12, 1); err != nil {
				return err
			}
			if err := expectGradient(m.params[0], 3); err != nil {
				return err
			}
		}
		if calls.Load() != 3 {
			return fmt.Errorf("%d calls", calls.Load())
		}
		if err := d.RegisterCommHook("again", hook); err == nil {
			return errors.New("a second hook was accepted")
		}
		data, err := d.LoggingData()
		if err == nil && data.CommHook != "eighths" {
			err = fmt.Errorf("logged hook %q", data.CommHook)
		}
		return err
	})
}

func TestCommHookErrorAndPanicAreErrors(t *testing.T) {
	for name, hook := range map[string]CommHook{
		"error":  func(*GradBucket) (Future, error) { return Future{}, errors.New("no network today") },
		"panic":  func(*GradBucket) (Future, error) { panic("no network today") },
		"nil":    func(*GradBucket) (Future, error) { return Future{}, nil },
		"result": func(b *GradBucket) (Future, error) { return ReadyFuture(ts.MustOfSlice([]float32{1, 2, 3})) },
	} {
		t.Run(name, func(t *testing.T) {
			group(t, 1, func(pg *ProcessGroup) error {
				d, err := NewDDP(product(1), pg, DDPOptions{})
				if err != nil {
					return err
				}
				defer d.Close()
				if err := d.RegisterCommHook(name, hook); err != nil {
					return err
				}
				err = step(d, 1, 2)
				if err == nil {
					return errors.New("no error")
				}
				if (name == "error" || name == "panic") && !strings.Contains(err.Error(), "no network today") {
					return fmt.Errorf("got %v", err)
				}
				return nil
			})
		})
	}
}

func TestBuiltinCommHooks(t *testing.T) {
	for _, hook := range []BuiltinCommHook{AllReduceHook, FP16CompressHook, BF16CompressHook} {
		group(t, 2, func(pg *ProcessGroup) error {
			m := product(1)
			d, err := NewDDP(m, pg, DDPOptions{GradientAsBucketView: pg.Size() == 2})
			if err != nil {
				return err
			}
			defer d.Close()
			if err := d.RegisterBuiltinCommHook(hook); err != nil {
				return err
			}
			for range 3 {
				if err := optimZero(m); err != nil {
					return err
				}
				if err := step(d, 4*float32(pg.Rank()), 1); err != nil {
					return err
				}
				if err := expectGradient(m.params[0], 2); err != nil {
					return fmt.Errorf("hook %d: %w", hook, err)
				}
			}
			return nil
		})
	}
}

func optimZero(m *toy) error {
	for _, p := range m.params {
		if err := tdp.SetGrad(p.Tensor, nil); err != nil {
			return err
		}
	}
	return nil
}

func TestBufferModes(t *testing.T) {
	group(t, 2, func(pg *ProcessGroup) error {
		m := product(1)
		r := float32(pg.Rank())
		for _, name := range []string{"broadcast", "average", "local"} {
			b := param(name, []int64{1}, 0)
			_ = tdp.SetRequiresGrad(b.Tensor, false)
			m.buffers = append(m.buffers, b)
		}
		d, err := NewDDP(m, pg, DDPOptions{BufferModes: map[string]BufferMode{"average": BufferAverage, "local": BufferLocal}})
		if err != nil {
			return err
		}
		defer d.Close()
		for _, b := range m.buffers {
			if err := tdp.Copy(b.Tensor, ts.MustOfSlice([]float32{10 + 2*r}), false); err != nil {
				return err
			}
		}
		if err := step(d, 1, 1); err != nil {
			return err
		}
		for i, want := range []float32{10, 11, 10 + 2*r} {
			if got := values(m.buffers[i].Tensor)[0]; got != want {
				return fmt.Errorf("%s: %v, want %v", m.buffers[i].Name, got, want)
			}
		}
		return nil
	})
}

// TestTwoForwardsOneBackwardWithBatchNorm: broadcasting buffers in place breaks this in PyTorch.
func TestTwoForwardsOneBackwardWithBatchNorm(t *testing.T) {
	group(t, 2, func(pg *ProcessGroup) error {
		weight, bias := param("weight", []int64{3}, 1), param("bias", []int64{3}, 0)
		mean, variance := param("running_mean", []int64{3}, 0), param("running_var", []int64{3}, 1)
		for _, b := range []Named{mean, variance} {
			_ = tdp.SetRequiresGrad(b.Tensor, false)
		}
		m := &toy{params: []Named{weight, bias}, buffers: []Named{mean, variance}}
		m.forward = func(x *ts.Tensor) *ts.Tensor {
			return ts.MustBatchNorm(x, weight.Tensor, bias.Tensor, mean.Tensor, variance.Tensor, true, 0.1, 1e-5, false)
		}
		d, err := NewDDP(m, pg, DDPOptions{})
		if err != nil {
			return err
		}
		defer d.Close()
		if err := ManualSeed(uint64(pg.Rank())); err != nil {
			return err
		}
		a, err := d.Forward(ts.MustRand([]int64{8, 3}, gotch.Float, gotch.CPU))
		if err != nil {
			return err
		}
		b, err := d.Forward(ts.MustRand([]int64{8, 3}, gotch.Float, gotch.CPU))
		if err != nil {
			return err
		}
		return d.Backward(a.MustMul(b, false).MustSum(gotch.Float, true))
	})
}

func TestWeightedGradients(t *testing.T) {
	group(t, 3, func(pg *ProcessGroup) error {
		m := product(1)
		d, err := NewDDP(m, pg, DDPOptions{})
		if err != nil {
			return err
		}
		defer d.Close()
		weighted := func(x, n float32) error {
			out, err := d.Forward(ts.MustOfSlice([]float32{x, 0}))
			if err != nil {
				return err
			}
			return d.BackwardWeighted(out.MustSum(gotch.Float, true), float64(n))
		}
		// Rank r has r+1 samples of gradient r in a first step, and one of gradient 10 in a second.
		r := float32(pg.Rank())
		if err := d.NoSync(func() error { return weighted(r, r+1) }); err != nil {
			return err
		}
		if err := weighted(10, 1); err != nil {
			return err
		}
		got, err := gradient(m.params[0])
		if err != nil {
			return err
		}
		want := float32(0*1+1*2+2*3+3*10) / float32(1+2+3+3)
		if diff := got - want; diff > 1e-5 || diff < -1e-5 {
			return fmt.Errorf("gradient %v, want %v", got, want)
		}
		if err := d.BackwardWeighted(nil, -1); !errors.Is(err, ErrValue) {
			return fmt.Errorf("a negative weight: %v", err)
		}
		return nil
	})
}

func TestAudit(t *testing.T) {
	group(t, 3, func(pg *ProcessGroup) error {
		m := product(1)
		extra := param("momentum", []int64{1}, 5)
		d, err := NewDDP(m, pg, DDPOptions{AuditEvery: 2, AuditAlso: func() iter.Seq2[string, *ts.Tensor] { return pairs([]Named{extra}) }})
		if err != nil {
			return err
		}
		defer d.Close()
		for range 4 {
			if err := step(d, 1, 1); err != nil {
				return err
			}
		}
		if pg.Rank() == 2 {
			if err := tdp.Copy(extra.Tensor, ts.MustOfSlice([]float32{6}), false); err != nil {
				return err
			}
		}
		if err := step(d, 1, 1); err != nil {
			return err
		}
		err = step(d, 1, 1)
		var audit *AuditError
		if !errors.As(err, &audit) || audit.Name != "momentum" || !strings.HasPrefix(audit.Ranks, "ranks 0, 1: ") {
			return fmt.Errorf("got %v", err)
		}
		return nil
	})
}

func TestJoinWithUnevenInputs(t *testing.T) {
	for _, byActive := range []bool{false, true} {
		group(t, 3, func(pg *ProcessGroup) error {
			m := product(1)
			m.buffers = []Named{param("seen", []int64{1}, 0)}
			_ = tdp.SetRequiresGrad(m.buffers[0].Tensor, false)
			d, err := NewDDP(m, pg, DDPOptions{})
			if err != nil {
				return err
			}
			defer d.Close()
			sgd, err := optim.NewSGD(m.NamedParameters(), optim.SGDOptions{LR: 1})
			if err != nil {
				return err
			}
			// Rank r has r+1 batches of gradient 6.
			err = d.Join(JoinOptions{DivideByActive: byActive}, func() error {
				for k := range pg.Rank() + 1 {
					if err := sgd.ZeroGrad(true); err != nil {
						return err
					}
					if err := step(d, 6, 0); err != nil {
						return err
					}
					active := float32(3 - k)
					want := 6 * active / 3
					if byActive {
						want = 6
					}
					if err := expectGradient(m.params[0], want); err != nil {
						return fmt.Errorf("batch %d: %w", k, err)
					}
					if err := sgd.Step(); err != nil {
						return err
					}
				}
				return nil
			})
			if err != nil {
				return err
			}
			// All have the model of the rank that trained longest.
			want := float32(1 - 6 - 4 - 2)
			if byActive {
				want = 1 - 18
			}
			if got := values(m.params[0].Tensor)[0]; got != want {
				return fmt.Errorf("weight %v, want %v", got, want)
			}
			return nil
		})
	}
}

func TestJoinEndTogether(t *testing.T) {
	group(t, 2, func(pg *ProcessGroup) error {
		d, err := NewDDP(product(1), pg, DDPOptions{})
		if err != nil {
			return err
		}
		defer d.Close()
		err = d.Join(JoinOptions{EndTogether: true}, func() error {
			for range 2 + pg.Rank() {
				if err := step(d, 1, 1); err != nil {
					return err
				}
			}
			return nil
		})
		if !errors.Is(err, ErrEarlyEnd) {
			return fmt.Errorf("got %v", err)
		}
		return nil
	})
}

func TestLoggingData(t *testing.T) {
	group(t, 2, func(pg *ProcessGroup) error {
		m := product(1)
		d, err := NewDDP(m, pg, DDPOptions{})
		if err != nil {
			return err
		}
		defer d.Close()
		if err := d.SetLoggingSampleRate(0); !errors.Is(err, ErrValue) {
			return fmt.Errorf("rate 0: %v", err)
		}
		if err := d.SetLoggingSampleRate(2); err != nil {
			return err
		}
		for range 20 {
			if err := step(d, 1, 1); err != nil {
				return err
			}
		}
		l, err := d.LoggingData()
		if err != nil {
			return err
		}
		if l.WorldSize != 2 || l.Rank != pg.Rank() || l.Iteration != 18 || l.NumParameterTensors != 1 || l.TotalParameterSizeBytes != 8 ||
			l.BackendName != "gloo" || l.BucketCapBytes != 25<<20 || len(l.BucketSizes) != 1 || l.BucketSizes[0] != 8 || l.ForwardComputeTime <= 0 {
			return fmt.Errorf("%+v", l)
		}
		return nil
	})
}

func TestTwoModulesAndOneLoss(t *testing.T) {
	group(t, 2, func(pg *ProcessGroup) error {
		a, b := product(1), product(1)
		da, err := NewDDP(a, pg, DDPOptions{})
		if err != nil {
			return err
		}
		defer da.Close()
		db, err := NewDDP(b, pg, DDPOptions{GradientAsBucketView: true})
		if err != nil {
			return err
		}
		defer db.Close()
		for range 3 {
			if err := errors.Join(optimZero(a), optimZero(b)); err != nil {
				return err
			}
			x, err := da.Forward(ts.MustOfSlice([]float32{float32(pg.Rank()), 1}))
			if err != nil {
				return err
			}
			y, err := db.Forward(x)
			if err != nil {
				return err
			}
			if err := Backward(y.MustSum(gotch.Float, true), da, db); err != nil {
				return err
			}
			if err := errors.Join(expectGradient(a.params[0], 0.5), expectGradient(b.params[0], 0.5)); err != nil {
				return err
			}
		}
		return nil
	})
}

func TestConvertAfterWrappingIsRefused(t *testing.T) {
	group(t, 2, func(pg *ProcessGroup) error {
		m := product(1)
		d, err := NewDDP(m, pg, DDPOptions{})
		if err != nil {
			return err
		}
		defer d.Close()
		for _, module := range []Module{d, m} {
			if _, err := ConvertSyncBatchNorm(module, pg); !errors.Is(err, ErrValue) || !strings.Contains(err.Error(), "already wrapped") {
				return fmt.Errorf("got %v", err)
			}
		}
		return nil
	})
}

// normalized is batch norm over the channels of x, by the tensors of m.
func batchNormToy(channels int64, dtype gotch.DType) *toy {
	make := func(name string, value float32) Named {
		p := param(name, []int64{channels}, value)
		p.Tensor = p.Tensor.MustDetach(false).MustTotype(dtype, true)
		return p
	}
	m := &toy{params: []Named{make("weight", 1.5), make("bias", 0.25)}, buffers: []Named{make("running_mean", 0), make("running_var", 1)}}
	for _, p := range m.params {
		_ = tdp.SetRequiresGrad(p.Tensor, true)
	}
	m.forward = func(x *ts.Tensor) *ts.Tensor {
		return ts.MustBatchNorm(x, m.params[0].Tensor, m.params[1].Tensor, m.buffers[0].Tensor, m.buffers[1].Tensor, true, 0.1, 1e-5, false)
	}
	return m
}

// TestSyncBatchNormIsTheWholeBatch: outputs, gradients and running statistics are those of one process with all ranks'
// samples, with uneven and empty shares.
func TestSyncBatchNormIsTheWholeBatch(t *testing.T) {
	for _, c := range []struct {
		name   string
		shape  []int64 // of one sample
		shares []int64 // samples a rank
		dtype  gotch.DType
		tol    float64
	}{
		{"2d", []int64{3, 4, 5}, []int64{2, 3}, gotch.Double, 1e-12},
		{"1d", []int64{3}, []int64{1, 1, 1}, gotch.Double, 1e-12},
		{"3d", []int64{2, 2, 3, 2}, []int64{2, 2}, gotch.Double, 1e-12},
		{"an empty share", []int64{3, 4}, []int64{4, 0, 2}, gotch.Double, 1e-12},
		{"float", []int64{3, 4, 5}, []int64{2, 3}, gotch.Float, 1e-5},
		{"half", []int64{3, 4, 5}, []int64{2, 3}, gotch.Half, 2e-2},
		{"bfloat16, an empty share", []int64{3, 4, 5}, []int64{0, 5}, gotch.BFloat16, 1e-1},
	} {
		t.Run(c.name, func(t *testing.T) {
			total := int64(0)
			for _, n := range c.shares {
				total += n
			}
			require.NoError(t, ManualSeed(5))
			all := ts.MustRandn(append([]int64{total}, c.shape...), gotch.Double, gotch.CPU).MustTotype(c.dtype, true)
			upstream := ts.MustRandn(append([]int64{total}, c.shape...), gotch.Double, gotch.CPU).MustTotype(c.dtype, true)
			grad := func(x *ts.Tensor) *ts.Tensor {
				g, err := tdp.Grad(x)
				require.NoError(t, err)
				return g
			}
			// The reference: one process, in double.
			ref := batchNormToy(c.shape[0], gotch.Double)
			xr := all.MustDetach(false).MustTotype(gotch.Double, true)
			require.NoError(t, tdp.SetRequiresGrad(xr, true))
			yr := ref.forward(xr)
			require.NoError(t, tdp.Backward(yr, upstream.MustTotype(gotch.Double, false), false, nil))
			close := func(what string, got, want *ts.Tensor) error {
				a, b := got.MustDetach(false).MustTotype(gotch.Double, true).Float64Values(), want.MustDetach(false).MustTotype(gotch.Double, true).Float64Values()
				if len(a) != len(b) {
					return fmt.Errorf("%s: %d elements, want %d", what, len(a), len(b))
				}
				for i := range a {
					if d := a[i] - b[i]; !(d <= c.tol && d >= -c.tol) {
						return fmt.Errorf("%s: element %d is %v, want %v", what, i, a[i], b[i])
					}
				}
				return nil
			}
			paramsDType := c.dtype
			if c.dtype == gotch.Half || c.dtype == gotch.BFloat16 {
				paramsDType = gotch.Float
			}
			group(t, len(c.shares), func(pg *ProcessGroup) error {
				m := batchNormToy(c.shape[0], paramsDType)
				if n, err := ConvertSyncBatchNorm(m, pg); err != nil || n != 1 {
					return fmt.Errorf("converted %d: %v", n, err)
				}
				begin := int64(0)
				for _, n := range c.shares[:pg.Rank()] {
					begin += n
				}
				n := c.shares[pg.Rank()]
				x := all.MustNarrow(0, begin, n, false).MustContiguous(true).MustDetach(true)
				if err := tdp.SetRequiresGrad(x, true); err != nil {
					return err
				}
				y := m.forward(x)
				if err := tdp.Backward(y, upstream.MustNarrow(0, begin, n, false), false, nil); err != nil {
					return err
				}
				gx, err := tdp.Grad(x)
				if err != nil {
					return err
				}
				if err := errors.Join(
					close("output", y, yr.MustNarrow(0, begin, n, false)),
					close("running mean", m.buffers[0].Tensor, ref.buffers[0].Tensor),
					close("running variance", m.buffers[1].Tensor, ref.buffers[1].Tensor)); err != nil {
					return err
				}
				if n > 0 {
					if err := close("gradient of the input", gx, grad(xr).MustNarrow(0, begin, n, false)); err != nil {
						return err
					}
				}
				// The parameters' gradients stay local: their sum over ranks is the whole batch's.
				for i := range m.params {
					g, err := tdp.Grad(m.params[i].Tensor)
					if err != nil {
						return err
					}
					sum := g.MustTotype(gotch.Double, false)
					if err := pg.AllReduce(sum, Sum); err != nil {
						return err
					}
					if err := close("gradient of "+m.params[i].Name, sum, grad(ref.params[i].Tensor)); err != nil {
						return err
					}
				}
				if n, err := RevertSyncBatchNorm(m); err != nil || n != 1 {
					return fmt.Errorf("reverted %d: %v", n, err)
				}
				return nil
			})
		})
	}
}
