package torchddp

import (
	"errors"
	"fmt"
	"slices"
	"testing"

	"github.com/goddp/goddp/internal/tdp"
	"github.com/goddp/goddp/torchddp/optim"
	"github.com/stretchr/testify/require"
	"github.com/sugarme/gotch"
	"github.com/sugarme/gotch/ts"
)

// layers is two linear layers with fractions that no small type holds.
func layers() *toy {
	w := func(n int) []float32 {
		v := make([]float32, n)
		for i := range v {
			v[i] = float32((i*37)%23-11) / 17
		}
		return v
	}
	m := &toy{params: []Named{
		param("first.weight", []int64{8, 4}, w(32)...), param("first.bias", []int64{8}, w(8)...),
		param("second.weight", []int64{2, 8}, w(16)...), param("second.bias", []int64{2}, w(2)...),
	}}
	m.forward = func(x *ts.Tensor) *ts.Tensor {
		h := ts.MustLinear(x, m.params[0].Tensor, m.params[1].Tensor).MustRelu(true)
		defer h.MustDrop()
		return ts.MustLinear(h, m.params[2].Tensor, m.params[3].Tensor)
	}
	return m
}

// inputs are a rank's batch of a step.
func inputs(rank, step int) *ts.Tensor {
	v := make([]float32, 12)
	for i := range v {
		v[i] = float32((i*13+rank*7+step*5)%19-9) / 7
	}
	t, err := tdp.FromSlice(v, []int64{3, 4}, place)
	if err != nil {
		panic(err)
	}
	return t
}

func tensorsOf(list []Named) []*ts.Tensor {
	out := make([]*ts.Tensor, len(list))
	for i, p := range list {
		out[i] = p.Tensor
	}
	return out
}

// train makes steps of d and gives all weights afterwards.
func train(d *DDP, m *toy, steps int, after func(step int) error) ([][]float32, error) {
	for i := range steps {
		x := inputs(d.pg.Rank(), i)
		out, err := d.Forward(x)
		x.MustDrop()
		if err != nil {
			return nil, err
		}
		loss := out.MustTotype(gotch.Float, true).MustSum(gotch.Float, true)
		err = d.Backward(loss)
		loss.MustDrop()
		if err == nil {
			err = after(i)
		}
		if err != nil {
			return nil, err
		}
	}
	return weights(m), nil
}

func weights(m *toy) (all [][]float32) {
	for _, p := range m.params {
		all = append(all, values(p.Tensor))
	}
	return all
}

func same(got, want [][]float32) error {
	if !slices.EqualFunc(got, want, slices.Equal[[]float32]) {
		return fmt.Errorf("got %v\nwant %v", got, want)
	}
	return nil
}

// lowPrecision is a step of mixed precision made by hand: the weights' copies in the small type, a backward, and the
// mean of the gradients.
func lowPrecision(pg *ProcessGroup, m *toy, step int, o MixedPrecision) error {
	low := layers()
	for i, p := range m.params {
		t := p.Tensor.MustDetach(false).MustTotype(o.Param, true)
		if err := tdp.SetRequiresGrad(t, true); err != nil {
			return err
		}
		low.params[i].Tensor = t
	}
	x := inputs(pg.Rank(), step).MustTotype(o.Param, true)
	out := low.forward(x)
	if err := tdp.Backward(out.MustTotype(gotch.Float, true).MustSum(gotch.Float, true), nil, false, nil); err != nil {
		return err
	}
	for i, p := range low.params {
		g, err := tdp.Grad(p.Tensor)
		if err != nil {
			return err
		}
		g = g.MustTotype(o.reduce(), true)
		if err := pg.AllReduce(g, Sum); err != nil {
			return err
		}
		g = g.MustDivScalar(ts.FloatScalar(float64(pg.Size())), true).MustTotype(gotch.Float, true)
		if err := tdp.SetGrad(m.params[i].Tensor, g); err != nil {
			return err
		}
	}
	return nil
}

func TestMixedPrecision(t *testing.T) {
	for _, o := range []MixedPrecision{
		{Param: gotch.BFloat16}, {Param: gotch.BFloat16, Reduce: gotch.Float}, {Param: gotch.Half},
	} {
		t.Run(fmt.Sprint(o.Param, o.Reduce), func(t *testing.T) {
			group(t, 2, func(pg *ProcessGroup) error {
				m, byHand := layers(), layers()
				d, err := NewDDP(m, pg, DDPOptions{MixedPrecision: &o})
				if err != nil {
					return err
				}
				defer d.Close()
				sgd, err := optim.NewSGD(tensorsOf(m.params), optim.SGDOptions{LR: 0.1, Momentum: 0.9})
				if err != nil {
					return err
				}
				defer sgd.Close()
				ref, err := optim.NewSGD(tensorsOf(byHand.params), optim.SGDOptions{LR: 0.1, Momentum: 0.9})
				if err != nil {
					return err
				}
				defer ref.Close()
				// The buckets are cut anew before the second step.
				_, err = train(d, m, 4, func(step int) error {
					if err := lowPrecision(pg, byHand, step, o); err != nil {
						return err
					}
					for i, p := range m.params {
						if p.Tensor.DType() != gotch.Float {
							return fmt.Errorf("%s is %v after the backward", p.Name, p.Tensor.DType())
						}
						got, err := tdp.Grad(p.Tensor)
						if err != nil {
							return err
						}
						want, err := tdp.Grad(byHand.params[i].Tensor)
						if err != nil {
							return err
						}
						if !slices.Equal(values(got), values(want)) {
							return fmt.Errorf("step %d: gradient of %s: %v, by hand %v", step, p.Name, values(got), values(want))
						}
					}
					return errors.Join(sgd.Step(), ref.Step(), sgd.ZeroGrad(step%2 == 0), ref.ZeroGrad(true),
						same(weights(m), weights(byHand)))
				})
				return err
			})
		})
	}
}

// Between a forward and its backward the parameters are small; whatever comes instead of the backward, they are
// themselves again afterwards.
func TestMixedPrecisionRestores(t *testing.T) {
	group(t, 2, func(pg *ProcessGroup) error {
		m := layers()
		frozen := param("frozen", []int64{2}, 1.23456)
		if err := tdp.SetRequiresGrad(frozen.Tensor, false); err != nil {
			return err
		}
		m.params = append(m.params, frozen)
		m.buffers = []Named{param("mean", []int64{2}, 0.1), {"count", ts.MustOfSlice([]int64{3})}}
		if err := tdp.SetRequiresGrad(m.buffers[0].Tensor, false); err != nil {
			return err
		}
		before := weights(m)
		inner, during := m.forward, gotch.Float
		var failure error
		m.forward = func(x *ts.Tensor) *ts.Tensor {
			during = frozen.Tensor.DType()
			if failure != nil {
				panic(failure)
			}
			return inner(x)
		}
		d, err := NewDDP(m, pg, DDPOptions{MixedPrecision: &MixedPrecision{Param: gotch.BFloat16, Buffer: gotch.BFloat16}})
		if err != nil {
			return err
		}
		if got := m.buffers[0].Tensor.DType(); got != gotch.BFloat16 {
			return fmt.Errorf("the buffer is %v", got)
		}
		if got := m.buffers[1].Tensor.DType(); got != gotch.Int64 {
			return fmt.Errorf("the counter is %v", got)
		}
		check := func(when string) error {
			if during != gotch.BFloat16 {
				return fmt.Errorf("%s: parameters were %v in the forward", when, during)
			}
			during = gotch.Float
			for _, p := range m.params {
				if p.Tensor.DType() != gotch.Float {
					return fmt.Errorf("%s: %s is %v", when, p.Name, p.Tensor.DType())
				}
			}
			return same(weights(m), before)
		}
		failure = errors.New("the model is tired")
		if _, err := d.Forward(inputs(0, 0)); !errors.Is(err, failure) {
			return fmt.Errorf("the forward's error was %v", err)
		}
		if err := check("after a failed forward"); err != nil {
			return err
		}
		failure = nil
		err = NoGrad(func() error { _, err := d.Forward(inputs(0, 0)); return err })
		if err != nil {
			return err
		}
		if err := check("after a forward without gradients"); err != nil {
			return err
		}
		// A forward whose output is thrown away: the next one begins with the true weights.
		for range 2 {
			if _, err := d.Forward(inputs(0, 0)); err != nil {
				return err
			}
		}
		if got := m.params[0].Tensor.DType(); got != gotch.BFloat16 {
			return fmt.Errorf("between forward and backward a weight is %v", got)
		}
		// Accumulation keeps its sum in the parameters' own type between the steps.
		err = d.NoSync(func() error {
			_, err := train(d, m, 2, func(int) error { return check("after a backward in NoSync") })
			return err
		})
		if err != nil {
			return err
		}
		if _, err := train(d, m, 1, func(int) error { return check("after a backward") }); err != nil {
			return err
		}
		if _, err := d.Forward(inputs(0, 0)); err != nil {
			return err
		}
		return errors.Join(d.Close(), check("after Close"))
	})
}

func TestModesRefuseNonsense(t *testing.T) {
	group(t, 1, func(pg *ProcessGroup) error {
		bf16 := &MixedPrecision{Param: gotch.BFloat16}
		for _, c := range []struct {
			o    DDPOptions
			want string
		}{
			{DDPOptions{MixedPrecision: &MixedPrecision{}}, "MixedPrecision.Param must be"},
			{DDPOptions{MixedPrecision: &MixedPrecision{Param: gotch.BFloat16, Reduce: gotch.Int64}}, "MixedPrecision.Reduce must be"},
			{DDPOptions{MixedPrecision: &MixedPrecision{Param: gotch.BFloat16, Buffer: gotch.Int64}}, "MixedPrecision.Buffer must be"},
			{DDPOptions{MixedPrecision: bf16, GradientAsBucketView: true}, "leave GradientAsBucketView off"},
			{DDPOptions{MixedPrecision: bf16, FindUnusedParameters: true}, "use StaticGraph"},
			{DDPOptions{DelayUntil: "first.bias"}, "go together"},
			{DDPOptions{DelayAllReduce: []string{"first.bias"}}, "go together"},
			{DDPOptions{DelayAllReduce: []string{"nobody"}, DelayUntil: "first.bias"}, `"nobody", which the model does not have`},
			{DDPOptions{DelayAllReduce: []string{"first.bias"}, DelayUntil: "nobody"}, `DelayUntil names "nobody"`},
			{DDPOptions{DelayAllReduce: []string{"first.bias"}, DelayUntil: "first.bias", Ignore: []string{"first.bias"}}, "both name"},
			{DDPOptions{DelayAllReduce: []string{"first.bias"}, DelayUntil: "first.bias", MixedPrecision: bf16}, "cannot be combined"},
			{DDPOptions{DelayAllReduce: []string{"first.weight", "first.bias", "second.weight", "second.bias"}, DelayUntil: "first.bias"}, "leave at least one"},
		} {
			if _, err := NewDDP(layers(), pg, c.o); !errors.Is(err, ErrValue) {
				return fmt.Errorf("%+v: %v", c.o, err)
			} else if err := contains(err, c.want); err != nil {
				return err
			}
		}
		// Only one way to reduce.
		d, err := NewDDP(layers(), pg, DDPOptions{MixedPrecision: bf16})
		if err != nil {
			return err
		}
		defer d.Close()
		return contains(d.RegisterBuiltinCommHook(FP16CompressHook), "can only be called once")
	})
}

func TestDelayedReduction(t *testing.T) {
	group(t, 2, func(pg *ProcessGroup) error {
		run := func(o DDPOptions) ([][]float32, error) {
			m := layers()
			d, err := NewDDP(m, pg, o)
			if err != nil {
				return nil, err
			}
			defer d.Close()
			sgd, err := optim.NewSGD(tensorsOf(m.params), optim.SGDOptions{LR: 0.1, Momentum: 0.9})
			if err != nil {
				return nil, err
			}
			defer sgd.Close()
			step := func(i int) error { return errors.Join(sgd.Step(), sgd.ZeroGrad(i%2 == 0)) }
			if _, err := train(d, m, 3, step); err != nil {
				return nil, err
			}
			// With accumulation.
			err = d.NoSync(func() error {
				_, err := train(d, m, 1, func(int) error { return nil })
				return err
			})
			if err != nil {
				return nil, err
			}
			return train(d, m, 2, step)
		}
		want, err := run(DDPOptions{})
		if err != nil {
			return err
		}
		got, err := run(DDPOptions{DelayAllReduce: []string{"second.bias", "second.weight"}, DelayUntil: "first.weight"})
		if err != nil {
			return err
		}
		return same(got, want)
	})
}

func TestDelayedReductionThatCannotBe(t *testing.T) {
	group(t, 2, func(pg *ProcessGroup) error {
		m := layers()
		// The trigger's gradient comes first.
		d, err := NewDDP(m, pg, DDPOptions{DelayAllReduce: []string{"first.weight"}, DelayUntil: "second.bias"})
		if err != nil {
			return err
		}
		_, err = train(d, m, 1, func(int) error { return nil })
		if err := contains(err, "the gradient of first.weight came after that of second.bias"); err != nil {
			return err
		}
		if err := d.Close(); err != nil {
			return err
		}
		// The trigger takes no part.
		m = layers()
		m.params = append(m.params, param("idle", []int64{2}, 1))
		d, err = NewDDP(m, pg, DDPOptions{DelayAllReduce: []string{"first.weight"}, DelayUntil: "idle", FindUnusedParameters: true})
		if err != nil {
			return err
		}
		defer d.Close()
		_, err = train(d, m, 1, func(int) error { return nil })
		return errors.Join(contains(err, "did not compute the gradient of idle"),
			contains(d.Join(JoinOptions{}, func() error { return nil }), "cannot be combined with DelayAllReduce"),
			contains(d.StepInBackward(&optim.SGD{}), "cannot be combined with DelayAllReduce"))
	})
}

func TestStepInBackward(t *testing.T) {
	sgd := func(p []*ts.Tensor) (optim.Optimizer, error) {
		return optim.NewSGD(p, optim.SGDOptions{LR: 0.1, Momentum: 0.9})
	}
	adam := func(p []*ts.Tensor) (optim.Optimizer, error) {
		return optim.NewAdamW(p, optim.AdamWOptions{LR: 0.01})
	}
	for _, c := range []struct {
		name  string
		make  func([]*ts.Tensor) (optim.Optimizer, error)
		o     DDPOptions
		some  bool // the optimizer has only the first two parameters
		local bool // a step in NoSync comes first
	}{
		{"SGD", sgd, DDPOptions{}, false, false},
		{"AdamW", adam, DDPOptions{}, false, false},
		{"bucket views", sgd, DDPOptions{GradientAsBucketView: true}, false, false},
		{"small buckets", adam, DDPOptions{BucketCapMB: 1e-5}, false, false},
		{"some parameters", sgd, DDPOptions{}, true, false},
		{"accumulation", sgd, DDPOptions{}, false, true},
		{"static graph", sgd, DDPOptions{StaticGraph: true}, false, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			group(t, 2, func(pg *ProcessGroup) error {
				run := func(inBackward bool) ([][]float32, error) {
					m := layers()
					own := tensorsOf(m.params)
					if c.some {
						own = own[:2]
					}
					d, err := NewDDP(m, pg, c.o)
					if err != nil {
						return nil, err
					}
					defer d.Close()
					o, err := c.make(own)
					if err != nil {
						return nil, err
					}
					defer o.Close()
					if inBackward {
						if err := d.StepInBackward(o.(BackwardOptimizer)); err != nil {
							return nil, err
						}
					}
					if c.local {
						err := d.NoSync(func() error {
							_, err := train(d, m, 1, func(int) error { return nil })
							return err
						})
						if err != nil {
							return nil, err
						}
					}
					return train(d, m, 4, func(i int) error {
						if inBackward {
							for k, p := range m.params {
								g, err := tdp.Grad(p.Tensor)
								if err != nil {
									return err
								}
								if own := !c.some || k < 2; own == (g != nil) {
									return fmt.Errorf("%s: gradient %v after the backward", p.Name, g)
								}
							}
						} else if err := o.Step(); err != nil {
							return err
						}
						if i == 1 {
							o.ParamGroups()[0].SetLR(0.03) // as a scheduler does
						}
						return tdp.ZeroGrad(tensorsOf(m.params), true)
					})
				}
				want, err := run(false)
				if err != nil {
					return err
				}
				got, err := run(true)
				if err != nil {
					return err
				}
				return same(got, want)
			})
		})
	}
}

func TestStepInBackwardRefusesNonsense(t *testing.T) {
	group(t, 1, func(pg *ProcessGroup) error {
		m := layers()
		d, err := NewDDP(m, pg, DDPOptions{})
		if err != nil {
			return err
		}
		defer d.Close()
		stranger, err := optim.NewSGD(tensorsOf(layers().params), optim.SGDOptions{LR: 1})
		if err != nil {
			return err
		}
		defer stranger.Close()
		if err := errors.Join(contains(d.StepInBackward(nil), "the optimizer is nil"),
			contains(d.StepInBackward(stranger), "none of the model's parameters")); err != nil {
			return err
		}
		o, err := optim.NewSGD(tensorsOf(m.params), optim.SGDOptions{LR: 1})
		if err != nil {
			return err
		}
		if err := d.StepInBackward(o); err != nil {
			return err
		}
		out, err := d.Forward(inputs(0, 0))
		if err != nil {
			return err
		}
		loss := out.MustSum(gotch.Float, true)
		if err := errors.Join(contains(d.BackwardWeighted(loss, 1), "choose one"), o.Close()); err != nil {
			return err
		}
		return contains(d.Backward(loss), "optimizer is closed")
	})
}

func TestDataParallel(t *testing.T) {
	for _, devices := range []int{1, 2, 3} {
		t.Run(fmt.Sprint(devices), func(t *testing.T) {
			m, whole := layers(), layers()
			var replicas []*toy
			dp, err := NewDataParallel(m, slices.Repeat([]gotch.Device{gotch.CPU}, devices), func(gotch.Device) (Module, error) {
				r := layers()
				for _, p := range r.params { // other weights: the module's count
					if err := NoGrad(func() error { p.Tensor.MustZero_(); return nil }); err != nil {
						return nil, err
					}
				}
				replicas = append(replicas, r)
				return r, nil
			})
			require.NoError(t, err)
			require.Len(t, replicas, devices-1)
			sgd, err := optim.NewSGD(tensorsOf(m.params), optim.SGDOptions{LR: 0.1})
			require.NoError(t, err)
			ref, err := optim.NewSGD(tensorsOf(whole.params), optim.SGDOptions{LR: 0.1})
			require.NoError(t, err)
			for step := range 3 {
				x := inputs(0, step) // 3 samples: with 2 devices 2 and 1
				out, err := dp.Forward(x, true)
				require.NoError(t, err)
				want := whole.forward(x)
				require.Equal(t, []int64{3, 2}, out.MustSize())
				require.InDeltaSlice(t, values(want), values(out), 1e-6)
				require.NoError(t, dp.Backward(out.MustSum(gotch.Float, true)))
				require.NoError(t, tdp.Backward(want.MustSum(gotch.Float, true), nil, false, nil))
				for i, p := range m.params {
					got, err := tdp.Grad(p.Tensor)
					require.NoError(t, err)
					want, err := tdp.Grad(whole.params[i].Tensor)
					require.NoError(t, err)
					require.InDeltaSlice(t, values(want), values(got), 1e-6, p.Name)
				}
				for _, r := range replicas {
					for _, p := range r.params {
						g, err := tdp.Grad(p.Tensor)
						require.NoError(t, err)
						require.Nil(t, g, "a replica kept a gradient")
					}
				}
				require.NoError(t, errors.Join(sgd.Step(), ref.Step()))
				if step == 0 { // and once accumulated
					require.NoError(t, errors.Join(sgd.ZeroGrad(true), ref.ZeroGrad(true)))
				}
			}
			// Fewer samples than devices.
			x := inputs(0, 9).MustNarrow(0, 0, 1, true)
			require.InDeltaSlice(t, values(whole.forward(x)), values(dp.ForwardT(x, false)), 1e-6)
			// Without gradients, on the replicas' threads too.
			require.NoError(t, NoGrad(func() error {
				out, err := dp.Forward(inputs(0, 0), false)
				require.False(t, out.MustRequiresGrad())
				return err
			}))
		})
	}
}

func TestDataParallelErrors(t *testing.T) {
	two := []gotch.Device{gotch.CPU, gotch.CPU}
	m := layers()
	for want, replicate := range map[string]func(gotch.Device) (Module, error){
		"replicate is nil":                        nil,
		"the replica on cpu: out of paper":        func(gotch.Device) (Module, error) { return nil, errors.New("out of paper") },
		"has 1 parameters and 0 buffers":          func(gotch.Device) (Module, error) { return product(1), nil },
		`replicate gave the module's own "first.`: func(gotch.Device) (Module, error) { return m, nil },
	} {
		_, err := NewDataParallel(m, two, replicate)
		require.ErrorContains(t, err, want)
	}
	_, err := NewDataParallel(nil, two, nil)
	require.ErrorIs(t, err, ErrValue)
	_, err = NewDataParallel(m, nil, nil)
	require.ErrorIs(t, err, ErrValue)
	broken := layers()
	dp, err := NewDataParallel(m, two, func(gotch.Device) (Module, error) { return broken, nil })
	require.NoError(t, err)
	broken.forward = func(*ts.Tensor) *ts.Tensor { panic("no weights left") }
	_, err = dp.Forward(inputs(0, 0), true)
	require.ErrorContains(t, err, "the replica on cpu: no weights left")
	_, err = dp.Forward(ts.MustOfSlice([]float32{1}).MustView([]int64{}, true), true)
	require.ErrorContains(t, err, "a batch of no dimensions cannot be split")
}

// After uneven inputs all ranks go on alike, with Adam's averages and step counts too; also a rank that had no batch.
func TestJoinSharesOptimizers(t *testing.T) {
	for name, make := range map[string]func(p []*ts.Tensor) (optim.Optimizer, error){
		"SGD": func(p []*ts.Tensor) (optim.Optimizer, error) {
			return optim.NewSGD(p, optim.SGDOptions{LR: 0.1, Momentum: 0.9})
		},
		"fused AdamW": func(p []*ts.Tensor) (optim.Optimizer, error) {
			return optim.NewAdamW(p, optim.AdamWOptions{LR: 0.01, Implementation: optim.Fused})
		},
	} {
		t.Run(name, func(t *testing.T) {
			group(t, 3, func(pg *ProcessGroup) error {
				m := layers()
				d, err := NewDDP(m, pg, DDPOptions{})
				if err != nil {
					return err
				}
				defer d.Close()
				o, err := make(tensorsOf(m.params))
				if err != nil {
					return err
				}
				defer o.Close()
				step := func(int) error { return errors.Join(o.Step(), o.ZeroGrad(true)) }
				if _, err := train(d, m, 0, step); err != nil {
					return err
				}
				err = d.Join(JoinOptions{Optimizers: []JoinOptimizer{o.(JoinOptimizer)}}, func() error {
					_, err := train(d, m, 2*pg.Rank(), step)
					return err
				})
				if err != nil {
					return err
				}
				// One more step together: equal weights need equal states.
				if _, err := train(d, m, 1, step); err != nil {
					return err
				}
				all, err := AllGatherObject(pg, weights(m))
				if err != nil {
					return err
				}
				return errors.Join(same(all[1], all[0]), same(all[2], all[0]))
			})
		})
	}
}
