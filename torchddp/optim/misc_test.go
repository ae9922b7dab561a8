package optim

import (
	"encoding/json"
	"iter"
	"math"
	"os"
	"path/filepath"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/sugarme/gotch"
	"github.com/sugarme/gotch/ts"

	"github.com/goddp/goddp/checkpoint/pickle"
	"github.com/goddp/goddp/internal/tdp"
	"github.com/goddp/goddp/internal/testenv"
)

type pyMisc struct {
	Clip       map[string]json.RawMessage   `json:"clip"`
	Average    map[string][]json.RawMessage `json:"average"`
	InBackward []json.RawMessage            `json:"in_backward"`
	Sparse     map[string][]json.RawMessage `json:"sparse"`
}

var misc struct {
	sync.Once
	result *pyMisc
}

func runMisc(t *testing.T) *pyMisc {
	t.Helper()
	testenv.Python(t)
	misc.Do(func() {
		dir := t.TempDir()
		script, err := os.ReadFile("testdata/misc.py")
		require.NoError(t, err)
		testenv.RunPython(t, string(script), dir)
		text, err := os.ReadFile(filepath.Join(dir, "misc.json"))
		require.NoError(t, err)
		var r pyMisc
		require.NoError(t, json.Unmarshal(text, &r))
		misc.result = &r
	})
	if misc.result == nil {
		t.Fatal("the run of Python failed in an earlier test")
	}
	return misc.result
}

// numbers is testdata/misc.py's function of this name, times a factor.
func numbers(t testing.TB, dtype gotch.DType, factor float64, shape ...int64) *ts.Tensor {
	t.Helper()
	n := int64(1)
	for _, s := range shape {
		n *= s
	}
	v := make([]float64, n)
	for i := range v {
		v[i] = float64((i*37+11)%64-32) / 16 * factor
	}
	x, err := tdp.FromSlice(v, shape, gotch.CPU)
	require.NoError(t, err)
	return x.MustTotype(dtype, true)
}

func values(t testing.TB, x *ts.Tensor) []float64 {
	t.Helper()
	v, err := tdp.ToSlice[float64](x.MustTotype(gotch.Double, false))
	require.NoError(t, err)
	return v
}

func leaf(t testing.TB, x *ts.Tensor) *ts.Tensor {
	t.Helper()
	require.NoError(t, tdp.SetRequiresGrad(x, true))
	return x
}

func withGrads(t testing.TB) []*ts.Tensor {
	t.Helper()
	p := []*ts.Tensor{leaf(t, numbers(t, gotch.Float, 1, 7, 3)), leaf(t, numbers(t, gotch.Double, 1, 5)),
		leaf(t, numbers(t, gotch.Float, 1, 40, 10)), numbers(t, gotch.Float, 1, 3)}
	require.NoError(t, tdp.SetGrad(p[0], numbers(t, gotch.Float, 1, 7, 3)))
	require.NoError(t, tdp.SetGrad(p[1], numbers(t, gotch.Double, 2, 5)))
	require.NoError(t, tdp.SetGrad(p[2], numbers(t, gotch.Float, 3, 40, 10)))
	return p
}

func TestClippingIsPythons(t *testing.T) {
	want := runMisc(t).Clip
	run := map[string]func(p []*ts.Tensor) (*ts.Tensor, error){
		"norm": func(p []*ts.Tensor) (*ts.Tensor, error) { return ClipGradNorm(p, 1.5) },
		"norm-loop": func(p []*ts.Tensor) (*ts.Tensor, error) {
			return ClipGradNormWith(p, 1.5, ClipOptions{Implementation: ForLoop})
		},
		"norm-inf": func(p []*ts.Tensor) (*ts.Tensor, error) {
			return ClipGradNormWith(p, 0.7, ClipOptions{NormType: math.Inf(1)})
		},
		"norm-1": func(p []*ts.Tensor) (*ts.Tensor, error) { return ClipGradNormWith(p, 3, ClipOptions{NormType: 1}) },
		"norm-large": func(p []*ts.Tensor) (*ts.Tensor, error) {
			return ClipGradNormWith(p, 1e6, ClipOptions{ErrorIfNonfinite: true})
		},
		"value": func(p []*ts.Tensor) (*ts.Tensor, error) { return nil, ClipGradValue(p, 0.4) },
	}
	require.Len(t, want, len(run))
	for name, f := range run {
		p := withGrads(t)
		total, err := f(p)
		require.NoError(t, err)
		var grads [][]float64
		for _, x := range p[:3] {
			g, err := tdp.Grad(x)
			require.NoError(t, err)
			grads = append(grads, values(t, g))
		}
		var norm any
		if total != nil {
			norm = values(t, total)[0]
		}
		got, err := json.Marshal([]any{norm, grads})
		require.NoError(t, err)
		require.JSONEq(t, string(want[name]), string(got), name)
	}
}

func TestClippingRefusesNonfinite(t *testing.T) {
	p := withGrads(t)
	bad, err := tdp.FromSlice([]float32{1, float32(math.Inf(1)), 2}, []int64{3}, gotch.CPU)
	require.NoError(t, err)
	require.NoError(t, tdp.SetGrad(leaf(t, p[3]), bad))
	_, err = ClipGradNormWith(p, 1, ClipOptions{ErrorIfNonfinite: true})
	require.ErrorIs(t, err, tdp.ErrValue)
	require.ErrorContains(t, err, "The total norm of order 2 for the gradients is non-finite")
	g, err := tdp.Grad(p[0])
	require.NoError(t, err)
	require.Equal(t, values(t, numbers(t, gotch.Float, 1, 7, 3)), values(t, g), "the gradients are as they were")
	norm, err := ClipGradNorm(p, 1)
	require.NoError(t, err)
	require.True(t, math.IsInf(values(t, norm)[0], 1))
	empty, err := ClipGradNorm([]*ts.Tensor{numbers(t, gotch.Float, 1, 2)}, 1)
	require.NoError(t, err)
	require.Equal(t, []float64{0}, values(t, empty))
}

type net struct{ w, mean, count *ts.Tensor }

func newNet(t *testing.T) *net {
	zero, err := tdp.FromSlice([]int64{0}, nil, gotch.CPU)
	require.NoError(t, err)
	return &net{leaf(t, numbers(t, gotch.Float, 1, 4, 3)), numbers(t, gotch.Float, 1, 3), zero}
}

func (n *net) NamedParameters() iter.Seq2[string, *ts.Tensor] {
	return pairs([]string{"w"}, []*ts.Tensor{n.w})
}

func (n *net) NamedBuffers() iter.Seq2[string, *ts.Tensor] {
	return pairs([]string{"mean", "count"}, []*ts.Tensor{n.mean, n.count})
}

// train is what testdata/misc.py's average does to the network in update i.
func (n *net) train(t *testing.T, i int) {
	d := n.w.MustDetach(false)
	d.MustMulScalar_(ts.FloatScalar(0.9))
	d.MustAddScalar_(ts.FloatScalar(0.01 * float64(i)))
	n.mean.MustMulScalar_(ts.FloatScalar(1.1))
	n.count.MustAddScalar_(ts.IntScalar(1))
}

func TestAveragesArePythons(t *testing.T) {
	want := runMisc(t).Average
	for name, o := range map[string]AverageOptions{
		"ema": {Decay: 0.9}, "ema-buffers": {Decay: 0.9, UseBuffers: true}, "swa": {}, "swa-buffers": {UseBuffers: true},
	} {
		n := newNet(t)
		a, err := NewAveragedModel(n, o)
		require.NoError(t, err)
		require.Len(t, want[name], 20)
		for i, py := range want[name] {
			n.train(t, i)
			require.NoError(t, a.Update())
			if i == 9 {
				// The state goes through a dict into another one.
				state, err := a.StateDict()
				require.NoError(t, err)
				b, err := NewAveragedModel(n, o)
				require.NoError(t, err)
				require.NoError(t, b.LoadStateDict(state))
				require.NoError(t, a.Close())
				a = b
			}
			got, err := json.Marshal([]any{values(t, a.average[0]), values(t, a.average[1]), int(values(t, a.average[2])[0]), a.Count()})
			require.NoError(t, err)
			require.JSONEq(t, string(py), string(got), "%s, update %d", name, i+1)
		}
		live, avg := values(t, n.w), values(t, a.average[0])
		require.NotEqual(t, live, avg)
		require.NoError(t, a.Swap())
		require.Equal(t, avg, values(t, n.w))
		require.Error(t, a.Update())
		require.NoError(t, a.Swap())
		require.Equal(t, live, values(t, n.w))
		require.ErrorIs(t, a.LoadStateDict(pickle.NewDict()), ErrStateDict)
		require.NoError(t, a.Close())
	}
}

func TestStepInBackwardIsPythons(t *testing.T) {
	want := runMisc(t).InBackward
	a, b := leaf(t, numbers(t, gotch.Float, 1, 6, 4)), leaf(t, numbers(t, gotch.Float, 1, 4, 2))
	o, err := NewSGD([]*ts.Tensor{a, b}, SGDOptions{LR: 0.05, Momentum: 0.9})
	require.NoError(t, err)
	require.NoError(t, o.StepInBackward(true))
	backward := func() {
		y := a.MustMatmul(b, false)
		loss := y.MustMul(y, true).MustSum(gotch.Float, true).MustMulScalar(ts.FloatScalar(0.01), true)
		require.NoError(t, tdp.Backward(loss, nil, false, nil))
	}
	for i, py := range want {
		backward()
		got, err := json.Marshal([]any{values(t, a), values(t, b)})
		require.NoError(t, err)
		require.JSONEq(t, string(py), string(got), "backward %d", i+1)
		g, err := tdp.Grad(a)
		require.NoError(t, err)
		require.Nil(t, g, "the gradient is gone once it was used")
	}
	require.NoError(t, o.StepInBackward(false))
	before := values(t, a)
	backward()
	require.Equal(t, before, values(t, a), "switched off")
	require.NoError(t, o.StepInBackward(true))
	require.NoError(t, o.Close())
	backward() // the hook went with the optimizer
	require.Equal(t, before, values(t, a))
}

// Gradients that are views of one buffer, as the reducer makes them, survive both kinds of ZeroGrad.
func TestZeroGradWithViews(t *testing.T) {
	p := []*ts.Tensor{leaf(t, numbers(t, gotch.Float, 1, 2, 3)), leaf(t, numbers(t, gotch.Float, 1, 4))}
	bucket := numbers(t, gotch.Float, 1, 10)
	o, err := NewSGD(p, SGDOptions{})
	require.NoError(t, err)
	defer func() { require.NoError(t, o.Close()) }()
	attach := func() {
		v0, err := bucket.Narrow(0, 0, 6, false)
		require.NoError(t, err)
		v1, err := bucket.Narrow(0, 6, 4, false)
		require.NoError(t, err)
		require.NoError(t, tdp.SetGrad(p[0], v0.MustView([]int64{2, 3}, true)))
		require.NoError(t, tdp.SetGrad(p[1], v1))
	}
	attach()
	require.NoError(t, o.ZeroGrad(false))
	require.Equal(t, make([]float64, 10), values(t, bucket), "zeros went into the bucket")
	g, err := tdp.Grad(p[1])
	require.NoError(t, err)
	gi, err := tdp.Describe(g)
	require.NoError(t, err)
	bi, err := tdp.Describe(bucket)
	require.NoError(t, err)
	require.Equal(t, bi.Storage, gi.Storage, "and the gradient is still the view")
	bucket.MustAddScalar_(ts.FloatScalar(1))
	require.NoError(t, o.ZeroGrad(true))
	g, err = tdp.Grad(p[0])
	require.NoError(t, err)
	require.Nil(t, g)
	require.Equal(t, 1.0, values(t, bucket)[0], "dropping leaves the bucket alone")
}

func TestStepDoesNotAllocate(t *testing.T) {
	p := withGrads(t)[:3]
	o, err := NewSGD(p, SGDOptions{Momentum: 0.9})
	require.NoError(t, err)
	defer func() { require.NoError(t, o.Close()) }()
	var failed error
	n := testing.AllocsPerRun(100, func() {
		if err := o.Step(); err != nil {
			failed = err
		}
	})
	require.NoError(t, failed)
	require.Zero(t, n)
}

// Python's fused SGD cannot take a parameter whose first gradient comes late. Here its buffer begins then.
func TestFusedSGDTakesLateGradients(t *testing.T) {
	run := func(i Implementation) [][]float64 {
		p := []*ts.Tensor{leaf(t, numbers(t, gotch.Float, 1, 5)), leaf(t, numbers(t, gotch.Float, 2, 3))}
		o, err := NewSGD(p, SGDOptions{LR: 0.5, Momentum: 0.5, Dampening: 0.25, Implementation: i})
		require.NoError(t, err)
		defer func() { require.NoError(t, o.Close()) }()
		for s := range 4 {
			require.NoError(t, tdp.SetGrad(p[0], numbers(t, gotch.Float, 1, 5)))
			if s >= 2 {
				require.NoError(t, tdp.SetGrad(p[1], numbers(t, gotch.Float, 1, 3)))
			}
			require.NoError(t, o.Step())
		}
		return [][]float64{values(t, p[0]), values(t, p[1])}
	}
	// The numbers are small binary fractions: nothing is rounded, so the implementations agree.
	require.Equal(t, run(ForLoop), run(Fused))
}

func TestConstructionErrors(t *testing.T) {
	p := []*ts.Tensor{leaf(t, numbers(t, gotch.Float, 1, 2))}
	q := []*ts.Tensor{leaf(t, numbers(t, gotch.Float, 1, 2))}
	_, err := NewSGD([]*ts.Tensor{}, SGDOptions{})
	require.ErrorContains(t, err, "optimizer got an empty parameter list")
	_, err = NewSGD(p, SGDOptions{LR: -1})
	require.ErrorContains(t, err, "invalid learning rate: -1.0")
	_, err = NewSGD(p, SGDOptions{Nesterov: true})
	require.ErrorContains(t, err, "nesterov momentum requires a momentum and zero dampening")
	_, err = NewAdam(p, AdamOptions{Betas: [2]float64{0.9, 1}})
	require.ErrorContains(t, err, "invalid beta parameter at index 1: 1.0")
	_, err = NewRMSprop(p, RMSpropOptions{Implementation: Fused})
	require.ErrorContains(t, err, "no fused implementation")
	_, err = NewSGD([]Group[SGDOptions]{{Params: p}, {Params: p}}, SGDOptions{})
	require.ErrorContains(t, err, "some parameters appear in more than one parameter group")
	_, err = NewSGD([]*ts.Tensor{p[0], p[0]}, SGDOptions{})
	require.ErrorContains(t, err, "twice")
	_, err = NewSGD([]*ts.Tensor{p[0].MustMulScalar(ts.FloatScalar(2), false)}, SGDOptions{})
	require.ErrorContains(t, err, "can't optimize a non-leaf Tensor")
	_, err = NewSGD([]Group[SGDOptions]{{Params: p}, {Named: pairs([]string{"q"}, q)}}, SGDOptions{})
	require.ErrorContains(t, err, "with/without names")

	o, err := NewSGD(p, SGDOptions{})
	require.NoError(t, err)
	require.NoError(t, o.AddParamGroup(Group[SGDOptions]{Params: q, Set: func(o *SGDOptions) { o.LR = 0 }}))
	require.Equal(t, 0.0, o.Options(1).LR)
	require.Equal(t, 1e-3, o.ParamGroups()[0].LR())
	require.NoError(t, o.Close())
	require.NoError(t, o.Close())
	require.ErrorIs(t, o.Step(), ErrClosed)
	require.ErrorIs(t, o.ZeroGrad(true), ErrClosed)
}

func TestStateDictErrors(t *testing.T) {
	p := []*ts.Tensor{leaf(t, numbers(t, gotch.Float, 1, 2)), leaf(t, numbers(t, gotch.Float, 1, 3))}
	o, err := NewAdam(pairs([]string{"a", "b"}, p), AdamOptions{})
	require.NoError(t, err)
	defer func() { require.NoError(t, o.Close()) }()
	for _, x := range p {
		info, err := tdp.Describe(x)
		require.NoError(t, err)
		require.NoError(t, tdp.SetGrad(x, numbers(t, gotch.Float, 1, info.Shape...)))
	}
	require.NoError(t, o.Step())
	good := func() (*pickle.Dict, *pickle.Dict, *pickle.Dict) {
		d, err := o.StateDict()
		require.NoError(t, err)
		groups, _ := d.Get("param_groups")
		state, _ := d.Get("state")
		return d, groups.(*pickle.List).Items[0].(*pickle.Dict), state.(*pickle.Dict)
	}
	d, g, _ := good()
	names, _ := g.Get("param_names")
	require.Equal(t, []any{"a", "b"}, names.(*pickle.List).Items)
	require.NoError(t, o.LoadStateDict(d))

	fails := func(text string, change func(d, group, state *pickle.Dict)) {
		t.Helper()
		d, g, s := good()
		change(d, g, s)
		err := o.LoadStateDict(d)
		require.ErrorIs(t, err, ErrStateDict)
		require.ErrorContains(t, err, text)
	}
	fails("different number of parameter groups", func(d, _, _ *pickle.Dict) { d.Set("param_groups", pickle.NewList()) })
	fails("doesn't match the size of optimizer's group", func(_, g, _ *pickle.Dict) { g.Set("params", pickle.NewList(int64(0))) })
	fails("saved by another optimizer", func(_, _, s *pickle.Dict) {
		s.Set(int64(0), pickle.NewDict().Set("momentum_buffer", numbers(t, gotch.Float, 1, 2)))
	})
	fails("shape", func(_, _, s *pickle.Dict) {
		e, _ := s.Get(int64(1))
		e.(*pickle.Dict).Set("exp_avg", numbers(t, gotch.Float, 1, 2))
	})
	fails("no max_exp_avg_sq", func(_, g, _ *pickle.Dict) { g.Set("amsgrad", true) })
	fails("capturable", func(_, g, _ *pickle.Dict) { g.Set("capturable", true) })
	fails("betas", func(_, g, _ *pickle.Dict) { g.Set("betas", pickle.NewTuple(0.9)) })
	before := values(t, p[0])
	require.NoError(t, o.Step())
	require.NotEqual(t, before, values(t, p[0]), "after failed loads the optimizer still works")
}

func TestSparseGradientsArePythons(t *testing.T) {
	want := runMisc(t).Sparse
	makers := map[string]func(p []*ts.Tensor) (Optimizer, error){
		"sgd":          sgd(SGDOptions{LR: 0.1}),
		"sgd-foreach":  sgd(SGDOptions{LR: 0.1, Implementation: Foreach}),
		"sgd-momentum": sgd(SGDOptions{LR: 0.1, Momentum: 0.9}),
		"adagrad":      adagrad(AdagradOptions{LR: 0.1}),
	}
	require.Len(t, want, len(makers))
	step := func(i int, table, dense *ts.Tensor, o Optimizer) error {
		require.NoError(t, o.ZeroGrad(true))
		at, err := tdp.FromSlice([]int64{int64(i % 8), 3, int64(i * 5 % 8), 3}, []int64{4}, gotch.CPU)
		require.NoError(t, err)
		rows, err := ts.Embedding(table, at, -1, false, true)
		require.NoError(t, err)
		y := rows.MustMul(dense, true)
		loss := y.MustMul(y, true).MustSum(gotch.Float, true).MustMulScalar(ts.FloatScalar(0.1), true)
		require.NoError(t, tdp.Backward(loss, nil, false, nil))
		g, err := tdp.Grad(table)
		require.NoError(t, err)
		info, err := tdp.Describe(g)
		require.NoError(t, err)
		require.True(t, info.Sparse)
		return o.Step()
	}
	for name, py := range want {
		table, dense := leaf(t, numbers(t, gotch.Float, 1, 8, 3)), leaf(t, numbers(t, gotch.Float, 1, 3))
		o, err := makers[name]([]*ts.Tensor{table, dense})
		require.NoError(t, err)
		for i := range py {
			require.NoError(t, step(i, table, dense, o))
			got, err := json.Marshal([]any{values(t, table), values(t, dense)})
			require.NoError(t, err)
			require.JSONEq(t, string(py[i]), string(got), "%s, step %d", name, i+1)
		}
		require.NoError(t, o.Close())
	}
	table, dense := leaf(t, numbers(t, gotch.Float, 1, 8, 3)), leaf(t, numbers(t, gotch.Float, 1, 3))
	o, err := NewAdam([]*ts.Tensor{table, dense}, AdamOptions{})
	require.NoError(t, err)
	defer func() { require.NoError(t, o.Close()) }()
	require.ErrorContains(t, step(0, table, dense, o), "Adam does not support sparse gradients")
}
