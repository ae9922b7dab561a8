package main

import (
	"bytes"
	"fmt"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/goddp/goddp/internal/testenv"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// network is several nodes on this machine: network namespaces on one bridge, each with an interface eth0.
type network struct {
	t     *testing.T
	names []string
	addrs []string
}

var networks int

// newNetwork makes n nodes, or skips the test where that is not permitted.
func newNetwork(t *testing.T, n int) *network {
	t.Helper()
	if _, err := exec.LookPath("ip"); err != nil {
		t.Skip("network namespaces need the program ip (iproute2), which is not installed")
	}
	networks++
	base := fmt.Sprintf("gd%d-%d", os.Getpid(), networks)
	nw := &network{t: t}
	hub := base + "-hub"
	t.Cleanup(func() {
		for _, name := range append(nw.names, hub) {
			exec.Command("ip", "netns", "del", name).Run()
		}
	})
	first := true
	ip := func(args ...string) {
		t.Helper()
		out, err := exec.Command("ip", args...).CombinedOutput()
		if err != nil && first {
			t.Skipf("network namespaces are not permitted here (root and CAP_SYS_ADMIN are needed): ip %s: %s", strings.Join(args, " "), bytes.TrimSpace(out))
		}
		first = false
		require.NoError(t, err, "ip %s: %s", strings.Join(args, " "), out)
	}
	ip("netns", "add", hub)
	ip("-n", hub, "link", "add", "br0", "type", "bridge")
	ip("-n", hub, "link", "set", "br0", "up")
	for i := range n {
		name := fmt.Sprintf("%s-%d", base, i)
		nw.names = append(nw.names, name)
		nw.addrs = append(nw.addrs, fmt.Sprintf("10.77.0.%d", i+1))
		ip("netns", "add", name)
		ip("-n", name, "link", "set", "lo", "up")
		ip("-n", hub, "link", "add", fmt.Sprint("p", i), "type", "veth", "peer", "name", "eth0", "netns", name)
		ip("-n", name, "addr", "add", nw.addrs[i]+"/24", "dev", "eth0")
		ip("-n", name, "link", "set", "eth0", "up")
		ip("-n", hub, "link", "set", fmt.Sprint("p", i), "master", "br0", "up")
	}
	return nw
}

// link takes a node's cable out, or puts it in again.
func (nw *network) link(i int, state string) {
	out, err := exec.Command("ip", "-n", nw.names[i], "link", "set", "eth0", state).CombinedOutput()
	require.NoError(nw.t, err, "%s", out)
}

// start starts goddp on a node.
func (nw *network) start(i int, args ...string) *process {
	nw.t.Helper()
	return startIn(nw.t, []string{"ip", "netns", "exec", nw.names[i]}, []string{"GLOO_SOCKET_IFNAME=eth0"}, args...)
}

// quick are short times for a rendezvous, and still long against the pauses of a busy machine.
const quick = "--rdzv-conf=join_timeout=40,last_call_timeout=1,keep_alive_interval=0.5,keep_alive_max_attempt=4,rejoin_timeout=30"

func (nw *network) elastic(nodes, restarts string, program ...string) []string {
	return append([]string{"run", "-v", "--nnodes", nodes, "--nproc-per-node=2", "--rdzv-backend=c10d", "--rdzv-endpoint=" + nw.addrs[0] + ":29400", "--rdzv-id=job",
		"--max-restarts", restarts, quick, "--grace=1", "--stop-grace=2"}, program...)
}

func TestNodesMeet(t *testing.T) {
	nw := newNetwork(t, 3)
	for _, static := range []bool{false, true} {
		var ps []*process
		for i := range 3 {
			args := nw.elastic("3", "0", self, "env")
			if static {
				args = []string{"run", "--nnodes=3", "--nproc-per-node=2", "--master-addr", nw.addrs[0], "--master-port=29517", "--node-rank", strconv.Itoa(i), self, "env"}
			}
			ps = append(ps, nw.start(i, args...))
		}
		for i, p := range ps {
			r := p.wait()
			require.Zero(t, r.code, r.err)
			envs := environments(t, r.out)
			require.Len(t, envs, 2)
			for j, e := range envs {
				assert.Equal(t, nw.addrs[0], e["MASTER_ADDR"], "an address is used as it was given")
				assert.Equal(t, []string{"6", "3", strconv.Itoa(j)}, []string{e["WORLD_SIZE"], e["GROUP_WORLD_SIZE"], e["LOCAL_RANK"]})
				if static {
					assert.Equal(t, []string{strconv.Itoa(i), strconv.Itoa(2*i + j), "29517"}, []string{e["GROUP_RANK"], e["RANK"], e["MASTER_PORT"]})
				}
			}
		}
	}
	var ps []*process
	for i := range 3 {
		ps = append(ps, nw.start(i, nw.elastic("3", "0", self, "meet")...))
	}
	for _, p := range ps {
		r := p.wait()
		require.Zero(t, r.code, r.err)
		assert.Equal(t, 2, strings.Count(r.out, "met "))
	}
}

// All nodes end with the root cause's exit code and name it, whichever node it was on.
func TestNodesAgreeOnTheRootCause(t *testing.T) {
	nw := newNetwork(t, 2)
	ps := []*process{nw.start(0, nw.elastic("2", "1", self, "exit", "9", "3")...), nw.start(1, nw.elastic("2", "1", self, "exit", "9", "3")...)}
	for _, p := range ps {
		r := p.wait()
		assert.Equal(t, 9, r.code, r.err)
		assert.Contains(t, r.err, "failed after 1 restarts")
		assert.Contains(t, r.err, "rank      : 3 (local rank 1, world size 4)")
		assert.Contains(t, r.err, "exiting with 9")
	}
}

func TestNodesThatDoNotBelongTogether(t *testing.T) {
	nw := newNetwork(t, 2)
	a := nw.start(0, nw.elastic("2", "0", self, "meet")...)
	args := nw.elastic("2", "0", self, "meet")
	for i := range args {
		args[i] = strings.Replace(args[i], "--rdzv-id=job", "--rdzv-id=another", 1)
	}
	r := nw.start(1, args...).wait()
	assert.Equal(t, exitError, r.code)
	assert.Contains(t, r.err, `it has --rdzv-id "job", this node "another"`)
	r = nw.start(1, nw.elastic("3", "0", self, "meet")...).wait()
	assert.Equal(t, exitError, r.code)
	assert.Contains(t, r.err, "--nnodes 3:3")
	require.NoError(t, a.cmd.Process.Signal(syscall.SIGTERM))
	assert.Equal(t, 128+15, a.wait().code)
	r = nw.start(1, "run", "--nnodes=2", "--rdzv-backend=c10d", "--rdzv-endpoint", nw.addrs[0]+":29400", "--rdzv-conf=join_timeout=0.5", self, "meet").wait()
	assert.Equal(t, exitError, r.code)
	assert.Contains(t, r.err, "cannot join the rendezvous at 10.77.0.1:29400")
}

// trainer builds the program that trains (launch/testdata/elastic), once.
func trainer(t *testing.T) string {
	t.Helper()
	trainerOnce.Do(func() {
		if out, err := exec.Command("go", "env", "GOWORK").Output(); err != nil || len(bytes.TrimSpace(out)) == 0 || strings.TrimSpace(string(out)) == "off" {
			trainerSkip = "libtorch is not set up here (no go.work): run `make setup`"
			return
		}
		dir, err := os.MkdirTemp("", "goddp-test-*")
		require.NoError(t, err)
		trainerPath = filepath.Join(dir, "trainer")
		out, err := exec.Command("go", "build", "-o", trainerPath, "../../launch/testdata/elastic").CombinedOutput()
		require.NoError(t, err, "%s", out)
	})
	if trainerSkip != "" {
		t.Skip(trainerSkip)
	}
	return trainerPath
}

var (
	trainerOnce              sync.Once
	trainerPath, trainerSkip string
)

var finals = regexp.MustCompile(`(?m)^.*final (\S+) (.*)$`)

// weights are the final ones that a run printed.
func weights(t *testing.T, out string) map[string][]float64 {
	t.Helper()
	w := map[string][]float64{}
	for _, m := range finals.FindAllStringSubmatch(out, -1) {
		for hex := range strings.FieldsSeq(m[2]) {
			bits, err := strconv.ParseUint(hex, 16, 32)
			require.NoError(t, err)
			w[m[1]] = append(w[m[1]], float64(math.Float32frombits(uint32(bits))))
		}
	}
	require.Len(t, w, 2, out)
	require.Len(t, w["weight"], 20, out)
	return w
}

// uninterrupted are the weights after so many steps of so many ranks, with nothing going wrong.
func uninterrupted(t *testing.T, ranks, steps int) map[string][]float64 {
	t.Helper()
	r := goddpEnv(t, []string{"GLOO_SOCKET_IFNAME=lo"}, "run", "--nproc-per-node", strconv.Itoa(ranks), trainer(t), "--steps", strconv.Itoa(steps), "--snapshot", filepath.Join(t.TempDir(), "s.pt"))
	require.Zero(t, r.code, r.err)
	return weights(t, r.out)
}

// near compares weights of runs with different numbers of ranks, whose sums have other roundings.
func near(t *testing.T, want, got map[string][]float64) {
	t.Helper()
	for name := range want {
		assert.InDeltaSlice(t, want[name], got[name], 1e-5, name)
	}
}

func restartsBefore(t *testing.T) int {
	if os.Getenv("GODDP_LONG") != "" {
		return 100
	}
	t.Log("5 restarts; with GODDP_LONG=1 there are 100")
	return 5
}

// A worker dies again and again, and every time all go on from the snapshot: the end is the very one of a run that nothing happened to.
func TestEveryRestartWorks(t *testing.T) {
	restarts := restartsBefore(t)
	want := uninterrupted(t, 2, restarts+3)
	var die []string
	for a := range restarts {
		die = append(die, fmt.Sprintf("%d:%d:%d", a%2, a+1, a))
	}
	p := startGoddp(t, []string{"GLOO_SOCKET_IFNAME=lo"}, "run", "-v", "--nproc-per-node=2", "--rdzv-backend=c10d", "--grace=1", "--max-restarts", strconv.Itoa(restarts), trainer(t),
		"--steps", strconv.Itoa(restarts+3), "--snapshot", filepath.Join(t.TempDir(), "s.pt"), "--die", strings.Join(die, ","))
	r := p.waitFor(time.Duration(restarts+6) * 10 * time.Second)
	require.Zero(t, r.code, r.err)
	assert.Equal(t, restarts, strings.Count(r.err, "restarting all workers"), "no attempt failed for another reason")
	assert.Equal(t, want, weights(t, r.out))
}

// The same over two nodes, where each loses its worker once, and with a static rendezvous, whose port stays. Two ranks in all: with more, the bits depend on
// DDP's buckets, which are laid out anew after the first step of each attempt.
func TestRestartOverTwoNodes(t *testing.T) {
	nw := newNetwork(t, 2)
	want := uninterrupted(t, 2, 8)
	for _, static := range []bool{false, true} {
		snap := filepath.Join(t.TempDir(), "s.pt")
		var ps []*process
		for i := range 2 {
			program := []string{trainer(t), "--steps=8", "--snapshot", snap, "--die", "1:2:0,0:5:1"}
			args := nw.elastic("2", "2", append([]string{"--nproc-per-node=1"}, program...)...)
			if static {
				args = append([]string{"run", "-v", "--nnodes=2", "--master-addr", nw.addrs[0], "--node-rank", strconv.Itoa(i), "--max-restarts=2", "--grace=1"}, program...)
			}
			ps = append(ps, nw.start(i, args...))
		}
		r := ps[0].wait()
		require.Zero(t, r.code, r.err)
		assert.Equal(t, 2, strings.Count(r.err, "restarting all workers"))
		assert.Equal(t, want, weights(t, r.out))
		r = ps[1].wait()
		require.Zero(t, r.code, r.err)
	}
}

// One of two launchers is killed: the other goes on alone from the snapshot. Then another one joins, and the work is shared again.
func TestNodeLossAndGrowth(t *testing.T) {
	nw := newNetwork(t, 2)
	const steps = 45
	snap := filepath.Join(t.TempDir(), "s.pt")
	program := []string{trainer(t), "--steps", strconv.Itoa(steps), "--snapshot", snap, "--pause=100ms"}
	a, b := nw.start(0, nw.elastic("1:2", "1", program...)...), nw.start(1, nw.elastic("1:2", "1", program...)...)
	a.until("begin step 0 rank 0 world 4", 1)
	a.until("step 4 done", 1)
	require.NoError(t, b.cmd.Process.Kill())
	b.cmd.Wait()
	a.until("world 2 attempt 1", 2)
	a.until("step 15 done", 1)
	late := nw.start(1, nw.elastic("1:2", "1", program...)...)
	late.until("world 4 attempt 1", 2) // growth is no restart
	r := a.waitFor(90 * time.Second)
	require.Zero(t, r.code, r.err)
	assert.Contains(t, r.err, "its connection ended")
	near(t, uninterrupted(t, 4, steps), weights(t, r.out))
	r = late.wait()
	require.Zero(t, r.code, r.err)
}

// A node's cable is pulled: nobody closes a connection, and both sides notice by themselves. The one that was cut off stops its workers, and joins again
// when the cable is back.
func TestLinkCut(t *testing.T) {
	nw := newNetwork(t, 2)
	const steps = 50
	snap := filepath.Join(t.TempDir(), "s.pt")
	program := []string{trainer(t), "--steps", strconv.Itoa(steps), "--snapshot", snap, "--pause=100ms"}
	a, b := nw.start(0, nw.elastic("1:2", "1", program...)...), nw.start(1, nw.elastic("1:2", "1", program...)...)
	a.until("step 3 done", 1)
	nw.link(1, "down")
	a.until("world 2 attempt 1", 2)
	a.until("step 12 done", 1)
	nw.link(1, "up")
	b.until("world 4 attempt 1", 2)
	r := a.waitFor(90 * time.Second)
	require.Zero(t, r.code, r.err)
	assert.Contains(t, r.err, "nothing was heard from it")
	near(t, uninterrupted(t, 4, steps), weights(t, r.out))
	r = b.wait()
	require.Zero(t, r.code, r.err)
	assert.Contains(t, r.err, "looking for the rendezvous's host again")
}

// The host itself is killed: the others stop their workers and look for it, and when something starts it again the job goes on.
func TestHostLoss(t *testing.T) {
	nw := newNetwork(t, 2)
	file := filepath.Join(t.TempDir(), "go")
	args := nw.elastic("2", "3", self, "sleepmeet", file)
	a, b := nw.start(0, args...), nw.start(1, args...)
	a.until("ready", 2)
	workers := b.until("ready", 2)
	require.NoError(t, a.cmd.Process.Kill())
	a.cmd.Wait()
	for _, line := range workers {
		gone(t, line)
	}
	require.NoError(t, os.WriteFile(file, nil, 0o644))
	for _, p := range []*process{nw.start(0, args...), b} {
		r := p.wait()
		require.Zero(t, r.code, r.err)
		assert.Equal(t, 2, strings.Count(r.out, "met "))
	}

	// Nobody starts it again.
	args = nw.elastic("2", "3", self, "sleep")
	for i := range args {
		args[i] = strings.Replace(args[i], "rejoin_timeout=30", "rejoin_timeout=1", 1)
	}
	a, b = nw.start(0, args...), nw.start(1, args...)
	b.until("ready", 2)
	require.NoError(t, a.cmd.Process.Kill())
	a.cmd.Wait()
	r := b.wait()
	assert.Equal(t, exitError, r.code)
	assert.Contains(t, r.err, "cannot join the rendezvous at 10.77.0.1:29400")
}

// A node that is told to go saves and leaves; the rest go on without it, and that is no failure.
func TestNodeLeaves(t *testing.T) {
	nw := newNetwork(t, 2)
	a, b := nw.start(0, nw.elastic("1:2", "0", self, "save")...), nw.start(1, nw.elastic("1:2", "0", self, "save")...)
	a.until("ready", 2)
	b.until("ready", 2)
	require.NoError(t, b.cmd.Process.Signal(syscall.SIGTERM))
	r := b.wait()
	assert.Equal(t, 75, r.code, r.err)
	a.until("ready", 4)
	require.NoError(t, a.cmd.Process.Signal(syscall.SIGUSR1))
	r = a.wait()
	assert.Equal(t, 75, r.code, r.err)
}

// Go programs under Python's torchrun, and Python programs under goddp run: the same job, on two nodes, with a restart.
func TestNodesWithPython(t *testing.T) {
	if testing.Short() {
		t.Skip("starts Python's torchrun several times: not with -short")
	}
	python := testenv.Python(t)
	nw := newNetwork(t, 2)
	script := filepath.Join(t.TempDir(), "w.py")
	require.NoError(t, os.WriteFile(script, []byte(`
import os, sys, torch, torch.distributed as dist
if os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    sys.exit(5)
dist.init_process_group("gloo")
t = torch.ones(1); dist.all_reduce(t)
print("sum", int(t.item()), flush=True)
dist.destroy_process_group()
`), 0o644))
	start := func(i int, torchrun bool, program ...string) *process {
		// In a namespace Python's torchrun does not see that the endpoint's address is its own.
		flags := []string{"--rdzv-conf=is_host=" + strconv.FormatBool(i == 0), "--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d", "--rdzv-endpoint=" + nw.addrs[0] + ":29400", "--rdzv-id=mix", "--max-restarts=1", "--monitor-interval=0.1"}
		if !torchrun {
			return nw.start(i, append(append([]string{"run", "--local-addr", nw.addrs[i]}, flags...), program...)...)
		}
		p := &process{t: t, out: &syncBuffer{}, err: &syncBuffer{}}
		args := append([]string{"netns", "exec", nw.names[i], python, "-m", "torch.distributed.run", "--no-python", "--local-addr", nw.addrs[i]}, flags...)
		p.cmd = exec.Command("ip", append(args, program...)...)
		p.cmd.Env = append(cleanEnv(), roleVar+"=worker", "GLOO_SOCKET_IFNAME=eth0", "OMP_NUM_THREADS=1")
		p.cmd.Stdout, p.cmd.Stderr = p.out, p.err
		require.NoError(t, p.cmd.Start())
		t.Cleanup(func() { p.cmd.Process.Kill() })
		return p
	}
	for _, c := range []struct {
		name     string
		torchrun bool
		program  []string
		say      string
	}{
		{"Go under torchrun", true, []string{self, "failmeet", filepath.Join(t.TempDir(), "failed")}, "met "},
		{"Go training under torchrun", true, []string{trainer(t), "--steps=3", "--snapshot", filepath.Join(t.TempDir(), "s.pt")}, "begin step 0"},
		{"Go under goddp", false, []string{self, "failmeet", filepath.Join(t.TempDir(), "failed")}, "met "},
		{"Python under goddp", false, []string{python, script}, "sum 2"},
	} {
		t.Run(c.name, func(t *testing.T) {
			ps := []*process{start(0, c.torchrun, c.program...), start(1, c.torchrun, c.program...)}
			for _, p := range ps {
				p.t = t
				r := p.waitFor(120 * time.Second)
				require.Zero(t, r.code, r.err)
				assert.Contains(t, r.out, c.say)
			}
		})
	}
}

// 64 workers start, meet and finish on this machine.
func TestManyWorkers(t *testing.T) {
	r := goddp(t, "run", "--nproc-per-node=64", self, "meet")
	require.Zero(t, r.code, r.err)
	assert.Equal(t, 64, strings.Count(r.out, "met "))
}
