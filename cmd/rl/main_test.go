package main

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/goddp/goddp/internal/testenv"
	"github.com/stretchr/testify/require"
)

// rlBinary is the built command: its ranks are processes of it. launcher is cmd/goddp.
var rlBinary, launcher string

func TestMain(m *testing.M) {
	dir, err := os.MkdirTemp("", "rl")
	if err == nil {
		rlBinary, launcher = filepath.Join(dir, "rl"), filepath.Join(dir, "goddp")
		var out []byte
		if out, err = exec.Command("go", "build", "-o", dir, ".", "../goddp").CombinedOutput(); err != nil {
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

// command prepares a program in a folder of its own, without a rank of this process's environment.
func command(t *testing.T, name string, args ...string) (*exec.Cmd, *bytes.Buffer, *bytes.Buffer) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	t.Cleanup(cancel)
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Dir = t.TempDir()
	cmd.Env = slices.DeleteFunc(os.Environ(), func(v string) bool {
		return regexp.MustCompile(`^(RANK|WORLD_SIZE|LOCAL_RANK|MASTER_ADDR|MASTER_PORT|SLURM_\w+)=`).MatchString(v)
	})
	cmd.Env = append(cmd.Env, "OMP_NUM_THREADS=1", "GLOO_SOCKET_IFNAME=lo")
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	return cmd, &stdout, &stderr
}

// quick is a job small enough for a test that still learns.
var quick = []string{"--backend", "gloo", "--envs", "4", "--hidden", "32", "--lr", "0.02"}

// train runs the program on two ranks to its end, and gives its output and the folder with rl.pt.
func train(t *testing.T, args ...string) (out, dir string) {
	t.Helper()
	cmd, stdout, stderr := command(t, rlBinary, slices.Concat(quick, []string{"--nproc-per-node", "2"}, args)...)
	require.NoError(t, cmd.Run(), stderr.String())
	return stdout.String(), cmd.Dir
}

var iterationLine = regexp.MustCompile(`(?m)^Iteration: (\d+), Loss: (-?\d+\.\d{6}), Return: (\d+\.\d)$`)

func iterations(out string) (lines []string, returns []float64) {
	for _, m := range iterationLine.FindAllStringSubmatch(out, -1) {
		r, _ := strconv.ParseFloat(m[3], 64)
		lines, returns = append(lines, m[0]), append(returns, r)
	}
	return lines, returns
}

func mean(list []float64) float64 {
	var sum float64
	for _, v := range list {
		sum += v
	}
	return sum / float64(len(list))
}

// TestLearns: returns go up, alike in every run, and Python plays as well with the weights.
func TestLearns(t *testing.T) {
	out, dir := train(t, "--iterations", "30")
	require.Contains(t, out, "Training with 2 Gloo ranks on the CPU")
	for rank := range 2 {
		require.Contains(t, out, fmt.Sprintf("My rank=%d, local_rank=%d\n", rank, rank))
	}
	require.Contains(t, out, "Iteration: 19, checkpoint saved at rl.pt\n")
	require.Contains(t, out, "Iteration: 29, checkpoint saved at rl.pt\n")
	lines, returns := iterations(out)
	require.Len(t, lines, 30)
	begin, end := mean(returns[:3]), mean(returns[27:])
	t.Logf("mean return of the first three iterations %.1f, of the last three %.1f", begin, end)
	require.Less(t, begin, 40.0)
	require.Greater(t, end, 4*begin)

	again, other := train(t, "--iterations", "30")
	repeated, _ := iterations(again)
	require.Equal(t, lines, repeated, "chance comes from the seed alone")
	require.Equal(t, content(t, dir), content(t, other))

	seeded, _ := train(t, "--iterations", "1", "--seed", "1")
	fresh, _ := iterations(seeded)
	require.NotEqual(t, lines[0], fresh[0])

	cmd, stdout, stderr := command(t, testenv.Python(t), script(t, "play.py"), filepath.Join(dir, "rl.pt"))
	require.NoError(t, cmd.Run(), stderr.String())
	var iterNo int
	var played float64
	_, err := fmt.Sscan(stdout.String(), &iterNo, &played)
	require.NoError(t, err, stdout.String())
	require.Equal(t, 29, iterNo)
	t.Logf("Python's mean return %.1f", played)
	require.Greater(t, played, 3*begin)
}

func script(t *testing.T, name string) string {
	path, err := filepath.Abs(filepath.Join("testdata", name))
	require.NoError(t, err)
	return path
}

func content(t *testing.T, dir string) []byte {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(dir, "rl.pt"))
	require.NoError(t, err)
	return text
}

// TestResumeIsBitIdentical: ten iterations, and ten more from their checkpoint, are twenty in one go.
func TestResumeIsBitIdentical(t *testing.T) {
	whole, dir := train(t, "--iterations", "20")
	_, half := train(t, "--iterations", "10", "--save-every", "4")
	require.NotEqual(t, content(t, dir), content(t, half))
	rest, resumed := train(t, "--iterations", "20", "--resume", filepath.Join(half, "rl.pt"))
	require.Contains(t, rest, fmt.Sprintf("Resumed from %s at iteration 10\n", filepath.Join(half, "rl.pt")))
	want, _ := iterations(whole)
	got, _ := iterations(rest)
	require.Equal(t, want[10:], got)
	require.Equal(t, content(t, dir), content(t, resumed))

	done, _ := train(t, "--iterations", "20", "--resume", filepath.Join(dir, "rl.pt"))
	require.Contains(t, done, "Nothing to do: ")
	require.Contains(t, done, "raise --iterations to go on")
	none, _ := iterations(done)
	require.Empty(t, none)
}

// TestResumeFromPython: Python's checkpoint, saved on a GPU for all that it says, goes on here, and the reverse.
func TestResumeFromPython(t *testing.T) {
	_, dir := train(t, "--iterations", "5")
	path := filepath.Join(dir, "rl.pt")
	testenv.RunPython(t, `
import io, sys, torch
sys.path.insert(0, sys.argv[1])
from play import load
iter_no, policy, optimizer = load(sys.argv[2])
buf = io.BytesIO()
torch.save({"iter_no": iter_no, "model": policy.state_dict(), "optimizer": optimizer.state_dict()}, buf)
torch.save(torch.load(io.BytesIO(buf.getvalue())), sys.argv[3] + "/python.pt")
# What was saved on a GPU has other location tags.
reader = torch._C.PyTorchFileReader(io.BytesIO(buf.getvalue()))
writer = torch._C.PyTorchFileWriter(sys.argv[3] + "/cuda.pt", True, 64)
for rec in reader.get_all_records():
    data = reader.get_record(rec)
    if rec == "data.pkl":
        assert b"X\x03\x00\x00\x00cpu" in data
        data = data.replace(b"X\x03\x00\x00\x00cpu", b"X\x06\x00\x00\x00cuda:0")
    if rec not in (".data/serialization_id", "version"):
        writer.write_record(rec, data, len(data))
writer.write_end_of_file()
`, filepath.Dir(script(t, "play.py")), path, dir)
	_, want := train(t, "--iterations", "8", "--resume", path)
	for _, name := range []string{"python.pt", "cuda.pt"} {
		out, got := train(t, "--iterations", "8", "--resume", filepath.Join(dir, name))
		require.Contains(t, out, "at iteration 5\n")
		require.Equal(t, content(t, want), content(t, got), name)
	}
}

// TestLaunchers: whoever starts the two ranks, they train the same network.
func TestLaunchers(t *testing.T) {
	_, dir := train(t, "--iterations", "4")
	want := content(t, dir)
	job := append(slices.Clone(quick), "--iterations", "4")
	check := func(t *testing.T, dir, out string) {
		t.Helper()
		require.Contains(t, out, "My rank=0, local_rank=0")
		require.Contains(t, out, "My rank=1, local_rank=1")
		require.Equal(t, 1, strings.Count(out, "Iteration: 3, Loss: "), "rank 0 alone prints")
		require.NotContains(t, out, "Training with", "a rank spawns none")
		require.Equal(t, want, content(t, dir))
	}
	run := func(t *testing.T, name string, args ...string) {
		t.Helper()
		cmd, stdout, stderr := command(t, name, args...)
		require.NoError(t, cmd.Run(), stderr.String())
		check(t, cmd.Dir, stdout.String())
	}
	t.Run("goddp run", func(t *testing.T) {
		run(t, launcher, slices.Concat([]string{"run", "--nproc-per-node", "2", rlBinary}, job)...)
	})
	t.Run("torchrun", func(t *testing.T) {
		run(t, testenv.Python(t), slices.Concat([]string{"-m", "torch.distributed.run", "--standalone", "--no-python", "--nproc-per-node", "2", rlBinary}, job)...)
	})
	t.Run("torch.distributed.launch", func(t *testing.T) { // the tutorial's
		run(t, testenv.Python(t), slices.Concat([]string{"-m", "torch.distributed.launch", "--use_env", "--nproc_per_node=2", "--no_python",
			"--master_port=" + strconv.Itoa(testenv.FreePort(t)), rlBinary}, job)...)
	})
	for name, env := range map[string]func(rank, port int) []string{
		"environment": func(rank, port int) []string {
			return []string{fmt.Sprint("RANK=", rank), fmt.Sprint("LOCAL_RANK=", rank), "WORLD_SIZE=2", "LOCAL_WORLD_SIZE=2",
				"MASTER_ADDR=127.0.0.1", fmt.Sprint("MASTER_PORT=", port)}
		},
		"Slurm": func(rank, port int) []string {
			return []string{fmt.Sprint("SLURM_PROCID=", rank), fmt.Sprint("SLURM_LOCALID=", rank), "SLURM_STEP_NUM_TASKS=2", "SLURM_NODEID=0",
				"SLURM_STEP_NODELIST=localhost", "SLURM_STEP_TASKS_PER_NODE=2", "SLURM_JOB_ID=7", "SLURM_STEP_ID=0", fmt.Sprint("MASTER_PORT=", port)}
		},
	} {
		t.Run(name, func(t *testing.T) {
			port, dir, out := testenv.FreePort(t), t.TempDir(), ""
			var cmds [2]*exec.Cmd
			var stdout, stderr [2]*bytes.Buffer
			for rank := range cmds {
				cmds[rank], stdout[rank], stderr[rank] = command(t, rlBinary, job...)
				cmds[rank].Dir = dir
				cmds[rank].Env = append(cmds[rank].Env, env(rank, port)...)
				require.NoError(t, cmds[rank].Start())
			}
			for rank := range cmds {
				require.NoError(t, cmds[rank].Wait(), stderr[rank].String())
				out += stdout[rank].String()
			}
			check(t, dir, out)
		})
	}
}

func TestBadArguments(t *testing.T) {
	for name, c := range map[string]struct {
		args []string
		text string
	}{
		"argument":         {[]string{"60"}, `unexpected argument "60": all settings are flags`},
		"unknown flag":     {[]string{"--epochs", "3"}, "unknown flag: --epochs"},
		"no iterations":    {[]string{"--iterations", "0"}, "--iterations must be positive, got 0"},
		"no environments":  {[]string{"--envs", "-1"}, "--envs must be positive, got -1"},
		"no width":         {[]string{"--hidden", "0"}, "--hidden must be positive"},
		"never saves":      {[]string{"--save-every", "0"}, "--save-every must be positive"},
		"never logs":       {[]string{"--log-every", "0"}, "--log-every must be positive"},
		"learning rate":    {[]string{"--lr", "nan"}, "--lr must not be negative"},
		"gamma":            {[]string{"--gamma", "1.5"}, "--gamma must lie between 0 and 1, got 1.5"},
		"unknown backend":  {[]string{"--backend", "mpi"}, `--backend must be auto, nccl or gloo, got "mpi"`},
		"port too large":   {[]string{"--master-port", "70000"}, "--master-port must lie between"},
		"no ranks":         {[]string{"--nproc-per-node", "0"}, "--nproc-per-node"},
		"no checkpoint":    {[]string{"--resume", "missing.pt"}, "missing.pt: no such file or directory; start without it"},
		"nccl without GPU": {[]string{"--backend", "nccl"}, "2 NCCL ranks need 2 GPUs, and there are 0"},
	} {
		t.Run(name, func(t *testing.T) {
			if _, err := os.Stat("/proc/driver/nvidia/version"); err == nil && strings.HasPrefix(name, "nccl") {
				t.Skip("this machine has a GPU")
			}
			cmd, stdout, stderr := command(t, rlBinary, c.args...)
			err := cmd.Run()
			var exit *exec.ExitError
			require.ErrorAs(t, err, &exit)
			require.Equal(t, 2, exit.ExitCode())
			require.Contains(t, stderr.String(), c.text)
			require.Empty(t, stdout.String(), "nothing was started")
		})
	}
}

func TestHelp(t *testing.T) {
	cmd, stdout, _ := command(t, rlBinary, "--help")
	require.NoError(t, cmd.Run())
	for _, text := range []string{"--iterations", "--resume", "torch.load reads it", "--nproc-per-node"} {
		require.Contains(t, stdout.String(), text)
	}
}

func TestCheckpointPathIsCheckedFirst(t *testing.T) {
	cmd, stdout, stderr := command(t, rlBinary, append(quick, "--checkpoint", "missing/dir/rl.pt")...)
	require.Error(t, cmd.Run())
	require.Contains(t, stderr.String(), "missing/dir")
	require.NotContains(t, stdout.String(), "Iteration", "no training before the error")
}

// TestBadCheckpoints: what cannot be resumed says why, on a rank, and ends the job.
func TestBadCheckpoints(t *testing.T) {
	_, dir := train(t, "--iterations", "1")
	good := filepath.Join(dir, "rl.pt")
	garbage := filepath.Join(dir, "garbage.pt")
	require.NoError(t, os.WriteFile(garbage, []byte("no checkpoint"), 0o666))
	weights := filepath.Join(dir, "weights.pt")
	testenv.RunPython(t, `import sys, torch; torch.save(torch.load(sys.argv[1])["model"], sys.argv[2])`, good, weights)
	for name, c := range map[string]struct{ args, want []string }{
		"garbage":       {[]string{"--resume", garbage}, []string{"resume from " + garbage}},
		"weights only":  {[]string{"--resume", weights}, []string{"resume from " + weights, `"model"`}},
		"another width": {[]string{"--resume", good, "--hidden", "64"}, []string{"size mismatch for affine1.weight", "[32, 4]", "[64, 4]"}},
	} {
		t.Run(name, func(t *testing.T) {
			cmd, stdout, stderr := command(t, rlBinary, slices.Concat(quick, []string{"--nproc-per-node", "2"}, c.args)...)
			require.Error(t, cmd.Run())
			for _, text := range append(c.want, "rank ") {
				require.Contains(t, stderr.String(), text)
			}
			require.NotContains(t, stdout.String(), "Iteration")
		})
	}
}
