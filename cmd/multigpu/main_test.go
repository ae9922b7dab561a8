package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/goddp/goddp/checkpoint"
	"github.com/goddp/goddp/internal/testenv"
	"github.com/stretchr/testify/require"
)

// program is the built command: its ranks are processes of it.
var program string

func TestMain(m *testing.M) {
	dir, err := os.MkdirTemp("", "multigpu")
	if err == nil {
		program = filepath.Join(dir, "multigpu")
		var out []byte
		if out, err = exec.Command("go", "build", "-o", program, ".").CombinedOutput(); err != nil {
			err = fmt.Errorf("%w: %s", err, out)
		}
	}
	code := 1
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
	} else {
		code = m.Run()
	}
	_ = os.RemoveAll(dir)
	os.Exit(code)
}

// start runs the program in a folder of its own, without a rank of this process's environment.
func command(t *testing.T, args ...string) (*exec.Cmd, *bytes.Buffer, *bytes.Buffer) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	t.Cleanup(cancel)
	cmd := exec.CommandContext(ctx, program, args...)
	cmd.Dir = t.TempDir()
	cmd.Env = slices.DeleteFunc(os.Environ(), func(v string) bool {
		return regexp.MustCompile(`^(RANK|WORLD_SIZE|LOCAL_RANK|MASTER_ADDR|MASTER_PORT|SLURM_\w+)=`).MatchString(v)
	})
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	return cmd, &stdout, &stderr
}

func lines(b *bytes.Buffer) []string { return strings.Split(strings.TrimSpace(b.String()), "\n") }

func TestOutput(t *testing.T) {
	cmd, stdout, stderr := command(t, "12", "5", "--backend", "gloo", "--nproc-per-node", "2", "--dataset-size", "256")
	require.NoError(t, cmd.Run(), stderr.String())
	var want []string
	for epoch := range 12 {
		for rank := range 2 {
			want = append(want, fmt.Sprintf("[CPU%d] Epoch %d | Batchsize: 32 | Steps: 4", rank, epoch))
		}
	}
	for _, epoch := range []int{0, 5, 10} {
		want = append(want, fmt.Sprintf("Epoch %d | Training checkpoint saved at checkpoint.pt", epoch))
	}
	got := lines(stdout)
	require.Contains(t, got[0], "Training with 2 Gloo ranks on the CPU")
	require.ElementsMatch(t, want, got[1:])
	require.FileExists(t, filepath.Join(cmd.Dir, "checkpoint.pt"))
}

// TestWeightsArePythons: the same job in Python ends with the same bits.
func TestWeightsArePythons(t *testing.T) {
	python := testenv.Python(t)
	script, err := filepath.Abs("testdata/multigpu.py")
	require.NoError(t, err)
	for _, c := range []struct {
		world int
		args  []string
	}{
		{1, []string{"5", "4", "--loss", "mse"}},
		{2, []string{"5", "4", "--loss", "mse"}},
		{2, []string{"3", "2", "--loss", "cross_entropy", "--seed", "7"}},
		{2, []string{"3", "2", "--loss", "mse", "--batch-size", "48", "--dataset-size", "1001", "--lr", "0.05", "--seed", "3"}},
		{3, []string{"3", "2", "--loss", "mse", "--dataset-size", "500"}},
	} {
		t.Run(fmt.Sprint(c.world, c.args), func(t *testing.T) {
			cmd, _, stderr := command(t, append(c.args, "--backend", "gloo", "--nproc-per-node", strconv.Itoa(c.world), "--checkpoint", "go.ckpt")...)
			require.NoError(t, cmd.Run(), stderr.String())
			py := exec.Command(python, append([]string{script}, append(c.args, "--world-size", strconv.Itoa(c.world), "--checkpoint", "py.ckpt",
				"--master-port", strconv.Itoa(testenv.FreePort(t)))...)...)
			py.Dir = cmd.Dir
			py.Env = append(os.Environ(), "GLOO_SOCKET_IFNAME=lo")
			out, err := py.CombinedOutput()
			require.NoError(t, err, string(out))
			testenv.RunPython(t, `
import sys, torch
a, b = (torch.load(p, weights_only=True) for p in sys.argv[1:])
assert list(a) == list(b) == ["weight", "bias"], (list(a), list(b))
for k in a:
    assert torch.equal(a[k].view(torch.int32), b[k].view(torch.int32)), (k, a[k], b[k])
`, filepath.Join(cmd.Dir, "go.ckpt"), filepath.Join(cmd.Dir, "py.ckpt"))
		})
	}
}

func TestBadArguments(t *testing.T) {
	for name, c := range map[string]struct {
		args []string
		text string
	}{
		"none":             {nil, "need TOTAL_EPOCHS and SAVE_EVERY, got 0 arguments"},
		"one":              {[]string{"5"}, "got 1 arguments"},
		"three":            {[]string{"5", "5", "5"}, "got 3 arguments"},
		"no number":        {[]string{"five", "1"}, `TOTAL_EPOCHS must be a positive whole number, got "five"`},
		"zero":             {[]string{"5", "0"}, `SAVE_EVERY must be a positive whole number, got "0"`},
		"unknown flag":     {[]string{"5", "1", "--epochs", "3"}, "unknown flag: --epochs"},
		"unknown backend":  {[]string{"5", "1", "--backend", "mpi"}, `--backend must be auto, nccl or gloo, got "mpi"`},
		"unknown loss":     {[]string{"5", "1", "--loss", "hinge"}, `--loss must be cross_entropy or mse`},
		"batch size":       {[]string{"5", "1", "--batch-size", "0"}, "--batch-size must be positive"},
		"dataset size":     {[]string{"5", "1", "--dataset-size", "-1"}, "--dataset-size must be positive"},
		"learning rate":    {[]string{"5", "1", "--lr", "nan"}, "--lr must not be negative"},
		"no ranks":         {[]string{"5", "1", "--nproc-per-node", "0"}, "--nproc-per-node"},
		"ranks no number":  {[]string{"5", "1", "--nproc-per-node", "many"}, "--nproc-per-node"},
		"port too large":   {[]string{"5", "1", "--master-port", "70000"}, "--master-port must lie between"},
		"nccl without GPU": {[]string{"5", "1", "--backend", "nccl"}, "the nccl backend needs a GPU"},
	} {
		t.Run(name, func(t *testing.T) {
			if strings.HasPrefix(name, "nccl") && hasGPU() {
				t.Skip("this machine has a GPU")
			}
			cmd, stdout, stderr := command(t, c.args...)
			err := cmd.Run()
			var exit *exec.ExitError
			require.ErrorAs(t, err, &exit)
			require.Equal(t, 2, exit.ExitCode())
			require.Contains(t, stderr.String(), c.text)
			require.Empty(t, stdout.String(), "nothing was started")
		})
	}
}

func hasGPU() bool {
	_, err := os.Stat("/proc/driver/nvidia/version")
	return err == nil
}

func TestHelp(t *testing.T) {
	cmd, stdout, _ := command(t, "--help")
	require.NoError(t, cmd.Run())
	for _, text := range []string{"TOTAL_EPOCHS", "SAVE_EVERY", "--batch-size", "always 0"} {
		require.Contains(t, stdout.String(), text)
	}
}

func TestCheckpointPathIsCheckedFirst(t *testing.T) {
	cmd, stdout, stderr := command(t, "5", "1", "--backend", "gloo", "--checkpoint", "missing/dir/model.pt")
	require.Error(t, cmd.Run())
	require.Contains(t, stderr.String(), "missing/dir")
	require.NotContains(t, stdout.String(), "Epoch", "no training before the error")
}

func TestTakenPort(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer l.Close()
	port := l.Addr().(*net.TCPAddr).Port
	cmd, stdout, stderr := command(t, "5", "1", "--backend", "gloo", "--master-port", strconv.Itoa(port))
	require.Error(t, cmd.Run())
	require.Contains(t, stderr.String(), strconv.Itoa(port))
	require.NotContains(t, stdout.String(), "Epoch")
}

// startTraining starts a job that is to be ended, and waits until it trains.
func startTraining(t *testing.T, cmd *exec.Cmd) {
	t.Helper()
	pipe, w, err := os.Pipe()
	require.NoError(t, err)
	t.Cleanup(func() { _ = pipe.Close() })
	cmd.Stdout = w
	require.NoError(t, cmd.Start())
	require.NoError(t, w.Close())
	buf := make([]byte, 1<<16)
	for seen := ""; !strings.Contains(seen, "Epoch 20 "); {
		n, err := pipe.Read(buf)
		require.NoError(t, err)
		seen += string(buf[:n])
	}
	go func() { _, _ = io.Copy(io.Discard, pipe) }()
}

// TestKilledRank: one rank dies by SIGKILL in the middle; the program says which, ends soon, and leaves no process.
func TestKilledRank(t *testing.T) {
	cmd, _, stderr := command(t, "1000000", "1000000", "--backend", "gloo", "--nproc-per-node", "2", "--dataset-size", "64")
	startTraining(t, cmd)
	children := childrenOf(t, cmd.Process.Pid)
	require.Len(t, children, 2)
	require.NoError(t, syscall.Kill(children[1], syscall.SIGKILL))
	start := time.Now()
	require.Error(t, cmd.Wait())
	require.Less(t, time.Since(start), 15*time.Second)
	require.Contains(t, stderr.String(), "SIGKILL")
	require.Regexp(t, `rank 1`, stderr.String())
	for _, pid := range children {
		require.ErrorIs(t, syscall.Kill(pid, 0), syscall.ESRCH, "process %d is left", pid)
	}
}

// TestInterrupt: Ctrl-C ends all ranks.
func TestInterrupt(t *testing.T) {
	cmd, _, _ := command(t, "1000000", "1000000", "--backend", "gloo", "--nproc-per-node", "2", "--dataset-size", "64")
	startTraining(t, cmd)
	children := childrenOf(t, cmd.Process.Pid)
	require.Len(t, children, 2)
	require.NoError(t, cmd.Process.Signal(syscall.SIGINT))
	start := time.Now()
	require.Error(t, cmd.Wait())
	require.Less(t, time.Since(start), 15*time.Second)
	for _, pid := range children {
		require.ErrorIs(t, syscall.Kill(pid, 0), syscall.ESRCH)
	}
}

func childrenOf(t *testing.T, pid int) []int {
	t.Helper()
	// A process's children are listed by thread.
	tasks, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", pid))
	require.NoError(t, err)
	var list []int
	for _, f := range tasks {
		text, err := os.ReadFile(f)
		if errors.Is(err, os.ErrNotExist) || errors.Is(err, syscall.ESRCH) {
			continue
		}
		require.NoError(t, err)
		for field := range strings.FieldsSeq(string(text)) {
			child, err := strconv.Atoi(field)
			require.NoError(t, err)
			list = append(list, child)
		}
	}
	slices.Sort(list)
	return list
}

// TestRankInEnvironment: started by someone else, the program is one rank and spawns none.
func TestRankInEnvironment(t *testing.T) {
	port := strconv.Itoa(testenv.FreePort(t))
	dir := t.TempDir()
	var cmds [2]*exec.Cmd
	var outs, errs [2]*bytes.Buffer
	for rank := range 2 {
		cmds[rank], outs[rank], errs[rank] = command(t, "3", "1", "--backend", "gloo", "--dataset-size", "128")
		cmds[rank].Dir = dir
		cmds[rank].Env = append(cmds[rank].Env, "RANK="+strconv.Itoa(rank), "LOCAL_RANK="+strconv.Itoa(rank), "WORLD_SIZE=2",
			"LOCAL_WORLD_SIZE=2", "MASTER_ADDR=127.0.0.1", "MASTER_PORT="+port)
		require.NoError(t, cmds[rank].Start())
	}
	for rank := range 2 {
		require.NoError(t, cmds[rank].Wait(), errs[rank].String())
		require.Contains(t, outs[rank].String(), fmt.Sprintf("[CPU%d] Epoch 2 | Batchsize: 32 | Steps: 2", rank))
	}
	require.Contains(t, outs[0].String(), "Epoch 2 | Training checkpoint saved")
	require.NotContains(t, outs[1].String(), "checkpoint")
}

// TestResume: a run that was stopped goes on with the next epoch and ends as one that was not.
func TestResume(t *testing.T) {
	args := []string{"--backend", "gloo", "--nproc-per-node", "2", "--dataset-size", "256", "--loss", "mse", "--lr", "0.05"}
	run := func(dir, epochs string) string {
		cmd, stdout, stderr := command(t, append([]string{epochs, "1", "--snapshot", "s.pt"}, args...)...)
		cmd.Dir = dir
		require.NoError(t, cmd.Run(), stderr.String())
		return stdout.String()
	}
	whole, cut := t.TempDir(), t.TempDir()
	require.NotContains(t, run(whole, "4"), "Resuming")
	require.Contains(t, run(cut, "2"), "Epoch 1 | Training snapshot saved at s.pt")
	out := run(cut, "4")
	require.Contains(t, out, "[CPU0] Resuming training from snapshot at Epoch 2")
	require.Contains(t, out, "[CPU1] Resuming training from snapshot at Epoch 2")
	require.NotContains(t, out, "] Epoch 1 |")
	require.Contains(t, out, "] Epoch 3 |")
	load := func(dir string) (epoch int64, weight []float64) {
		value, err := checkpoint.Load(filepath.Join(dir, "s.pt"), checkpoint.LoadOptions{})
		require.NoError(t, err)
		snapshot, err := checkpoint.SnapshotOf(value)
		require.NoError(t, err)
		require.NotNil(t, snapshot.Optimizer)
		w, ok := snapshot.Model.Get("weight")
		require.True(t, ok)
		return snapshot.Epoch, w.Float64Values()
	}
	wantEpoch, want := load(whole)
	epoch, got := load(cut)
	require.EqualValues(t, 4, wantEpoch)
	require.EqualValues(t, 4, epoch)
	require.Equal(t, want, got)

	cmd, _, stderr := command(t, append([]string{"6", "1", "--batch-norm", "--snapshot", "s.pt"}, args...)...)
	cmd.Dir = cut
	require.Error(t, cmd.Run())
	require.Contains(t, stderr.String(), "resuming from s.pt: ")
	require.Contains(t, stderr.String(), "Missing key(s)")
}

// TestSyncBatchNorm: two ranks with statistics over both train like one rank with batches of twice the size.
func TestSyncBatchNorm(t *testing.T) {
	train := func(args ...string) map[string][]float64 {
		cmd, _, stderr := command(t, append([]string{"3", "2", "--backend", "gloo", "--dataset-size", "256", "--loss", "mse", "--lr", "0.05"}, args...)...)
		require.NoError(t, cmd.Run(), stderr.String())
		sd, err := checkpoint.LoadStateDictFile(filepath.Join(cmd.Dir, "checkpoint.pt"), checkpoint.LoadOptions{})
		require.NoError(t, err)
		out := map[string][]float64{}
		for name, tensor := range sd.All() {
			out[name] = tensor.Float64Values()
		}
		return out
	}
	whole := train("--nproc-per-node", "1", "--batch-size", "64", "--batch-norm")
	shared := train("--nproc-per-node", "2", "--batch-size", "32", "--sync-bn")
	own := train("--nproc-per-node", "2", "--batch-size", "32", "--batch-norm")
	require.Len(t, whole, 7)
	for name, want := range whole {
		require.InDeltaSlice(t, want, shared[name], 1e-5, name)
	}
	require.Greater(t, math.Abs(whole["0.running_var"][0]-own["0.running_var"][0]), 1e-4, "each rank has seen its own half")
}

// TestUnderLaunchers: the same binary is a rank of goddp run and of Python's torchrun.
func TestUnderLaunchers(t *testing.T) {
	launchers := map[string]func(t *testing.T) []string{
		"goddp run": func(t *testing.T) []string {
			goddp := filepath.Join(t.TempDir(), "goddp")
			out, err := exec.Command("go", "build", "-o", goddp, "../goddp").CombinedOutput()
			require.NoError(t, err, string(out))
			return []string{goddp, "run"}
		},
		"torchrun": func(t *testing.T) []string {
			return []string{testenv.Python(t), "-m", "torch.distributed.run", "--no-python"}
		},
	}
	for name, launcher := range launchers {
		t.Run(name, func(t *testing.T) {
			line := append(launcher(t), "--nproc-per-node", "2", program, "2", "1", "--backend", "gloo", "--dataset-size", "128", "--snapshot", "s.pt")
			template, _, _ := command(t)
			ctx, cancel := context.WithTimeout(context.Background(), 3*time.Minute)
			defer cancel()
			cmd := exec.CommandContext(ctx, line[0], line[1:]...)
			cmd.Dir, cmd.Env = template.Dir, append(template.Env, "OMP_NUM_THREADS=1", "GLOO_SOCKET_IFNAME=lo")
			out, err := cmd.CombinedOutput()
			require.NoError(t, err, string(out))
			for _, text := range []string{"[CPU0] Epoch 1 | Batchsize: 32 | Steps: 2", "[CPU1] Epoch 1 |", "Epoch 1 | Training snapshot saved at s.pt"} {
				require.Contains(t, string(out), text)
			}
			require.NotContains(t, string(out), "Training with 2 Gloo ranks", "it started no ranks of its own")
		})
	}
}
