package checkpoint

import (
	"path/filepath"
	"testing"

	"github.com/goddp/goddp/internal/tdp"
	"github.com/goddp/goddp/internal/testenv"
	"github.com/stretchr/testify/require"
	"github.com/sugarme/gotch"
	"github.com/sugarme/gotch/ts"
)

// TestCUDACheckpoints proves that tensors of a GPU are saved as such and come back to it, that map_location moves them to
// the CPU and those of the CPU to the GPU, also two that share memory, and that Python reads the file on the same device.
func TestCUDACheckpoints(t *testing.T) {
	testenv.NeedGPU(t, tdp.CUDAAvailable)
	gpu := gotch.CudaBuilder(0)
	dir := t.TempDir()
	on := func(dev gotch.Device) *Dict {
		x, err := tdp.FromSlice([]float32{1, 2, 3, 4}, []int64{4}, dev)
		require.NoError(t, err)
		return NewDict().Set("x", x).Set("part", x.MustNarrow(0, 1, 2, false))
	}
	fromGPU, fromCPU := filepath.Join(dir, "gpu.pt"), filepath.Join(dir, "cpu.pt")
	require.NoError(t, Save(fromGPU, on(gpu)))
	require.NoError(t, Save(fromCPU, on(gotch.CPU)))
	for _, c := range []struct {
		what, path string
		m          MapLocation
		want       gotch.Device
	}{
		{"where it was", fromGPU, nil, gpu},
		{"where it was, the CPU", fromCPU, nil, gotch.CPU},
		{"all to the CPU", fromGPU, MapTo(gotch.CPU), gotch.CPU},
		{"a map to the CPU", fromGPU, MapDevices(map[string]string{"cuda:0": "cpu"}), gotch.CPU},
		{"all to the GPU", fromCPU, MapTo(gpu), gpu},
		{"a map to the GPU", fromCPU, MapDevices(map[string]string{"cpu": "cuda:0"}), gpu},
	} {
		t.Run(c.what, func(t *testing.T) {
			v, err := Load(c.path, LoadOptions{MapLocation: c.m})
			require.NoError(t, err)
			x, err := Get[*ts.Tensor](v, "x")
			require.NoError(t, err)
			part, err := Get[*ts.Tensor](v, "part")
			require.NoError(t, err)
			info, err := tdp.Describe(x)
			require.NoError(t, err)
			require.Equal(t, c.want, info.Device)
			got, err := tdp.ToSlice[float32](x)
			require.NoError(t, err)
			require.Equal(t, []float32{1, 2, 3, 4}, got)
			other, err := tdp.Describe(part)
			require.NoError(t, err)
			require.Equal(t, info.Storage, other.Storage, "they share memory")
		})
	}
	require.Equal(t, "ok\n", testenv.RunPython(t, `
import sys, torch
d = torch.load(sys.argv[1])
assert d["x"].device == torch.device("cuda:0") and d["x"].tolist() == [1, 2, 3, 4] and d["part"].tolist() == [2, 3], d
torch.save({"x": d["x"] * 2}, sys.argv[2])
print("ok")`, fromGPU, filepath.Join(dir, "python.pt")))
	v, err := Load(filepath.Join(dir, "python.pt"), LoadOptions{})
	require.NoError(t, err)
	x, err := Get[*ts.Tensor](v, "x")
	require.NoError(t, err)
	require.Equal(t, gpu, x.MustDevice())
}

// TestCUDAMissingDevice proves that a device that is not there is an error before anything is allocated: the first tensor
// of the file, which has a place, is not loaded either.
func TestCUDAMissingDevice(t *testing.T) {
	testenv.NeedGPU(t, tdp.CUDAAvailable)
	path := filepath.Join(t.TempDir(), "x.pt")
	gpu := gotch.CudaBuilder(0)
	require.NoError(t, Save(path, NewDict().Set("a", ts.MustOnes([]int64{4}, gotch.Float, gpu)).
		Set("b", ts.MustOnes([]int64{4}, gotch.Float, gotch.CPU))))
	v, err := Load(path, LoadOptions{MapLocation: MapDevices(map[string]string{"cpu": "cuda:99"})})
	require.ErrorIs(t, err, ErrDevice)
	require.ErrorContains(t, err, "cuda:99")
	require.Nil(t, v)
	_, err = Load(path, LoadOptions{MapLocation: MapTo(gotch.CudaBuilder(99))})
	require.ErrorIs(t, err, ErrDevice)
}
