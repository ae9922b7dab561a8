package libtorch

import (
	"bytes"
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestParseFlavor(t *testing.T) {
	for in, want := range map[string]Flavor{"": Auto, "auto": Auto, "CPU": CPU, "cuda": CUDA} {
		got, err := ParseFlavor(in)
		require.NoError(t, err)
		require.Equal(t, want, got)
	}
	_, err := ParseFlavor("rocm")
	require.ErrorContains(t, err, `unknown flavor "rocm": use cpu, cuda or auto`)
}

func TestFindGPU(t *testing.T) {
	const lib = "usr/lib/x86_64-linux-gnu/libcuda.so.1"
	for _, c := range []struct {
		files []string
		want  bool
		why   string
	}{
		{nil, false, "no NVIDIA GPU here"},
		{[]string{lib}, false, "the NVIDIA driver is there, but no GPU"},
		{[]string{"dev/nvidia0"}, false, "an NVIDIA device is there, but no driver library libcuda.so.1"},
		{[]string{"dev/nvidiactl", lib}, false, "the NVIDIA driver is there, but no GPU"},
		{[]string{"dev/nvidia0", lib}, true, "an NVIDIA GPU is there"},
		{[]string{"proc/driver/nvidia/gpus/0000:01:00.0/information", "proc/driver/nvidia/version"}, true, "an NVIDIA GPU is there"},
		{[]string{"dev/dxg", "usr/lib/wsl/lib/libcuda.so.1"}, true, "an NVIDIA GPU is there"},
	} {
		root := t.TempDir()
		for _, f := range c.files {
			require.NoError(t, os.MkdirAll(filepath.Dir(filepath.Join(root, f)), 0o755))
			require.NoError(t, os.WriteFile(filepath.Join(root, f), nil, 0o644))
		}
		found, why := findGPUIn(root)
		require.Equal(t, c.want, found, c.files)
		require.Equal(t, c.why, why, c.files)
	}
}

func TestFreeMemory(t *testing.T) {
	dir := t.TempDir()
	meminfo := filepath.Join(dir, "meminfo")
	_, ok := freeMemory(meminfo, dir)
	require.False(t, ok)
	require.NoError(t, os.WriteFile(meminfo, []byte("MemTotal:       9 kB\nMemAvailable:    4194304 kB\n"), 0o644))
	free, ok := freeMemory(meminfo, dir)
	require.True(t, ok)
	require.EqualValues(t, 4<<30, free)
	require.NoError(t, os.WriteFile(filepath.Join(dir, "memory.max"), []byte("max\n"), 0o644))
	free, _ = freeMemory(meminfo, dir)
	require.EqualValues(t, 4<<30, free)
	require.NoError(t, os.WriteFile(filepath.Join(dir, "memory.max"), []byte("3221225472\n"), 0o644))
	require.NoError(t, os.WriteFile(filepath.Join(dir, "memory.current"), []byte("1073741824\n"), 0o644))
	free, _ = freeMemory(meminfo, dir)
	require.EqualValues(t, 2<<30, free)
}

// The pinned wheels: each once, all with a hash, and no CPU set-up that needs the big ones.
func TestWheelPins(t *testing.T) {
	seen := map[string]bool{}
	for _, w := range wheels {
		require.False(t, seen[w.name], w.name)
		seen[w.name] = true
		require.Len(t, w.sha256, 64, w.name)
		require.True(t, strings.HasPrefix(w.file, strings.ReplaceAll(w.name, "-", "_")+"-"+w.version+"-"), w.file)
		require.Positive(t, w.size)
	}
	require.Len(t, wheelsOf(CPU), 3)
	require.Len(t, wheelsOf(CUDA), len(wheels))
}

func TestKeep(t *testing.T) {
	for name, want := range map[string][2]bool{ // cpu, cuda
		"torch/include/ATen/ATen.h":               {true, true},
		"torch/lib/libtorch_cpu.so":               {true, true},
		"torch/lib/libgomp.so.1":                  {true, true},
		"torch/lib/libtorch_cuda.so":              {false, true},
		"torch/lib/libtorch_cuda_linalg.so":       {false, true},
		"torch/lib/libc10_cuda.so":                {false, true},
		"torch/lib/libcaffe2_nvrtc.so":            {false, true},
		"torch/lib/libtorch_python.so":            {false, false},
		"torch/lib/libshm/x":                      {false, false},
		"torch/bin/ptxas":                         {false, false},
		"torch/nn/modules/linear.py":              {false, false},
		"torchgen/api/cpp.py":                     {false, false},
		"torch-2.11.0.dist-info/licenses/LICENSE": {true, true},
		"nvidia/cu13/lib/libcudart.so.13":         {true, true},
		"nvidia/cu13/lib/libcudart_static.a":      {false, false},
		"nvidia/cu13/lib/libnvperf_host.so":       {false, true},
		"nvidia/nccl/lib/libnccl.so.2":            {false, true},
		"nvidia/nccl/include/nccl.h":              {false, true},
		"nvidia/cu13/lib/libnvrtc.alt.so.13":      {false, false},
		"nvidia/cu13/lib/libnvrtc.so.13":          {false, true},
		"nvidia/cu13/lib/libcusolverMg.so.12":     {false, false},
	} {
		require.Equal(t, want, [2]bool{keep(CPU, name), keep(CUDA, name)}, name)
	}
}

func TestLock(t *testing.T) {
	var said bytes.Buffer
	s := &setup{cfg: Config{Cache: t.TempDir()}, ui: newProgress(&said)}
	unlock, err := s.lock(t.Context(), "x", "thing")
	require.NoError(t, err)
	ctx, cancel := context.WithTimeout(t.Context(), 150*time.Millisecond)
	defer cancel()
	_, err = s.lock(ctx, "x", "thing")
	require.ErrorIs(t, err, context.DeadlineExceeded)
	require.Contains(t, said.String(), "waiting for another set-up (process ")
	unlock()
	unlock, err = s.lock(t.Context(), "x", "thing")
	require.NoError(t, err)
	unlock()
}

func TestProgressLines(t *testing.T) {
	var out bytes.Buffer
	p := newProgress(&out)
	p.period = 0
	p.amount("torch", 250e6, 1000e6, time.Now().Add(-10*time.Second))
	require.Equal(t, "  torch: 250 of 1000 MB (25%), 25 MB/s, 30s left\n", out.String())
	p.tty = true
	out.Reset()
	p.move("one")
	p.move("three")
	p.say("done")
	require.Equal(t, "  one\r     \r  three\r       \rgoddp: done\n", out.String())
}

// The trees that this machine has of the pinned wheel, unpacked by set-up or installed by pip, share object files.
func TestWheelHeaders(t *testing.T) {
	dir := t.TempDir()
	torch := filepath.Join(dir, "torch")
	require.False(t, wheelHeaders(torch), "no list of files")
	record := filepath.Join(dir, "torch-"+Version+".dist-info", "RECORD")
	require.NoError(t, os.Mkdir(filepath.Dir(record), 0o755))
	require.NoError(t, os.WriteFile(record, []byte("torch/include/ATen/ATen.h,sha256=x,1\n"), 0o644))
	require.False(t, wheelHeaders(torch), "other headers")
	require.Equal(t, headerSum("torch/include/b,sha256=1,1\r\ntorch/lib/x.so,,\r\ntorch/include/a,sha256=2,1\r\n"),
		headerSum("torch/include/a,sha256=2,1\ntorch/include/b,sha256=1,1\ntorch/x.pyc,,\n"), "pip adds lines and orders them anew")

	cache, err := CacheDir()
	require.NoError(t, err)
	trees, err := filepath.Glob(filepath.Join(cache, "libtorch", Version+"-*", "torch"))
	require.NoError(t, err)
	pip, err := filepath.Glob(filepath.Join(PythonDir(cache), "lib", "python*", "site-packages", "torch"))
	require.NoError(t, err)
	for _, tree := range append(trees, pip...) {
		require.True(t, wheelHeaders(tree), tree)
	}
	t.Logf("%d trees here", len(trees)+len(pip))
}
