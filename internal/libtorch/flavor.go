package libtorch

import (
	"os"
	"path/filepath"
)

// flavor settles Auto, with the reason in words.
func (c Config) flavor() (Flavor, string) {
	switch c.Flavor {
	case CPU, CUDA:
		return c.Flavor, "as asked for"
	}
	found, why := c.seams.gpu()
	if found {
		return CUDA, why
	}
	return CPU, why
}

// findGPU looks for an NVIDIA GPU with a driver, without loading the driver: that takes a second and, in some
// containers, a context on a GPU.
func findGPU() (bool, string) { return findGPUIn("/") }

func findGPUIn(root string) (bool, string) {
	glob := func(patterns ...string) string {
		for _, p := range patterns {
			if m, _ := filepath.Glob(filepath.Join(root, p)); len(m) > 0 {
				return m[0]
			}
		}
		return ""
	}
	driver := glob("usr/lib/x86_64-linux-gnu/libcuda.so.1", "usr/lib64/libcuda.so.1", "usr/lib/libcuda.so.1",
		"usr/lib/wsl/lib/libcuda.so.1", "usr/local/nvidia/lib64/libcuda.so.1", "usr/local/cuda/compat/libcuda.so.1",
		"run/opengl-driver/lib/libcuda.so.1")
	device := glob("proc/driver/nvidia/gpus/*", "dev/nvidia[0-9]*")
	if device == "" && glob("dev/dxg") != "" && glob("usr/lib/wsl/lib/libcuda.so.1") != "" {
		device = "dev/dxg"
	}
	switch {
	case device != "" && driver != "":
		return true, "an NVIDIA GPU is there"
	case device != "":
		// The driver's library may lie where only the dynamic linker's configuration knows.
		if _, err := os.Stat(filepath.Join(root, "proc/driver/nvidia/version")); err == nil {
			return true, "an NVIDIA GPU is there"
		}
		return false, "an NVIDIA device is there, but no driver library libcuda.so.1"
	case driver != "":
		return false, "the NVIDIA driver is there, but no GPU"
	}
	return false, "no NVIDIA GPU here"
}
