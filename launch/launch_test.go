package launch

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/multierr"
	"golang.org/x/sys/unix"
)

// The test binary is also the program under test: with this variable it runs one of the programs below instead of the tests.
const programVar = "GODDP_LAUNCH_TEST"

func TestMain(m *testing.M) {
	if name := os.Getenv(programVar); name != "" {
		os.Exit(Main(programs[name]))
	}
	os.Exit(Main(func(context.Context) error { return Exit(m.Run()) }))
}

// limit is far above what anything here takes, and far below a hang.
const limit = 30 * time.Second

var quiet = slog.New(slog.DiscardHandler)

// syncBuffer may be read while ranks write.
type syncBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (b *syncBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.Write(p)
}

func (b *syncBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.String()
}

// spawnTest runs an entry and gives what it printed, how long it took, and its error.
func spawnTest(t *testing.T, e *Entry, n int, o SpawnOptions) (string, time.Duration, error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	defer cancel()
	var out syncBuffer
	o.Stdout, o.Stderr, o.Logger = &out, &out, quiet
	begin := time.Now()
	err := e.Spawn(ctx, n, o)
	took := time.Since(begin)
	require.NoError(t, ctx.Err(), "hung; output:\n%s", out.String())
	return out.String(), took, err
}

// gone waits until a process is gone or a zombie.
func gone(t *testing.T, pid int) {
	t.Helper()
	deadline := time.Now().Add(5 * time.Second)
	for running(pid) {
		if time.Now().After(deadline) {
			t.Fatalf("process %d is still there", pid)
		}
		time.Sleep(10 * time.Millisecond)
	}
}

func running(pid int) bool {
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return false
	}
	state := strings.TrimSpace(string(data[bytes.LastIndexByte(data, ')')+1:]))
	return state[0] != 'Z' && state[0] != 'X'
}

// pids reads "pid N" marks from output.
func pids(t *testing.T, out, mark string) []int {
	t.Helper()
	var all []int
	for line := range strings.Lines(out) {
		if _, after, ok := strings.Cut(line, mark+" "); ok {
			pid, err := strconv.Atoi(strings.TrimSpace(after))
			require.NoError(t, err, line)
			all = append(all, pid)
		}
	}
	return all
}

var sleepLong = func(ctx context.Context) error {
	select {
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-time.After(2 * limit):
		return errors.New("slept to the end")
	}
}

var envEntry = Register("env", func(_ context.Context, e Env) error {
	tid := unix.Gettid()
	for range 50 {
		runtime.Gosched()
		time.Sleep(100 * time.Microsecond)
		if unix.Gettid() != tid {
			return errors.New("the rank's function moved to another thread")
		}
	}
	fmt.Printf("%d/%d local %d/%d group %d source %s addr %s fd %v omp %s marker %q run %v error file %v\n", e.Rank, e.WorldSize, e.LocalRank, e.LocalWorldSize, e.GroupRank,
		e.Source, e.MasterAddr, e.ListenFD > 0, os.Getenv("OMP_NUM_THREADS"), os.Getenv(envSpawn), strings.HasPrefix(e.RunID, "spawn-"), e.ErrorFile != "")
	for _, name := range []string{"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME", "TORCHELASTIC_RESTART_COUNT"} {
		if os.Getenv(name) == "" {
			return fmt.Errorf("%s is not set", name)
		}
	}
	return nil
})

func TestSpawnGivesEachRankItsPlace(t *testing.T) {
	for _, n := range []int{1, 2, 16} {
		out, took, err := spawnTest(t, envEntry, n, SpawnOptions{})
		require.NoError(t, err)
		assert.Equal(t, n, strings.Count(out, "\n"), out)
		for r := range n {
			omp, prefix := "1", fmt.Sprintf("[rank%d] ", r)
			if n == 1 {
				omp, prefix = "", ""
			}
			assert.Contains(t, "\n"+out, fmt.Sprintf("\n%s%d/%d local %d/%d group 0 source spawn addr 127.0.0.1 fd %v omp %s marker \"\" run true error file true\n",
				prefix, r, n, r, n, r == 0, omp))
		}
		t.Logf("%d ranks: %v", n, took)
	}
}

// The rank serves on the socket that the parent bound, so no other process can take the port in between.
var socketEntry = Register("socket", func(_ context.Context, e Env) error {
	addr := net.JoinHostPort(e.MasterAddr, strconv.Itoa(e.MasterPort))
	if e.Rank != 0 {
		c, err := net.DialTimeout("tcp", addr, limit)
		if err != nil {
			return err
		}
		defer c.Close()
		b, err := io.ReadAll(c)
		if string(b) != "hello" {
			return fmt.Errorf("read %q, %v", b, err)
		}
		return nil
	}
	f := os.NewFile(uintptr(e.ListenFD), "master")
	ln, err := net.FileListener(f)
	if err != nil {
		return err
	}
	f.Close()
	for range e.WorldSize - 1 {
		c, err := ln.Accept()
		if err != nil {
			return err
		}
		io.WriteString(c, "hello")
		c.Close()
	}
	ln.Close()
	// Closed now: the variable is still there, but must not be believed.
	if again, ok, err := FromEnv(); err != nil || !ok || again.ListenFD != 0 {
		return fmt.Errorf("FromEnv after the socket was closed: %v %v %v", again, ok, err)
	}
	return nil
})

func TestMasterSocketIsHandedToRankZero(t *testing.T) {
	out, _, err := spawnTest(t, socketEntry, 3, SpawnOptions{})
	require.NoError(t, err, out)

	ln, e := net.Listen("tcp4", "127.0.0.1:0")
	require.NoError(t, e)
	port := ln.Addr().(*net.TCPAddr).Port
	out, _, err = spawnTest(t, envEntry, 2, SpawnOptions{MasterPort: port})
	require.ErrorIs(t, err, syscall.EADDRINUSE)
	assert.ErrorContains(t, err, fmt.Sprintf("master port %d is taken", port))
	assert.Empty(t, out, "no rank may have started")

	ln.Close()
	out, _, err = spawnTest(t, socketEntry, 2, SpawnOptions{MasterPort: port})
	require.NoError(t, err, out)
}

func TestSpawnRefuses(t *testing.T) {
	nop := func(context.Context, Env) error { return nil }
	for _, n := range []int{0, -1} {
		assert.EqualError(t, Spawn(t.Context(), n, nop), fmt.Sprintf("launch: cannot spawn %d ranks: the world size must be 1 or more", n))
	}
	assert.ErrorContains(t, Spawn(t.Context(), 1, nil), "function is nil")
	assert.ErrorContains(t, Spawn(t.Context(), 1, nop, SpawnOptions{MasterPort: 70000}), "master port 70000")
	assert.ErrorContains(t, Register("env", nop).Spawn(t.Context(), 1), `Register("env")`)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	assert.ErrorIs(t, Spawn(ctx, 1, nop), context.Canceled)

	t.Setenv("RANK", "0")
	assert.ErrorIs(t, Spawn(t.Context(), 1, nop), ErrEnv)
	t.Setenv("WORLD_SIZE", "1")
	t.Setenv("MASTER_ADDR", "127.0.0.1")
	t.Setenv("MASTER_PORT", "29500")
	assert.ErrorIs(t, Spawn(t.Context(), 1, nop), ErrInRank)
}

var errDisk = errors.New("disk full")

var failEntry = Register("fail", func(ctx context.Context, e Env) error {
	if e.Rank != 1 {
		fmt.Println("pid", os.Getpid())
		return sleepLong(ctx)
	}
	time.Sleep(50 * time.Millisecond)
	switch how := os.Getenv("HOW"); how {
	case "error":
		return fmt.Errorf("epoch 3: %w", errDisk)
	case "exit error":
		return &ExitError{Code: 7, Err: errDisk}
	case "panic":
		fmt.Println(os.Args[len(os.Args)+e.Rank])
	case "panic elsewhere":
		go func() { panic("boom elsewhere") }()
		time.Sleep(limit)
	case "exit":
		fmt.Fprintln(os.Stderr, "cannot go on: no more coffee")
		os.Exit(3)
	case "kill":
		unix.Kill(os.Getpid(), unix.SIGKILL)
		time.Sleep(limit)
	case "goexit":
		runtime.Goexit()
	case "abort":
		fmt.Fprintln(os.Stderr, "terminate called after throwing an instance of 'c10::Error'\n  what():  out of luck")
		unix.Kill(os.Getpid(), unix.SIGABRT)
		time.Sleep(limit)
	}
	return nil
})

func TestFirstFailureIsReported(t *testing.T) {
	for _, c := range []struct {
		how, message, stack, signal string
		code                        int
		panics                      bool
	}{
		{how: "error", message: "epoch 3: disk full", code: 1},
		{how: "exit error", message: "disk full", code: 7},
		{how: "panic", message: fmt.Sprintf("panic: runtime error: index out of range [%d] with length %d", len(os.Args)+1, len(os.Args)), stack: "launch_test.go", code: 2, panics: true},
		{how: "panic elsewhere", message: "panic: boom elsewhere", stack: "launch_test.go", code: 2, panics: true},
		{how: "exit", message: "cannot go on: no more coffee", code: 3},
		{how: "kill", message: "killed by SIGKILL", signal: "SIGKILL", code: -1},
		{how: "abort", message: "SIGABRT: abort: terminate called after throwing an instance of 'c10::Error': what():  out of luck", stack: "launch_test.go", code: 2},
		{how: "goexit", message: "the rank's function ended its goroutine by runtime.Goexit (was FailNow of a testing.T called?)", code: 1},
	} {
		t.Run(c.how, func(t *testing.T) {
			out, took, err := spawnTest(t, failEntry, 3, SpawnOptions{Env: []string{"HOW=" + c.how}})
			var r *RankError
			require.ErrorAs(t, err, &r, out)
			assert.Equal(t, 1, r.Rank)
			assert.Equal(t, 1, r.LocalRank)
			assert.Equal(t, c.message, r.Message)
			assert.Contains(t, r.Stack, c.stack)
			assert.Equal(t, c.code, r.ExitCode)
			assert.Equal(t, c.signal, r.Signal)
			assert.Equal(t, c.panics, r.Panic)
			assert.NotZero(t, r.PID)
			assert.WithinDuration(t, time.Now(), r.Time, limit)
			assert.Contains(t, err.Error(), fmt.Sprintf("rank 1 (pid %d, ", r.PID))
			// The others obeyed SIGTERM: that is no failure of theirs, and it takes no grace time.
			assert.Len(t, multierr.Errors(err), 1, "%v", err)
			assert.Less(t, took, 5*time.Second)
			others := pids(t, out, "pid")
			assert.Len(t, others, 2)
			for _, pid := range append(others, r.PID) {
				assert.False(t, running(pid), "pid %d", pid)
			}
			if c.signal != "" {
				assert.Contains(t, r.Hint, "out-of-memory")
				assert.Equal(t, 137, ExitCode(err))
			}
		})
	}
}

var stubbornEntry = Register("stubborn", func(_ context.Context, e Env) error {
	if e.Rank == 0 {
		time.Sleep(100 * time.Millisecond)
		return errDisk
	}
	// A rank inside a collective looks at no context; and it has a child of its own, which ignores SIGTERM.
	cmd := exec.Command("sh", "-c", "trap '' TERM; sleep 100")
	if err := cmd.Start(); err != nil {
		return err
	}
	fmt.Println("pid", os.Getpid())
	fmt.Println("pid", cmd.Process.Pid)
	time.Sleep(2 * limit)
	return nil
})

func TestOthersAreKilledAfterGrace(t *testing.T) {
	out, took, err := spawnTest(t, stubbornEntry, 3, SpawnOptions{})
	var r *RankError
	require.ErrorAs(t, err, &r)
	assert.Equal(t, 0, r.Rank)
	assert.Len(t, multierr.Errors(err), 1)
	assert.Greater(t, took, DefaultGrace)
	assert.Less(t, took, 5*time.Second, "all must be over within 5 s of the failure")
	all := pids(t, out, "pid")
	assert.Len(t, all, 4)
	for _, pid := range all {
		gone(t, pid)
	}
}

// Rank 0 loses its peer before the parent could see that peer's end: the peer is the root cause all the same.
var causeEntry = Register("cause", func(ctx context.Context, e Env) error {
	switch e.Rank {
	case 0:
		return errors.New("[gloo] Connection closed by peer [127.0.0.1]:4711")
	case 1:
		time.Sleep(80 * time.Millisecond)
		return errors.New("loss is NaN")
	}
	<-ctx.Done()
	return fmt.Errorf("saving failed: %w", errDisk)
})

func TestRootCauseComesFirstAndAllErrorsAreKept(t *testing.T) {
	_, _, err := spawnTest(t, causeEntry, 3, SpawnOptions{})
	all := multierr.Errors(err)
	require.Len(t, all, 3, "%v", err)
	var ranks []int
	for _, e := range all {
		var r *RankError
		require.ErrorAs(t, e, &r)
		ranks = append(ranks, r.Rank)
	}
	assert.Equal(t, []int{1, 0, 2}, ranks)
	var root *RankError
	require.ErrorAs(t, err, &root)
	assert.Equal(t, "loss is NaN", root.Message)
	assert.True(t, all[1].(*RankError).PeerLost)
}

var peerEntry = Register("peer", func(_ context.Context, e Env) error {
	if e.Rank == 1 {
		c, err := net.Dial("tcp", net.JoinHostPort(e.MasterAddr, strconv.Itoa(e.MasterPort)))
		if err != nil {
			return err
		}
		io.WriteString(c, "x")
		// Memory to give back makes the kernel take longer over a killed process.
		ballast := bytes.Repeat([]byte{1}, 64<<20)
		unix.Kill(os.Getpid(), unix.SIGKILL)
		time.Sleep(limit)
		runtime.KeepAlive(ballast)
	}
	ln, err := net.FileListener(os.NewFile(uintptr(e.ListenFD), "master"))
	if err != nil {
		return err
	}
	c, err := ln.Accept()
	if err != nil {
		return err
	}
	_, err = io.ReadAll(c)
	return fmt.Errorf("[gloo] Connection closed by peer: %v", err)
})

// A rank that another one's death ends first is still not the root cause.
func TestKilledPeerIsTheRootCause(t *testing.T) {
	for range 10 {
		out, _, err := spawnTest(t, peerEntry, 2, SpawnOptions{})
		all := multierr.Errors(err)
		require.Len(t, all, 2, "%v\n%s", err, out)
		assert.Equal(t, 1, all[0].(*RankError).Rank)
		assert.Equal(t, "SIGKILL", all[0].(*RankError).Signal)
		assert.True(t, all[1].(*RankError).PeerLost)
		assert.Equal(t, 137, ExitCode(err))
	}
}

// Programs that a rank started hear of the end too, and a rank may wait for them.
var familyEntry = Register("family", func(ctx context.Context, e Env) error {
	cmd := exec.Command("sh", "-c", "trap 'echo child heard; exit 0' TERM; echo pid $$; while :; do sleep 0.05; done")
	cmd.Stdout = os.Stdout
	if err := cmd.Start(); err != nil {
		return err
	}
	<-ctx.Done()
	if err := cmd.Wait(); err != nil {
		return err
	}
	return context.Cause(ctx)
})

func TestSignalsReachWholeProcessGroups(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	var out syncBuffer
	go func() {
		for deadline := time.Now().Add(limit); strings.Count(out.String(), "pid") < 2 && time.Now().Before(deadline); {
			time.Sleep(5 * time.Millisecond)
		}
		cancel()
	}()
	err := familyEntry.Spawn(ctx, 2, SpawnOptions{Stdout: &out, Logger: quiet})
	assert.ErrorIs(t, err, context.Canceled)
	assert.Len(t, multierr.Errors(err), 1, "%v", err)
	assert.Contains(t, out.String(), "[rank0] child heard\n")
	assert.Contains(t, out.String(), "[rank1] child heard\n")
}

func TestCancelledContextEndsRanks(t *testing.T) {
	ctx, cancel := context.WithCancelCause(t.Context())
	var out syncBuffer
	go func() {
		for strings.Count(out.String(), "pid") < 1 {
			time.Sleep(5 * time.Millisecond)
		}
		cancel(errors.New("enough"))
	}()
	err := failEntry.Spawn(ctx, 1, SpawnOptions{Stdout: &out, Logger: quiet})
	assert.ErrorContains(t, err, "enough")
	all := pids(t, out.String(), "pid")
	require.Len(t, all, 1)
	assert.False(t, running(all[0]))
}

// program starts this binary as one of the programs.
type program struct {
	*exec.Cmd
	out syncBuffer
}

func startProgram(t *testing.T, name string, env ...string) *program {
	t.Helper()
	p := &program{Cmd: exec.Command(os.Args[0], "-some", "argument")}
	p.WaitDelay = time.Second // a process that a rank left behind may hold the pipe
	p.Env = append(append(os.Environ(), programVar+"="+name), env...)
	p.Stdout, p.Stderr = &p.out, &p.out
	require.NoError(t, p.Start())
	t.Cleanup(func() {
		p.Process.Kill()
		p.Process.Wait()
	})
	return p
}

// end waits for the program and gives its exit status.
func (p *program) end(t *testing.T) int {
	t.Helper()
	over := time.AfterFunc(limit, func() { p.Process.Kill() })
	p.Wait()
	require.True(t, over.Stop(), "hung; output:\n%s", p.out.String())
	return p.ProcessState.ExitCode()
}

// until waits for n occurrences of a text.
func (p *program) until(t *testing.T, text string, n int) {
	t.Helper()
	for deadline := time.Now().Add(limit); strings.Count(p.out.String(), text) < n; {
		if time.Now().After(deadline) {
			t.Fatalf("no %d × %q in:\n%s", n, text, p.out.String())
		}
		time.Sleep(5 * time.Millisecond)
	}
}

var programs = map[string]func(context.Context) error{
	"twice": func(ctx context.Context) error {
		defer fmt.Println("deferred")
		if len(os.Args) != 3 {
			return fmt.Errorf("arguments %q", os.Args)
		}
		err := Spawn(ctx, 2, func(_ context.Context, e Env) error {
			fmt.Println("first", e.Rank)
			if e.Rank == 1 {
				return errors.New("first fails")
			}
			return nil
		}, SpawnOptions{Logger: quiet})
		var r *RankError
		if !errors.As(err, &r) || r.Rank != 1 || r.Message != "first fails" {
			return fmt.Errorf("first Spawn: %v", err)
		}
		what := "second"
		err = Spawn(ctx, 2, func(ctx context.Context, e Env) error {
			fmt.Println(what, e.Rank) // a closure's variable, as the way here left it
			if err := Spawn(ctx, 1, func(context.Context, Env) error { return nil }); !errors.Is(err, ErrInRank) {
				return fmt.Errorf("nested: %v", err)
			}
			return Run(ctx, 5, func(_ context.Context, e Env) error {
				if e.WorldSize != 2 {
					return errors.New("Run in a rank must stay in it")
				}
				return nil
			})
		}, SpawnOptions{Logger: quiet})
		fmt.Println("after the second:", err)
		return err
	},
	"elsewhere": func(ctx context.Context) error {
		var err error
		done := make(chan struct{})
		go func() {
			defer close(done)
			err = Spawn(ctx, 2, func(_ context.Context, e Env) error {
				fmt.Println("rank", e.Rank)
				return nil
			}, SpawnOptions{Logger: quiet})
		}()
		<-done
		fmt.Println("parent only", err)
		return err
	},
	"astray": func(ctx context.Context) error {
		if os.Getenv("RANK") != "" {
			return nil
		}
		return Spawn(ctx, 1, func(context.Context, Env) error { return nil }, SpawnOptions{Logger: quiet})
	},
	"fails": func(ctx context.Context) error {
		return Run(ctx, 2, func(ctx context.Context, e Env) error {
			if e.Rank == 1 {
				panic(fmt.Sprintf("boom in rank %d", e.Rank))
			}
			return sleepLong(ctx)
		})
	},
	"plain panic": func(context.Context) error { panic("no rank") },
	"usage":       func(context.Context) error { return &ExitError{Code: 2, Err: errors.New("usage: twice [flags]")} },
	"sleep": func(ctx context.Context) error {
		return Run(ctx, 3, func(ctx context.Context, e Env) error {
			cmd := exec.Command("sh", "-c", "trap '' TERM INT HUP; echo pid $$; sleep 100")
			cmd.Stdout = os.Stdout
			if err := cmd.Start(); err != nil {
				return err
			}
			fmt.Println("pid", os.Getpid())
			switch os.Getenv("HOW") {
			case "deaf":
				time.Sleep(2 * limit)
			case "save":
				<-ctx.Done()
				time.Sleep(time.Duration(e.Rank) * 300 * time.Millisecond)
				fmt.Println("saved after", context.Cause(ctx))
				return ErrResume
			case "plain":
				<-ctx.Done()
				return ctx.Err()
			}
			return sleepLong(ctx)
		}, SpawnOptions{StopGrace: 4 * time.Second})
	},
	"lonely": func(ctx context.Context) error {
		return Run(ctx, 1, func(ctx context.Context, e Env) error {
			fi, err := os.Stdout.Stat()
			fmt.Println("pipe", err == nil && fi.Mode()&os.ModeNamedPipe != 0, "rank", e.Rank)
			return nil
		})
	},
}

func TestSpawnTwiceInOneProgram(t *testing.T) {
	p := startProgram(t, "twice")
	code := p.end(t)
	out := p.out.String()
	assert.Equal(t, 0, code, out)
	for line, times := range map[string]int{"[rank0] first 0\n": 1, "[rank1] first 1\n": 1, "[rank0] second 0\n": 1, "[rank1] second 1\n": 1, "after the second: <nil>\n": 1,
		// Spawn does not return in a rank, but what was deferred before it is called.
		"deferred\n": 5} {
		assert.Equal(t, times, strings.Count(out, line), "%q in:\n%s", line, out)
	}
}

func TestSpawnOnAnotherGoroutineDoesNotReturnInARank(t *testing.T) {
	p := startProgram(t, "elsewhere")
	assert.Equal(t, 0, p.end(t), p.out.String())
	out := p.out.String()
	assert.Equal(t, 1, strings.Count(out, "parent only <nil>"), out)
	assert.Contains(t, out, "[rank0] rank 0\n")
	assert.Contains(t, out, "[rank1] rank 1\n")
}

func TestRankThatDoesNotComeToSpawn(t *testing.T) {
	p := startProgram(t, "astray")
	assert.Equal(t, 1, p.end(t))
	assert.Contains(t, p.out.String(), "without coming to it")
}

func TestMainPrintsAndGivesStatus(t *testing.T) {
	for name, want := range map[string]struct {
		code int
		text []string
	}{
		"fails":       {2, []string{"rank 1 (pid ", ", exit code 2) failed: panic: boom in rank 1", "--- rank 1 ---", "launch_test.go", "OMP_NUM_THREADS=1 for each rank"}},
		"plain panic": {2, []string{"panic: no rank", "launch_test.go"}},
		"usage":       {2, []string{"usage: twice [flags]"}},
	} {
		p := startProgram(t, name)
		assert.Equal(t, want.code, p.end(t), name)
		for _, s := range want.text {
			assert.Contains(t, p.out.String(), s)
		}
	}
}

func TestSingleRankGetsTheParentsOutput(t *testing.T) {
	file := filepath.Join(t.TempDir(), "out")
	f, err := os.Create(file)
	require.NoError(t, err)
	p := &program{Cmd: exec.Command(os.Args[0])}
	p.Env = append(os.Environ(), programVar+"=lonely")
	p.Stdout = f
	require.NoError(t, p.Start())
	assert.Equal(t, 0, p.end(t))
	f.Close()
	data, err := os.ReadFile(file)
	require.NoError(t, err)
	assert.Equal(t, "pipe false rank 0\n", string(data))
}

func TestSignalsToTheParent(t *testing.T) {
	for _, c := range []struct {
		how  string
		sig  []unix.Signal
		code int
		max  time.Duration
		text string
	}{
		{"polite", []unix.Signal{unix.SIGINT}, 130, 3 * time.Second, "launch: stopped: received SIGINT"},
		{"polite", []unix.Signal{unix.SIGTERM}, 143, 3 * time.Second, "launch: stopped: received SIGTERM"},
		{"plain", []unix.Signal{unix.SIGTERM}, 143, 3 * time.Second, "launch: stopped: received SIGTERM"},
		{"deaf", []unix.Signal{unix.SIGINT}, 130, 7 * time.Second, "launch: stopped: received SIGINT"},
		{"deaf", []unix.Signal{unix.SIGINT, unix.SIGINT}, 130, 3 * time.Second, "killing all ranks"},
		{"save", []unix.Signal{unix.SIGUSR1}, ExitResume, 5 * time.Second, "saved after received SIGUSR1"},
		{"save", []unix.Signal{unix.SIGTERM}, ExitResume, 5 * time.Second, "saved after received SIGTERM"},
		{"polite", []unix.Signal{unix.SIGUSR1}, 138, 3 * time.Second, "launch: stopped: received SIGUSR1"},
		{"deaf", []unix.Signal{unix.SIGKILL}, -1, 3 * time.Second, ""},
	} {
		t.Run(fmt.Sprint(c.how, c.sig), func(t *testing.T) {
			dir := t.TempDir()
			p := startProgram(t, "sleep", "HOW="+c.how, "TMPDIR="+dir)
			p.until(t, "pid ", 6)
			begin := time.Now()
			for i, sig := range c.sig {
				if i > 0 {
					time.Sleep(2 * sameSignal)
				}
				require.NoError(t, p.Process.Signal(sig))
			}
			code := p.end(t)
			took := time.Since(begin)
			out := p.out.String()
			assert.Equal(t, c.code, code, out)
			assert.Less(t, took, c.max, out)
			assert.Contains(t, out, c.text)
			if c.how == "save" {
				assert.Equal(t, 3, strings.Count(out, "saved after"), out)
			}
			// Ranks and the processes they started, which ignore everything but SIGKILL.
			all := pids(t, out, "pid")
			require.Len(t, all, 6)
			for _, pid := range all {
				gone(t, pid)
			}
			left, err := os.ReadDir(dir)
			require.NoError(t, err)
			assert.Empty(t, left, "temporary files")
		})
	}
}

// A rank that Slurm started runs in the process itself, and leaves with a status that means "start me again".
func TestRunAsASlurmTask(t *testing.T) {
	const task = "SLURM_STEP_NUM_TASKS=2 SLURM_LOCALID=1 SLURM_NODEID=0 SLURM_STEP_NODELIST=localhost SLURM_STEP_TASKS_PER_NODE=2 SLURM_JOB_ID=7 SLURM_STEP_ID=0 SLURM_PROCID=1"
	p := startProgram(t, "under torchrun", strings.Fields(task)...)
	assert.Equal(t, 0, p.end(t), p.out.String())
	assert.Contains(t, p.out.String(), "here: rank 1 of 2 (local 1 of 2, node 0, master localhost:15007, from slurm)")

	p = startProgram(t, "sleep", append(strings.Fields(task), "HOW=save")...)
	p.until(t, "pid ", 2)
	require.NoError(t, p.Process.Signal(unix.SIGUSR1))
	assert.Equal(t, ExitResume, p.end(t), p.out.String())
	assert.Contains(t, p.out.String(), "saved after received SIGUSR1")
	for _, pid := range pids(t, p.out.String(), "pid") {
		unix.Kill(pid, unix.SIGKILL) // the process that the task left behind
	}

	p = startProgram(t, "sleep", append(strings.Fields(task), "HOW=plain")...)
	p.until(t, "pid ", 2)
	require.NoError(t, p.Process.Signal(unix.SIGTERM))
	assert.Equal(t, 143, p.end(t), p.out.String())
	assert.Contains(t, p.out.String(), "context canceled (after SIGTERM)")
	for _, pid := range pids(t, p.out.String(), "pid") {
		unix.Kill(pid, unix.SIGKILL)
	}

	p = startProgram(t, "fails", append(strings.Fields(task), "SLURM_PROCID=5")...)
	assert.Equal(t, 1, p.end(t))
	assert.Contains(t, p.out.String(), "SLURM_PROCID=5 is outside SLURM_STEP_NUM_TASKS=2")
}

// A process that left its rank's group is out of reach; what it holds open must not hold up Spawn.
var escapeEntry = Register("escape", func(_ context.Context, e Env) error {
	cmd := exec.Command("sleep", "8")
	cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := cmd.Start(); err != nil {
		return err
	}
	fmt.Println("pid", cmd.Process.Pid)
	return nil
})

func TestOutputHeldOpenByADaemon(t *testing.T) {
	out, took, err := spawnTest(t, escapeEntry, 2, SpawnOptions{})
	require.NoError(t, err)
	assert.Less(t, took, 6*time.Second)
	all := pids(t, out, "pid")
	assert.Len(t, all, 2)
	for _, pid := range all {
		unix.Kill(pid, unix.SIGKILL)
	}
}

type brokenWriter struct{ n int }

func (b *brokenWriter) Write(p []byte) (int, error) {
	b.n++
	return 0, errDisk
}

// A writer that fails must not make ranks block on a full pipe.
func TestBrokenWriter(t *testing.T) {
	var log, stderr syncBuffer
	w := &brokenWriter{}
	err := outputEntry.Spawn(t.Context(), 2, SpawnOptions{Env: []string{"HOW=huge"}, Stdout: w, Stderr: &stderr, Logger: slog.New(slog.NewTextHandler(&log, nil))})
	require.NoError(t, err)
	assert.Equal(t, 1, w.n)
	assert.Contains(t, log.String(), "output of the ranks was lost")
	assert.Contains(t, log.String(), "disk full")
}

func TestOOMKillsAreCounted(t *testing.T) {
	put := func(root, name, text string) {
		path := filepath.Join(root, name)
		require.NoError(t, os.MkdirAll(filepath.Dir(path), 0o700))
		require.NoError(t, os.WriteFile(path, []byte(text), 0o600))
	}
	v2, v1, container, none := t.TempDir(), t.TempDir(), t.TempDir(), t.TempDir()
	put(v2, "self", "0::/a/b\n")
	put(v2, "a/b/memory.events", "low 0\noom 4\noom_kill 3\n")
	put(v2, "memory.events", "oom_kill 9\n")
	put(v1, "self", "5:cpu,cpuacct:/x\n4:memory:/x\n0::/\n")
	put(v1, "memory/x/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n")
	put(container, "self", "0::/on/the/host\n")
	put(container, "memory.events", "oom_kill 7\n")
	for root, want := range map[string]int{v2: 3, v1: 2, container: 7, none: -1} {
		assert.Equal(t, want, oomKillsUnder(root, filepath.Join(root, "self")))
	}

	ooms := -1
	explain := func() string {
		e := &RankError{}
		(&rank{tail: &tail{}}).explain(e, unix.SIGKILL, ooms)
		return e.Hint
	}
	assert.Contains(t, explain(), "or the kernel's out-of-memory killer")
	if now := oomKills(); now > 0 {
		ooms = now - 1
		assert.Contains(t, explain(), "ended a process of this container")
	}
}

var outputEntry = Register("output", func(_ context.Context, e Env) error {
	switch os.Getenv("HOW") {
	case "partial":
		fmt.Printf("no end %d", e.Rank)
	case "huge":
		chunk := bytes.Repeat([]byte{'x'}, 1<<20)
		for range 16 {
			os.Stdout.Write(chunk)
		}
		os.Stdout.WriteString("\nafter\n")
	case "mixed":
		for i := range 2000 {
			// Several writes a line, so that lines of two ranks would mix if they were not kept whole.
			fmt.Print("[GPU", e.Rank)
			fmt.Print("] step ")
			fmt.Println(i)
		}
	case "own":
		fmt.Printf("[rank%d] said so itself\n", e.Rank)
	case "bar":
		fmt.Print("10%\r20%\r\n")
	}
	return nil
})

func TestOutput(t *testing.T) {
	run := func(how string, n int, p Prefix) string {
		out, _, err := spawnTest(t, outputEntry, n, SpawnOptions{Env: []string{"HOW=" + how}, Prefix: p})
		require.NoError(t, err)
		return out
	}
	out := run("partial", 2, PrefixAuto)
	assert.ElementsMatch(t, []string{"[rank0] no end 0", "[rank1] no end 1", ""}, strings.Split(out, "\n"))
	assert.Equal(t, "no end 0", run("partial", 1, PrefixAuto))
	assert.Equal(t, "[rank0] no end 0", run("partial", 1, PrefixOn))
	assert.ElementsMatch(t, []string{"no end 0", "no end 1", ""}, strings.Split(run("partial", 2, PrefixOff), "\n"))
	assert.ElementsMatch(t, []string{"[rank0] said so itself", "[rank1] said so itself", ""}, strings.Split(run("own", 2, PrefixAuto), "\n"))
	assert.Equal(t, "[rank0] 10%\r[rank0] 20%\r\n", run("bar", 1, PrefixOn))
	assert.Equal(t, strings.Repeat("x", 16<<20)+"\nafter\n", run("huge", 1, PrefixOff))

	for _, p := range []Prefix{PrefixAuto, PrefixOff} {
		next := map[string]int{}
		for line := range strings.Lines(run("mixed", 4, p)) {
			var rank, step int
			if p == PrefixAuto {
				_, line, _ = strings.Cut(line, "] ")
			}
			_, err := fmt.Sscanf(line, "[GPU%d] step %d\n", &rank, &step)
			require.NoError(t, err, "%q", line)
			key := strconv.Itoa(rank)
			require.Equal(t, next[key], step)
			next[key]++
		}
		assert.Equal(t, map[string]int{"0": 2000, "1": 2000, "2": 2000, "3": 2000}, next)
	}
}

func TestLongLinesTakeBoundedMemory(t *testing.T) {
	var got bytes.Buffer
	l := &lines{to: &sink{w: &got}, prefix: "[rank0] "}
	chunk := bytes.Repeat([]byte{'y'}, 32<<10)
	for range 1024 {
		l.Write(chunk)
	}
	assert.LessOrEqual(t, cap(l.rest)+cap(l.out), 4*maxLine)
	l.Close()
	assert.Equal(t, 1024*len(chunk), bytes.Count(got.Bytes(), []byte{'y'}))
	for line := range strings.Lines(got.String()) {
		require.True(t, strings.HasPrefix(line, "[rank0] y"))
	}
}
