package launch

import (
	"context"
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/goddp/goddp/internal/testenv"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func init() {
	programs["under torchrun"] = func(ctx context.Context) error {
		return Run(ctx, 1, func(ctx context.Context, e Env) error {
			os.Stdout.WriteString("here: " + e.String() + "\n")
			if !e.UseAgentStore || e.ErrorFile == "" || e.RunID == "" {
				os.Stdout.WriteString("incomplete\n")
			}
			switch os.Getenv("HOW") {
			case "error":
				if e.Rank == 1 {
					return detailed{errDisk}
				}
				return sleepLong(ctx)
			case "panic":
				if e.Rank == 0 {
					panic("boom under torchrun")
				}
				return sleepLong(ctx)
			}
			return nil
		})
	}
}

// Python's own torchrun starts the Go binary, which finds its rank, and shows what it recorded as the root cause.
func TestUnderPythonsTorchrun(t *testing.T) {
	python := testenv.Python(t)
	run := func(how string) (string, error) {
		ctx, cancel := context.WithTimeout(t.Context(), 4*limit)
		defer cancel()
		cmd := exec.CommandContext(ctx, python, "-m", "torch.distributed.run", "--standalone", "--no-python", "--nproc-per-node", "2", os.Args[0])
		cmd.Env = append(os.Environ(), programVar+"=under torchrun", "HOW="+how, "OMP_NUM_THREADS=1")
		out, err := cmd.CombinedOutput()
		require.NoError(t, ctx.Err(), "hung:\n%s", out)
		return string(out), err
	}
	out, err := run("")
	require.NoError(t, err, out)
	assert.Contains(t, out, "here: rank 0 of 2 (local 0 of 2, node 0, ")
	assert.Contains(t, out, "here: rank 1 of 2 (local 1 of 2, node 0, ")
	assert.Contains(t, out, "from torchrun)")
	assert.NotContains(t, out, "incomplete")

	root := func(out string) string {
		_, root, ok := strings.Cut(out, "Root Cause (first observed failure):")
		require.True(t, ok, out)
		return root
	}
	out, err = run("error")
	require.Error(t, err)
	assert.Contains(t, root(out), "rank      : 1 (local_rank: 1)")
	assert.Contains(t, root(out), "exitcode  : 1 ")
	assert.Contains(t, root(out), "traceback : disk full\n  at train.go:12")

	out, err = run("panic")
	require.Error(t, err)
	assert.Contains(t, root(out), "rank      : 0 (local_rank: 0)")
	assert.Contains(t, root(out), "exitcode  : 2 ")
	assert.Contains(t, root(out), "traceback : panic: boom under torchrun")
	assert.Contains(t, root(out), "torchrun_test.go")
}
