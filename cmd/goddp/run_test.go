package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/goddp/goddp/internal/testenv"
	"github.com/goddp/goddp/launch"
	"github.com/goddp/goddp/launch/tcpstore"
	"github.com/spf13/pflag"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// The test binary is goddp itself, and the program that it runs as well, as this variable says.
const roleVar = "GODDP_TEST_ROLE"

func TestMain(m *testing.M) {
	switch os.Getenv(roleVar) {
	case "":
		code := m.Run()
		if trainerPath != "" {
			os.RemoveAll(filepath.Dir(trainerPath))
		}
		os.Exit(code)
	case "goddp":
		// Its workers are of the other role.
		os.Setenv(roleVar, "worker")
		main()
	case "worker":
		os.Exit(worker(os.Args[1:]))
	}
}

// worker is the program under the launcher. Its first argument says what it does.
func worker(args []string) int {
	rank, _ := strconv.Atoi(os.Getenv("RANK"))
	attempt, _ := strconv.Atoi(os.Getenv("TORCHELASTIC_RESTART_COUNT"))
	switch args[0] {
	case "env":
		vars := map[string]string{}
		for _, v := range os.Environ() {
			name, value, _ := strings.Cut(v, "=")
			vars[name] = value
		}
		out, _ := json.Marshal(map[string]any{"env": vars, "args": args})
		fmt.Printf("ENV %s\n", out)
	case "exit": // exit CODE RANK [TIMES]: others wait to be ended
		code, _ := strconv.Atoi(args[1])
		times := 1 << 30
		if len(args) > 3 {
			times, _ = strconv.Atoi(args[3])
		}
		if attempt >= times {
			return 0
		}
		if args[2] == strconv.Itoa(rank) {
			fmt.Fprintln(os.Stderr, "exiting with", code)
			return code
		}
		time.Sleep(time.Minute)
	case "record": // fails as our programs do, with an error file
		return launch.Main(func(ctx context.Context) error {
			return launch.Run(ctx, 1, func(ctx context.Context, e launch.Env) error {
				if e.Rank == 1 {
					panic("index 7 out of range")
				}
				<-ctx.Done()
				return ctx.Err()
			})
		})
	case "crash": // crash RANK: killed by SIGKILL
		if args[1] == strconv.Itoa(rank) {
			syscall.Kill(os.Getpid(), syscall.SIGKILL)
		}
		time.Sleep(time.Minute)
	case "say":
		fmt.Println("out", rank)
		fmt.Fprintln(os.Stderr, "err", rank)
	case "save": // saves on a signal and leaves to be resumed
		ch := make(chan os.Signal, 8)
		signal.Notify(ch, syscall.SIGTERM, syscall.SIGUSR1, syscall.SIGINT, syscall.SIGUSR2)
		fmt.Println("ready", os.Getpid())
		s := <-ch
		time.Sleep(100 * time.Millisecond)
		fmt.Println("saved on", s)
		return launch.ExitResume
	case "sleep":
		fmt.Println("ready", os.Getpid())
		time.Sleep(time.Minute)
	case "stubborn": // ignores signals, and so does what it started
		signal.Ignore(syscall.SIGTERM, syscall.SIGINT)
		c := exec.Command("sh", "-c", "trap '' TERM INT; sleep 60")
		c.Start()
		fmt.Println("ready", os.Getpid())
		fmt.Println("ready", c.Process.Pid)
		time.Sleep(time.Minute)
	case "failmeet": // the same, after rank 1 failed once
		if _, err := os.Stat(args[1]); rank == 1 && err != nil {
			if err := os.WriteFile(args[1], nil, 0o644); err != nil {
				panic(err)
			}
			return 5
		}
		if err := meet(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
	case "sleepmeet": // sleeps until it is started with the file there
		if _, err := os.Stat(args[1]); err != nil {
			fmt.Println("ready", os.Getpid())
			time.Sleep(time.Minute)
		}
		if err := meet(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
	case "meet": // meets the others at the store, as init_process_group does
		if err := meet(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
	}
	return 0
}

// meet uses the store as ranks do: each sets its address, and reads those of all.
func meet() error {
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	rank, world := os.Getenv("RANK"), os.Getenv("WORLD_SIZE")
	c, err := tcpstore.Dial(ctx, net.JoinHostPort(os.Getenv("MASTER_ADDR"), os.Getenv("MASTER_PORT")))
	if err != nil {
		return err
	}
	defer c.Close()
	if err := c.Set(ctx, "rank/"+rank, []byte(rank)); err != nil {
		return err
	}
	n, _ := strconv.Atoi(world)
	for i := range n {
		if v, err := c.Get(ctx, fmt.Sprint("rank/", i)); err != nil || string(v) != strconv.Itoa(i) {
			return fmt.Errorf("rank %d: %q %w", i, v, err)
		}
	}
	fmt.Println("met", rank, "of", world)
	return nil
}

type result struct {
	out, err string
	code     int
}

// goddp runs goddp in a process of its own.
func goddp(t *testing.T, args ...string) result { return goddpEnv(t, nil, args...) }

func goddpEnv(t *testing.T, env []string, args ...string) result {
	t.Helper()
	p := startGoddp(t, env, args...)
	return p.wait()
}

type process struct {
	t        *testing.T
	cmd      *exec.Cmd
	out, err *syncBuffer
}

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

func startGoddp(t *testing.T, env []string, args ...string) *process {
	t.Helper()
	return startIn(t, nil, env, args...)
}

// startIn starts goddp behind another command, such as one that enters a network namespace.
func startIn(t *testing.T, before, env []string, args ...string) *process {
	t.Helper()
	all := append(append(append([]string{}, before...), os.Args[0]), args...)
	p := &process{t: t, cmd: exec.Command(all[0], all[1:]...), out: &syncBuffer{}, err: &syncBuffer{}}
	p.cmd.Env = append(cleanEnv(), append([]string{roleVar + "=goddp"}, env...)...)
	p.cmd.Stdout, p.cmd.Stderr = p.out, p.err
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	p.cmd.WaitDelay = 5 * time.Second
	require.NoError(t, p.cmd.Start())
	t.Cleanup(func() {
		if p.cmd.ProcessState == nil {
			p.cmd.Process.Kill()
			p.cmd.Wait()
		}
	})
	return p
}

// cleanEnv is the environment without what a launcher around these tests might have set.
func cleanEnv() []string {
	return slices.DeleteFunc(os.Environ(), func(s string) bool {
		for _, p := range []string{"PET_", "RANK=", "WORLD_SIZE=", "LOCAL_", "MASTER_", "TORCHELASTIC_", "OMP_NUM_THREADS=", "SLURM_", "CUDA_VISIBLE_DEVICES="} {
			if strings.HasPrefix(s, p) {
				return true
			}
		}
		return false
	})
}

func (p *process) wait() result {
	p.t.Helper()
	return p.waitFor(60 * time.Second)
}

func (p *process) waitFor(limit time.Duration) result {
	p.t.Helper()
	done := make(chan error, 1)
	go func() { done <- p.cmd.Wait() }()
	select {
	case <-done:
	case <-time.After(limit):
		p.cmd.Process.Kill()
		<-done
		p.t.Fatalf("goddp hung\n%s\n%s", p.out, p.err)
	}
	return result{p.out.String(), p.err.String(), p.cmd.ProcessState.ExitCode()}
}

// until waits for n lines of standard output with a text.
func (p *process) until(text string, n int) []string {
	p.t.Helper()
	deadline := time.Now().Add(30 * time.Second)
	for {
		var found []string
		for line := range strings.Lines(p.out.String()) {
			if strings.Contains(line, text) {
				found = append(found, strings.TrimSpace(line))
			}
		}
		if len(found) >= n {
			return found
		}
		if time.Now().After(deadline) {
			p.t.Fatalf("%d of %d times %q within 30 s\n%s\n%s", len(found), n, text, p.out, p.err)
		}
		time.Sleep(5 * time.Millisecond)
	}
}

// environments reads what workers of the kind env printed, by rank.
func environments(t *testing.T, out string) []map[string]string {
	t.Helper()
	var all []map[string]string
	for line := range strings.Lines(out) {
		_, text, ok := strings.Cut(line, "ENV ")
		if !ok {
			continue
		}
		var v struct {
			Env  map[string]string
			Args []string
		}
		require.NoError(t, json.Unmarshal([]byte(text), &v), line)
		v.Env["ARGS"] = strings.Join(v.Args, " ")
		all = append(all, v.Env)
	}
	slices.SortFunc(all, func(a, b map[string]string) int { return strings.Compare(a["RANK"], b["RANK"]) })
	return all
}

var self = os.Args[0]

// torchrunVars are the variables that torchrun gives its workers.
var torchrunVars = []string{"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_NAME", "ROLE_WORLD_SIZE",
	"MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE",
	"TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_SIGNALS_TO_HANDLE", "TORCH_NCCL_ASYNC_ERROR_HANDLING", "OMP_NUM_THREADS"}

func TestRunGivesTorchrunsVariables(t *testing.T) {
	r := goddp(t, "run", "--nproc-per-node", "2", "--role", "trainer", "--rdzv-id", "job7", "--max-restarts", "3", self, "env", "a", "--rank=${local_rank}")
	require.Zero(t, r.code, r.err)
	envs := environments(t, r.out)
	require.Len(t, envs, 2)
	for i, e := range envs {
		for _, name := range torchrunVars {
			assert.NotEmpty(t, e[name], name)
		}
		n := strconv.Itoa(i)
		assert.Equal(t, []string{n, n, "2", "2", "0", "1", n, "2", "trainer", "job7", "0", "3", "True", "1", "1"}, []string{e["RANK"], e["LOCAL_RANK"], e["WORLD_SIZE"], e["LOCAL_WORLD_SIZE"],
			e["GROUP_RANK"], e["GROUP_WORLD_SIZE"], e["ROLE_RANK"], e["ROLE_WORLD_SIZE"], e["ROLE_NAME"], e["TORCHELASTIC_RUN_ID"], e["TORCHELASTIC_RESTART_COUNT"],
			e["TORCHELASTIC_MAX_RESTARTS"], e["TORCHELASTIC_USE_AGENT_STORE"], e["TORCH_NCCL_ASYNC_ERROR_HANDLING"], e["OMP_NUM_THREADS"]})
		assert.Equal(t, "env a --rank="+n, e["ARGS"])
	}
	assert.Contains(t, r.out, "[rank1] ENV")
	assert.Contains(t, r.err, "OMP_NUM_THREADS=1 for each worker")
	r = goddpEnv(t, []string{"OMP_NUM_THREADS=3"}, "run", "--nproc-per-node", "2", self, "env")
	assert.Equal(t, "3", environments(t, r.out)[0]["OMP_NUM_THREADS"])
	assert.Empty(t, r.err)
}

// The same program under Python's torchrun and under goddp run has the same variables, but for what differs from job to job.
func TestRunAgreesWithPythonsTorchrun(t *testing.T) {
	python := testenv.Python(t)
	cmd := exec.Command(python, "-m", "torch.distributed.run", "--no-python", "--nnodes", "1", "--nproc-per-node", "2", "--role", "r", "--rdzv-id", "x", "--max-restarts", "1", "--master-port", strconv.Itoa(testenv.FreePort(t)), self, "env")
	cmd.Env = append(cleanEnv(), roleVar+"=worker")
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, "%s", out)
	theirs := environments(t, string(out))
	r := goddp(t, "run", "--nnodes", "1", "--nproc-per-node", "2", "--role", "r", "--rdzv-id", "x", "--max-restarts", "1", "--master-port", strconv.Itoa(testenv.FreePort(t)), self, "env")
	require.Zero(t, r.code, r.err)
	ours := environments(t, r.out)
	require.Len(t, theirs, 2)
	require.Len(t, ours, 2)
	for i := range 2 {
		for _, name := range torchrunVars {
			switch name {
			case "MASTER_PORT", "TORCHELASTIC_ERROR_FILE":
				assert.NotEmpty(t, ours[i][name])
			case "TORCHELASTIC_SIGNALS_TO_HANDLE":
				assert.Equal(t, theirs[i][name]+",SIGUSR1", ours[i][name])
			default:
				assert.Equal(t, theirs[i][name], ours[i][name], name)
			}
		}
		assert.Empty(t, missingIn(ours[i], theirs[i]))
	}
}

// missingIn gives the variables that torchrun sets and goddp run does not.
func missingIn(ours, theirs map[string]string) (names []string) {
	for name := range theirs {
		if _, ok := ours[name]; !ok && !strings.HasPrefix(name, "KMP_") && name != "_" && name != "LC_CTYPE" {
			names = append(names, name)
		}
	}
	return names
}

func TestRunNumberOfWorkers(t *testing.T) {
	for arg, want := range map[string]int{"3": 3, "cpu": runtime.NumCPU()} {
		r := goddp(t, "run", "--nproc_per_node="+arg, self, "env")
		require.Zero(t, r.code, r.err)
		assert.Len(t, environments(t, r.out), want, arg)
	}
	want := launch.GPUs().Count()
	if want == 0 {
		want = runtime.NumCPU()
		r := goddp(t, "run", "--nproc-per-node=gpu", self, "env")
		assert.Equal(t, exitError, r.code)
		assert.Contains(t, r.err, "no GPU")
	}
	r := goddp(t, "run", "--nproc-per-node=auto", self, "env")
	require.Zero(t, r.code, r.err)
	assert.Len(t, environments(t, r.out), want)

	r = goddp(t, "run", self, "env") // a single worker has this program's own output
	require.Zero(t, r.code, r.err)
	assert.True(t, strings.HasPrefix(r.out, "ENV "), r.out)
	assert.Empty(t, environments(t, r.out)[0]["OMP_NUM_THREADS"])
}

func TestRunFlagsFromTheEnvironment(t *testing.T) {
	r := goddpEnv(t, []string{"PET_NPROC_PER_NODE=2", "PET_RDZV_ID=seven", "PET_STANDALONE=0", "PET_MAX_RESTARTS=5", "PET_ROLE=pet"}, "run", "--role", "flag", self, "env")
	require.Zero(t, r.code, r.err)
	envs := environments(t, r.out)
	require.Len(t, envs, 2)
	assert.Equal(t, []string{"seven", "5", "flag"}, []string{envs[0]["TORCHELASTIC_RUN_ID"], envs[0]["TORCHELASTIC_MAX_RESTARTS"], envs[0]["ROLE_NAME"]})
	r = goddpEnv(t, []string{"PET_STANDALONE=maybe"}, "run", self, "env")
	assert.Equal(t, exitUsage, r.code)
	assert.Contains(t, r.err, "PET_STANDALONE")
}

// Every flag is known in both spellings and, but for our own, from the environment; see the other tests for what they do.
func TestRunHelpNamesEveryFlagInGroups(t *testing.T) {
	r := goddp(t, "run", "--help")
	require.Zero(t, r.code, r.err)
	last := -1
	for _, g := range (&runOptions{}).groups() {
		at := strings.Index(r.out, "\n"+g.title+":\n")
		require.Greater(t, at, last, g.title)
		last = at
		for _, f := range g.flags {
			assert.Contains(t, r.out[at:], "--"+f.name)
			assert.NotEmpty(t, f.text, f.name)
		}
	}
	// torchrun's own list.
	for _, name := range []string{"nnodes", "nproc-per-node", "rdzv-backend", "rdzv-endpoint", "rdzv-id", "rdzv-conf", "standalone", "max-restarts", "monitor-interval", "start-method",
		"event-log-handler", "role", "module", "no-python", "run-path", "log-dir", "redirects", "tee", "local-ranks-filter", "duplicate-stdout-filters", "duplicate-stderr-filters",
		"node-rank", "master-addr", "master-port", "local-addr", "logs-specs", "numa-binding", "signals-to-handle", "virtual-local-rank"} {
		assert.Contains(t, r.out, "--"+name, name)
	}
	for _, line := range strings.Split(r.out, "\n") {
		assert.LessOrEqual(t, len([]rune(line)), 150, line)
	}
}

func TestRunRefuses(t *testing.T) {
	for _, c := range []struct {
		args []string
		say  string
	}{
		{[]string{}, "no PROGRAM"},
		{[]string{"--nnodes", "0"}, "--nnodes"},
		{[]string{"--nnodes", "3:2", "--rdzv-backend=c10d"}, "MIN:MAX"},
		{[]string{"--nnodes", "1:2"}, "needs --rdzv-backend c10d"},
		{[]string{"--nnodes", "2"}, "--master-addr"},
		{[]string{"--nnodes", "2", "--master-addr", "h", "--node-rank", "2"}, "numbered from 0"},
		{[]string{"--nnodes", "2", "--rdzv-backend", "c10d"}, "--rdzv-endpoint"},
		{[]string{"--nnodes", "2", "--standalone"}, "one node"},
		{[]string{"--nproc-per-node", "many"}, "--nproc-per-node"},
		{[]string{"--nproc-per-node", "xpu"}, "Intel"},
		{[]string{"--rdzv-backend", "etcd"}, "c10d does the same"},
		{[]string{"--rdzv-backend", "carrier"}, "static or c10d"},
		{[]string{"--rdzv-backend", "c10d", "--master-addr", "h"}, "--rdzv-endpoint"},
		{[]string{"--rdzv-conf", "x=1"}, "unknown key"},
		{[]string{"--rdzv-conf", "join_timeout"}, "KEY=VALUE"},
		{[]string{"--rdzv-conf", "join_timeout=-1"}, "seconds"},
		{[]string{"--rdzv-conf", "is_host=perhaps"}, "true or false"},
		{[]string{"--rdzv-conf", "store_type=file"}, "tcp"},
		{[]string{"--max-restarts", "-1"}, "0 or more"},
		{[]string{"--node-rank", "x"}, "0 or more"},
		{[]string{"--master-port", "99999"}, "no port"},
		{[]string{"--monitor-interval", "soon"}, "seconds"},
		{[]string{"--grace", "0"}, "seconds"},
		{[]string{"--stop-grace", "x"}, "seconds"},
		{[]string{"--signals-to-handle", "SIGTERM,SIGNOT"}, "SIGNOT"},
		{[]string{"--signals-to-handle", "SIGKILL"}, "handled"},
		{[]string{"--redirects", "4"}, "RANK:STD"},
		{[]string{"--tee", "0:1,x:2"}, "RANK:STD"},
		{[]string{"--local-ranks-filter", "0,,1"}, "commas"},
		{[]string{"--prefix", "maybe"}, "auto, on or off"},
		{[]string{"--start-method", "thread"}, "forkserver"},
		{[]string{"--event-log-handler", "console"}, "Python"},
		{[]string{"--run-path"}, "no Python interpreter"},
		{[]string{"--logs-specs", "x"}, "Python class"},
		{[]string{"--numa-binding", "node"}, "numactl"},
		{[]string{"--module", "--no-python"}, "exclude"},
		{[]string{"--no-such-flag"}, "unknown flag"},
	} {
		args := c.args
		if len(args) > 0 {
			args = append(slices.Clone(args), self)
		}
		var out, errs bytes.Buffer
		code := run(t.Context(), append([]string{"run"}, args...), stdio{nil, &out, &errs})
		assert.Equal(t, exitUsage, code, "%v", c.args)
		first, _, _ := strings.Cut(errs.String(), "\n")
		assert.Contains(t, first, c.say, "%v", c.args)
	}
	r := goddp(t, "run", "/no/such/program")
	assert.Equal(t, exitError, r.code)
	assert.Contains(t, r.err, "/no/such/program")
}

func TestRunAcceptsTorchrunsHabits(t *testing.T) {
	r := goddp(t, "run", "--start_method=fork", "--monitor_interval=5", "--event-log-handler=null", "--rdzv_conf=timeout=30,join_timeout=30,read_timeout=60,rejoin_timeout=5,last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=4,is_host=1",
		"--rdzv_backend=c10d", "--rdzv_endpoint=localhost:0", "--local_addr=127.0.0.2", "--nnodes=1:1", self, "env")
	require.Zero(t, r.code, r.err)
	assert.Equal(t, "127.0.0.2", environments(t, r.out)[0]["MASTER_ADDR"])
	port := strconv.Itoa(testenv.FreePort(t))
	r = goddp(t, "run", "--rdzv-endpoint", "127.0.0.1:"+port, self, "env")
	require.Zero(t, r.code, r.err)
	assert.Equal(t, port, environments(t, r.out)[0]["MASTER_PORT"])
	r = goddp(t, "run", "--master-addr", "localhost", "--master-port", port, "--node-rank=0", self, "meet")
	require.Zero(t, r.code, r.err)
	r = goddp(t, "run", "--master-addr", "::1", "--nproc-per-node=2", self, "meet")
	if ln, err := net.Listen("tcp", "[::1]:0"); err == nil {
		ln.Close()
		require.Zero(t, r.code, r.err)
	} else {
		assert.NotZero(t, r.code)
		t.Logf("no IPv6 here: %v", err)
	}
}

// Two jobs of one node at the same time do not meet, and each has its own store.
func TestRunStandaloneJobsDoNotMeet(t *testing.T) {
	var ps []*process
	for _, flags := range [][]string{{"--standalone"}, {"--standalone"}, {}, {"--rdzv-backend=c10d"}} {
		ps = append(ps, startGoddp(t, nil, append(append([]string{"run", "--nproc-per-node=3"}, flags...), self, "meet")...))
	}
	for _, p := range ps {
		r := p.wait()
		require.Zero(t, r.code, r.err)
		assert.Equal(t, 3, strings.Count(r.out, "met "), r.out)
	}

	ln, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer ln.Close()
	r := goddp(t, "run", "--master-port", strconv.Itoa(ln.Addr().(*net.TCPAddr).Port), self, "meet")
	assert.Equal(t, exitError, r.code)
	assert.Contains(t, r.err, "is taken by another process")
}

func TestRunPrograms(t *testing.T) {
	dir := t.TempDir()
	script := filepath.Join(dir, "w.sh")
	require.NoError(t, os.WriteFile(script, []byte("#!/bin/sh\necho script $RANK $*\n"), 0o755))
	r := goddp(t, "run", script, "--flag", "x")
	require.Zero(t, r.code, r.err)
	assert.Equal(t, "script 0 --flag x\n", r.out)
	r = goddp(t, "run", "sh", "-c", "echo by path $WORLD_SIZE")
	require.Zero(t, r.code, r.err)
	assert.Equal(t, "by path 1\n", r.out)

	// A package of a module is built once, wherever it lies.
	require.NoError(t, os.WriteFile(filepath.Join(dir, "go.mod"), []byte("module example.com/m\n\ngo 1.24\n"), 0o644))
	require.NoError(t, os.Mkdir(filepath.Join(dir, "prog"), 0o755))
	require.NoError(t, os.WriteFile(filepath.Join(dir, "prog", "main.go"), []byte("package main\n\nimport (\n\t\"fmt\"\n\t\"os\"\n)\n\nfunc main() { fmt.Println(\"go\", os.Getenv(\"RANK\"), os.Args[1:]) }\n"), 0o644))
	for _, name := range []string{"./prog", "prog", "./prog/main.go", "example.com/m/prog", filepath.Join(dir, "prog")} {
		p := exec.Command(self, "run", "--nproc-per-node=2", "--prefix=off", name, "arg")
		p.Dir = dir
		p.Env = append(cleanEnv(), roleVar+"=goddp", "GOWORK=off", "GOFLAGS=-mod=mod")
		out, err := p.CombinedOutput()
		require.NoError(t, err, "%s: %s", name, out)
		assert.Contains(t, string(out), "go 0 [arg]\n", name)
		assert.Contains(t, string(out), "go 1 [arg]\n", name)
	}
	require.NoError(t, os.WriteFile(filepath.Join(dir, "prog", "main.go"), []byte("package main\n\nfunc main() { nonsense }\n"), 0o644))
	r = goddpEnv(t, []string{"GOWORK=off"}, "run", filepath.Join(dir, "prog"))
	assert.Equal(t, exitError, r.code)
	assert.Contains(t, r.err, "undefined: nonsense")
}

func TestRunPythonPrograms(t *testing.T) {
	python := testenv.Python(t)
	dir := t.TempDir()
	file := filepath.Join(dir, "train.py")
	require.NoError(t, os.WriteFile(file, []byte("import os, sys; print('py', os.environ['RANK'], sys.argv[1:])\n"), 0o755))
	env := []string{"PYTHON_EXEC=" + python, "PYTHONPATH=" + dir}
	for _, args := range [][]string{{file, "a"}, {"--module", "train", "a"}, {"-m", "train", "a"}, {python, file, "a"}} {
		r := goddpEnv(t, env, append([]string{"run", "--nproc-per-node=2"}, args...)...)
		require.Zero(t, r.code, r.err)
		for i := range 2 {
			assert.Contains(t, r.out, fmt.Sprintf("[rank%d] py %d ['a']\n", i, i), "%v", args)
		}
	}
	for arg, want := range map[string]string{"--pass-local-rank-arg": "--local_rank", "--pass_local_rank_arg=local-rank": "--local-rank"} {
		for _, program := range [][]string{{file}, {python, "-u", file}} {
			r := goddpEnv(t, env, append(append([]string{"run", "--nproc-per-node=2", arg}, program...), "a")...)
			require.Zero(t, r.code, r.err)
			assert.Contains(t, r.out, fmt.Sprintf("[rank1] py 1 ['%s=1', 'a']\n", want), "%v", program)
		}
	}
	// What Python's @record writes is shown, stack and all.
	failing := filepath.Join(dir, "failing.py")
	require.NoError(t, os.WriteFile(failing, []byte("from torch.distributed.elastic.multiprocessing.errors import record\n@record\ndef main():\n    raise ValueError('no such layer')\nmain()\n"), 0o644))
	rec := goddpEnv(t, env, "run", failing)
	assert.Equal(t, 1, rec.code)
	assert.Contains(t, rec.err, "error     : ValueError: no such layer")
	assert.Contains(t, rec.err, "stack     :\n")
	assert.Contains(t, rec.err, "failing.py\", line 4, in main")

	// Not taken for Python: the system runs it, and has no interpreter line to go by.
	r := goddpEnv(t, env, "run", "--no-python", file)
	assert.Equal(t, exitError, r.code)
	assert.Contains(t, r.err, "exec format error")
}

func TestRunPassesLocalRank(t *testing.T) {
	r := goddp(t, "run", "--nproc-per-node=2", "--pass-local-rank-arg", "sh", "-c", "echo $0 $1", "x")
	require.NotZero(t, r.code) // sh does not know the argument
	r = goddp(t, "run", "--nproc-per-node=2", "--pass-local-rank-arg", "echo", "x")
	require.Zero(t, r.code, r.err)
	assert.Contains(t, r.out, "[rank1] --local_rank=1 x\n")
}

func TestRunVirtualLocalRank(t *testing.T) {
	r := goddpEnv(t, []string{"CUDA_VISIBLE_DEVICES=4,6"}, "run", "--nproc-per-node=2", "--virtual-local-rank", self, "env")
	require.Zero(t, r.code, r.err)
	envs := environments(t, r.out)
	for i, want := range []string{"4", "6"} {
		assert.Equal(t, []string{"0", want}, []string{envs[i]["LOCAL_RANK"], envs[i]["CUDA_VISIBLE_DEVICES"]})
	}
	r = goddpEnv(t, []string{"CUDA_VISIBLE_DEVICES=4"}, "run", "--nproc-per-node=2", "--virtual-local-rank", self, "env")
	assert.NotZero(t, r.code)
	assert.Contains(t, r.err, "local rank 1 has no GPU")
}

func TestRunOutput(t *testing.T) {
	logs := func(dir, name string) string {
		found, err := filepath.Glob(filepath.Join(dir, "job_*", "attempt_0", name))
		require.NoError(t, err)
		if len(found) != 1 {
			return "none"
		}
		data, err := os.ReadFile(found[0])
		require.NoError(t, err)
		return string(data)
	}
	base := []string{"run", "--nproc-per-node=3", "--rdzv-id=job"}
	with := func(dir string, flags ...string) result {
		r := goddp(t, slices.Concat(base, []string{"--log-dir", dir}, flags, []string{self, "say"})...)
		require.Zero(t, r.code, r.err)
		return r
	}
	dir := t.TempDir()
	r := with(dir, "--redirects", "0:3,1:1")
	assert.NotContains(t, r.out+r.err, "[rank0]")
	assert.Contains(t, r.err, "[rank1] err 1\n")
	assert.NotContains(t, r.out, "out 1")
	assert.Contains(t, r.out, "[rank2] out 2\n")
	assert.Equal(t, []string{"out 0\n", "err 0\n", "out 1\n", "none"}, []string{logs(dir, "0/stdout.log"), logs(dir, "0/stderr.log"), logs(dir, "1/stdout.log"), logs(dir, "1/stderr.log")})

	dir = t.TempDir()
	r = with(dir, "-t", "3", "--local-ranks-filter", "0,2", "--duplicate-stdout-filters", "out 1,out 2", "--duplicate-stderr-filters", "err 0")
	assert.Contains(t, r.out, "[rank0] out 0\n")
	assert.Contains(t, r.err, "[rank2] err 2\n")
	assert.NotContains(t, r.out+r.err, "[rank1]")
	assert.Equal(t, "out 1\n", logs(dir, "1/stdout.log"))
	assert.Equal(t, "[rank0] err 0\n", logs(dir, "filtered_stderr.log"))
	picked := logs(dir, "filtered_stdout.log")
	assert.Contains(t, picked, "out 1\n")
	assert.Contains(t, picked, "out 2\n")
	assert.NotContains(t, picked, "out 0")

	r = goddp(t, append(base, "-r", "1", self, "say")...) // without --log-dir, in a temporary folder
	require.Zero(t, r.code)
	assert.NotContains(t, r.out, "out")
	_, kept, ok := strings.Cut(r.err, "folder=")
	require.True(t, ok, r.err)
	kept, _, _ = strings.Cut(kept, "\n")
	defer os.RemoveAll(kept)
	data, err := os.ReadFile(filepath.Join(kept, "attempt_0", "2", "stdout.log"))
	require.NoError(t, err)
	assert.Equal(t, "out 2\n", string(data))
	r = goddp(t, append(base, "--prefix", "off", self, "say")...)
	assert.Contains(t, "\n"+r.out, "\nout 1\n")
	r = goddpEnv(t, []string{"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE=<${role_name} ${rank}/${local_rank}>:"}, append(base, self, "say")...)
	assert.Contains(t, r.out, "<default 1/1>:out 1\n")
	r = goddp(t, "run", "--prefix", "on", "-v", self, "say")
	assert.Contains(t, r.out, "[rank0] out 0\n")
	assert.Contains(t, r.err, "starting the workers")
}

func TestRunDry(t *testing.T) {
	r := goddp(t, "run", "--dry-run", "--nproc-per-node=2", "--pass-local-rank-arg", "/no/such/program", "x")
	require.Zero(t, r.code, r.err)
	assert.Contains(t, r.out, "LOCAL_RANK=1 ")
	assert.Contains(t, r.out, "/no/such/program --local_rank=1 x\n")
}

func TestRunExitStatusIsTheRootCauses(t *testing.T) {
	r := goddp(t, "run", "--nproc-per-node=3", self, "exit", "7", "2")
	assert.Equal(t, 7, r.code)
	for _, say := range []string{"Root cause (first failure)", "rank      : 2 (local rank 2, world size 3)", "exit      : exit code 7", "error     : exiting with 7", "host      : ", "pid       : ", "time      : 20"} {
		assert.Contains(t, r.err, say)
	}
	assert.NotContains(t, r.err, "Other failures", "those that the launcher ended are no failures")

	r = goddp(t, "run", "--nproc-per-node=2", self, "crash", "1")
	assert.Equal(t, 128+9, r.code)
	assert.Contains(t, r.err, "SIGKILL")

	dir := t.TempDir()
	r = goddp(t, "run", "--nproc-per-node=2", "--log-dir", dir, self, "record")
	assert.Equal(t, 2, r.code)
	assert.Contains(t, r.err, "error     : panic: index 7 out of range")
	assert.Contains(t, r.err, "run_test.go", "the stack of the panic")
	assert.Contains(t, r.err, "error.json")
	files, _ := filepath.Glob(filepath.Join(dir, "*", "attempt_0", "1", "error.json"))
	require.Len(t, files, 1)
	recorded, err := launch.ReadErrorFile(files[0])
	require.NoError(t, err)
	assert.Equal(t, "panic: index 7 out of range", recorded.Message)

	// A launcher under another one reports in the same way.
	file := filepath.Join(t.TempDir(), "error.json")
	r = goddpEnv(t, []string{"TORCHELASTIC_ERROR_FILE=" + file}, "run", self, "exit", "5", "0")
	assert.Equal(t, 5, r.code)
	recorded, err = launch.ReadErrorFile(file)
	require.NoError(t, err)
	assert.Contains(t, recorded.Message, "exit code 5")
}

func TestRunRestarts(t *testing.T) {
	r := goddp(t, "run", "-v", "--nproc-per-node=2", "--max-restarts=3", "--grace=1", self, "exit", "7", "1", "2")
	require.Zero(t, r.code, r.err)
	assert.Equal(t, 2, strings.Count(r.err, "restarting all workers"))
	r = goddp(t, "run", "--nproc-per-node=2", "--max-restarts=2", self, "exit", "7", "1")
	assert.Equal(t, 7, r.code)
	assert.Contains(t, r.err, "failed after 2 restarts")
	assert.Equal(t, 3, strings.Count(r.err, "[rank1] exiting with 7"))
}

func TestRunSignals(t *testing.T) {
	for _, c := range []struct {
		name string
		sig  syscall.Signal
		args []string
		code int
		say  string
	}{
		{"ends workers", syscall.SIGTERM, []string{self, "sleep"}, 128 + 15, ""},
		{"interrupt", syscall.SIGINT, []string{self, "sleep"}, 128 + 2, ""},
		{"time to save", syscall.SIGTERM, []string{self, "save"}, launch.ExitResume, "saved on terminated"},
		{"preemption", syscall.SIGUSR1, []string{self, "save"}, launch.ExitResume, "saved on user defined signal 1"},
		{"preemption without a handler", syscall.SIGUSR1, []string{"sh", "-c", "echo ready $$; sleep 60; true"}, 128 + 10, ""},
		{"a chosen signal", syscall.SIGUSR2, []string{"--signals-to-handle=SIGUSR2", self, "save"}, launch.ExitResume, "saved on user defined signal 2"},
		{"killed after the grace time", syscall.SIGTERM, []string{"--stop-grace=0.3", self, "stubborn"}, 128 + 15, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			p := startGoddp(t, nil, append([]string{"run", "--nproc-per-node=2"}, c.args...)...)
			ready := p.until("ready", 2)
			time.Sleep(50 * time.Millisecond)
			require.NoError(t, p.cmd.Process.Signal(c.sig))
			r := p.wait()
			assert.Equal(t, c.code, r.code, r.err)
			assert.Contains(t, r.out, c.say)
			for _, line := range ready {
				gone(t, line)
			}
		})
	}
}

// gone waits for the end of the process whose number stands at the end of a line.
func gone(t *testing.T, line string) {
	t.Helper()
	fields := strings.Fields(line)
	pid := fields[len(fields)-1]
	deadline := time.Now().Add(5 * time.Second)
	for {
		data, err := os.ReadFile("/proc/" + pid + "/stat")
		if err != nil {
			return
		}
		if state := strings.Fields(string(data[bytes.LastIndexByte(data, ')')+1:])); state[0] == "Z" || state[0] == "X" {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("process %s is still there (%s)", pid, line)
		}
		time.Sleep(5 * time.Millisecond)
	}
}

// A launcher that is killed leaves nothing behind, not even what workers have started.
func TestRunKilledLeavesNoOrphans(t *testing.T) {
	p := startGoddp(t, nil, "run", "--nproc-per-node=2", self, "stubborn")
	ready := p.until("ready", 4)
	require.NoError(t, p.cmd.Process.Kill())
	p.cmd.Wait()
	for _, line := range ready {
		gone(t, line)
	}
}

func TestRunSmallThings(t *testing.T) {
	assert.Equal(t, []string{"a,b", "c"}, words("a,,b,c"))
	for text, want := range map[string]bool{"./x": false, "example.com/x": true, "ls": false, "/bin/ls": false, ".": true, "x.go": true, "a/b": false} {
		_, is := goPackage(text)
		assert.Equal(t, want, is, text)
	}
}

// What deploy/ shows is what this program understands.
func TestDeployFilesHaveFlagsThatExist(t *testing.T) {
	files, err := filepath.Glob("../../deploy/*/*")
	require.NoError(t, err)
	seen := 0
	for _, file := range files {
		data, err := os.ReadFile(file)
		require.NoError(t, err)
		text := strings.ReplaceAll(string(data), "\\\n", " ")
		if strings.HasSuffix(file, ".sbatch") {
			out, err := exec.Command("bash", "-n", file).CombinedOutput()
			require.NoError(t, err, "%s", out)
		}
		var calls [][]string
		for line := range strings.Lines(text) {
			if _, args, ok := strings.Cut(line, "goddp run "); ok && strings.HasSuffix(file, ".sbatch") && !strings.HasPrefix(line, "#") {
				calls = append(calls, strings.Fields(strings.NewReplacer(`"`, "", "$min", "2", "$SLURM_JOB_NUM_NODES", "4", "$port", "29400").Replace(args)))
			}
			if _, args, ok := strings.Cut(line, `["goddp", "run", `); ok {
				calls = append(calls, strings.Fields(strings.NewReplacer(`"`, "", ",", "", "]", "").Replace(args)))
			}
		}
		if strings.Contains(text, "args:\n") {
			_, after, _ := strings.Cut(text, "args:\n")
			var args []string
			for line := range strings.Lines(after) {
				arg, ok := strings.CutPrefix(strings.TrimSpace(line), "- ")
				if ok && !strings.HasPrefix(arg, "containerPort") {
					args = append(args, strings.Trim(arg, `"`))
				} else if !strings.HasPrefix(strings.TrimSpace(line), "#") {
					break
				}
			}
			calls = append(calls, args)
		}
		for _, args := range calls {
			seen++
			f := pflag.NewFlagSet("run", pflag.ContinueOnError)
			f.SetInterspersed(false)
			o := &runOptions{}
			o.addTo(f)
			require.NoError(t, f.Parse(args), "%s: %v", file, args)
			require.NoError(t, o.fromEnv(f, func(string) (string, bool) { return "", false }))
			o.nproc = "1" // no GPU is needed to read the flags
			_, err := o.elastic()
			require.NoError(t, err, "%s: %v", file, args)
			require.NotEmpty(t, f.Args(), "%s: %v", file, args)
		}
	}
	assert.Equal(t, 5, seen, "calls of goddp run in deploy/")
}

// What Kubeflow's operator sets for an elastic job.
func TestRunTakesTheOperatorsVariables(t *testing.T) {
	env := map[string]string{"PET_RDZV_BACKEND": "c10d", "PET_RDZV_ENDPOINT": "train-worker-0:29400", "PET_RDZV_ID": "train", "PET_NNODES": "2:4", "PET_NPROC_PER_NODE": "3",
		"PET_MAX_RESTARTS": "10", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "train-worker-0", "PET_MASTER_PORT": "23456"}
	f := pflag.NewFlagSet("run", pflag.ContinueOnError)
	o := &runOptions{}
	o.addTo(f)
	require.NoError(t, o.fromEnv(f, func(name string) (string, bool) { v, ok := env[name]; return v, ok }))
	e, err := o.elastic()
	require.NoError(t, err)
	assert.Equal(t, []any{2, 4, 3, 10, "train-worker-0:29400", false}, []any{e.MinNodes, e.MaxNodes, e.Workers, e.MaxRestarts, e.Endpoint, e.Static})
}
