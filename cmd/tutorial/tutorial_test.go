// Package tutorial_test keeps the four programs of the series small differences of one another, the pages in docs/tutorial
// true to them, and runs each as its page says.
package tutorial_test

import (
	"bytes"
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/goddp/goddp/checkpoint"
)

var series = []string{"single", "multi", "launcher", "nodes"}

func source(t *testing.T, name string) []string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(name, "main.go"))
	require.NoError(t, err)
	return strings.Split(string(text), "\n")
}

// changed gives the lines that only a or only b has, by the longest common subsequence.
func changed(a, b []string) (removed, added []string) {
	common := make([][]int, len(a)+1)
	for i := range common {
		common[i] = make([]int, len(b)+1)
	}
	for i := len(a) - 1; i >= 0; i-- {
		for j := len(b) - 1; j >= 0; j-- {
			if a[i] == b[j] {
				common[i][j] = common[i+1][j+1] + 1
			} else {
				common[i][j] = max(common[i+1][j], common[i][j+1])
			}
		}
	}
	i, j := 0, 0
	for i < len(a) || j < len(b) {
		switch {
		case i < len(a) && j < len(b) && a[i] == b[j]:
			i, j = i+1, j+1
		case j == len(b) || i < len(a) && common[i+1][j] >= common[i][j+1]:
			removed = append(removed, a[i])
			i++
		default:
			added = append(added, b[j])
			j++
		}
	}
	return removed, added
}

// TestStepsAreSmall: who has read one program has read most of the next.
func TestStepsAreSmall(t *testing.T) {
	for i, bound := range []int{55, 55, 30} {
		removed, added := changed(source(t, series[i]), source(t, series[i+1]))
		require.LessOrEqual(t, len(removed)+len(added), bound, "%s to %s:\n- %s\n+ %s", series[i], series[i+1],
			strings.Join(removed, "\n- "), strings.Join(added, "\n+ "))
		require.Less(t, len(removed), len(added)+10)
	}
	require.Less(t, len(source(t, "nodes")), 220)
}

// TestPagesAreTheCode: what a page shows of a program is in it, and what it shows as a change is one.
func TestPagesAreTheCode(t *testing.T) {
	block := regexp.MustCompile("(?ms)^```(\\w+)\n(.*?)^```$")
	for i, name := range series {
		page, err := os.ReadFile(fmt.Sprintf("../../docs/tutorial/%d-%s.md", i+1, name))
		require.NoError(t, err)
		lines := source(t, name)
		var removed, added []string
		if i > 0 {
			removed, added = changed(source(t, series[i-1]), lines)
		}
		shown := map[string]int{}
		for _, m := range block.FindAllStringSubmatch(string(page), -1) {
			shown[m[1]]++
			switch m[1] {
			case "go":
				require.Contains(t, strings.Join(lines, "\n"), strings.TrimSuffix(m[2], "\n"), "%s: an excerpt that is not in the program", name)
			case "diff":
				for line := range strings.Lines(m[2]) {
					text := strings.TrimSuffix(line[1:], "\n")
					switch line[0] {
					case '-':
						require.Contains(t, removed, text, "%s: not removed", name)
					case '+':
						require.Contains(t, added, text, "%s: not added", name)
					default:
						require.Contains(t, lines, text, "%s: not there", name)
					}
				}
			}
		}
		require.Positive(t, shown["go"]+shown["diff"], "%s shows nothing of the program", name)
		require.Positive(t, shown["console"], "%s does not show a run", name)
	}
}

var bin string // a folder for the programs

func TestMain(m *testing.M) {
	dir, err := os.MkdirTemp("", "tutorial")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	bin = dir
	code := m.Run()
	_ = os.RemoveAll(dir)
	os.Exit(code)
}

// build makes the programs that the tests run.
var build = sync.OnceValue(func() error {
	args := []string{"build", "-o", bin, "../goddp"}
	for _, name := range series {
		args = append(args, "./"+name)
	}
	if out, err := exec.Command("go", args...).CombinedOutput(); err != nil {
		return fmt.Errorf("%w: %s", err, out)
	}
	return nil
})

// start starts a command line of the built programs in a folder, with its output in one buffer.
func start(t *testing.T, dir string, line ...string) (*exec.Cmd, *bytes.Buffer) {
	t.Helper()
	require.NoError(t, build())
	ctx, cancel := context.WithTimeout(context.Background(), 3*time.Minute)
	t.Cleanup(cancel)
	for i, word := range line {
		if word == "goddp" || slices.Contains(series, word) {
			line[i] = filepath.Join(bin, word)
		}
	}
	cmd := exec.CommandContext(ctx, line[0], line[1:]...)
	cmd.Dir = dir
	rank := regexp.MustCompile(`^(RANK|WORLD_SIZE|LOCAL_RANK|MASTER_ADDR|MASTER_PORT|SLURM_\w+)=`)
	cmd.Env = append(slices.DeleteFunc(os.Environ(), rank.MatchString), "CUDA_VISIBLE_DEVICES=")
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	require.NoError(t, cmd.Start())
	return cmd, &out
}

func run(t *testing.T, dir string, line ...string) string {
	t.Helper()
	cmd, out := start(t, dir, line...)
	require.NoError(t, cmd.Wait(), out.String())
	return out.String()
}

func weights(t *testing.T, path string) []float64 {
	t.Helper()
	v, err := checkpoint.Load(path, checkpoint.LoadOptions{})
	require.NoError(t, err)
	if d, ok := v.(*checkpoint.Dict); ok && filepath.Base(path) == "snapshot.pt" {
		v, _ = d.Get("model")
	}
	sd, err := checkpoint.StateDictOf(v)
	require.NoError(t, err)
	w, ok := sd.Get("weight")
	require.True(t, ok)
	return w.Float64Values()
}

func TestSingle(t *testing.T) {
	dir := t.TempDir()
	out := run(t, dir, "single", "3", "2")
	require.Equal(t, []string{"[CPU0] Epoch 0 | Steps: 64", "Epoch 0 | Training checkpoint saved at checkpoint.pt", "[CPU0] Epoch 1 | Steps: 64",
		"[CPU0] Epoch 2 | Steps: 64", "Epoch 2 | Training checkpoint saved at checkpoint.pt"}, strings.Split(strings.TrimSpace(out), "\n"))
	require.Len(t, weights(t, filepath.Join(dir, "checkpoint.pt")), 20)
	cmd, text := start(t, dir, "single", "3")
	require.Error(t, cmd.Wait())
	require.Contains(t, text.String(), "usage: ")
}

func TestMulti(t *testing.T) {
	dir := t.TempDir()
	out := run(t, dir, "multi", "3", "2")
	for _, line := range []string{"[CPU0] Epoch 2 | Steps: 32", "[CPU1] Epoch 2 | Steps: 32"} {
		require.Contains(t, out, line)
	}
	require.Equal(t, 2, strings.Count(out, "Training checkpoint saved"), "one rank saves")
	require.Len(t, weights(t, filepath.Join(dir, "checkpoint.pt")), 20)
}

func TestLauncher(t *testing.T) {
	cmd, text := start(t, t.TempDir(), "launcher", "3", "1")
	require.Error(t, cmd.Wait())
	require.Contains(t, text.String(), "no launcher has started this process: goddp run")

	whole, cut := t.TempDir(), t.TempDir()
	job := func(dir, epochs string) string {
		return run(t, dir, "goddp", "run", "--nproc-per-node", "2", "launcher", epochs, "1")
	}
	require.NotContains(t, job(whole, "4"), "Resuming")
	job(cut, "2")
	out := job(cut, "4")
	require.Contains(t, out, "[CPU1] Resuming training from snapshot at Epoch 2")
	require.NotContains(t, out, "] Epoch 1 |")
	require.Equal(t, weights(t, filepath.Join(whole, "snapshot.pt")), weights(t, filepath.Join(cut, "snapshot.pt")))
}

// TestNodes runs two launchers, each of which is a node. Only the first one has the snapshot.
func TestNodes(t *testing.T) {
	dirs := []string{t.TempDir(), t.TempDir()}
	job := func(epochs string) string {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		require.NoError(t, err)
		port := l.Addr().(*net.TCPAddr).Port
		require.NoError(t, l.Close())
		var cmds []*exec.Cmd
		var outs []*bytes.Buffer
		for node, dir := range dirs {
			cmd, out := start(t, dir, "goddp", "run", "--nnodes", "2", "--node-rank", fmt.Sprint(node), "--master-addr", "127.0.0.1",
				"--master-port", fmt.Sprint(port), "--nproc-per-node", "1", "nodes", epochs, "1")
			cmds, outs = append(cmds, cmd), append(outs, out)
		}
		for i, cmd := range cmds {
			require.NoError(t, cmd.Wait(), outs[i].String())
		}
		return outs[0].String() + outs[1].String()
	}
	out := job("2")
	require.Contains(t, out, "[CPU0] Epoch 1 | Steps: 32")
	require.Contains(t, out, "[CPU1] Epoch 1 | Steps: 32")
	require.NoFileExists(t, filepath.Join(dirs[1], "snapshot.pt"))
	out = job("3")
	require.Contains(t, out, "[CPU0] Resuming training from snapshot at Epoch 2")
	require.Contains(t, out, "[CPU1] Epoch 2 |", "the other node heard of it")
	require.NotContains(t, out, "] Epoch 1 |")
	// The last step of the series still trains what its first did, on as many ranks.
	ref := t.TempDir()
	run(t, ref, "goddp", "run", "--nproc-per-node", "2", "launcher", "3", "1")
	require.Equal(t, weights(t, filepath.Join(ref, "snapshot.pt")), weights(t, filepath.Join(dirs[0], "snapshot.pt")))
}
