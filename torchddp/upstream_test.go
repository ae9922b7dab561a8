package torchddp

// What the tests of PyTorch's own DDP assert (torch/testing/_internal/distributed/distributed_test.py and
// c10d's test_c10d_gloo.py), for Go. docs/parity.md says which test here stands for which there.

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/goddp/goddp/internal/tdp"
	"github.com/goddp/goddp/models/nn"
	"github.com/goddp/goddp/torchddp/optim"
	"github.com/sugarme/gotch"
	"github.com/sugarme/gotch/ts"
)

func denseLayer(in, out int64) *nn.Linear { return nn.Must(nn.NewLinear(in, out, nn.LinearOptions{})) }

func mlp() nn.Module {
	return nn.NewSequential(denseLayer(4, 6), nn.NewReLU(), denseLayer(6, 6), nn.NewReLU(), denseLayer(6, 3))
}

// draws gives seeded random tensors that are the same on every rank.
func draws(seed uint64, shapes ...[]int64) (list []*ts.Tensor, err error) {
	builds.Lock()
	defer builds.Unlock()
	if err := ManualSeed(seed); err != nil {
		return nil, err
	}
	for _, s := range shapes {
		list = append(list, ts.MustRandn(s, gotch.Double, gotch.CPU))
	}
	return list, nil
}

// local trains a copy of a model as one process would: no DDP, the whole batch.
func localStep(m nn.Module, x, y *ts.Tensor) error {
	out, err := nn.Forward(m, x, true)
	if err != nil {
		return err
	}
	return tdp.Backward(out.MustMseLoss(y, 1, true), nil, false, nil)
}

func ddpStep(d *DDP, x, y *ts.Tensor) error {
	out, err := d.Forward(x)
	if err != nil {
		return err
	}
	return d.Backward(out.MustMseLoss(y, 1, true))
}

// sameGrads compares the gradients of two models of one make. A gradient that is nil must be nil in both.
func sameGrads(what string, a, b Module) error {
	want := map[string]*ts.Tensor{}
	for name, p := range b.NamedParameters() {
		g, err := tdp.Grad(p)
		if err != nil {
			return err
		}
		want[name] = g
	}
	for name, p := range a.NamedParameters() {
		g, err := tdp.Grad(p)
		if err != nil {
			return err
		}
		if (g == nil) != (want[name] == nil) {
			return fmt.Errorf("%s: gradient of %s: %v, want %v", what, name, g, want[name])
		}
		if g != nil {
			if err := near(what+": gradient of "+name, g, want[name], 1e-12); err != nil {
				return err
			}
		}
	}
	return nil
}

func gradList(m Module) (list []*ts.Tensor, err error) {
	for _, p := range m.NamedParameters() {
		g, err := gradOf(p)
		if err != nil {
			return nil, err
		}
		list = append(list, g)
	}
	return list, nil
}

// pairOf makes a model for DDP and its twin that trains alone.
func pairOf(make func() nn.Module) (m, alone nn.Module, err error) {
	m, err = build(make, gotch.Double)
	if err == nil {
		alone, err = build(make, gotch.Double)
	}
	return m, alone, err
}

// TestTrainsLikeOneProcess: parameters equal those of one process with all samples, after each step, with other samples
// each time.
func TestTrainsLikeOneProcess(t *testing.T) {
	for _, size := range []int{2, 3} {
		for _, o := range []DDPOptions{
			{}, {GradientAsBucketView: true}, {StaticGraph: true}, {StaticGraph: true, GradientAsBucketView: true},
			{FindUnusedParameters: true}, {BucketCapMB: 0.0001},
		} {
			group(t, size, func(pg *ProcessGroup) error {
				m, alone, err := pairOf(mlp)
				if err != nil {
					return err
				}
				d, err := NewDDP(m, pg, o)
				if err != nil {
					return err
				}
				defer d.Close()
				n := int64(size)
				for k := range 5 {
					xy, err := draws(uint64(k), []int64{2 * n, 4}, []int64{2 * n, 3})
					if err != nil {
						return err
					}
					liveZero(m)
					liveZero(alone)
					mine := func(x *ts.Tensor) *ts.Tensor { return x.MustNarrow(0, 2*int64(pg.Rank()), 2, false) }
					if err := errors.Join(ddpStep(d, mine(xy[0]), mine(xy[1])), localStep(alone, xy[0], xy[1])); err != nil {
						return err
					}
					if err := sameGrads(fmt.Sprintf("%+v, step %d", o, k), m, alone); err != nil {
						return err
					}
					for _, m := range []Module{m, alone} {
						g, err := gradList(m)
						if err != nil {
							return err
						}
						if err := descend(m, g); err != nil {
							return err
						}
					}
				}
				return nil
			})
		}
	}
}

// TestLayerWithoutOutputs: parameters without elements pass.
func TestLayerWithoutOutputs(t *testing.T) {
	group(t, 2, func(pg *ProcessGroup) error {
		d, err := NewDDP(denseLayer(10, 0), pg, DDPOptions{})
		if err != nil {
			return err
		}
		return d.Close()
	})
}

// meanHook is a communication hook of Go that averages over a group.
func meanHook(pg *ProcessGroup, then float64) CommHook {
	return func(b *GradBucket) (Future, error) {
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
		return f.Then(func(sum *ts.Tensor) (*ts.Tensor, error) {
			return sum.MulScalar(ts.FloatScalar(then/float64(pg.Size())), false)
		})
	}
}

// TestHookParity: a hook that averages, over the world or a group of the same ranks, trains like no hook.
func TestHookParity(t *testing.T) {
	group(t, 2, func(pg *ProcessGroup) error {
		other, err := pg.NewGroup(context.Background(), []int{0, 1}, GroupOptions{})
		if err != nil {
			return err
		}
		for _, g := range []*ProcessGroup{pg, other} {
			plain, hooked, err := pairOf(mlp)
			if err != nil {
				return err
			}
			a, err := NewDDP(plain, pg, DDPOptions{})
			if err != nil {
				return err
			}
			b, err := NewDDP(hooked, pg, DDPOptions{GradientAsBucketView: true})
			if err != nil {
				return err
			}
			if err := b.RegisterCommHook("mean", meanHook(g, 1)); err != nil {
				return err
			}
			for k := range 100 {
				xy, err := draws(uint64(100*pg.Rank()+k), []int64{3, 4}, []int64{3, 3})
				if err != nil {
					return err
				}
				liveZero(plain)
				liveZero(hooked)
				if err := errors.Join(ddpStep(a, xy[0], xy[1]), ddpStep(b, xy[0], xy[1]), sameGrads("hook", hooked, plain)); err != nil {
					return err
				}
			}
			if err := errors.Join(a.Close(), b.Close()); err != nil {
				return err
			}
		}
		return nil
	})
}

// TestAccumulation: after a step in NoSync gradients differ from those of the whole batch, after the synchronised one that
// follows they equal them, with and without views and hooks. A forward without gradients adds nothing.
func TestAccumulation(t *testing.T) {
	for name, hook := range map[string]func(pg *ProcessGroup) CommHook{
		"no hook":   nil,
		"hook":      func(pg *ProcessGroup) CommHook { return meanHook(pg, 1) },
		"then hook": func(pg *ProcessGroup) CommHook { return thenHook(meanHook(pg, 0.5)) },
	} {
		for _, view := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, view %t", name, view), func(t *testing.T) {
				group(t, 2, func(pg *ProcessGroup) error {
					m, alone, err := pairOf(mlp)
					if err != nil {
						return err
					}
					d, err := NewDDP(m, pg, DDPOptions{GradientAsBucketView: view})
					if err != nil {
						return err
					}
					defer d.Close()
					if hook != nil {
						if err := d.RegisterCommHook(name, hook(pg)); err != nil {
							return err
						}
					}
					for k := range 4 {
						xy, err := draws(uint64(k), []int64{4, 4}, []int64{4, 3})
						if err != nil {
							return err
						}
						x, y := share(xy[0], []int64{2, 2}, pg.Rank()), share(xy[1], []int64{2, 2}, pg.Rank())
						if err := localStep(alone, xy[0], xy[1]); err != nil {
							return err
						}
						if k%2 == 1 {
							if err := errors.Join(ddpStep(d, x, y), sameGrads(fmt.Sprint(k), m, alone)); err != nil {
								return err
							}
							liveZero(m)
							liveZero(alone)
							continue
						}
						err = d.NoSync(func() error {
							return errors.Join(NoGrad(func() error { _, err := d.Forward(x); return err }), ddpStep(d, x, y))
						})
						if err != nil {
							return err
						}
						if sameGrads("", m, alone) == nil {
							return errors.New("gradients were averaged in NoSync")
						}
					}
					return nil
				})
			})
		}
	}
}

// thenHook doubles what a hook gives, in a further future.
func thenHook(hook CommHook) CommHook {
	return func(b *GradBucket) (Future, error) {
		f, err := hook(b)
		if err != nil {
			return Future{}, err
		}
		return f.Then(func(t *ts.Tensor) (*ts.Tensor, error) { return t.MulScalar(ts.FloatScalar(2), false) })
	}
}

// runOne is a step of a module whose forward the test gives.
func runOne(d *DDP, forward func() *ts.Tensor) error {
	outs, err := d.Run(func() ([]*ts.Tensor, error) { return []*ts.Tensor{forward()}, nil })
	if err != nil {
		return err
	}
	return d.Backward(outs[0])
}

func ones(shape ...int64) *ts.Tensor { return ts.MustOnes(shape, gotch.Float, gotch.CPU) }

func sumOf(layer ts.ModuleT, x *ts.Tensor) *ts.Tensor {
	return layer.ForwardT(x, true).MustSum(gotch.Float, true)
}

// TestBranchesWithNoSync: ranks take other layers in each part of an accumulation, and yet every parameter has a gradient
// in the end, the same on all ranks.
func TestBranchesWithNoSync(t *testing.T) {
	group(t, 2, func(pg *ProcessGroup) error {
		layers := []*nn.Linear{denseLayer(1, 1), denseLayer(1, 1), denseLayer(1, 1), denseLayer(1, 1)}
		m := nn.NewSequential(layers[0], layers[1], layers[2], layers[3])
		d, err := NewDDP(m, pg, DDPOptions{FindUnusedParameters: true})
		if err != nil {
			return err
		}
		defer d.Close()
		step := func(k int) error {
			return runOne(d, func() *ts.Tensor { return sumOf(layers[2*pg.Rank()+k], ones(1, 1)) })
		}
		if err := errors.Join(d.NoSync(func() error { return step(0) }), step(1)); err != nil {
			return err
		}
		for name, p := range m.NamedParameters() {
			g, err := gradOf(p)
			if err != nil {
				return fmt.Errorf("%s: %w", name, err)
			}
			if v := values(g)[0]; v != 0.5 {
				return fmt.Errorf("%s: gradient %v, want one rank's 1 over two ranks", name, v)
			}
		}
		return nil
	})
}

// TestSharedUnusedParameter: an unused parameter that two layers share, and a loss that is changed in place.
func TestSharedUnusedParameter(t *testing.T) {
	for _, static := range []bool{true, false} {
		group(t, 2, func(pg *ProcessGroup) error {
			a, b, used := denseLayer(10, 5), denseLayer(10, 5), denseLayer(10, 5)
			b.Bias.MustDrop()
			b.Bias = nn.Must(tdp.Share(a.Bias))
			d, err := NewDDP(nn.NewSequential(a, b, used), pg, DDPOptions{FindUnusedParameters: true, StaticGraph: static})
			if err != nil {
				return err
			}
			defer d.Close()
			for range 6 {
				outs, err := d.Run(func() ([]*ts.Tensor, error) { return []*ts.Tensor{sumOf(used, ones(20, 10))}, nil })
				if err != nil {
					return err
				}
				outs[0].MustDivScalar_(ts.FloatScalar(10))
				if err := d.Backward(outs[0]); err != nil {
					return err
				}
			}
			return nil
		})
	}
}

// TestOutputUnusedInLoss: the layer behind an output that the loss leaves out keeps its gradient as it was: none at
// first, later the last one, as without DDP.
func TestOutputUnusedInLoss(t *testing.T) {
	group(t, 2, func(pg *ProcessGroup) error {
		make := func() nn.Module { return nn.NewSequential(denseLayer(10, 10), denseLayer(10, 10)) }
		m, alone, err := pairOf(make)
		if err != nil {
			return err
		}
		d, err := NewDDP(m, pg, DDPOptions{FindUnusedParameters: true})
		if err != nil {
			return err
		}
		defer d.Close()
		xs, err := draws(7, []int64{10, 10})
		if err != nil {
			return err
		}
		outputs := func(m nn.Module) []*ts.Tensor {
			s := m.(*nn.Sequential)
			return []*ts.Tensor{s.At(0).ForwardT(xs[0], true), s.At(1).ForwardT(xs[0], true)}
		}
		for k := range 7 {
			loss := func(o []*ts.Tensor) *ts.Tensor {
				if k == 1 || k == 2 {
					return o[0].MustMatmul(o[1], false).MustSum(gotch.Double, true)
				}
				return o[1].MustSum(gotch.Double, false)
			}
			if k == 1 {
				liveZero(m)
				liveZero(alone)
			}
			outs, err := d.Run(func() ([]*ts.Tensor, error) { return outputs(m), nil })
			if err != nil {
				return err
			}
			err = errors.Join(d.Backward(loss(outs)), tdp.Backward(loss(outputs(alone)), nil, false, nil))
			if err != nil {
				return err
			}
			if err := sameGrads(fmt.Sprint(k), m, alone); err != nil {
				return err
			}
			if g, err := tdp.Grad(m.(*nn.Sequential).At(0).(*nn.Linear).Weight); err != nil || (g == nil) != (k == 0) {
				return fmt.Errorf("step %d: gradient %v %v", k, g, err)
			}
		}
		return nil
	})
}

// TestStaticGraphThatChanges is told, whichever way it changes, and the logging data has it.
func TestStaticGraphThatChanges(t *testing.T) {
	for _, c := range []struct {
		uses [2]bool
		text string
	}{
		{[2]bool{false, true}, "Your training graph has changed in this iteration"},
		{[2]bool{true, false}, "did not receive"},
	} {
		group(t, 2, func(pg *ProcessGroup) error {
			a, b := denseLayer(10, 10), denseLayer(10, 10)
			d, err := NewDDP(nn.NewSequential(a, b), pg, DDPOptions{StaticGraph: true})
			if err != nil {
				return err
			}
			defer d.Close()
			for k, both := range c.uses {
				err = runOne(d, func() *ts.Tensor {
					h := a.ForwardT(ones(20, 10), true)
					if both {
						h = b.ForwardT(h, true)
					}
					return h.MustSum(gotch.Float, true)
				})
				if k == 0 && err != nil {
					return err
				}
			}
			var unused *UnusedParametersError
			if c.uses[0] && (!errors.As(err, &unused) || !slices.Equal(unused.Names, []string{"1.weight", "1.bias"})) {
				return fmt.Errorf("got %v", err)
			}
			if !c.uses[0] && (err == nil || !strings.Contains(err.Error(), c.text)) {
				return fmt.Errorf("got %v", err)
			}
			data, err := d.LoggingData()
			if err == nil && !strings.Contains(data.Error, c.text) {
				err = fmt.Errorf("logged %q", data.Error)
			}
			return err
		})
	}
}

// TestTensorsWithoutGradient pass through, and new ones may be made, with every combination of options.
func TestTensorsWithoutGradient(t *testing.T) {
	for _, o := range []DDPOptions{
		{}, {FindUnusedParameters: true}, {StaticGraph: true}, {FindUnusedParameters: true, StaticGraph: true},
	} {
		group(t, 2, func(pg *ProcessGroup) error {
			m := denseLayer(10, 10)
			d, err := NewDDP(m, pg, o)
			if err != nil {
				return err
			}
			defer d.Close()
			for range 6 {
				outs, err := d.Run(func() ([]*ts.Tensor, error) {
					y := m.ForwardT(ones(1, 10), true)
					return []*ts.Tensor{y, y.MustDetach(false), ones(3)}, nil
				})
				if err != nil {
					return err
				}
				for i, o := range outs {
					if info, err := tdp.Describe(o); err != nil || info.RequiresGrad != (i == 0) {
						return fmt.Errorf("output %d requires a gradient: %t %v", i, info.RequiresGrad, err)
					}
				}
				if err := d.Backward(outs[0].MustAdd(outs[1], false).MustSum(gotch.Float, true)); err != nil {
					return err
				}
			}
			return nil
		})
	}
}

// TestTwoForwardsOfAStaticGraph: both forwards of one backward count.
func TestTwoForwardsOfAStaticGraph(t *testing.T) {
	group(t, 2, func(pg *ProcessGroup) error {
		m, alone, err := pairOf(mlp)
		if err != nil {
			return err
		}
		d, err := NewDDP(m, pg, DDPOptions{StaticGraph: true})
		if err != nil {
			return err
		}
		defer d.Close()
		x := ts.MustOnes([]int64{2, 4}, gotch.Double, gotch.CPU)
		for k := range 3 {
			liveZero(m)
			liveZero(alone)
			var loss, want *ts.Tensor
			for range 2 {
				out, err := d.Forward(x)
				if err != nil {
					return err
				}
				mine, other := out.MustSum(gotch.Double, true), alone.ForwardT(x, true).MustSum(gotch.Double, true)
				if loss == nil {
					loss, want = mine, other
				} else {
					loss, want = loss.MustAdd(mine, true), want.MustAdd(other, true)
				}
			}
			if err := errors.Join(d.Backward(loss), tdp.Backward(want, nil, false, nil), sameGrads(fmt.Sprint(k), m, alone)); err != nil {
				return err
			}
		}
		return nil
	})
}

// TestNestedUnusedParametersAreNamed: all of them, by their paths; frozen and ignored ones are not. The logging data has
// the error.
func TestNestedUnusedParametersAreNamed(t *testing.T) {
	group(t, 2, func(pg *ProcessGroup) error {
		used, unused, ignored, frozen := denseLayer(3, 3), denseLayer(3, 3), denseLayer(3, 3), denseLayer(3, 3)
		if err := frozen.Freeze(); err != nil {
			return err
		}
		m := nn.NewSequential(nn.NewSequential(used, nn.NewSequential(unused, nn.NewReLU())), ignored, nn.NewSequential(frozen))
		d, err := NewDDP(m, pg, DDPOptions{Ignore: []string{"1.weight", "1.bias"}})
		if err != nil {
			return err
		}
		defer d.Close()
		err = runOne(d, func() *ts.Tensor { return sumOf(used, ones(2, 3)) })
		var e *UnusedParametersError
		if !errors.As(err, &e) || !slices.Equal(e.Names, []string{"0.1.0.weight", "0.1.0.bias"}) {
			return fmt.Errorf("got %v", err)
		}
		for _, text := range []string{"0.1.0.weight", "FindUnusedParameters"} {
			if !strings.Contains(err.Error(), text) {
				return fmt.Errorf("%q is not in: %v", text, err)
			}
		}
		data, err := d.LoggingData()
		if err == nil && !strings.Contains(data.Error, "Expected to have finished reduction") {
			err = fmt.Errorf("logged %q", data.Error)
		}
		return err
	})
}

// TestOneRankEvaluates alone, through DDP, a model with buffers.
func TestOneRankEvaluates(t *testing.T) {
	group(t, 2, func(pg *ProcessGroup) error {
		m := nn.NewSequential(denseLayer(3, 4), nn.Must(nn.NewBatchNorm1d(4, nn.BatchNormOptions{})))
		d, err := NewDDP(m, pg, DDPOptions{})
		if err != nil {
			return err
		}
		defer d.Close()
		if pg.Rank() == 0 {
			for range 3 {
				if _, err := nn.Evaluate(d, ones(5, 3)); err != nil {
					return err
				}
			}
		}
		return runOne(d, func() *ts.Tensor { return sumOf(m, ts.MustRand([]int64{4, 3}, gotch.Float, gotch.CPU)) })
	})
}

// TestForwardsWithoutBackward: any number of outputs may be ignored before training goes on.
func TestForwardsWithoutBackward(t *testing.T) {
	for _, o := range []DDPOptions{{}, {FindUnusedParameters: true}} {
		group(t, 2, func(pg *ProcessGroup) error {
			used, unused := denseLayer(3, 3), denseLayer(3, 3)
			m := nn.NewSequential(used, unused)
			if !o.FindUnusedParameters {
				m = nn.NewSequential(used)
			}
			d, err := NewDDP(m, pg, o)
			if err != nil {
				return err
			}
			defer d.Close()
			for range 4 {
				if _, err := d.Run(func() ([]*ts.Tensor, error) { return []*ts.Tensor{used.ForwardT(ones(2, 3), true)}, nil }); err != nil {
					return err
				}
			}
			for range 4 {
				if err := runOne(d, func() *ts.Tensor { return sumOf(used, ones(2, 3)) }); err != nil {
					return err
				}
			}
			return nil
		})
	}
}

// TestSecondDDPAfterFailedBackward: closing takes the hooks off, so that another DDP of the same model works.
func TestSecondDDPAfterFailedBackward(t *testing.T) {
	group(t, 2, func(pg *ProcessGroup) error {
		m := denseLayer(10, 10)
		first, err := NewDDP(m, pg, DDPOptions{})
		if err != nil {
			return err
		}
		if err := first.RegisterCommHook("fails", func(*GradBucket) (Future, error) { return Future{}, errors.New("simulated") }); err != nil {
			return err
		}
		if err := runOne(first, func() *ts.Tensor { return sumOf(m, ones(10, 10)) }); err == nil {
			return errors.New("no error")
		}
		if err := first.Close(); err != nil {
			return err
		}
		liveZero(m)
		second, err := NewDDP(m, pg, DDPOptions{})
		if err != nil {
			return err
		}
		defer second.Close()
		if err := runOne(second, func() *ts.Tensor { return sumOf(m, ones(10, 10)) }); err != nil {
			return err
		}
		return expectGradient(Named{"weight", m.Weight}, 10)
	})
}

// TestUpdateProcessGroup: DDP goes on with fewer ranks, with others, and with all again; also after a backward that failed.
func TestUpdateProcessGroup(t *testing.T) {
	for _, o := range []DDPOptions{{}, {FindUnusedParameters: true, BucketCapMB: 0.0001}} {
		group(t, 3, func(pg *ProcessGroup) error {
			m := product(float32(1 + pg.Rank()))
			d, err := NewDDP(m, pg, o)
			if err != nil {
				return err
			}
			defer d.Close()
			train := func(want float32) error {
				for range 3 {
					if err := optimZero(m); err != nil {
						return err
					}
					if err := errors.Join(step(d, 6*float32(pg.Rank()), 1), expectGradient(m.params[0], want)); err != nil {
						return err
					}
				}
				return nil
			}
			if err := train(6); err != nil {
				return err
			}
			fail := errors.New("simulated")
			for _, c := range []struct {
				ranks []int
				want  float32
			}{{[]int{0, 1}, 3}, {[]int{1, 2}, 9}, {[]int{0, 1, 2}, 6}} {
				g, err := pg.NewGroup(context.Background(), c.ranks, GroupOptions{})
				if err != nil && !errors.Is(err, ErrNotMember) {
					return err
				}
				if !slices.Contains(c.ranks, pg.Rank()) {
					continue
				}
				// A forward whose backward never came must not be in the way.
				m.forward = func(x *ts.Tensor) *ts.Tensor { panic(fail) }
				if _, err := d.Forward(ones(2)); !errors.Is(err, fail) {
					return fmt.Errorf("got %v", err)
				}
				m.forward = func(x *ts.Tensor) *ts.Tensor { return x.MustMul(m.params[0].Tensor, false) }
				if err := d.UpdateProcessGroup(g); err != nil {
					return err
				}
				if d.ProcessGroup() != g {
					return errors.New("the group is not the new one")
				}
				if err := train(c.want); err != nil {
					return fmt.Errorf("ranks %v: %w", c.ranks, err)
				}
			}
			if err := d.Close(); err != nil {
				return err
			}
			if err := d.UpdateProcessGroup(pg); !errors.Is(err, ErrValue) {
				return fmt.Errorf("after Close: %v", err)
			}
			return nil
		})
	}
}

// TestLoggingDataIsWhole: the values that Python's test of them wants.
func TestLoggingDataIsWhole(t *testing.T) {
	group(t, 2, func(pg *ProcessGroup) error {
		plain := func(in, out int64) nn.Module { return nn.Must(nn.NewLinear(in, out, nn.LinearOptions{NoBias: true})) }
		m := nn.NewSequential(plain(2, 10), plain(10, 50), plain(50, 4))
		d, err := NewDDP(m, pg, DDPOptions{})
		if err != nil {
			return err
		}
		defer d.Close()
		if err := d.SetLoggingSampleRate(2); err != nil {
			return err
		}
		for range 20 {
			if err := runOne(d, func() *ts.Tensor { return sumOf(m, ones(2, 2)) }); err != nil {
				return err
			}
		}
		l, err := d.LoggingData()
		if err != nil {
			return err
		}
		bytes := strconv.Itoa(4 * (20 + 500 + 200))
		for name, want := range map[string]string{
			"world_size": "2", "rank": strconv.Itoa(pg.Rank()), "device_ids": "", "output_device": "-1", "broadcast_buffers": "1",
			"bucket_cap_bytes": strconv.Itoa(25 << 20), "find_unused_parameters": "0", "gradient_as_bucket_view": "0", "backend_name": "gloo",
			"iteration": "18", "dtypes": "float", "total_parameter_size_bytes": bytes, "num_parameter_tensors": "3", "bucket_sizes": bytes,
			"has_rebuilt_buckets": "1", "rebuilt_bucket_sizes": bytes, "prev_iteration_grad_ready_order_indices": "2, 1, 0",
			"rebuilt_per_bucket_param_indices": "2 1 0", "is_multi_device_module": "0", "has_sync_bn": "0",
		} {
			if got := l.Raw[name]; got != want {
				return fmt.Errorf("%s: %q, want %q", name, got, want)
			}
		}
		if n := l.Raw["unused_parameter_size"]; n != "" && n != "0" {
			return fmt.Errorf("unused_parameter_size: %s", n)
		}
		at := func(name string) int64 { n, _ := strconv.ParseInt(l.Raw[name], 10, 64); return n }
		order := []int64{1, at("forward_compute_time_start"), at("backward_compute_time_start"), at("backward_comm_time_start"), at("backward_comm_time_end")}
		if !slices.IsSorted(order) || at("backward_compute_time_end") < at("backward_compute_time_start") {
			return fmt.Errorf("times out of order: %v", order)
		}
		if min(l.AvgForwardComputeTime, l.AvgBackwardComputeTime, l.AvgBackwardCommTime) < 1 ||
			l.AvgBackwardComputeCommOverlapTime > min(l.AvgBackwardComputeTime, l.AvgBackwardCommTime) {
			return fmt.Errorf("times: %+v", l)
		}

		// Two dtypes are two buckets.
		large := nn.NewSequential(plain(1000, 200), plain(200, 50))
		if err := large.At(0).To(gotch.CPU, gotch.Double); err != nil {
			return err
		}
		mixed, err := NewDDP(large, pg, DDPOptions{BucketCapMB: 1.5})
		if err != nil {
			return err
		}
		defer mixed.Close()
		if l, err = mixed.LoggingData(); err != nil {
			return err
		}
		sizes := []int{4 * 200 * 50, 8 * 1000 * 200}
		if l.BucketCapBytes != 3<<19 || !slices.Equal(l.BucketSizes, sizes) || l.Raw["dtypes"] != "double, float" {
			return fmt.Errorf("mixed: %+v", l.Raw)
		}
		return nil
	})
}

// TestSparseGradientsAreTheWholeBatch: an embedding with sparse gradients trains like one process with all samples.
func TestSparseGradientsAreTheWholeBatch(t *testing.T) {
	for _, view := range []bool{false, true} {
		group(t, 2, func(pg *ProcessGroup) error {
			make := func() nn.Module {
				return nn.NewSequential(nn.Must(nn.NewEmbedding(10, 3, nn.EmbeddingOptions{Sparse: true})), denseLayer(3, 3))
			}
			m, alone, err := pairOf(make)
			if err != nil {
				return err
			}
			d, err := NewDDP(m, pg, DDPOptions{GradientAsBucketView: view})
			if err != nil {
				return err
			}
			defer d.Close()
			for k := range 4 {
				index := ts.MustOfSlice([]int64{1, 1, int64(k), 4, 4, 9})
				ys, err := draws(uint64(k), []int64{6, 3})
				if err != nil {
					return err
				}
				liveZero(m)
				liveZero(alone)
				mine := []int64{3, 3}
				err = ddpStep(d, share(index, mine, pg.Rank()), share(ys[0], mine, pg.Rank()))
				if err := errors.Join(err, localStep(alone, index, ys[0])); err != nil {
					return err
				}
				table := func(m nn.Module) *ts.Tensor {
					g := nn.Must(gradOf(m.(*nn.Sequential).At(0).(*nn.Embedding).Weight))
					if !nn.Must(tdp.Describe(g)).Sparse {
						nn.Check(errors.New("the gradient is not sparse"))
					}
					return ts.MustZeros([]int64{10, 3}, gotch.Double, gotch.CPU).MustAdd(g, true)
				}
				if err := near("table", table(m), table(alone), 1e-12); err != nil {
					return err
				}
			}
			return nil
		})
	}
}

// TestJoinIsLocalTraining: with unequal numbers of batches, gradients divided by the ranks that still have some, all ranks
// end with the weights of one process that took the mean of each round.
// TestJoinWithEverything: models with buffers and with unused parameters, hooks, and NoSync in between, with ranks that
// have other numbers of batches, also none. In the end all ranks hold the same state, that of the last one.
// TestJoinPassesErrorsOn: with an error of the loop, nobody is waited for.
// TestStaticGraphIsDetected: the logging data tells whether StaticGraph would have been allowed.
func TestStaticGraphIsDetected(t *testing.T) {
	for _, dynamic := range []bool{false, true} {
		group(t, 2, func(pg *ProcessGroup) error {
			a, b := denseLayer(10, 10), denseLayer(10, 10)
			d, err := NewDDP(nn.NewSequential(a, b), pg, DDPOptions{FindUnusedParameters: true})
			if err != nil {
				return err
			}
			defer d.Close()
			for k := range 6 {
				err := runOne(d, func() *ts.Tensor {
					if dynamic && k%2 == 0 {
						return sumOf(b, a.ForwardT(ones(1, 10), true))
					}
					return sumOf(b, ones(1, 10))
				})
				if err != nil {
					return err
				}
			}
			l, err := d.LoggingData()
			if err != nil {
				return err
			}
			if got := l.Raw["can_set_static_graph"] == "1"; got == dynamic {
				return fmt.Errorf("dynamic %t: can_set_static_graph is %q", dynamic, l.Raw["can_set_static_graph"])
			}
			return nil
		})
	}
}

// tiedNet has two layers with one weight, and one layer in two places.
type tiedNet struct {
	nn.Base
	a, b, again *nn.Linear
}

func newTiedNet() nn.Module {
	m := &tiedNet{a: denseLayer(4, 4), b: denseLayer(4, 4)}
	m.b.Weight.MustDrop()
	m.b.Weight = nn.Must(tdp.Share(m.a.Weight))
	m.again = m.b
	nn.Check(errors.Join(nn.Register(m, "a", &m.a), nn.Register(m, "b", &m.b), nn.Register(m, "again", &m.again)))
	return m
}

// ForwardT runs the layers.
func (m *tiedNet) ForwardT(x *ts.Tensor, train bool) *ts.Tensor {
	return nn.Run(x, train, m.a, nn.NewTanh(), m.b, nn.NewTanh(), m.again)
}

// TestSharedWeightsAreReducedOnce: gradients of shared weights, and of a layer that stands in two places, are those of one
// process with the whole batch, and each is in one bucket once.
func TestSharedWeightsAreReducedOnce(t *testing.T) {
	for _, o := range []DDPOptions{{}, {StaticGraph: true}, {FindUnusedParameters: true}, {GradientAsBucketView: true}} {
		group(t, 2, func(pg *ProcessGroup) error {
			m, alone, err := pairOf(newTiedNet)
			if err != nil {
				return err
			}
			d, err := NewDDP(m, pg, o)
			if err != nil {
				return err
			}
			defer d.Close()
			for k := range 4 {
				xy, err := draws(uint64(k), []int64{4, 4}, []int64{4, 4})
				if err != nil {
					return err
				}
				liveZero(m)
				liveZero(alone)
				x, y := share(xy[0], []int64{2, 2}, pg.Rank()), share(xy[1], []int64{2, 2}, pg.Rank())
				err = errors.Join(ddpStep(d, x, y), localStep(alone, xy[0], xy[1]))
				if err := errors.Join(err, sameGrads(fmt.Sprintf("%+v, step %d", o, k), m, alone)); err != nil {
					return err
				}
			}
			l, err := d.LoggingData()
			if err == nil && (l.NumParameterTensors != 3 || l.TotalParameterSizeBytes != 8*(16+4+4)) {
				err = fmt.Errorf("%+v", l)
			}
			return err
		})
	}
}

// TestZeroGradOfBucketViews: optimizers drop or clear gradients that are views of buckets, and training goes on right.
func TestZeroGradOfBucketViews(t *testing.T) {
	for _, toNone := range []bool{true, false} {
		group(t, 2, func(pg *ProcessGroup) error {
			m := product(1)
			d, err := NewDDP(m, pg, DDPOptions{GradientAsBucketView: true})
			if err != nil {
				return err
			}
			defer d.Close()
			sgd, err := optim.NewSGD(m.NamedParameters(), optim.SGDOptions{LR: 0.25})
			if err != nil {
				return err
			}
			defer sgd.Close()
			want := float32(1)
			for range 5 {
				if err := sgd.ZeroGrad(toNone); err != nil {
					return err
				}
				if err := errors.Join(step(d, 4*float32(pg.Rank()), 1), expectGradient(m.params[0], 2), sgd.Step()); err != nil {
					return err
				}
				want -= 0.5
				if got := values(m.params[0].Tensor)[0]; got != want {
					return fmt.Errorf("weight %v, want %v", got, want)
				}
			}
			return nil
		})
	}
}
