package testenv

import (
	"os"
	"testing"
)

// NeedGPUVar makes a GPU that is missing a failure: a run on a machine that has one must not pass by skipping.
const NeedGPUVar = "GODDP_NEED_GPU"

// NeedGPU skips a test that needs a GPU, with the reason, where this program cannot use one. available is
// tdp.CUDAAvailable: this package itself links no libtorch.
func NeedGPU(t testing.TB, available func() (bool, error)) {
	t.Helper()
	ok, err := available()
	if ok && err == nil {
		return
	}
	why := "this machine has no NVIDIA driver"
	if _, statErr := os.Stat("/proc/driver/nvidia/version"); statErr == nil {
		why = "libtorch finds no CUDA device: was it set up with `make setup FLAVOR=cuda`, and does nvidia-smi list a GPU?"
	}
	if err != nil {
		why += " (" + err.Error() + ")"
	}
	if os.Getenv(NeedGPUVar) != "" {
		t.Fatalf("no GPU, and %s is set: %s", NeedGPUVar, why)
	}
	t.Skip("needs a GPU: " + why)
}
