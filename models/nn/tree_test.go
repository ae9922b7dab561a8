package nn

import (
	"errors"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/sugarme/gotch"
	"github.com/sugarme/gotch/ts"

	"github.com/goddp/goddp/internal/tdp"
)

func linear(in, out int64) *Linear { return Must(NewLinear(in, out, LinearOptions{})) }

func ones(t testing.TB, shape ...int64) *ts.Tensor {
	x, err := tdp.Empty(shape, gotch.Float, gotch.CPU, false)
	require.NoError(t, err)
	require.NoError(t, tdp.Fill(x, 1))
	return x
}

func names[V any](s func(func(string, V) bool)) (out []string) {
	for name := range s {
		out = append(out, name)
	}
	return out
}

// net is a model as a user would write one.
type net struct {
	Base
	First *Linear
	Norm  *BatchNorm
	Head  Module
	Scale *ts.Tensor
}

func newNet(t testing.TB) *net {
	n := &net{First: linear(3, 4), Norm: Must(NewBatchNorm1d(4, BatchNormOptions{})), Scale: Must(Trainable(ones(t, 1)))}
	n.Head = NewSequential(linear(4, 4), NewReLU(), linear(4, 2))
	require.NoError(t, Register(n, "first", &n.First))
	require.NoError(t, Register(n, "norm", &n.Norm))
	require.NoError(t, Register(n, "head", &n.Head))
	require.NoError(t, n.RegisterParameter("scale", &n.Scale))
	return n
}

func (n *net) ForwardT(x *ts.Tensor, train bool) *ts.Tensor {
	return Run(x, train && n.Training(), n.First, n.Norm, n.Head)
}

func TestOrderIsOfRegistration(t *testing.T) {
	n := newNet(t)
	require.Equal(t, []string{"scale", "first.weight", "first.bias", "norm.weight", "norm.bias", "head.0.weight",
		"head.0.bias", "head.2.weight", "head.2.bias"}, names(n.NamedParameters()))
	require.Equal(t, []string{"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}, names(n.NamedBuffers()))
	require.Equal(t, []string{"scale", "first.weight", "first.bias", "norm.weight", "norm.bias", "norm.running_mean",
		"norm.running_var", "norm.num_batches_tracked", "head.0.weight", "head.0.bias", "head.2.weight", "head.2.bias"},
		names(n.NamedState()))
	require.Equal(t, []string{"", "first", "norm", "head", "head.0", "head.1", "head.2"}, names(NamedModules(n)))
	require.Equal(t, []string{"first", "norm", "head"}, names(Children(n)))
	var versions []int64
	for _, v := range n.ModuleVersions() {
		versions = append(versions, v)
	}
	require.Equal(t, []int64{1, 1, 2, 1, 1, 1, 1}, versions)
	for range n.NamedParameters() { // ending early is fine
		break
	}
	var order []string
	require.NoError(t, Apply(n, func(m Module) error { order = append(order, m.Path()); return nil }))
	require.Equal(t, []string{"first", "norm", "head.0", "head.1", "head.2", "head", ""}, order)
	stop := errors.New("stop")
	require.ErrorIs(t, Apply(n, func(m Module) error { return stop }), stop)
}

func TestRegistrationMistakes(t *testing.T) {
	n := newNet(t)
	var p *ts.Tensor
	var m Module
	for name, want := range map[string]string{
		"first": `"first" is taken by a module`,
		"scale": `"scale" is taken by a parameter`,
		"a.b":   "dot",
		"":      "needs a name",
	} {
		for what, err := range map[string]error{
			"parameter": n.RegisterParameter(name, &p), "buffer": n.RegisterBuffer(name, &p, true), "module": Register(n, name, &m),
		} {
			require.ErrorIs(t, err, ErrTree)
			require.ErrorContains(t, err, want)
			require.ErrorContains(t, err, what)
		}
	}
	require.NoError(t, n.RegisterBuffer("extra", &p, false))
	require.ErrorContains(t, n.RegisterParameter("extra", &p), "taken by a buffer")
	require.ErrorContains(t, n.RegisterForeign("extra", &p, false), "taken by a buffer")
	_, err := NewNamedSequential(Named{"a", linear(1, 1)}, Named{"a", linear(1, 1)})
	require.ErrorIs(t, err, ErrTree)
	_, err = Try(func() *Sequential { return NewSequential(linear(1, 1), nil) })
	require.ErrorIs(t, err, ErrTree)

	s := NewSequential()
	require.NoError(t, s.Append("inner", NewSequential()))
	require.ErrorContains(t, s.At(0).(*Sequential).Append("outer", s), "own descendant")
	require.ErrorIs(t, s.Set(1, linear(1, 1)), ErrTree)
	require.ErrorIs(t, s.Set(0, nil), ErrTree)
}

// TestSlots: what is assigned to a registered field is what the tree has.
func TestSlots(t *testing.T) {
	n := newNet(t)
	n.Head = linear(4, 7)
	require.Contains(t, names(n.NamedParameters()), "head.weight")
	require.Equal(t, "head", n.Head.Path())
	n.Head = nil
	require.NotContains(t, names(n.NamedParameters()), "head.weight")
	n.First.Bias = nil
	require.NotContains(t, names(n.NamedParameters()), "first.bias")
	s := NewSequential(linear(1, 1), NewReLU())
	require.NoError(t, s.Set(0, NewIdentity()))
	require.Empty(t, names(s.NamedParameters()))
	require.Equal(t, "0", s.At(0).Path())
}

// TestSharedOnce: a weight in two layers and a layer in two places are one parameter, under the first name; the state
// has every name.
func TestSharedOnce(t *testing.T) {
	a, b := linear(3, 3), linear(3, 3)
	b.Weight = Must(tdp.Share(a.Weight)) // another handle on the same tensor
	m := NewModuleList(a, b, a)
	require.Equal(t, []string{"0.weight", "0.bias", "1.bias"}, names(m.NamedParameters()))
	require.Equal(t, []string{"0.weight", "0.bias", "1.weight", "1.bias", "2.weight", "2.bias"}, names(m.NamedState()))
	require.Equal(t, []string{"", "0", "1"}, names(NamedModules(m)))
	s, err := Summarize(m)
	require.NoError(t, err)
	require.EqualValues(t, 9+3+3, s.Parameters)
	m.Drop()
	require.Empty(t, names(m.NamedParameters()))
}

func TestSparseParametersAreNamed(t *testing.T) {
	m := NewSequential(Must(NewEmbedding(4, 2, EmbeddingOptions{Sparse: true})), linear(2, 1), Must(NewEmbedding(4, 2, EmbeddingOptions{})))
	require.Equal(t, []string{"0.weight"}, slices.Collect(m.SparseParameters()))
	x := Must(tdp.FromSlice([]int64{1, 3}, []int64{2}, gotch.CPU))
	y := m.At(0).ForwardT(x, true)
	g := ones(t, 2, 2)
	require.NoError(t, tdp.Backward(y, g, false, nil))
	grad, err := tdp.Grad(m.At(0).(*Embedding).Weight)
	require.NoError(t, err)
	info, err := tdp.Describe(grad)
	require.NoError(t, err)
	require.True(t, info.Sparse)
}

func TestBatchNormKeys(t *testing.T) {
	plain := Must(NewBatchNorm1d(2, BatchNormOptions{}))
	weight := Must(NewBatchNorm1d(2, BatchNormOptions{NoRunningStats: true}))
	bare := Must(NewBatchNorm1d(2, BatchNormOptions{NoRunningStats: true, NoAffine: true}))
	m := NewSequential(linear(1, 2), plain, NewSequential(weight), bare, plain)
	mean := ones(t, 2)
	require.NoError(t, m.RegisterForeign("gotch.norm.running_mean", &mean, true))
	want := map[string]*ts.Tensor{"gotch.norm": mean, "1": plain.RunningMean, "2.0": nil, "3": nil}
	got := map[string]*ts.Tensor{}
	for name, key := range m.BatchNormKeys() {
		got[name] = key
	}
	require.Equal(t, want, got)
	require.Equal(t, []string{"2.0", "3"}, names(m.BareBatchNorms()))
	for name, key := range plain.BatchNormKeys() {
		require.Empty(t, name)
		require.Same(t, plain.RunningMean, key)
	}
}

func TestTrainingIsOfTheTreeAndTheCall(t *testing.T) {
	n := newNet(t)
	x := ones(t, 4, 3)
	count := func() int64 { return Must(tdp.ToSlice[int64](n.Norm.NumBatchesTracked))[0] }
	n.ForwardT(x, true)
	require.EqualValues(t, 1, count())
	n.ForwardT(x, false)
	require.EqualValues(t, 1, count())
	n.Norm.Eval()
	require.True(t, n.Training())
	n.ForwardT(x, true)
	require.EqualValues(t, 1, count())
	n.Train()
	require.True(t, n.Norm.Training())
	n.ForwardT(x, true)
	require.EqualValues(t, 2, count())
	n.Eval()
	require.False(t, n.Norm.Training())
	n.ForwardT(x, true)
	require.EqualValues(t, 2, count())
	require.NoError(t, n.Norm.ResetParameters())
	require.EqualValues(t, 0, count())
}

func TestFreeze(t *testing.T) {
	n := newNet(t)
	require.NoError(t, n.First.Freeze())
	s, err := Summarize(n)
	require.NoError(t, err)
	require.EqualValues(t, s.Parameters-3*4-4, s.Trainable)
	for name, p := range n.NamedParameters() {
		require.Equal(t, !strings.HasPrefix(name, "first."), Must(tdp.Describe(p)).RequiresGrad, name)
	}
	require.NoError(t, n.Unfreeze())
	s, err = Summarize(n)
	require.NoError(t, err)
	require.Equal(t, s.Parameters, s.Trainable)
}

// TestMoveInPlace: after a change of dtype everybody who held a tensor holds the new one, and its gradient.
func TestMoveInPlace(t *testing.T) {
	n := newNet(t)
	x := ones(t, 4, 3)
	y := n.ForwardT(x, true)
	require.NoError(t, tdp.Backward(y, ones(t, 4, 2), false, nil))
	held := n.First.Weight
	before := Must(tdp.Describe(held))
	require.NoError(t, n.To(gotch.CPU, gotch.Double))
	after := Must(tdp.Describe(held))
	require.Equal(t, before.Impl, after.Impl)
	require.Equal(t, gotch.Double, after.DType)
	require.True(t, after.RequiresGrad)
	require.True(t, after.Leaf)
	require.Equal(t, gotch.Double, Must(tdp.Describe(Must(tdp.Grad(held)))).DType)
	require.Equal(t, gotch.Double, Must(tdp.Describe(n.Norm.RunningMean)).DType)
	require.Equal(t, gotch.Int64, Must(tdp.Describe(n.Norm.NumBatchesTracked)).DType)
	_, err := Forward(n, x, true)
	require.Error(t, err) // float input, double weights
	require.NoError(t, n.ToDType(gotch.Float))
	y2, err := Forward(n, x, true)
	require.NoError(t, err)
	require.NoError(t, tdp.Backward(y2, ones(t, 4, 2), false, nil))
	require.NoError(t, n.ZeroGrad())
	require.Nil(t, Must(tdp.Grad(held)))

	c := Must(NewConv2d(3, 8, Size{3}, ConvOptions{}))
	require.NoError(t, c.ToChannelsLast())
	require.Equal(t, []int64{27, 1, 9, 3}, Must(tdp.Describe(c.Weight)).Stride)
}

func TestShapeErrorsNameTheLayer(t *testing.T) {
	m := NewSequential(linear(4, 8), NewSequential(NewReLU(), linear(9, 2)))
	_, err := Forward(m, ones(t, 5, 4), true)
	var e *Error
	require.ErrorAs(t, err, &e)
	require.Equal(t, "1.1", e.Path)
	require.Equal(t, "Linear(in_features=9, out_features=2, bias=True)", e.Module)
	require.Equal(t, []int64{5, 8}, e.Input)
	require.Equal(t, []int64{2, 9}, e.Weight)
	require.ErrorContains(t, err, "1.1: Linear(in_features=9, out_features=2, bias=True) got an input of shape [5 8], its weight has shape [2 9]: ")
	require.ErrorContains(t, err, "mat1 and mat2 shapes cannot be multiplied")

	b := Must(NewBatchNorm2d(3, BatchNormOptions{}))
	_, err = Forward(b, ones(t, 2, 3), true)
	require.ErrorIs(t, err, tdp.ErrValue)
	require.ErrorContains(t, err, "expected 4D input (got 2D input)")
	_, err = Forward(Must(NewBatchNorm1d(3, BatchNormOptions{})), ones(t, 1, 3), true)
	require.ErrorContains(t, err, "more than 1 value per channel")
	_, err = Forward(NewModuleList(), ones(t, 1), true)
	require.ErrorIs(t, err, tdp.ErrUnsupported)
	_, err = Forward(linear(1, 1), nil, true)
	require.ErrorIs(t, err, tdp.ErrValue)
}

func TestMissingBuffer(t *testing.T) {
	b := Must(NewBatchNorm1d(3, BatchNormOptions{}))
	b.RunningVar = nil
	_, err := Forward(NewSequential(b), ones(t, 2, 3), false)
	require.ErrorIs(t, err, tdp.ErrValue)
	require.ErrorContains(t, err, "0: BatchNorm1d(3")
	require.ErrorContains(t, err, "the buffer running_var is missing")
	b.RunningMean, b.RunningVar = nil, Must(tdp.Share(b.Weight))
	_, err = Forward(b, ones(t, 2, 3), false)
	require.ErrorContains(t, err, "the buffer running_mean is missing")
}

func TestLossErrorsNameBothShapes(t *testing.T) {
	for _, l := range []Loss{MSELoss{}, L1Loss{}, SmoothL1Loss{}, BCEWithLogitsLoss{}} {
		_, err := Try(func() *ts.Tensor { return l.Forward(ones(t, 4, 1), ones(t, 4)) })
		var e *LossError
		require.ErrorAs(t, err, &e)
		require.Equal(t, []int64{4, 1}, e.Input)
		require.Equal(t, []int64{4}, e.Target)
		require.ErrorIs(t, err, tdp.ErrValue)
	}
	_, err := Try(func() *ts.Tensor { return CrossEntropyLoss{Reduction: 9}.Forward(ones(t, 4, 1), ones(t, 4)) })
	require.ErrorContains(t, err, "unknown reduction 9")
	_, err = Try(func() *ts.Tensor { return NLLLoss{}.Forward(ones(t, 4, 2), ones(t, 5)) })
	require.ErrorContains(t, err, "NLLLoss of input [4 2] and target [5]")
}

func TestOptionMistakes(t *testing.T) {
	for name, f := range map[string]func() error{
		"linear size":     func() error { _, err := NewLinear(-1, 2, LinearOptions{}); return err },
		"groups":          func() error { _, err := NewConv2d(3, 4, Size{3}, ConvOptions{Groups: 2}); return err },
		"negative groups": func() error { _, err := NewConv2d(3, 4, Size{3}, ConvOptions{Groups: -1}); return err },
		"channels":        func() error { _, err := NewConv2d(-3, 4, Size{3}, ConvOptions{}); return err },
		"no kernel":       func() error { _, err := NewConv2d(3, 4, nil, ConvOptions{}); return err },
		"negative kernel": func() error { _, err := NewConv2d(3, 4, Size{-1}, ConvOptions{}); return err },
		"kernel size":     func() error { _, err := NewConv2d(3, 4, Size{1, 2, 3}, ConvOptions{}); return err },
		"stride":          func() error { _, err := NewConv2d(3, 4, Size{1}, ConvOptions{Stride: Size{1, 2, 3}}); return err },
		"dilation":        func() error { _, err := NewConv1d(3, 4, Size{1}, ConvOptions{Dilation: Size{1, 2, 3}}); return err },
		"padding":         func() error { _, err := NewConv3d(3, 4, Size{1}, ConvOptions{Padding: Size{1, 2}}); return err },
		"same and stride": func() error { _, err := NewConv2d(3, 4, Size{3}, ConvOptions{Same: true, Stride: Size{2}}); return err },
		"same and padding": func() error {
			_, err := NewConv2d(3, 4, Size{3}, ConvOptions{Same: true, Padding: Size{2}})
			return err
		},
		"padding mode":     func() error { _, err := NewConv2d(3, 4, Size{3}, ConvOptions{PaddingMode: "mirror"}); return err },
		"batch norm":       func() error { _, err := NewBatchNorm2d(-1, BatchNormOptions{}); return err },
		"layer norm":       func() error { _, err := NewLayerNorm(nil, LayerNormOptions{}); return err },
		"group norm":       func() error { _, err := NewGroupNorm(2, 3, GroupNormOptions{}); return err },
		"embedding":        func() error { _, err := NewEmbedding(-2, 3, EmbeddingOptions{}); return err },
		"padding index":    func() error { _, err := NewEmbedding(2, 3, EmbeddingOptions{PaddingIdx: new(int64(2))}); return err },
		"dropout":          func() error { _, err := NewDropout(1.5); return err },
		"dropout in place": func() error { _, err := NewDropoutInplace(-1); return err },
		"pool":             func() error { _, err := NewMaxPool2d(nil, MaxPoolOptions{}); return err },
		"pool stride":      func() error { _, err := NewMaxPool2d(Size{2}, MaxPoolOptions{Stride: Size{1, 2, 3}}); return err },
		"pool dilation":    func() error { _, err := NewMaxPool1d(Size{2}, MaxPoolOptions{Dilation: Size{1, 2}}); return err },
		"pool padding":     func() error { _, err := NewAvgPool3d(Size{2}, AvgPoolOptions{Padding: Size{1, 2}}); return err },
		"pool divisor":     func() error { _, err := NewAvgPool1d(Size{2}, AvgPoolOptions{DivisorOverride: 2}); return err },
		"adaptive":         func() error { _, err := NewAdaptiveAvgPool2d(nil); return err },
		"adaptive size":    func() error { _, err := NewAdaptiveAvgPool2d(Size{1, 2, 3}); return err },
		"fans":             func() error { return KaimingNormal(ones(t, 3), KaimingOptions{}) },
		"xavier":           func() error { return XavierUniform(ones(t, 3), 1) },
		"eye":              func() error { return Eye(ones(t, 3)) },
	} {
		require.ErrorIs(t, f(), tdp.ErrValue, name)
	}
}

func TestNoGradRestores(t *testing.T) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	l, x := linear(2, 2), ones(t, 1, 2)
	recorded := func() bool { return Must(tdp.Describe(l.ForwardT(x, true))).RequiresGrad }
	require.NoError(t, NoGrad(func() {
		require.False(t, recorded())
		require.NoError(t, NoGrad(func() {}))
		require.False(t, recorded(), "the inner scope must restore what was before, not recording")
	}))
	require.True(t, recorded())
	require.PanicsWithValue(t, "oops", func() { _ = NoGrad(func() { panic("oops") }) })
	require.True(t, recorded())
	y, err := Evaluate(l, x)
	require.NoError(t, err)
	require.False(t, Must(tdp.Describe(y)).RequiresGrad)
	_, err = Evaluate(l, ones(t, 3))
	require.Error(t, err)
	require.True(t, recorded())
}

func TestTryLetsBugsPass(t *testing.T) {
	_, err := Try(func() int { Check(errors.ErrUnsupported); return 1 })
	require.ErrorIs(t, err, errors.ErrUnsupported)
	require.Panics(t, func() { _, _ = Try(func() int { var s []int; return s[len(s)] }) })
	require.Panics(t, func() { _, _ = Try(func() int { panic("text") }) })
	v, err := Try(func() int { return Must(3, nil) })
	require.NoError(t, err)
	require.Equal(t, 3, v)
}

// TestRunGivesATensorOfItsOwn: what comes out may be dropped without harm to what went in.
func TestRunGivesATensorOfItsOwn(t *testing.T) {
	x := ones(t, 2)
	for _, y := range []*ts.Tensor{Run(x, true), Run(x, true, through{}), NewSequential().ForwardT(x, true),
		NewIdentity().ForwardT(x, true), NewSequential(NewIdentity(), NewIdentity()).ForwardT(x, true)} {
		require.NotSame(t, x, y)
		y.MustDrop()
		require.Equal(t, []float32{1, 1}, Must(tdp.ToSlice[float32](x)))
	}
}

// through hands its input on, as some gotch models do.
type through struct{}

func (through) ForwardT(x *ts.Tensor, train bool) *ts.Tensor { return x }

func TestSummary(t *testing.T) {
	n := newNet(t)
	s, err := Summarize(n)
	require.NoError(t, err)
	require.EqualValues(t, 1+12+4+8+16+4+8+2, s.Parameters)
	require.EqualValues(t, 9, s.Buffers)
	require.EqualValues(t, 55*4+8*4+8, s.Bytes())
	require.Equal(t, `path      module                                                                            parameters      memory
(itself)  net()                                                                                      1         4 B
first     Linear(in_features=3, out_features=4, bias=True)                                          16        64 B
norm      BatchNorm1d(4, eps=1e-05, momentum=0.1, affine=True, track_running_stats=True)             8        72 B
head.0    Linear(in_features=4, out_features=4, bias=True)                                          20        80 B
head.2    Linear(in_features=4, out_features=2, bias=True)                                          10        40 B
net: 55 parameters (55 trainable, 220 B), 9 buffer elements (40 B)`, s.String())
	require.Equal(t, "1.5 KiB", bytes(1536))
}

func TestModuleListPrintsEqualNeighboursOnce(t *testing.T) {
	require.Equal(t, "ModuleList()", NewModuleList().String())
	require.Equal(t, `ModuleList(
  (0-1): 2 x Linear(in_features=2, out_features=2, bias=True)
  (2): ReLU()
)`, NewModuleList(linear(2, 2), linear(2, 2), NewReLU()).String())
}
