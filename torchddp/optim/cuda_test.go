package optim

import (
	"strings"
	"testing"

	"github.com/goddp/goddp/internal/tdp"
	"github.com/goddp/goddp/internal/testenv"
	"github.com/stretchr/testify/require"
	"github.com/sugarme/gotch"
)

// TestCUDATrajectoriesArePythons proves that optimizers on a GPU, the fused ones and those that Auto chooses, give Python's
// weights bit for bit in each of 100 steps. Python has no fused Adagrad for CUDA.
func TestCUDATrajectoriesArePythons(t *testing.T) {
	testenv.NeedGPU(t, tdp.CUDAAvailable)
	testenv.Python(t)
	var chosen []pyCase
	for _, c := range cases() {
		fused := strings.Contains(c.Name, "-fused-")
		if fused && c.Algo != "Adagrad" || strings.Contains(c.Name, "-auto-") {
			chosen = append(chosen, c)
		}
	}
	require.Greater(t, len(chosen), 20)
	d := stepInPython(t, t.TempDir(), "cuda", chosen)
	d.device = gotch.CudaBuilder(0)
	for _, c := range chosen {
		t.Run(c.Name, func(t *testing.T) {
			params := d.start(t, c.DType)
			o, err := c.make(params)
			require.NoError(t, err)
			defer func() { require.NoError(t, o.Close()) }()
			d.follow(t, &c, o, params, 0)
		})
	}
}
