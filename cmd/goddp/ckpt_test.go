package main

import (
	"bytes"
	"context"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestCkpt(t *testing.T) {
	const data = "../../checkpoint/ptfile/testdata/"
	call := func(want int, args ...string) (string, string) {
		t.Helper()
		var out, errs bytes.Buffer
		got := run(context.Background(), append([]string{"ckpt"}, args...), stdio{os.Stdin, &out, &errs})
		require.Equal(t, want, got, "%v: %s%s", args, &out, &errs)
		return out.String(), errs.String()
	}
	out, _ := call(exitOK, "show", data+"train_sgd.ckpt", "--verify", "--key", "model")
	require.Contains(t, out, "the checksums are right")
	require.Contains(t, out, "conv.weight")
	require.NotContains(t, out, "iter_no")
	to := filepath.Join(t.TempDir(), "m.safetensors")
	_, errs := call(exitError, "convert", data+"train_sgd.ckpt", to)
	require.Contains(t, errs, "--key model")
	call(exitOK, "--key", "model", "convert", data+"train_sgd.ckpt", to, "--metadata", "run=1")
	out, _ = call(exitOK, "show", to)
	require.Contains(t, out, "metadata run: 1")
	out, _ = call(exitError, "diff", data+"linear.ckpt", data+"block.ckpt")
	require.Contains(t, out, "weight: only in the first")
	call(exitOK, "diff", data+"linear.ckpt", data+"nocrc.ckpt")
	for _, args := range [][]string{{}, {"show"}, {"show", "a", "b"}, {"burn", "a"}, {"show", "--no-such-flag", "a"}} {
		call(exitUsage, args...)
	}
}
