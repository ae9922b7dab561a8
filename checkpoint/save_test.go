package checkpoint

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/sugarme/gotch"
	"github.com/sugarme/gotch/ts"

	"github.com/goddp/goddp/internal/tdp"
	"github.com/goddp/goddp/internal/testenv"
)

func floats(t testing.TB, shape []int64, v ...float32) *ts.Tensor {
	t.Helper()
	x, err := tdp.FromSlice(v, shape, gotch.CPU)
	require.NoError(t, err)
	return x
}

// The file of the tutorial's rank 0: the state_dict of ToyNet's Linear(20, 1).
func TestSaveLinearAsPythonDoes(t *testing.T) {
	dir := t.TempDir()
	want := filepath.Join(dir, "py", "model.pt")
	require.NoError(t, os.Mkdir(filepath.Dir(want), 0o755))
	testenv.RunPython(t, `
import sys, torch
m = torch.nn.Linear(20, 1)
with torch.no_grad():
    m.weight.copy_(torch.arange(20.0).reshape(1, 20)); m.bias.fill_(0.5)
torch.save(m.state_dict(), sys.argv[1])`, want)

	weight := make([]float32, 20)
	for i := range weight {
		weight[i] = float32(i)
	}
	sd := NewStateDict().Set("weight", floats(t, []int64{1, 20}, weight...)).Set("bias", floats(t, []int64{1}, 0.5)).SetVersion("", 1)
	got := filepath.Join(dir, "model.pt")
	require.NoError(t, CheckWritable(got))
	require.NoError(t, Save(got, sd))

	a, err := os.ReadFile(want)
	require.NoError(t, err)
	b, err := os.ReadFile(got)
	require.NoError(t, err)
	require.Equal(t, len(a), len(b))
	differing := 0
	for i := range a {
		if a[i] != b[i] {
			differing++
		}
	}
	require.LessOrEqual(t, differing, 40+8, "only the serialization_id and its two CRCs may differ")

	out := testenv.RunPython(t, `
import sys, torch
for mmap in (False, True):
    m = torch.nn.Linear(20, 1)
    m.load_state_dict(torch.load(sys.argv[1], weights_only=True, mmap=mmap))
    print(m.weight.sum().item(), m.bias.item())`, got)
	require.Equal(t, "190.0 0.5\n190.0 0.5\n", out)

	left, err := os.ReadDir(dir)
	require.NoError(t, err)
	require.Len(t, left, 2, "no temporary file stays behind")
}
