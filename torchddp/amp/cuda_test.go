package amp

import (
	"encoding/json"
	"math"
	"os"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/sugarme/gotch"
	"github.com/sugarme/gotch/ts"

	"github.com/goddp/goddp/internal/tdp"
	"github.com/goddp/goddp/internal/testenv"
	"github.com/goddp/goddp/torchddp/optim"
)

var gpu = gotch.CudaBuilder(0)

// onGPU moves numbers to the GPU.
func onGPU(t testing.TB, shape ...int64) *ts.Tensor {
	x := numbers(t, shape...)
	require.NoError(t, tdp.Move(x, &gpu, gotch.Invalid, 0))
	return x
}

// runCUDA runs testdata/cuda.py.
func runCUDA(t *testing.T, into any) {
	script, err := os.ReadFile("testdata/cuda.py")
	require.NoError(t, err)
	require.NoError(t, json.Unmarshal([]byte(testenv.RunPython(t, string(script))), into))
}

// TestCUDAAutocastIsPythons proves that a forward under autocast on a GPU runs in the dtypes that Python's runs in, and that
// loss and gradients are Python's: the kernels are the same, so the bits should be, and the log says whether they are.
func TestCUDAAutocastIsPythons(t *testing.T) {
	testenv.NeedGPU(t, tdp.CUDAAvailable)
	var want struct {
		Backward map[string]struct {
			DType string
			Loss  float64
			Grads [][]float64
		}
	}
	runCUDA(t, &want)
	for name, dtype := range map[string]gotch.DType{"bfloat16": gotch.BFloat16, "float16": gotch.Half} {
		t.Run(name, func(t *testing.T) {
			py := want.Backward[name]
			x, w, v := onGPU(t, 16, 8), onGPU(t, 8, 16), onGPU(t, 16, 4)
			params := []*ts.Tensor{w, v}
			for _, p := range params {
				require.NoError(t, tdp.SetRequiresGrad(p, true))
			}
			var loss *ts.Tensor
			require.NoError(t, Autocast(Options{Device: gpu, DType: dtype}, func() error {
				out := x.MustMatmul(w, false).MustRelu(true).MustMatmul(v, true)
				require.Equal(t, dtype, out.DType())
				require.Equal(t, py.DType, dtypeName(out.DType()))
				out = out.MustTotype(gotch.Float, true)
				loss = out.MustMul(out, false).MustMean(gotch.Float, true)
				return nil
			}))
			small, err := loss.MulScalar(ts.FloatScalar(1e-4), false)
			require.NoError(t, err)
			require.NoError(t, tdp.Backward(small, nil, false, nil))
			bits := slices.Equal([]float64{py.Loss}, floats(t, loss))
			require.InEpsilon(t, py.Loss, floats(t, loss)[0], 1e-2)
			for i, p := range params {
				g, err := tdp.Grad(p)
				require.NoError(t, err)
				got := floats(t, g)
				bits = bits && slices.Equal(py.Grads[i], got)
				require.InDeltaSlice(t, py.Grads[i], got, 1e-2*largest(py.Grads[i]))
			}
			t.Log("bit for bit Python's:", bits)
		})
	}
}

func largest(v []float64) (m float64) {
	for _, x := range v {
		m = max(m, math.Abs(x))
	}
	return m
}

// TestCUDAGradScalerIsPythons proves that steps with an infinity or a NaN on a GPU are skipped and the scale follows
// Python's, also with fused optimizers, where the host never learns of the overflow.
func TestCUDAGradScalerIsPythons(t *testing.T) {
	testenv.NeedGPU(t, tdp.CUDAAvailable)
	var want struct {
		Scaler map[string][]struct {
			Scale float64
			Param []float64
		}
	}
	runCUDA(t, &want)
	for name, make := range map[string]func(p []*ts.Tensor) (optim.Optimizer, error){
		"sgd": func(p []*ts.Tensor) (optim.Optimizer, error) {
			return optim.NewSGD(p, optim.SGDOptions{LR: 0.1, Momentum: 0.9})
		},
		"sgd-fused": func(p []*ts.Tensor) (optim.Optimizer, error) {
			return optim.NewSGD(p, optim.SGDOptions{LR: 0.1, Momentum: 0.9, Implementation: optim.Fused})
		},
		"adam": func(p []*ts.Tensor) (optim.Optimizer, error) {
			return optim.NewAdam(p, optim.AdamOptions{LR: 0.01})
		},
		"adam-fused": func(p []*ts.Tensor) (optim.Optimizer, error) {
			return optim.NewAdam(p, optim.AdamOptions{LR: 0.01, Implementation: optim.Fused})
		},
	} {
		t.Run(name, func(t *testing.T) {
			steps := want.Scaler[name]
			require.Len(t, steps, 12)
			p := onGPU(t, 3, 4)
			require.NoError(t, tdp.SetRequiresGrad(p, true))
			o, err := make([]*ts.Tensor{p})
			require.NoError(t, err)
			defer func() { require.NoError(t, o.Close()) }()
			s, err := NewGradScaler(ScalerOptions{Device: gpu, InitScale: 1024, GrowthInterval: 3})
			require.NoError(t, err)
			defer func() { require.NoError(t, s.Close()) }()
			require.True(t, s.Enabled())
			for i, py := range steps {
				require.NoError(t, o.ZeroGrad(true))
				loss, err := p.MustMul(p, false).MulScalar(ts.FloatScalar(0.1), true)
				require.NoError(t, err)
				scaled, err := s.Scale(loss.MustSum(gotch.Float, true))
				require.NoError(t, err)
				require.NoError(t, tdp.Backward(scaled, nil, false, nil))
				if i == 2 || i == 7 {
					bad := math.Inf(1)
					if i == 7 {
						bad = math.NaN()
					}
					g, err := tdp.Grad(p)
					require.NoError(t, err)
					v := floats(t, g)
					v[6] = bad
					x, err := tdp.FromSlice(v, []int64{3, 4}, gotch.CPU)
					require.NoError(t, err)
					require.NoError(t, tdp.Copy(g, x, false))
				}
				_, err = s.Step(o)
				require.NoError(t, err)
				require.NoError(t, s.Update())
				scale, err := s.GetScale()
				require.NoError(t, err)
				require.Equal(t, py.Scale, scale, "step %d", i)
				require.InDeltaSlice(t, py.Param, floats(t, p), 1e-6, "step %d", i)
			}
		})
	}
}
