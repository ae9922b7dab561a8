package main

import (
	"os"
	"regexp"
	"strconv"
	"testing"

	"github.com/goddp/goddp/internal/testenv"
	"github.com/stretchr/testify/require"
)

func TestMain(m *testing.M) { os.Exit(testenv.Main(m)) }

// row reads a row of the table.
func row(t *testing.T, out, name string) (dp, ddp float64) {
	t.Helper()
	m := regexp.MustCompile(regexp.QuoteMeta(name) + ` +(\S+) +(\S+) +(\S+)`).FindStringSubmatch(out)
	require.NotNil(t, m, "%s\n%s", name, out)
	dp, err := strconv.ParseFloat(m[1], 64)
	require.NoError(t, err)
	ddp, err = strconv.ParseFloat(m[2], 64)
	require.NoError(t, err)
	return dp, ddp
}

var apart = regexp.MustCompile(`after (\d+) steps their weights differ\s+by (\S+) at most`)

func TestWaysToStart(t *testing.T) {
	for _, way := range testenv.Ways("nproc-per-node") {
		t.Run(way.Name, func(t *testing.T) {
			out := way.Run(t, t.TempDir(), testenv.Program(t, "./cmd/dpvsddp"), "--arch", "simplenet", "--batch-size", "12",
				"--rounds", "2", "--steps", "3", "--warmup", "1").Out
			require.Contains(t, out, "simplenet, 203530 parameters; batches of 12 images of 28x28, "+
				"shared by 2 CPU replicas; median of 2 rounds of 3 steps")
			for _, name := range []string{"step time, ms", "images a second", "memory of all, MiB", "memory of the fullest, MiB"} {
				dp, ddp := row(t, out, name)
				require.Positive(t, dp, name)
				require.Positive(t, ddp, name)
			}
			time, _ := row(t, out, "step time, ms")
			rate, _ := row(t, out, "images a second")
			require.InEpsilon(t, 12_000/time, rate, 0.05)
			// 203530 floats for the one other replica, and their gradients back.
			for name, want := range map[string][2]float64{
				"weights copied a step, MiB":                     {0.8, 0},
				"gradients collected on one device a step, MiB":  {0.8, 0},
				"gradients exchanged by each device a step, MiB": {0, 0.8},
			} {
				dp, ddp := row(t, out, name)
				require.Equal(t, want, [2]float64{dp, ddp}, name)
			}
			m := apart.FindStringSubmatch(out)
			require.NotNil(t, m, out)
			require.Equal(t, "7", m[1])
			d, err := strconv.ParseFloat(m[2], 64)
			require.NoError(t, err)
			require.Less(t, d, 1e-5, "both trained the same")
		})
	}
}

// A network with batch norm: each share is normalised by itself on both sides.
func TestResNet(t *testing.T) {
	r := testenv.Run(t, t.TempDir(), nil, testenv.Program(t, "./cmd/dpvsddp"), "--backend", "gloo", "--nproc-per-node", "2", "--batch-size", "8",
		"--image-size", "8", "--rounds", "1", "--steps", "2", "--warmup", "0")
	require.Zero(t, r.Code, r.Err)
	copied, _ := row(t, r.Out, "weights copied a step, MiB")
	collected, _ := row(t, r.Out, "gradients collected on one device a step, MiB")
	require.Greater(t, copied, collected, "buffers are copied too")
	m := apart.FindStringSubmatch(r.Out)
	d, err := strconv.ParseFloat(m[2], 64)
	require.NoError(t, err)
	require.Less(t, d, 1e-4)
}

func TestBadCommandLines(t *testing.T) {
	for name, c := range map[string]struct {
		args []string
		text string
	}{
		"unknown flag": {[]string{"--nope"}, "unknown flag: --nope"},
		"network":      {[]string{"--arch", "vgg16"}, "--arch must be simplenet or one of [resnet18 "},
		"batch size":   {[]string{"--batch-size", "0"}, "--batch-size must be positive"},
		"rounds":       {[]string{"--rounds", "0"}, "--rounds must be positive"},
		"warm-up":      {[]string{"--warmup", "-1"}, "--warmup must not be negative"},
		"odd shares":   {[]string{"--backend", "gloo", "--nproc-per-node", "2", "--batch-size", "7"}, "--batch-size 7 cannot be shared out equally to 2 devices"},
	} {
		t.Run(name, func(t *testing.T) {
			r := testenv.Run(t, t.TempDir(), nil, testenv.Program(t, "./cmd/dpvsddp"), c.args...)
			require.Equal(t, 2, r.Code, r.Err)
			require.Contains(t, r.Err, c.text)
			require.NotContains(t, r.Out, "step time")
		})
	}
}

// Ranks of another machine cannot take part in DataParallel.
func TestSeveralMachines(t *testing.T) {
	port := strconv.Itoa(testenv.FreePort(t))
	var nodes [2]*testenv.Process
	for rank := range 2 {
		env := []string{"RANK=" + strconv.Itoa(rank), "LOCAL_RANK=0", "WORLD_SIZE=2", "LOCAL_WORLD_SIZE=1", "MASTER_ADDR=127.0.0.1", "MASTER_PORT=" + port}
		nodes[rank] = testenv.Start(t, t.TempDir(), env, testenv.Program(t, "./cmd/dpvsddp"), "--backend", "gloo")
	}
	for _, p := range nodes {
		r := p.Wait()
		require.Equal(t, 2, r.Code, r.Err)
		require.Contains(t, r.Err, "start ranks on one machine only")
	}
}
