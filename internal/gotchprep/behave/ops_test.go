package behave

import (
	"bytes"
	"errors"
	"math"
	"os"
	"path/filepath"
	"reflect"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/sugarme/gotch"
	"github.com/sugarme/gotch/nn"
	"github.com/sugarme/gotch/ts"
)

func values(t *testing.T, x *ts.Tensor, want ...float64) {
	t.Helper()
	got := x.Float64Values()
	if len(got) != len(want) {
		t.Fatalf("got %v, want %v", got, want)
	}
	for i := range got {
		if math.Abs(got[i]-want[i]) > 1e-5 {
			t.Fatalf("got %v, want %v", got, want)
		}
	}
}

func TestSeveralOutputs(t *testing.T) {
	x := ts.MustOfSlice([]float32{3, 1, 2, 6, 5, 4}).MustView([]int64{2, 3}, true)
	v, i := x.MustTopK(2, 1, true, true)
	values(t, v, 3, 2, 6, 5)
	values(t, i, 0, 2, 0, 1)
	q, r := x.MustQr(true, false)
	values(t, q.MustMatmul(r, false), 3, 1, 2, 6, 5, 4)
	u, s, w := x.MustSvd(true, true, false)
	values(t, u.MustMatmul(s.MustDiag(0, false), false).MustMatmul(w.MustT(false), false), 3, 1, 2, 6, 5, 4)
	weights := []*ts.Tensor{ts.MustRandn([]int64{8, 3}, gotch.Float, gotch.CPU), ts.MustRandn([]int64{8, 2}, gotch.Float, gotch.CPU)}
	h := []*ts.Tensor{ts.MustZeros([]int64{1, 1, 2}, gotch.Float, gotch.CPU), ts.MustZeros([]int64{1, 1, 2}, gotch.Float, gotch.CPU)}
	in := x.MustView([]int64{2, 1, 3}, false)
	out, hn, cn := in.MustLstm(h, weights, false, 1, 0, false, false, false)
	if !reflect.DeepEqual(out.MustSize(), []int64{2, 1, 2}) || !reflect.DeepEqual(hn.MustSize(), []int64{1, 1, 2}) || !reflect.DeepEqual(cn.MustSize(), []int64{1, 1, 2}) {
		t.Errorf("lstm: %v %v %v", out.MustSize(), hn.MustSize(), cn.MustSize())
	}
}

func TestLists(t *testing.T) {
	x := ts.MustOfSlice([]float32{1, 2, 3, 4, 5})
	parts := x.MustSplit(2, 0, false)
	if len(parts) != 3 {
		t.Fatalf("%d parts", len(parts))
	}
	values(t, parts[2], 5)
	if n := len(ts.MustZeros([]int64{0, 2}, gotch.Float, gotch.CPU).MustUnbind(0, true)); n != 0 {
		t.Errorf("nothing was unbound into %d", n)
	}
	grid := ts.MustMeshgrid([]*ts.Tensor{x, x})
	if len(grid) != 2 || !reflect.DeepEqual(grid[1].MustSize(), []int64{5, 5}) {
		t.Error("meshgrid")
	}
}

// &shape[0] of an empty shape panicked.
func TestEmptySlices(t *testing.T) {
	x := ts.MustOnes([]int64{}, gotch.Float, gotch.CPU)
	if size := x.MustSize(); len(size) != 0 {
		t.Errorf("the size of a scalar is %v", size)
	}
	if v, err := x.Float64Value(nil); v != 1 || err != nil {
		t.Errorf("got %v, %v", v, err)
	}
	values(t, ones(2, 2).MustSumDimIntlist([]int64{}, false, gotch.Float, true), 4)
	values(t, ones(1).MustView(nil, true), 1)
}

func TestManyDimensions(t *testing.T) {
	want := []int64{1, 2, 1, 1, 3, 1, 1, 1, 2, 1}
	x := ts.MustZeros(want, gotch.Float, gotch.CPU)
	if got := x.MustSize(); !reflect.DeepEqual(got, want) {
		t.Errorf("got %v", got)
	}
	if got := x.MustStride(); len(got) != 10 || got[1] != 6 {
		t.Errorf("strides %v", got)
	}
}

// Optional tensors may be nil or undefined.
func TestOptionalTensors(t *testing.T) {
	x := ts.MustOfSlice([]float32{1, 3}).MustView([]int64{1, 2}, true)
	for _, none := range []*ts.Tensor{nil, ts.None, ts.NewTensor()} {
		y, err := ts.LayerNorm(x, []int64{2}, none, none, 0, false)
		if err != nil {
			t.Fatal(err)
		}
		values(t, y, -1, 1)
		if _, err := ts.BatchNorm(ones(2, 2), none, none, none, none, true, 0.1, 1e-5, false); err != nil {
			t.Error(err)
		}
		q := ones(1, 1, 2, 4)
		if _, err := ts.ScaledDotProductAttention(q, q, q, none, 0, false, nil); err != nil {
			t.Error(err)
		}
		if _, err := x.NllLoss(ts.MustOfSlice([]int64{0}), none, 1, -100, false); err != nil {
			t.Error(err)
		}
		if _, err := ts.Conv2d(ones(1, 1, 3, 3), ones(1, 1, 2, 2), none, []int64{1, 1}, []int64{0, 0}, []int64{1, 1}, 1); err != nil {
			t.Error(err)
		}
	}
}

// Wrappers that passed a flag or a dimension as a factor.
func TestMisplacedArguments(t *testing.T) {
	x := ts.MustOfSlice([]float32{-1, 2})
	values(t, x.MustRrelu(false, false), -(1.0/8+1.0/3)/2, 2)
	y := ts.MustOfSlice([]float32{1, 2, 3, 4}).MustView([]int64{2, 2}, true)
	values(t, ts.MustTrapezoid(y, 0), 2, 3)
	values(t, ts.MustTrapezoid(y, 1), 1.5, 3.5)
	values(t, ts.MustCumulativeTrapezoid(y, 0), 2, 3)
}

func grad(t *testing.T) bool {
	t.Helper()
	x := ones(1)
	defer x.MustDrop()
	x.MustRequiresGrad_(true)
	y := x.MustMul(x, false)
	defer y.MustDrop()
	return y.MustRequiresGrad()
}

func TestNoGradRestores(t *testing.T) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	ts.NoGrad(func() {
		if grad(t) {
			t.Error("gradients in NoGrad")
		}
		ts.NoGrad(func() {})
		if grad(t) {
			t.Error("the inner NoGrad switched gradients on for the outer one")
		}
		g := ts.NewNoGradGuard()
		g.Drop()
		g.Drop()
		if grad(t) {
			t.Error("the inner guard switched gradients on for NoGrad")
		}
	})
	if !grad(t) {
		t.Error("no gradients after NoGrad")
	}
	func() {
		defer func() { recover() }()
		ts.NoGrad(func() { panic("on the way") })
	}()
	if !grad(t) {
		t.Error("no gradients after a panic in NoGrad")
	}
	if ts.NoGrad1(func() interface{} { return grad(t) }).(bool) {
		t.Error("gradients in NoGrad1")
	}
	was := ts.MustGradSetEnabled(false)
	if was != true || ts.MustGradSetEnabled(true) != false {
		t.Error("MustGradSetEnabled does not return what was set before")
	}
}

// Without a locked thread, what one goroutine set stayed on its thread for whoever came next: 977 of 1000 operations of
// others ran without gradients.
func TestNoGradStaysAtHome(t *testing.T) {
	busy(t)
	var wg sync.WaitGroup
	for g := range 6 {
		wg.Add(1)
		go func() {
			defer wg.Done()
			for i := range 200 {
				if g%2 == 0 {
					ts.NoGrad(func() {
						runtime.Gosched()
						if grad(t) {
							t.Errorf("round %d: gradients in NoGrad", i)
						}
					})
				} else if !grad(t) {
					t.Errorf("round %d: no gradients outside", i)
				}
			}
		}()
	}
	wg.Wait()
}

func TestRunBackward(t *testing.T) {
	x, y := ts.MustOfSlice([]float32{2}), ts.MustOfSlice([]float32{3})
	x.MustRequiresGrad_(true)
	y.MustRequiresGrad_(true)
	z := x.MustMul(y, false)
	w := x.MustMul(x, false)
	grads, err := ts.RunBackward([]*ts.Tensor{z, w}, []*ts.Tensor{x, y}, false, false)
	if err != nil || len(grads) != 2 {
		t.Fatal(grads, err)
	}
	values(t, grads[0], 3+4)
	values(t, grads[1], 2)
}

func store(t *testing.T) (*nn.VarStore, []string) {
	t.Helper()
	vs := nn.NewVarStore(gotch.CPU)
	names := []string{"delta", "alpha", "charlie", "bravo", "echo"}
	for i, n := range names {
		vs.Root().Sub(n).MustOnes("w", []int64{int64(i + 1)})
	}
	return vs, names
}

// A Go map gives another order each time, and another one on each rank.
func TestVarStoreOrder(t *testing.T) {
	vs, _ := store(t)
	for range 50 {
		var got []int64
		for _, v := range vs.TrainableVariables() {
			got = append(got, v.MustSize()[0])
		}
		if want := []int64{2, 4, 3, 1, 5}; !reflect.DeepEqual(got, want) { // alpha bravo charlie delta echo
			t.Fatalf("got %v, want %v", got, want)
		}
	}
}

func TestSubPathsDoNotShare(t *testing.T) {
	p := nn.NewVarStore(gotch.CPU).Root().Sub("a").Sub("b").Sub("c")
	left := p.Sub("left")
	p.Sub("right")
	if got := left.Paths()[3]; got != "left" {
		t.Errorf("the path became %q", got)
	}
}

func TestVarStoreMends(t *testing.T) {
	vs, _ := store(t)
	if err := vs.Freeze(); err != nil {
		t.Fatal(err)
	}
	if n := len(vs.TrainableVariables()); n != 0 {
		t.Errorf("%d variables are trained when frozen", n)
	}
	if err := vs.Unfreeze(); err != nil {
		t.Fatal(err)
	}
	if n := len(vs.TrainableVariables()); n != 5 {
		t.Errorf("%d variables are trained again, not 5", n)
	}
	file := filepath.Join(t.TempDir(), "vars.ot")
	if err := vs.Save(file); err != nil {
		t.Fatal(err)
	}
	vs.TrainableVariables()[0].MustDetach(false).MustZero_()
	start := time.Now()
	if err := vs.Load(file); err != nil {
		t.Fatal(err)
	}
	if d := time.Since(start); d > 900*time.Millisecond {
		t.Errorf("loading five numbers took %v", d)
	}
	values(t, vs.TrainableVariables()[0], 1, 1)
	vs.ToHalf()
	for name, v := range vs.Variables() {
		if v.DType() != gotch.Half {
			t.Errorf("%s is %v after ToHalf", name, v.DType())
		}
	}
	if d := ones(1).MustDevice(); d != gotch.CPU {
		t.Errorf("a tensor on the CPU is on %v", d)
	}
}

// ClipGradNorm waited for its own lock for ever.
func TestClipGradNorm(t *testing.T) {
	vs := nn.NewVarStore(gotch.CPU)
	w := vs.Root().MustOnes("w", []int64{2, 2})
	unused := vs.Root().MustOnes("unused", []int64{2})
	opt, err := nn.DefaultSGDConfig().Build(vs, 0.1)
	if err != nil {
		t.Fatal(err)
	}
	loss := w.MustMulScalar(ts.FloatScalar(2), false).MustSum(gotch.Float, true)
	loss.MustBackward()
	done := make(chan error, 1)
	go func() { done <- opt.ClipGradNorm(1) }()
	select {
	case err := <-done:
		if err != nil {
			t.Fatal(err)
		}
	case <-time.After(20 * time.Second):
		t.Fatal("ClipGradNorm does not return")
	}
	values(t, w.MustGrad(false), 0.5, 0.5, 0.5, 0.5)
	if unused.MustGrad(false).MustDefined() {
		t.Error("a gradient came from nowhere")
	}
	opt.ClipGradValue(0.25)
	values(t, w.MustGrad(false), 0.25, 0.25, 0.25, 0.25)
	nan := ts.MustOfSlice([]float32{float32(math.NaN()), 0, 0, 0}).MustView([]int64{2, 2}, true)
	g := w.MustGrad(false)
	g.Copy_(nan)
	if err := opt.ClipGradNorm(1, nn.WithErrorIfNonFinite(true)); !errors.Is(err, nn.ErrNonFinite) {
		t.Errorf("got %v, want ErrNonFinite", err)
	}
}

// The learning rates of a second optimizer with more groups overran a vector that the first had sized.
func TestLearningRates(t *testing.T) {
	one, err := ts.Sgd(0.1, 0, 0, 0, false)
	if err != nil {
		t.Fatal(err)
	}
	defer one.Drop()
	one.AddParameter(ones(1), 0)
	if lrs, err := one.GetLearningRates(); err != nil || !reflect.DeepEqual(lrs, []float64{0.1}) {
		t.Errorf("got %v, %v", lrs, err)
	}
	two, err := ts.Adam(0.2, 0.9, 0.99, 0)
	if err != nil {
		t.Fatal(err)
	}
	two.AddParameter(ones(1), 2)
	if err := two.SetLearningRates([]float64{1, 2, 3}); err != nil {
		t.Fatal(err)
	}
	if lrs, err := two.GetLearningRates(); err != nil || !reflect.DeepEqual(lrs, []float64{1, 2, 3}) {
		t.Errorf("got %v, %v", lrs, err)
	}
	two.Drop()
	two.Drop()
	if err := two.Step(); err == nil {
		t.Error("a dropped optimizer steps")
	}
}

func TestBatchNormChecksDimensions(t *testing.T) {
	bn := nn.BatchNorm2D(nn.NewVarStore(gotch.CPU).Root(), 3, nn.DefaultBatchNormConfig())
	bn.ForwardT(ones(2, 3, 4, 4), true).MustDrop()
	defer func() {
		if _, ok := recover().(error); !ok {
			t.Error("a list went through BatchNorm2D")
		}
	}()
	bn.ForwardT(ones(2, 3), true)
}

func TestTorchScript(t *testing.T) {
	m, err := ts.ModuleLoad("testdata/echo.pt")
	if err != nil {
		t.Fatal(err)
	}
	x := ts.MustOfSlice([]float32{1, 2})
	in := []*ts.IValue{ts.NewIValue(x), ts.NewIValue([]int64{1, 2, 3}), ts.NewIValue([]bool{true, false}), ts.NewIValue("go"), ts.NewIValue(0.5)}
	run := func() []interface{} {
		out, err := m.ForwardIs(in)
		if err != nil {
			t.Fatal(err)
		}
		return out.Value().([]interface{})
	}
	got := run()
	val := func(i int) interface{} { return got[i].(*ts.IValue).Value() }
	pair := val(0).([]*ts.Tensor)
	values(t, pair[1], 2, 3)
	for i, want := range map[int]interface{}{1: []int64{2, 3, 4}, 2: []bool{false, true}, 3: "go!", 4: 1.0, 7: []string{"go", "gogo"}, 8: []int64{}, 9: []float64{0.5, 1.5}} {
		if !reflect.DeepEqual(val(i), want) {
			t.Errorf("value %d: got %#v, want %#v", i, val(i), want)
		}
	}
	named := val(5).(map[string]*ts.Tensor)
	values(t, named["twice"], 2, 4)
	values(t, named["more"], 1.5, 2.5)
	values(t, val(6).([]*ts.Tensor)[2], 4, 8)
	drop := func(list []interface{}) {
		for _, v := range list {
			switch v := v.(*ts.IValue).Value().(type) {
			case []*ts.Tensor:
				for _, x := range v {
					x.MustDrop()
				}
			case map[string]*ts.Tensor:
				for _, x := range v {
					x.MustDrop()
				}
			}
		}
	}
	drop(got)
	flat(t, 10_000, func() { drop(run()) })
	if _, err := m.ForwardIs(in[:2]); err == nil {
		t.Error("three arguments are missing and nobody noticed")
	}
	m.Drop()
	m.Drop()
	if _, err := m.ForwardIs(in); err == nil {
		t.Error("a dropped module runs")
	}
}

func TestTorchScriptParameters(t *testing.T) {
	data, err := os.ReadFile("testdata/line.pt")
	if err != nil {
		t.Fatal(err)
	}
	m, err := ts.ModuleLoadData(bytes.NewReader(data))
	if err != nil {
		t.Fatal(err)
	}
	defer m.Drop()
	params, err := m.NamedParameters()
	if err != nil || len(params) != 2 || params[0].Name != "weight" || params[1].Name != "bias" {
		t.Fatal(params, err)
	}
	x := ts.MustOfSlice([]float32{1, 1}).MustView([]int64{1, 2}, true)
	y, err := m.ForwardTs([]*ts.Tensor{x})
	if err != nil {
		t.Fatal(err)
	}
	values(t, y, 5.5)
	y.MustSum(gotch.Float, false).MustBackward()
	values(t, params[0].Tensor.MustGrad(false), 1, 1)
}
