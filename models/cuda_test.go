package models

import (
	"encoding/json"
	"os"
	"path/filepath"
	"testing"

	"github.com/goddp/goddp/internal/tdp"
	"github.com/goddp/goddp/internal/testenv"
	"github.com/goddp/goddp/models/nn"
	"github.com/goddp/goddp/torchddp/amp"
	"github.com/goddp/goddp/torchddp/optim"
	"github.com/stretchr/testify/require"
	"github.com/sugarme/gotch"
	"github.com/sugarme/gotch/ts"
)

// TestCUDAResNetIsPythons proves that three steps of ResNet-18 on a GPU give Python's losses, in float32 and under
// bfloat16 autocast, in both memory layouts. cuDNN may add gradients up in another order, hence the tolerances; the log
// says whether the losses are the same bits.
func TestCUDAResNetIsPythons(t *testing.T) {
	testenv.NeedGPU(t, tdp.CUDAAvailable)
	script, err := os.ReadFile("testdata/cuda.py")
	require.NoError(t, err)
	gpu := gotch.CudaBuilder(0)
	for _, c := range []struct {
		dtype, layout string
		tol           float64
	}{
		{"float32", "contiguous", 1e-3}, {"float32", "channels_last", 1e-3},
		{"bfloat16", "contiguous", 3e-2}, {"bfloat16", "channels_last", 3e-2},
	} {
		t.Run(c.dtype+"-"+c.layout, func(t *testing.T) {
			var want struct {
				DType  string
				Losses []float64
			}
			require.NoError(t, json.Unmarshal([]byte(testenv.RunPython(t, string(script), c.dtype, c.layout)), &want))
			require.NoError(t, tdp.ManualSeed(3))
			net, err := NewResNet18(ResNetOptions{NumClasses: 10})
			require.NoError(t, err)
			x := ts.MustEmpty([]int64{8, 3, 32, 32}, gotch.Float, gotch.CPU)
			require.NoError(t, nn.Normal(x, 0, 1))
			require.NoError(t, net.To(gpu, gotch.Float))
			require.NoError(t, tdp.Move(x, &gpu, gotch.Invalid, 0))
			y, err := tdp.FromSlice([]int64{0, 1, 2, 3, 4, 5, 6, 7}, []int64{8}, gpu)
			require.NoError(t, err)
			if c.layout == "channels_last" {
				require.NoError(t, net.ToChannelsLast())
				require.NoError(t, tdp.Move(x, nil, gotch.Invalid, tdp.ChannelsLast))
			}
			opt, err := optim.NewSGD(net.NamedParameters(), optim.SGDOptions{LR: 0.01})
			require.NoError(t, err)
			defer func() { require.NoError(t, opt.Close()) }()
			var losses []float64
			for range want.Losses {
				require.NoError(t, opt.ZeroGrad(true))
				var loss *ts.Tensor
				require.NoError(t, amp.Autocast(amp.Options{Device: gpu, DType: gotch.BFloat16, Disabled: c.dtype == "float32"}, func() error {
					out, err := nn.Forward(net, x, true)
					if err != nil {
						return err
					}
					defer out.MustDrop()
					require.Equal(t, want.DType, "torch."+tdp.DTypeName(out.DType()))
					loss = nn.CrossEntropyLoss{}.Forward(out, y)
					return nil
				}))
				require.NoError(t, tdp.Backward(loss, nil, false, nil))
				require.NoError(t, opt.Step())
				v, err := tdp.ToSlice[float32](loss)
				require.NoError(t, err)
				loss.MustDrop()
				losses = append(losses, float64(v[0]))
			}
			t.Logf("losses %v, Python's %v", losses, want.Losses)
			require.InDeltaSlice(t, want.Losses, losses, c.tol)
		})
	}
}

// TestCUDAScript proves that a TorchScript module loads onto a GPU and computes there what Python does.
func TestCUDAScript(t *testing.T) {
	testenv.NeedGPU(t, tdp.CUDAAvailable)
	path := filepath.Join(t.TempDir(), "net.pt")
	out := testenv.RunPython(t, `
import json, sys, torch
torch.manual_seed(1)
net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2)).eval()
torch.jit.script(net).save(sys.argv[1])
print(json.dumps(net.cuda()(torch.arange(4.0).cuda()).tolist()))`, path)
	var want []float64
	require.NoError(t, json.Unmarshal([]byte(out), &want))
	gpu := gotch.CudaBuilder(0)
	m, err := LoadScript(path, gpu)
	require.NoError(t, err)
	x, err := tdp.FromSlice([]float32{0, 1, 2, 3}, []int64{4}, gpu)
	require.NoError(t, err)
	y, err := nn.Evaluate(m, x)
	require.NoError(t, err)
	require.Equal(t, gpu, y.MustDevice())
	got, err := tdp.ToSlice[float32](y)
	require.NoError(t, err)
	for i := range want {
		require.InDelta(t, want[i], got[i], 1e-6)
	}
}
