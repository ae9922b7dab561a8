package main

import (
	"math"
	"os"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/goddp/goddp/internal/testenv"
	"github.com/stretchr/testify/require"
)

func TestMain(m *testing.M) { os.Exit(testenv.Main(m)) }

func cifar10(t *testing.T, dir string, args ...string) testenv.Result {
	t.Helper()
	return testenv.Run(t, dir, nil, testenv.Program(t, "./cmd/cifar10"), args...)
}

// two are two ranks that train a small network on made-up images.
func two(args ...string) []string {
	return append([]string{"--synthetic", "--arch", "resnet18", "--batch-size", "8", "--workers", "2", "--backend", "gloo", "--world-size", "2"}, args...)
}

var (
	batchLine = regexp.MustCompile(`^Rank (\d), Batch: (\d+), Loss: (\d+\.\d+), Accuracy: (\d+\.\d+)%$`)
	timeLine  = regexp.MustCompile(`^Rank (\d): Training time for epoch (\d+): \d+\.\d+ seconds$`)
	testLine  = regexp.MustCompile(`^Epoch (\d+), Test Accuracy: (\d+\.\d\d)%$`)
)

// printed is what a run printed, by rank and epoch; the times of epochs are left out.
type printed struct {
	batches map[string][][]string // the lines' texts
	tests   []string
}

func read(t *testing.T, r testenv.Result) printed {
	t.Helper()
	p := printed{batches: map[string][][]string{}}
	epochs := map[string]string{} // of a rank's lines to come
	seen := map[string]int{}
	for _, line := range r.Lines() {
		if m := batchLine.FindStringSubmatch(line); m != nil {
			if m[2] == "0" {
				p.batches[m[1]] = append(p.batches[m[1]], nil)
			}
			list := p.batches[m[1]]
			require.NotEmpty(t, list, "%s\n%s", line, r.Out)
			list[len(list)-1] = append(list[len(list)-1], line)
		} else if m := timeLine.FindStringSubmatch(line); m != nil {
			epochs[m[1]] = m[2]
		} else if m := testLine.FindStringSubmatch(line); m != nil {
			p.tests = append(p.tests, line)
		} else {
			require.Regexp(t, `^(Training with 2 Gloo ranks.*|Rank \d: (Preparing data|Building model)\.\.)$`, line)
			seen[line]++
		}
	}
	for _, rank := range []string{"0", "1"} {
		require.Equal(t, 1, seen["Rank "+rank+": Preparing data.."], r.Out)
		require.Equal(t, 1, seen["Rank "+rank+": Building model.."], r.Out)
		require.NotEmpty(t, epochs[rank], r.Out)
	}
	return p
}

func loss(t *testing.T, line string) float64 {
	t.Helper()
	v, err := strconv.ParseFloat(batchLine.FindStringSubmatch(line)[3], 64)
	require.NoError(t, err)
	return v
}

// However it is started, the same ranks train the same, and tell it in the tutorial's lines.
func TestWaysToStart(t *testing.T) {
	var first printed
	for _, way := range testenv.Ways("world-size") {
		t.Run(way.Name, func(t *testing.T) {
			r := way.Run(t, t.TempDir(), testenv.Program(t, "./cmd/cifar10"), "--synthetic", "--size", "40", "--arch", "resnet18", "--batch-size", "4",
				"--workers", "2", "--log-every", "2")
			p := read(t, r)
			for _, rank := range []string{"0", "1"} { // 20 images in 5 batches
				require.Len(t, p.batches[rank], 1)
				for i, line := range p.batches[rank][0] {
					require.Equal(t, strconv.Itoa(2*i), batchLine.FindStringSubmatch(line)[2])
				}
				require.Len(t, p.batches[rank][0], 3)
			}
			require.Len(t, p.tests, 1)
			if first.batches == nil {
				first = p
			}
			require.Equal(t, first, p)
		})
	}
}

// TestResume: a run that ended after an epoch and goes on prints what one prints that was never stopped.
func TestResume(t *testing.T) {
	whole := read(t, cifar10(t, t.TempDir(), two("--size", "32", "--log-every", "1", "--epochs", "2")...))
	dir := t.TempDir()
	args := two("--size", "32", "--log-every", "1", "--snapshot", "run", "--resume")
	half := read(t, cifar10(t, dir, append(args, "--epochs", "1")...))
	rest := read(t, cifar10(t, dir, append(args, "--epochs", "2")...))
	for _, rank := range []string{"0", "1"} {
		require.Len(t, whole.batches[rank], 2)
		require.Equal(t, whole.batches[rank], append(half.batches[rank], rest.batches[rank]...))
	}
	require.Equal(t, whole.tests, append(half.tests, rest.tests...))
}

// TestVariants: each flag does something, and what should be the same up to rounding is.
func TestVariants(t *testing.T) {
	run := func(args ...string) float64 {
		r := cifar10(t, t.TempDir(), two(append([]string{"--size", "16", "--eval-every", "0"}, args...)...)...)
		require.Zero(t, r.Code, r.Err)
		p := read(t, r)
		require.Empty(t, p.tests)
		return loss(t, p.batches["0"][0][0])
	}
	plain := run()
	require.InEpsilon(t, math.Log(10), plain, 0.5, "ten classes, and nothing learnt yet")
	last := run("--channels-last")
	require.InEpsilon(t, plain, last, 1e-4)
	require.NotEqual(t, plain, last, "other kernels round otherwise")
	half := run("--amp")
	require.InEpsilon(t, plain, half, 0.1)
	require.NotEqual(t, plain, half)
	sync := run("--sync-bn")
	require.InEpsilon(t, plain, sync, 0.5)
	require.Greater(t, math.Abs(plain-sync), 1e-3, "statistics of both ranks")
	run("--amp", "--sync-bn", "--channels-last", "--cifar-stem")
	require.Greater(t, run("--classes", "1000"), 5.5, "near the logarithm of 1000")
}

func TestBadCommandLines(t *testing.T) {
	for name, c := range map[string]struct {
		args []string
		text string
	}{
		"unknown flag":   {[]string{"--nope"}, "unknown flag: --nope"},
		"argument":       {[]string{"5"}, `unexpected argument "5"`},
		"network":        {[]string{"--synthetic", "--arch", "resnet7"}, "--arch must be one of [resnet18 "},
		"classes":        {[]string{"--classes", "9"}, "--classes must be at least"},
		"batch size":     {[]string{"--batch_size", "0"}, "--batch-size must be positive"},
		"momentum":       {[]string{"--momentum", "nan"}, "--momentum must not be negative"},
		"weight decay":   {[]string{"--weight-decay", "-1"}, "--weight-decay must not be negative"},
		"evaluation":     {[]string{"--eval-every", "-1"}, "--eval-every must not be negative"},
		"ranks":          {[]string{"--synthetic", "--world_size", "0"}, "--world-size"},
		"no data":        {[]string{"--data", "nowhere"}, "nowhere/cifar-10-python.tar.gz"},
		"what can help":  {[]string{"--data", "nowhere"}, "(--synthetic)"},
		"resume nothing": {[]string{"--synthetic", "--resume"}, "--resume needs --snapshot"},
	} {
		t.Run(name, func(t *testing.T) {
			r := cifar10(t, t.TempDir(), c.args...)
			require.Equal(t, 2, r.Code, r.Err)
			require.Contains(t, r.Err, c.text)
			require.Empty(t, r.Out, "nothing was started")
		})
	}
	r := cifar10(t, t.TempDir(), "--help")
	require.Zero(t, r.Code)
	for _, text := range []string{`--arch string .*"resnet50"`, `--batch-size int .*128`, `--workers int .*8`, `--lr float .*0\.1`,
		`--momentum float .*0\.9`, `--weight-decay float .*0\.0005`, `--epochs int`, `--world-size`, `--amp`, `--sync-bn`, `--channels-last`} {
		require.Regexp(t, text, r.Out)
	}
}

// TestWorldSizeOfAnotherJob: a number of ranks that is not the launcher's is refused.
func TestWorldSizeOfAnotherJob(t *testing.T) {
	env := strings.Fields("RANK=0 LOCAL_RANK=0 WORLD_SIZE=2 LOCAL_WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=1")
	r := testenv.Run(t, t.TempDir(), env, testenv.Program(t, "./cmd/cifar10"), "--synthetic", "--world-size", "4")
	require.Equal(t, 2, r.Code, r.Err)
	require.Contains(t, r.Err, "--world-size is 4, but this job was started with 2 ranks")
}
