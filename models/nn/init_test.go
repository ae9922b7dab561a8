package nn

import (
	"encoding/json"
	"math"
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/sugarme/gotch/ts"

	"github.com/goddp/goddp/internal/tdp"
	"github.com/goddp/goddp/internal/testenv"
)

// TestInitLikePython draws with every function of init.go, one after the other, and holds the bits.
func TestInitLikePython(t *testing.T) {
	out := testenv.RunPython(t, `
import json, math, torch
from torch.nn import init
torch.manual_seed(11)
torch.set_num_threads(1)
fills = [
    lambda w: init.uniform_(w, -2, 3), lambda w: init.normal_(w, 1, 0.5), lambda w: init.trunc_normal_(w, 0.1, 0.7, -1, 1.5),
    lambda w: init.constant_(w, 0.3),
    lambda w: init.kaiming_uniform_(w, nonlinearity="relu"), lambda w: init.kaiming_normal_(w, mode="fan_out"),
    lambda w: init.kaiming_uniform_(w, a=math.sqrt(5)), lambda w: init.kaiming_normal_(w, nonlinearity="linear"),
    lambda w: init.xavier_uniform_(w, 1.5), lambda w: init.xavier_normal_(w),
]
r = [f(torch.empty(6, 4, 3, 2)).reshape(-1).view(torch.int32).tolist() for f in fills]
r.append(init.eye_(torch.empty(3, 5)).reshape(-1).view(torch.int32).tolist())
print(json.dumps(r))`)
	var want [][]int32
	require.NoError(t, json.Unmarshal([]byte(out), &want))
	require.NoError(t, tdp.ManualSeed(11))
	for i, f := range []func(*ts.Tensor) error{
		func(w *ts.Tensor) error { return Uniform(w, -2, 3) },
		func(w *ts.Tensor) error { return Normal(w, 1, 0.5) },
		func(w *ts.Tensor) error { return TruncNormal(w, 0.1, 0.7, -1, 1.5) },
		func(w *ts.Tensor) error { return Constant(w, 0.3) },
		func(w *ts.Tensor) error { return KaimingUniform(w, KaimingOptions{}) },
		func(w *ts.Tensor) error { return KaimingNormal(w, KaimingOptions{FanOut: true, LeakyReLU: true}) },
		func(w *ts.Tensor) error { return KaimingUniform(w, KaimingOptions{LeakyReLU: true, A: math.Sqrt(5)}) },
		func(w *ts.Tensor) error { return KaimingNormal(w, KaimingOptions{Linear: true}) },
		func(w *ts.Tensor) error { return XavierUniform(w, 1.5) },
		func(w *ts.Tensor) error { return XavierNormal(w, 1) },
	} {
		w := ones(t, 6, 4, 3, 2)
		require.NoError(t, f(w))
		require.Equal(t, want[i], bits(t, w), "function %d", i)
	}
	w := ones(t, 3, 5)
	require.NoError(t, Eye(w))
	require.Equal(t, want[10], bits(t, w))
}

func bits(t *testing.T, x *ts.Tensor) []int32 {
	v, err := tdp.ToSlice[float32](x)
	require.NoError(t, err)
	out := make([]int32, len(v))
	for i, f := range v {
		out[i] = int32(math.Float32bits(f))
	}
	return out
}

// TestEdgesLikePython: layers without inputs or outputs, and layers that only print.
func TestEdgesLikePython(t *testing.T) {
	out := testenv.RunPython(t, `
import json, warnings, torch
from torch import nn
warnings.simplefilter("ignore")
torch.manual_seed(5)
a, b, c = nn.Linear(0, 5), nn.Linear(3, 0), nn.Linear(2, 3)
print(json.dumps({"drawn": [a.bias.tolist(), b.bias.tolist(), c.weight.reshape(-1).view(torch.int32).tolist()], "repr": [repr(m) for m in [
    nn.Sequential(), nn.ModuleList([nn.Linear(1, 1), nn.Linear(1, 1), nn.Sequential(nn.ReLU())]), nn.BatchNorm3d(4, eps=1e-12, momentum=None),
    nn.Embedding(4, 2, padding_idx=-1, scale_grad_by_freq=True, sparse=True), nn.MaxPool3d((1, 2, 3), stride=2, ceil_mode=True),
    nn.AvgPool2d((1, 2), padding=(0, 1)), nn.AvgPool1d(3), nn.AdaptiveAvgPool1d(4), nn.AdaptiveAvgPool3d((None, 2, 3)),
    nn.Softmax(dim=1), nn.LayerNorm([2, 3], eps=1e20), nn.GroupNorm(2, 4, eps=123456.0), nn.Dropout(0.25), nn.Identity(), nn.Tanh(),
    nn.GELU("tanh"), nn.SiLU(inplace=True), nn.Conv3d(2, 4, (1, 2, 3), padding=(0, 1, 0), groups=2, bias=False, padding_mode="circular"),
    nn.Sequential(nn.Sequential(nn.ModuleList([nn.ReLU(), nn.ReLU()])))]]}))`)
	var want struct {
		Drawn [3]json.RawMessage
		Repr  []string
	}
	require.NoError(t, json.Unmarshal([]byte(out), &want))
	require.NoError(t, tdp.ManualSeed(5))
	a, b, c := linear(0, 5), linear(3, 0), linear(2, 3)
	drawn := []any{Must(tdp.ToSlice[float32](a.Bias)), Must(tdp.ToSlice[float32](b.Bias)), bits(t, c.Weight)}
	for i, v := range drawn {
		text, err := json.Marshal(v)
		require.NoError(t, err)
		require.JSONEq(t, string(want.Drawn[i]), string(text))
	}
	for i, m := range []Module{
		NewSequential(), NewModuleList(linear(1, 1), linear(1, 1), NewSequential(NewReLU())),
		Must(NewBatchNorm3d(4, BatchNormOptions{Eps: 1e-12, Cumulative: true})),
		Must(NewEmbedding(4, 2, EmbeddingOptions{PaddingIdx: new(int64(-1)), ScaleGradByFreq: true, Sparse: true})),
		Must(NewMaxPool3d(Size{1, 2, 3}, MaxPoolOptions{Stride: Size{2}, CeilMode: true})),
		Must(NewAvgPool2d(Size{1, 2}, AvgPoolOptions{Padding: Size{0, 1}})), Must(NewAvgPool1d(Size{3}, AvgPoolOptions{})),
		Must(NewAdaptiveAvgPool1d(Size{4})), Must(NewAdaptiveAvgPool3d(Size{-1, 2, 3})), NewSoftmax(1),
		Must(NewLayerNorm([]int64{2, 3}, LayerNormOptions{Eps: 1e20})), Must(NewGroupNorm(2, 4, GroupNormOptions{Eps: 123456})),
		Must(NewDropout(0.25)), NewIdentity(), NewTanh(), NewGELUTanh(), NewSiLUInplace(),
		Must(NewConv3d(2, 4, Size{1, 2, 3}, ConvOptions{Padding: Size{0, 1, 0}, Groups: 2, NoBias: true, PaddingMode: Circular})),
		NewSequential(NewSequential(NewModuleList(NewReLU(), NewReLU()))),
	} {
		require.Equal(t, want.Repr[i], Repr(m))
	}
}
