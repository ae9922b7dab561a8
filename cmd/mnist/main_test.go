package main

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/goddp/goddp/data/vision"
	"github.com/goddp/goddp/internal/testenv"
	"github.com/goddp/goddp/launch"
	"github.com/stretchr/testify/require"
)

func TestMain(m *testing.M) { os.Exit(testenv.Main(m)) }

func mnist(t *testing.T, args ...string) testenv.Result {
	t.Helper()
	return testenv.Run(t, t.TempDir(), nil, testenv.Program(t, "./cmd/mnist"), args...)
}

var (
	rankLine = regexp.MustCompile(`^Rank (\d), Epoch (\d+), Avg Loss: (\d+\.\d{6})$`)
	testLine = regexp.MustCompile(`^Epoch (\d+), Test Accuracy: (\d+\.\d\d)%$`)
)

// figures reads what a run printed: each rank's losses and the accuracies, by epoch.
func figures(t *testing.T, r testenv.Result) (losses map[string][]string, accuracies []float64) {
	t.Helper()
	losses = map[string][]string{}
	for _, line := range r.Lines() {
		if m := rankLine.FindStringSubmatch(line); m != nil {
			losses[m[1]] = append(losses[m[1]], m[3])
			require.Equal(t, strconv.Itoa(len(losses[m[1]])), m[2], r.Out)
		} else if m := testLine.FindStringSubmatch(line); m != nil {
			v, err := strconv.ParseFloat(m[2], 64)
			require.NoError(t, err)
			accuracies = append(accuracies, v)
			require.Equal(t, strconv.Itoa(len(accuracies)), m[1], r.Out)
		} else {
			require.Regexp(t, "^Training with 2 Gloo ranks", line)
		}
	}
	return losses, accuracies
}

// However it is started, the same ranks train the same.
func TestWaysToStart(t *testing.T) {
	var first map[string][]string
	for _, way := range testenv.Ways("nproc-per-node") {
		t.Run(way.Name, func(t *testing.T) {
			r := way.Run(t, t.TempDir(), testenv.Program(t, "./cmd/mnist"), "--synthetic", "--size", "2000")
			losses, accuracies := figures(t, r)
			require.Len(t, losses["0"], 2, r.Out)
			require.Len(t, losses["1"], 2, r.Out)
			require.Len(t, accuracies, 2, r.Out)
			require.Greater(t, accuracies[1], 90.0, "made-up digits are easy")
			if first == nil {
				first = losses
			}
			require.Equal(t, first, losses)
		})
	}
}

// TestTutorialsLines: with the same digits the tutorial's own program prints the same lines, to the last figure.
func TestTutorialsLines(t *testing.T) {
	python := testenv.Python(t)
	script, err := filepath.Abs("testdata/mnist.py")
	require.NoError(t, err)
	root := t.TempDir()
	writeDigits(t, root, false, 1001)
	writeDigits(t, root, true, 203)
	r := mnist(t, "--plain", "--data", root, "--backend", "gloo", "--nproc-per-node", "2")
	require.Zero(t, r.Code, r.Err)

	cmd := exec.Command(python, script, "2", root, strconv.Itoa(testenv.FreePort(t)))
	cmd.Env = append(testenv.CleanEnv(), "GLOO_SOCKET_IFNAME=lo", "OMP_NUM_THREADS=1", "PYTHONDONTWRITEBYTECODE=1")
	var stderr strings.Builder
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	require.NoError(t, err, stderr.String())
	want := strings.Split(strings.TrimSpace(string(out)), "\n")
	require.Len(t, want, 6)
	require.ElementsMatch(t, want, r.Lines()[1:])
}

// writeDigits writes made-up digits as MNIST's files, which torchvision reads too.
func writeDigits(t *testing.T, root string, test bool, n int) {
	t.Helper()
	ctx := context.Background()
	set, err := vision.MNIST(ctx, vision.Options{Synthetic: true, Size: n, Test: test})
	require.NoError(t, err)
	images := binary.BigEndian.AppendUint32(nil, 0x803)
	labels := binary.BigEndian.AppendUint32(nil, 0x801)
	for _, v := range []uint32{uint32(n), 28, 28} {
		images = binary.BigEndian.AppendUint32(images, v)
	}
	labels = binary.BigEndian.AppendUint32(labels, uint32(n))
	for i := range n {
		s, err := set.Item(ctx, i)
		require.NoError(t, err)
		images, labels = append(images, s.Image.Pix...), append(labels, byte(s.Label))
	}
	part := "train"
	if test {
		part = "t10k"
	}
	dir := filepath.Join(root, "MNIST", "raw")
	require.NoError(t, os.MkdirAll(dir, 0o755))
	require.NoError(t, os.WriteFile(filepath.Join(dir, part+"-images-idx3-ubyte"), images, 0o644))
	require.NoError(t, os.WriteFile(filepath.Join(dir, part+"-labels-idx1-ubyte"), labels, 0o644))
}

// TestRealDigits wants the real data: in the folder that $GODDP_MNIST names, or in the repository's data folder.
func TestRealDigits(t *testing.T) {
	root := os.Getenv("GODDP_MNIST")
	if root == "" {
		var err error
		root, err = filepath.Abs("../../data")
		require.NoError(t, err)
	}
	var missing *vision.MissingError
	if _, err := vision.MNIST(context.Background(), vision.Options{Root: root}); errors.As(err, &missing) {
		t.Skipf("%v; GODDP_MNIST names another folder", missing)
	}
	for _, args := range [][]string{nil, {"--amp"}} {
		r := mnist(t, append([]string{"--data", root, "--backend", "gloo", "--nproc-per-node", "2"}, args...)...)
		require.Zero(t, r.Code, r.Err)
		_, accuracies := figures(t, r)
		require.Len(t, accuracies, 2)
		require.GreaterOrEqual(t, accuracies[1], 97.0, "%v\n%s", args, r.Out)
	}
}

func TestAMPAndCurriculum(t *testing.T) {
	run := func(args ...string) map[string][]string {
		r := mnist(t, append([]string{"--synthetic", "--size", "2000", "--backend", "gloo", "--nproc-per-node", "2"}, args...)...)
		require.Zero(t, r.Code, r.Err)
		losses, accuracies := figures(t, r)
		require.Greater(t, accuracies[1], 85.0, r.Out)
		return losses
	}
	plain, amp := run(), run("--amp")
	for i, text := range plain["0"] {
		a, err := strconv.ParseFloat(text, 64)
		require.NoError(t, err)
		b, err := strconv.ParseFloat(amp["0"][i], 64)
		require.NoError(t, err)
		require.NotEqual(t, a, b, "bfloat16 rounds")
		require.InEpsilon(t, a, b, 0.1)
	}
	require.NotEqual(t, plain, run("--curriculum"))
}

// TestDifficulty: the easiest images of a class are those near its mean.
func TestDifficulty(t *testing.T) {
	ctx := context.Background()
	set, err := vision.MNIST(ctx, vision.Options{Synthetic: true, Size: 300})
	require.NoError(t, err)
	scores, err := difficulty(ctx, set)
	require.NoError(t, err)
	require.Len(t, scores, 300)
	// By the definition, for one class.
	var mean [784]float64
	var members []int
	for i := range set.Len() {
		if set.Label(i) == 3 {
			members = append(members, i)
			s, err := set.Item(ctx, i)
			require.NoError(t, err)
			for k, p := range s.Image.Pix {
				mean[k] += float64(p)
			}
		}
	}
	require.Greater(t, len(members), 10)
	for _, i := range members {
		s, err := set.Item(ctx, i)
		require.NoError(t, err)
		want := 0.0
		for k, p := range s.Image.Pix {
			d := float64(p) - mean[k]/float64(len(members))
			want += d * d
		}
		require.InEpsilon(t, want, scores[i], 1e-9)
	}
}

func TestBadCommandLines(t *testing.T) {
	for name, c := range map[string]struct {
		args []string
		text string
	}{
		"unknown flag":        {[]string{"--nope"}, "unknown flag: --nope"},
		"argument":            {[]string{"50"}, `unexpected argument "50"`},
		"epochs":              {[]string{"--epochs", "0x"}, "--epochs"},
		"batch size":          {[]string{"--batch-size", "0"}, "--batch-size must be positive"},
		"learning rate":       {[]string{"--lr", "0"}, "--lr must be positive"},
		"workers":             {[]string{"--workers", "-1"}, "--workers must not be negative"},
		"size alone":          {[]string{"--size", "10"}, "add --synthetic"},
		"resume alone":        {[]string{"--resume"}, "--resume needs --snapshot"},
		"fetch and make up":   {[]string{"--download", "--synthetic"}, "exclude each other"},
		"backend":             {[]string{"--synthetic", "--backend", "mpi"}, "--backend must be auto, nccl or gloo"},
		"ranks":               {[]string{"--synthetic", "--nproc-per-node", "many"}, "--nproc-per-node"},
		"no data":             {[]string{"--data", "nowhere"}, "t10k-images-idx3-ubyte"},
		"no data, what to do": {[]string{"--data", "nowhere"}, "--synthetic"},
	} {
		t.Run(name, func(t *testing.T) {
			r := mnist(t, c.args...)
			require.Equal(t, 2, r.Code, r.Err)
			require.Contains(t, r.Err, c.text)
			require.Empty(t, r.Out, "nothing was started")
		})
	}
	r := mnist(t, "--help")
	require.Zero(t, r.Code)
	for _, flag := range []string{"--amp", "--curriculum", "--data", "--synthetic", "--download", "--batch-size int", "--epochs int", "--plain"} {
		require.Contains(t, r.Out, flag)
	}
}

// TestJSON: with --json standard output has nothing else.
func TestJSON(t *testing.T) {
	r := mnist(t, "--synthetic", "--size", "500", "--json", "--backend", "gloo", "--nproc-per-node", "2")
	require.Zero(t, r.Code, r.Err)
	for _, line := range r.Lines() {
		require.True(t, json.Valid([]byte(line)), line)
	}
	require.Contains(t, r.Err, "Rank 1, Epoch 2, Avg Loss: ")
}

// TestStoppedAndResumed: told to end, the job saves and asks to be started again, and then goes on where it was.
func TestStoppedAndResumed(t *testing.T) {
	dir := t.TempDir()
	args := []string{"--synthetic", "--size", "2000", "--backend", "gloo", "--nproc-per-node", "2", "--snapshot", "run", "--resume", "--log-every", "1"}
	p := testenv.Start(t, dir, nil, testenv.Program(t, "./cmd/mnist"), append(args, "--epochs", "1000000")...)
	p.Until("Epoch 2, Test")
	require.NoError(t, p.Cmd.Process.Signal(syscall.SIGTERM))
	r := p.Wait()
	require.Equal(t, launch.ExitResume, r.Code, r.Err)
	before, accuracies := figures(t, r)
	done := len(accuracies)
	require.Len(t, before["0"], done)

	r = testenv.Run(t, dir, nil, testenv.Program(t, "./cmd/mnist"), append(args, "--epochs", strconv.Itoa(done+2))...)
	require.Zero(t, r.Code, r.Err)
	var epochs []string
	for _, line := range r.Lines() {
		if m := testLine.FindStringSubmatch(line); m != nil {
			epochs = append(epochs, m[1])
		}
	}
	require.Equal(t, []string{strconv.Itoa(done + 1), strconv.Itoa(done + 2)}, epochs, r.Out)
}

// TestDamagedData: a file that is cut short is named.
func TestDamagedData(t *testing.T) {
	root := t.TempDir()
	writeDigits(t, root, false, 50)
	writeDigits(t, root, true, 20)
	path := filepath.Join(root, "MNIST", "raw", "train-images-idx3-ubyte")
	whole, err := os.ReadFile(path)
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(path, whole[:len(whole)-100], 0o644))
	r := mnist(t, "--data", root, "--backend", "gloo", "--nproc-per-node", "2")
	require.NotZero(t, r.Code)
	require.Contains(t, r.Err, path)
	require.True(t, slices.ContainsFunc(r.Lines(), func(s string) bool { return strings.HasPrefix(s, "Training with") }))
	require.NotContains(t, r.Out, "Epoch")
}
