package amp

import (
	"encoding/json"
	"errors"
	"maps"
	"math"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/sugarme/gotch"
	"github.com/sugarme/gotch/ts"

	"github.com/goddp/goddp/checkpoint/pickle"
	"github.com/goddp/goddp/internal/tdp"
	"github.com/goddp/goddp/internal/testenv"
	"github.com/goddp/goddp/torchddp/optim"
)

type pyScaler struct {
	Steps []json.RawMessage `json:"steps"`
	State [][3]any          `json:"state"`
}

type pyResult struct {
	Table    map[string]string `json:"table"`
	Backward struct {
		Loss float64   `json:"loss"`
		Grad []float64 `json:"grad"`
	} `json:"backward"`
	Scaler map[string]pyScaler `json:"scaler"`
}

var python struct {
	sync.Once
	result *pyResult
}

func runPython(t *testing.T) *pyResult {
	t.Helper()
	testenv.Python(t)
	python.Do(func() {
		dir := t.TempDir()
		script, err := os.ReadFile("testdata/amp.py")
		require.NoError(t, err)
		testenv.RunPython(t, string(script), dir)
		text, err := os.ReadFile(filepath.Join(dir, "amp.json"))
		require.NoError(t, err)
		var r pyResult
		require.NoError(t, json.Unmarshal(text, &r))
		python.result = &r
	})
	if python.result == nil {
		t.Fatal("the run of Python failed in an earlier test")
	}
	return python.result
}

// numbers is testdata/amp.py's function of this name.
func numbers(t testing.TB, shape ...int64) *ts.Tensor {
	t.Helper()
	n := int64(1)
	for _, s := range shape {
		n *= s
	}
	v := make([]float32, n)
	for i := range v {
		v[i] = float32((i*37+11)%64-32) / 16
	}
	x, err := tdp.FromSlice(v, shape, gotch.CPU)
	require.NoError(t, err)
	return x
}

func dtypeName(t gotch.DType) string {
	return map[gotch.DType]string{gotch.Float: "torch.float32", gotch.Double: "torch.float64", gotch.BFloat16: "torch.bfloat16",
		gotch.Half: "torch.float16", gotch.Int64: "torch.int64", gotch.ComplexFloat: "torch.complex64"}[t]
}

// The operations of testdata/amp.py's table.
func opsOfTable(t *testing.T) map[string]func() (*ts.Tensor, error) {
	a, c := numbers(t, 4, 4), numbers(t, 2, 4, 4)
	b := numbers(t, 4, 4).MustAddScalar(ts.FloatScalar(1), true)
	img, w, v := numbers(t, 1, 2, 5, 5), numbers(t, 3, 2, 3, 3), numbers(t, 4)
	half := func(x *ts.Tensor) *ts.Tensor { return x.MustTotype(gotch.BFloat16, false) }
	h, hb, himg := half(a), half(b), half(img)
	ops := map[string]func() (*ts.Tensor, error){
		"matmul":  func() (*ts.Tensor, error) { return a.Matmul(b, false) },
		"mm":      func() (*ts.Tensor, error) { return a.Mm(b, false) },
		"addmm":   func() (*ts.Tensor, error) { return a.Addmm(a, b, false) },
		"bmm":     func() (*ts.Tensor, error) { return c.Bmm(c, false) },
		"baddbmm": func() (*ts.Tensor, error) { return c.Baddbmm(c, c, ts.FloatScalar(1), ts.FloatScalar(1), false) },
		"linear":  func() (*ts.Tensor, error) { return ts.Linear(a, b, v) },
		"conv2d": func() (*ts.Tensor, error) {
			return ts.Conv2d(img, w, ts.NewTensor(), []int64{1, 1}, []int64{0, 0}, []int64{1, 1}, 1)
		},
		"add":         func() (*ts.Tensor, error) { return a.Add(b, false) },
		"add-mixed":   func() (*ts.Tensor, error) { return a.Add(h, false) },
		"relu":        func() (*ts.Tensor, error) { return a.Relu(false) },
		"exp":         func() (*ts.Tensor, error) { return a.Exp(false) },
		"exp-bf16":    func() (*ts.Tensor, error) { return h.Exp(false) },
		"mse_loss":    func() (*ts.Tensor, error) { return h.MseLoss(hb, 1, false) },
		"cat-mixed":   func() (*ts.Tensor, error) { return ts.Cat([]*ts.Tensor{a, h}, 0) },
		"stack-mixed": func() (*ts.Tensor, error) { return ts.Stack([]*ts.Tensor{a, h}, 0) },
		"layer_norm": func() (*ts.Tensor, error) {
			return ts.LayerNorm(h, []int64{4}, ts.NewTensor(), ts.NewTensor(), 1e-5, false)
		},
		"double-matmul": func() (*ts.Tensor, error) {
			return a.MustTotype(gotch.Double, false).Matmul(b.MustTotype(gotch.Double, false), true)
		},
		"int-matmul": func() (*ts.Tensor, error) {
			return a.MustTotype(gotch.Int64, false).Matmul(b.MustTotype(gotch.Int64, false), true)
		},
		"square":       func() (*ts.Tensor, error) { return a.Square(false) },
		"sigmoid-bf16": func() (*ts.Tensor, error) { return h.Sigmoid(false) },
		"binary_cross_entropy_with_logits": func() (*ts.Tensor, error) {
			return h.BinaryCrossEntropyWithLogits(h.MustSigmoid(false), ts.NewTensor(), ts.NewTensor(), 1, false)
		},
		"gelu":           func() (*ts.Tensor, error) { return h.Gelu("none", false) },
		"logsumexp-bf16": func() (*ts.Tensor, error) { return h.Logsumexp([]int64{0}, false, false) },
		"avg_pool2d": func() (*ts.Tensor, error) {
			return himg.AvgPool2d([]int64{2, 2}, []int64{2, 2}, []int64{0, 0}, false, true, nil, false)
		},
	}
	maps.Copy(ops, lowerOps(t))
	maps.Copy(ops, fullOps(t))
	return ops
}

func TestAutocastChoosesPythonsDTypes(t *testing.T) {
	want := runPython(t).Table
	compared, cast := 0, 0
	for name, dtype := range map[string]gotch.DType{"torch.bfloat16": gotch.BFloat16, "torch.float16": gotch.Half} {
		require.NoError(t, Autocast(Options{DType: dtype}, func() error {
			for op, f := range opsOfTable(t) {
				require.Contains(t, want, op+"/"+name)
				y, err := f()
				if want[op+"/"+name] == "error" {
					require.Error(t, err, "%s with %s", op, name)
					continue
				}
				require.NoError(t, err, op)
				info, err := tdp.Describe(y)
				require.NoError(t, err)
				require.Equal(t, want[op+"/"+name], dtypeName(info.DType), "%s with %s", op, name)
				compared++
				if info.DType == dtype {
					cast++
				}
			}
			return nil
		}))
	}
	require.Equal(t, len(want), 2*len(opsOfTable(t)))
	require.Greater(t, compared, 150)
	require.Greater(t, cast, 40)
}

func dtypeOfMatmul(t *testing.T) gotch.DType {
	t.Helper()
	a := numbers(t, 3, 3)
	y, err := a.Matmul(a, false)
	require.NoError(t, err)
	info, err := tdp.Describe(y)
	require.NoError(t, err)
	return info.DType
}

func TestAutocastNestsAndRestores(t *testing.T) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	check := func(on bool, dtype gotch.DType, product gotch.DType) {
		t.Helper()
		enabled, d, err := Enabled(gotch.CPU)
		require.NoError(t, err)
		require.Equal(t, on, enabled)
		require.Equal(t, dtype, d)
		require.Equal(t, product, dtypeOfMatmul(t))
	}
	check(false, gotch.BFloat16, gotch.Float)
	sentinel := errors.New("from inside")
	err := Autocast(Options{}, func() error {
		check(true, gotch.BFloat16, gotch.BFloat16)
		require.NoError(t, Autocast(Options{Disabled: true}, func() error {
			check(false, gotch.BFloat16, gotch.Float)
			return Autocast(Options{DType: gotch.Half}, func() error {
				check(true, gotch.Half, gotch.Half)
				return nil
			})
		}))
		check(true, gotch.BFloat16, gotch.BFloat16)
		return sentinel
	})
	require.ErrorIs(t, err, sentinel)
	check(false, gotch.BFloat16, gotch.Float)

	func() {
		defer func() { require.Equal(t, "boom", recover()) }()
		_ = Autocast(Options{DType: gotch.Half}, func() error { panic("boom") })
	}()
	check(false, gotch.BFloat16, gotch.Float)

	// Another thread has modes of its own.
	require.NoError(t, Autocast(Options{}, func() error {
		done := make(chan gotch.DType)
		go func() {
			runtime.LockOSThread()
			done <- dtypeOfMatmul(t)
		}()
		require.Equal(t, gotch.Float, <-done)
		return nil
	}))
	require.Error(t, Autocast(Options{DType: gotch.Double}, func() error { return nil }))

	// Without a GPU, autocast for CUDA is off, as in Python.
	if ok, err := tdp.CUDAAvailable(); err == nil && !ok {
		require.NoError(t, Autocast(Options{Device: gotch.CudaBuilder(0)}, func() error {
			enabled, _, err := Enabled(gotch.CudaBuilder(0))
			require.False(t, enabled)
			return err
		}))
	}
}

// Cast copies of trainable weights are kept within the outermost scope, and no longer.
func TestAutocastCache(t *testing.T) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	x, w := numbers(t, 2, 2), numbers(t, 2, 2)
	require.NoError(t, tdp.SetRequiresGrad(w, true))
	product := func() []float32 {
		y, err := x.Matmul(w, false)
		require.NoError(t, err)
		v, err := tdp.ToSlice[float32](y.MustTotype(gotch.Float, true))
		require.NoError(t, err)
		return v
	}
	double := func() {
		twice, err := tdp.FromSlice([]float32{9, 9, 9, 9}, []int64{2, 2}, gotch.CPU)
		require.NoError(t, err)
		require.NoError(t, tdp.Copy(w, twice, false))
	}
	var before, stale []float32
	require.NoError(t, Autocast(Options{}, func() error {
		before = product()
		double()
		require.NoError(t, Autocast(Options{}, func() error { return nil })) // an inner exit keeps the cache
		stale = product()
		return nil
	}))
	require.Equal(t, before, stale)
	var fresh []float32
	require.NoError(t, Autocast(Options{}, func() error { fresh = product(); return nil }))
	require.NotEqual(t, before, fresh)
	restore := numbers(t, 2, 2)
	require.NoError(t, Autocast(Options{NoCache: true}, func() error {
		first := product()
		require.Equal(t, fresh, first)
		require.NoError(t, tdp.Copy(w, restore, false))
		require.Equal(t, before, product())
		return nil
	}))
}

func TestBackwardOfAutocastIsPythons(t *testing.T) {
	want := runPython(t).Backward
	x, w := numbers(t, 6, 5), numbers(t, 5, 3)
	require.NoError(t, tdp.SetRequiresGrad(w, true))
	var loss *ts.Tensor
	require.NoError(t, Autocast(Options{}, func() error {
		loss = x.MustMatmul(w, false).MustRelu(true).MustTotype(gotch.Float, true)
		loss = loss.MustMul(loss, false).MustMean(gotch.Float, true)
		return nil
	}))
	require.NoError(t, tdp.Backward(loss, nil, false, nil))
	l, err := tdp.ToSlice[float32](loss)
	require.NoError(t, err)
	require.Equal(t, want.Loss, float64(l[0]))
	g, err := tdp.Grad(w)
	require.NoError(t, err)
	require.Equal(t, want.Grad, floats(t, g))
}

func floats(t testing.TB, x *ts.Tensor) []float64 {
	t.Helper()
	v, err := tdp.ToSlice[float32](x)
	require.NoError(t, err)
	out := make([]float64, len(v))
	for i := range v {
		out[i] = float64(v[i])
	}
	return out
}

// scalerLoss is the loss of testdata/amp.py's scaler.
func scalerLoss(t *testing.T, params []*ts.Tensor) *ts.Tensor {
	t.Helper()
	var loss *ts.Tensor
	for k, p := range params {
		term, err := p.MustMul(p, false).MulScalar(ts.FloatScalar(0.1*float64(k+1)), true)
		require.NoError(t, err)
		term = term.MustSum(gotch.Float, true)
		if loss == nil {
			loss = term
		} else {
			loss = loss.MustAdd(term, true)
		}
	}
	return loss
}

func setGradAt(t *testing.T, p *ts.Tensor, i int, v float64) {
	t.Helper()
	g, err := tdp.Grad(p)
	require.NoError(t, err)
	b, err := tdp.HostBytes(g)
	require.NoError(t, err)
	bits := math.Float32bits(float32(v))
	for k := range 4 {
		b[4*i+k] = byte(bits >> (8 * k))
	}
	g.MustDrop()
}

func TestGradScalerIsPythons(t *testing.T) {
	sgd := func(o optim.SGDOptions) func(p []*ts.Tensor) (optim.Optimizer, error) {
		return func(p []*ts.Tensor) (optim.Optimizer, error) { return optim.NewSGD(p, o) }
	}
	adam := func(o optim.AdamOptions) func(p []*ts.Tensor) (optim.Optimizer, error) {
		return func(p []*ts.Tensor) (optim.Optimizer, error) { return optim.NewAdam(p, o) }
	}
	makers := map[string]func(p []*ts.Tensor) (optim.Optimizer, error){
		"sgd":             sgd(optim.SGDOptions{LR: 0.1, Momentum: 0.9}),
		"sgd-clip":        sgd(optim.SGDOptions{LR: 0.1, Momentum: 0.9}),
		"sgd-fused":       sgd(optim.SGDOptions{LR: 0.1, Implementation: optim.Fused}),
		"adam":            adam(optim.AdamOptions{LR: 0.01}),
		"adam-fused":      adam(optim.AdamOptions{LR: 0.01, Implementation: optim.Fused}),
		"adam-fused-clip": adam(optim.AdamOptions{LR: 0.01, Implementation: optim.Fused}),
	}
	want := runPython(t).Scaler
	require.Len(t, want, len(makers))
	for name, py := range want {
		t.Run(name, func(t *testing.T) { followScaler(t, py, makers[name], strings.Contains(name, "clip")) })
	}
}

func followScaler(t *testing.T, py pyScaler, make func(p []*ts.Tensor) (optim.Optimizer, error), clip bool) {
	params := []*ts.Tensor{numbers(t, 3, 4), numbers(t, 5), numbers(t, 4)}
	for _, p := range params {
		require.NoError(t, tdp.SetRequiresGrad(p, true))
	}
	var opts []optim.Optimizer
	for _, list := range [][]*ts.Tensor{params[:2], params[2:]} {
		o, err := make(list)
		require.NoError(t, err)
		defer func() { require.NoError(t, o.Close()) }()
		opts = append(opts, o)
	}
	s, err := NewGradScaler(ScalerOptions{InitScale: 1024, GrowthInterval: 4})
	require.NoError(t, err)
	defer func() { require.NoError(t, s.Close()) }()
	require.Len(t, py.Steps, 30)
	for i := range py.Steps {
		for _, o := range opts {
			require.NoError(t, o.ZeroGrad(true))
		}
		scaled, err := s.Scale(scalerLoss(t, params))
		require.NoError(t, err)
		require.NoError(t, tdp.Backward(scaled, nil, false, nil))
		bad := [2]bool{}
		switch i {
		case 3, 11:
			setGradAt(t, params[1], 0, math.Inf(1))
			bad[0] = true
		case 12:
			setGradAt(t, params[1], 0, math.NaN())
			bad[0] = true
		case 20:
			setGradAt(t, params[2], 1, math.Inf(-1))
			bad[1] = true
		}
		if clip {
			for _, o := range opts {
				require.NoError(t, s.Unscale(o))
			}
			for _, list := range [][]*ts.Tensor{params[:2], params[2:]} {
				norm, err := optim.ClipGradNorm(list, 0.5)
				require.NoError(t, err)
				norm.MustDrop()
			}
		}
		for k, o := range opts {
			did, err := s.Step(o)
			require.NoError(t, err)
			require.Equal(t, !bad[k], did, "step %d of optimizer %d", i, k)
		}
		before, err := s.GetScale()
		require.NoError(t, err)
		require.NoError(t, s.Update())
		after, err := s.GetScale()
		require.NoError(t, err)
		if bad[0] || bad[1] {
			require.Equal(t, before/2, after)
		}
		tracker, err := s.growthTracker()
		require.NoError(t, err)
		var got [][]float64
		for _, p := range params {
			got = append(got, floats(t, p))
		}
		text, err := json.Marshal([]any{after, tracker, got})
		require.NoError(t, err)
		require.JSONEq(t, string(py.Steps[i]), string(text), "after step %d", i)
	}
	state, err := s.StateDict()
	require.NoError(t, err)
	i := 0
	for k, v := range state.Strings() {
		want := py.State[i]
		require.Equal(t, want[0], k)
		switch x := v.(type) {
		case float64:
			require.Equal(t, [3]any{k, "float", x}, want)
		case int64:
			require.Equal(t, [3]any{k, "int", float64(x)}, want)
		default:
			t.Fatalf("%s is a %T", k, v)
		}
		i++
	}
	require.Equal(t, len(py.State), i)

	// A new scaler goes on from there, before its first Scale and after.
	for _, started := range []bool{false, true} {
		other, err := NewGradScaler(ScalerOptions{})
		require.NoError(t, err)
		if started {
			_, err := other.Scale(numbers(t, 1))
			require.NoError(t, err)
		}
		require.NoError(t, other.LoadStateDict(state))
		again, err := other.StateDict()
		require.NoError(t, err)
		require.Equal(t, state, again)
		require.NoError(t, other.Close())
	}
}

func TestGradScalerErrors(t *testing.T) {
	p := numbers(t, 3)
	require.NoError(t, tdp.SetRequiresGrad(p, true))
	o, err := optim.NewSGD([]*ts.Tensor{p}, optim.SGDOptions{})
	require.NoError(t, err)
	defer func() { require.NoError(t, o.Close()) }()
	s, err := NewGradScaler(ScalerOptions{})
	require.NoError(t, err)
	defer func() { require.NoError(t, s.Close()) }()

	require.ErrorIs(t, s.Unscale(o), ErrNotScaled)
	_, err = s.Step(o)
	require.ErrorIs(t, err, ErrNotScaled)
	require.ErrorIs(t, s.Update(), ErrNotScaled)
	scale, err := s.GetScale()
	require.NoError(t, err)
	require.Equal(t, 65536.0, scale)

	_, err = s.Scale(p)
	require.NoError(t, err)
	require.ErrorIs(t, s.Update(), ErrNoInfChecks)
	_, err = s.Step(o) // no gradient
	require.ErrorIs(t, err, ErrNoInfChecks)
	require.ErrorIs(t, s.Update(), ErrNoInfChecks)
	require.NoError(t, s.endIteration())

	require.NoError(t, tdp.SetGrad(p, numbers(t, 3)))
	require.NoError(t, s.Unscale(o))
	require.ErrorIs(t, s.Unscale(o), ErrUnscaledTwice)
	_, err = s.Step(o)
	require.NoError(t, err)
	require.ErrorIs(t, s.Unscale(o), ErrUnscaleLate)
	_, err = s.Step(o)
	require.ErrorIs(t, err, ErrSteppedTwice)
	require.NoError(t, s.Update())
	require.NoError(t, s.SetScale(8))
	scale, err = s.GetScale()
	require.NoError(t, err)
	require.Equal(t, 8.0, scale)

	h := numbers(t, 3).MustTotype(gotch.Half, true)
	require.NoError(t, tdp.SetRequiresGrad(h, true))
	require.NoError(t, tdp.SetGrad(h, numbers(t, 3).MustTotype(gotch.Half, true)))
	oh, err := optim.NewSGD([]*ts.Tensor{h}, optim.SGDOptions{})
	require.NoError(t, err)
	defer func() { require.NoError(t, oh.Close()) }()
	require.ErrorContains(t, s.Unscale(oh), "Attempting to unscale FP16 gradients.")

	require.ErrorIs(t, s.LoadStateDict(pickle.NewDict()), ErrEmptyState)
	_, err = NewGradScaler(ScalerOptions{GrowthFactor: 1})
	require.Error(t, err)
	_, err = NewGradScaler(ScalerOptions{BackoffFactor: 1})
	require.Error(t, err)

	off, err := NewGradScaler(ScalerOptions{Disabled: true})
	require.NoError(t, err)
	same, err := off.Scale(p)
	require.NoError(t, err)
	require.Equal(t, floats(t, p), floats(t, same))
	did, err := off.Step(o)
	require.NoError(t, err)
	require.True(t, did)
	require.NoError(t, off.Update())
	d, err := off.StateDict()
	require.NoError(t, err)
	require.Zero(t, d.Len())
}
