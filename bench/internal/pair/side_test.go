package pair

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/goddp/goddp/internal/testenv"
)

const testSide = "GODDP_PAIR_TEST_SIDE"

// TestMain lets the test's own binary be a side.
func TestMain(m *testing.M) {
	if os.Getenv(testSide) == "" {
		os.Exit(m.Run())
	}
	fmt.Println("[Gloo] a line of a library's") // which is not to be taken for an answer
	err := Serve(Answer{"ready": {1}}, func(r Request) (Answer, error) {
		switch r.Do {
		case "rank":
			var rank, world, threads float64
			text := os.ExpandEnv("$RANK $WORLD_SIZE $OMP_NUM_THREADS")
			_, err := fmt.Sscan(text, &rank, &world, &threads)
			return Answer{"rank": {rank}, "world": {world}, "threads": {threads}}, err
		case "cores":
			cores, err := Cores()
			a := Answer{}
			for _, c := range cores {
				a["cores"] = append(a["cores"], float64(c))
			}
			return a, err
		case "panic":
			panic("at the disco")
		case "die":
			fmt.Fprintln(os.Stderr, "last words")
			os.Exit(3)
		case "hang":
			select {}
		}
		return nil, Unknown(r)
	})
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func self(t *testing.T, ranks int) Command {
	exe, err := os.Executable()
	require.NoError(t, err)
	return Command{Name: "Go", Argv: []string{exe}, Env: []string{testSide + "=1"}, Ranks: ranks, Threads: 3}
}

func startSelf(t *testing.T, ranks int) *Side {
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	s, err := Start(ctx, self(t, ranks))
	require.NoError(t, err)
	t.Cleanup(func() { _ = s.Kill() })
	return s
}

func TestSideAnswers(t *testing.T) {
	s := startSelf(t, 2)
	require.Equal(t, Answer{"ready": {1}}, s.Ready)
	for range 2 {
		a, err := s.Turn(t.Context(), Request{Do: "rank"})
		require.NoError(t, err)
		require.Equal(t, Answer{"rank": {0.5}, "world": {2}, "threads": {3}}, a, "the mean of ranks 0 and 1")
	}
	require.NoError(t, s.Close())
}

func TestErrorsOfASide(t *testing.T) {
	for request, want := range map[string]string{
		"panic":  "at the disco",
		"juggle": `there is no "juggle" here`,
		"die":    "it ended: exit status 3; its standard error ends:\nlast words",
	} {
		t.Run(request, func(t *testing.T) {
			s := startSelf(t, 1)
			_, err := s.Turn(t.Context(), Request{Do: request})
			require.ErrorContains(t, err, "Go, rank 0: ")
			require.ErrorContains(t, err, want)
		})
	}
}

func TestSideThatHangsIsGivenUp(t *testing.T) {
	s := startSelf(t, 0)
	pid := s.procs[0].cmd.Process.Pid
	gaveUp := errors.New("that was long enough")
	ctx, cancel := context.WithTimeoutCause(t.Context(), 50*time.Millisecond, gaveUp)
	defer cancel()
	_, err := s.Turn(ctx, Request{Do: "hang"})
	require.ErrorIs(t, err, gaveUp)
	require.NoError(t, s.Kill())
	require.ErrorIs(t, syscall.Kill(pid, 0), syscall.ESRCH, "the process is gone")
}

func TestSideThatCannotStart(t *testing.T) {
	_, err := Start(t.Context(), Command{Name: "Go", Argv: []string{filepath.Join(t.TempDir(), "nothing")}})
	require.ErrorIs(t, err, os.ErrNotExist)
	_, err = Start(t.Context(), Command{Name: "Go", Argv: []string{"sh", "-c", "echo no luck >&2; exit 1"}})
	require.ErrorContains(t, err, "no luck")
}

func TestEachTurnAfresh(t *testing.T) {
	f := Fresh{Command: self(t, 1)}
	a, err := f.Turn(t.Context(), Request{Do: "rank"})
	require.NoError(t, err)
	require.Equal(t, []float64{1}, a["world"])
	_, err = f.Turn(t.Context(), Request{Do: "die"})
	require.ErrorContains(t, err, "last words")
}

func TestRanksGetTheirCores(t *testing.T) {
	all, err := Cores()
	require.NoError(t, err)
	require.NotEmpty(t, all)
	c := self(t, 0)
	c.Cores = all[len(all)-1:]
	f := Fresh{Command: c}
	a, err := f.Turn(t.Context(), Request{Do: "cores"})
	require.NoError(t, err)
	require.Equal(t, []float64{float64(all[len(all)-1])}, a["cores"])
	after, err := Cores()
	require.NoError(t, err)
	require.Equal(t, all, after, "this process keeps its own")

	require.Equal(t, []int{0, 1}, share([]int{0, 1, 2, 3, 4}, 0, 2))
	require.Equal(t, []int{2, 3, 4}, share([]int{0, 1, 2, 3, 4}, 1, 2))
	require.Equal(t, []int{7}, share([]int{7}, 1, 2), "fewer cores than ranks are shared")
}

func TestJob(t *testing.T) {
	job := Job{Side: "sh", Argv: []string{"sh", "-c", "echo ready; cat >/dev/null; exit $CODE"}}
	job.Until, job.Env = "ready", []string{"CODE=0"}
	a, err := job.Turn(t.Context(), Request{})
	require.NoError(t, err)
	require.Positive(t, a["until"][0])
	require.GreaterOrEqual(t, a["seconds"][0], a["until"][0])

	job.Env = []string{"CODE=2"}
	_, err = job.Turn(t.Context(), Request{})
	require.ErrorContains(t, err, "exit status 2")
	job.Env, job.Until = []string{"CODE=0"}, "steady"
	_, err = job.Turn(t.Context(), Request{})
	require.ErrorContains(t, err, `never printed "steady"`)
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	_, err = Job{Argv: []string{"sh", "-c", "sleep 60 & wait"}}.Turn(ctx, Request{})
	require.ErrorIs(t, err, context.DeadlineExceeded)
}

func TestPythonSide(t *testing.T) {
	python := testenv.Python(t)
	dir := t.TempDir()
	script := `
import goddpbench

print("a line of a library's")


def handle(request):
    if request["do"] == "memory":
        return goddpbench.memory()
    if request["do"] == "fail":
        raise ValueError("on purpose")
    return goddpbench.measure(request["n"], lambda: sum(range(1000)))


goddpbench.serve(handle, ready={"ready": [1]})
`
	require.NoError(t, os.WriteFile(filepath.Join(dir, "goddpbench.py"), PythonModule, 0o666))
	require.NoError(t, os.WriteFile(filepath.Join(dir, "side.py"), []byte(script), 0o666))
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	s, err := Start(ctx, Command{Name: "Python", Argv: []string{python, filepath.Join(dir, "side.py")}})
	require.NoError(t, err)
	defer s.Kill()
	require.Equal(t, Answer{"ready": {1}}, s.Ready)
	a, err := s.Turn(ctx, Request{Do: "sum", N: 10})
	require.NoError(t, err)
	require.Positive(t, a["seconds"][0])
	require.Contains(t, a, "switches")
	a, err = s.Turn(ctx, Request{Do: "memory"})
	require.NoError(t, err)
	require.Greater(t, a["resident"][0], a["private"][0])
	_, err = s.Turn(ctx, Request{Do: "fail"})
	require.ErrorContains(t, err, "ValueError: on purpose")
	require.NoError(t, s.Close())
}

func TestPythonIsMissing(t *testing.T) {
	t.Setenv("GODDP_PYTHON", "")
	t.Setenv("GODDP_CACHE", t.TempDir())
	_, err := Python()
	require.ErrorIs(t, err, ErrNoPython)
	t.Setenv("GODDP_PYTHON", "/opt/python")
	p, err := Python()
	require.NoError(t, err)
	require.Equal(t, "/opt/python", p)
}

func TestServe(t *testing.T) {
	var out bytes.Buffer
	in := strings.NewReader(`{"do":"twice","n":4}` + "\n" + `{"do":"fail"}` + "\n")
	err := serve(in, &out, Answer{"x": {1}}, func(r Request) (Answer, error) {
		if r.Do == "fail" {
			return nil, errors.New("on purpose")
		}
		return Answer{"n": {float64(2 * r.N)}}, nil
	})
	require.NoError(t, err)
	require.Equal(t, `{"values":{"x":[1]}}
{"values":{"n":[8]}}
{"values":null,"error":"fail: on purpose"}
`, out.String())
	require.ErrorContains(t, serve(strings.NewReader("nonsense\n"), &out, nil, nil), `request "nonsense"`)
}

func TestMeasure(t *testing.T) {
	var kept [][]byte
	a, err := Measure(10, func() error {
		for range 10 {
			kept = append(kept, make([]byte, 1000))
		}
		return nil
	})
	require.NoError(t, err)
	require.Len(t, slices.Collect(slices.Values(kept)), 10)
	require.GreaterOrEqual(t, a["allocs"][0], 1.0)
	require.GreaterOrEqual(t, a["bytes"][0], 1000.0)
	require.Positive(t, a["seconds"][0])
	_, err = Measure(1, func() error { return errors.New("on purpose") })
	require.EqualError(t, err, "on purpose")
	m, err := Memory()
	require.NoError(t, err)
	require.Greater(t, m["resident"][0], m["private"][0])
	require.Positive(t, PeakMemory())
}
