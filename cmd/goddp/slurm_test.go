package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/goddp/goddp/internal/testenv"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// slurm is a cluster of two nodes on this machine: Slurm's own daemons, each node in namespaces of its own.
type slurm struct {
	t       *testing.T
	network *network
	dir     string // configuration, state and logs
	work    string // where jobs are submitted, with the programs
	stops   []func()
}

// in is the cluster for a subtest.
func (s *slurm) in(t *testing.T) *slurm {
	c := *s
	c.t = t
	return &c
}

const slurmConf = `ClusterName=goddp
SlurmctldHost=node0
AuthType=auth/munge
# How long a requeued job waits, too.
AuthInfo=socket=DIR/munge.socket,cred_expire=5
SlurmUser=root
SlurmdUser=root
StateSaveLocation=DIR/state
SlurmdSpoolDir=DIR/spool-%n
SlurmctldPidFile=DIR/slurmctld.pid
SlurmdPidFile=DIR/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SlurmdTimeout=10
# The test asks for more cores than a small machine has.
SlurmdParameters=config_overrides
NodeName=node[0-1] CPUs=8 RealMemory=100 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
`

// newSlurm starts a cluster, or skips the test with the reason. GODDP_SLURM=1, which also asks for the long parts, makes
// that a failure.
func newSlurm(t *testing.T) *slurm {
	t.Helper()
	t.Cleanup(func() {
		if t.Skipped() && os.Getenv("GODDP_SLURM") == "1" {
			t.Error("GODDP_SLURM=1, but the test was skipped for the reason above")
		}
	})
	if os.Geteuid() != 0 {
		t.Skip("Slurm's daemons need root here")
	}
	for _, name := range []string{"slurmctld", "slurmd", "srun", "sbatch", "scancel", "scontrol", "munged", "unshare"} {
		if _, err := exec.LookPath(name); err != nil {
			t.Skipf("%s is not installed (Debian: apt-get install slurm-wlm munge)", name)
		}
	}
	s := &slurm{t: t, dir: t.TempDir(), work: t.TempDir()}
	s.network = newNetwork(t, 2)

	hosts := "127.0.0.1 localhost\n"
	for i, addr := range s.network.addrs {
		hosts += fmt.Sprintf("%s node%d\n", addr, i)
		require.NoError(t, os.MkdirAll(filepath.Join(s.dir, fmt.Sprint("spool-node", i)), 0o755))
	}
	require.NoError(t, os.MkdirAll(filepath.Join(s.dir, "state"), 0o755))
	// No cgroups: the machine's own belong to somebody else. Older versions have no word for that, but do without them too.
	cgroup := "disabled"
	version, err := exec.CommandContext(t.Context(), "slurmd", "-V").Output()
	require.NoError(t, err)
	if regexp.MustCompile(`^slurm(-wlm)? (2[0-2])\.`).Match(version) {
		cgroup = "cgroup/v1"
	}
	for name, text := range map[string]string{
		"hosts": hosts, "slurm.conf": strings.ReplaceAll(slurmConf, "DIR", s.dir),
		"cgroup.conf": "CgroupPlugin=" + cgroup + "\n", "munge.key": strings.Repeat("a key for this test only. ", 5),
	} {
		require.NoError(t, os.WriteFile(filepath.Join(s.dir, name), []byte(text), 0o600))
	}
	build := exec.CommandContext(t.Context(), "go", "build", "-o", s.work, "../goddp", "../multigpu", "../mnist")
	out, err := build.CombinedOutput()
	require.NoError(t, err, "%s", out)

	in := func(name string) string { return filepath.Join(s.dir, name) }
	s.daemon(0, "munged", "--foreground", "--force", "--key-file="+in("munge.key"), "--socket="+in("munge.socket"),
		"--pid-file="+in("munged.pid"), "--log-file="+in("munged.log"), "--seed-file="+in("munge.seed"))
	s.until("munged's socket", func() bool { _, err := os.Stat(in("munge.socket")); return err == nil })
	s.daemon(0, "slurmctld", "-D")
	for i := range s.network.names {
		s.stops = append(s.stops, s.daemon(i, "slurmd", "-D"))
	}
	s.until("two idle nodes", func() bool {
		nodes, err := s.command("sinfo", "-h", "-N", "-o", "%T")
		return err == nil && nodes == "idle\nidle"
	})
	return s
}

// inNode is the start of a command line on a node, which has a host name and a list of hosts of its own.
func (s *slurm) inNode(i int, flags []string, script string, args ...string) []string {
	line := append([]string{"ip", "netns", "exec", s.network.names[i], "unshare", "--uts", "--mount"}, flags...)
	script = fmt.Sprintf("hostname node%d && mount --bind '%s' /etc/hosts && ", i, filepath.Join(s.dir, "hosts")) + script
	return append(append(line, "sh", "-c", script, "sh"), args...)
}

func (s *slurm) environ() []string {
	return append(testenv.CleanEnv(), "SLURM_CONF="+filepath.Join(s.dir, "slurm.conf"), "PATH="+s.work+":"+os.Getenv("PATH"))
}

// daemon starts a program on a node, and what it starts in turn ends with it: it is the child of the first process of a
// process namespace, and that process lives as long as a pipe to this one.
func (s *slurm) daemon(node int, name string, args ...string) (stop func()) {
	s.t.Helper()
	line := s.inNode(node, []string{"--pid", "--fork", "--mount-proc"}, `{ "$@" </dev/null & read -r _; }`, append([]string{name}, args...)...)
	cmd := exec.Command(line[0], line[1:]...)
	cmd.Env, cmd.Dir = s.environ(), s.dir
	log, err := os.Create(filepath.Join(s.dir, fmt.Sprintf("%s-%d.out", name, node)))
	require.NoError(s.t, err)
	defer log.Close()
	cmd.Stdout, cmd.Stderr = log, log
	life, err := cmd.StdinPipe()
	require.NoError(s.t, err)
	require.NoError(s.t, cmd.Start())
	stopped := false
	stop = func() {
		if stopped {
			return
		}
		stopped = true
		life.Close()
		_ = cmd.Wait() // its shell ends with the status of read
		if s.t.Failed() {
			text, _ := os.ReadFile(log.Name())
			s.t.Logf("%s on node%d:\n%s", name, node, text)
		}
	}
	s.t.Cleanup(stop)
	return stop
}

// command runs one of Slurm's commands on the first node.
func (s *slurm) command(args ...string) (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 3*time.Minute) // works in a test's cleanup too
	defer cancel()
	line := s.inNode(0, nil, `exec "$@"`, args...)
	cmd := exec.CommandContext(ctx, line[0], line[1:]...)
	cmd.Env, cmd.Dir, cmd.WaitDelay = append(s.environ(), "RANKS=2", "MIN=1"), s.work, 5*time.Second
	out, err := cmd.Output()
	if exit := (*exec.ExitError)(nil); errors.As(err, &exit) {
		err = fmt.Errorf("%v: %w: %s", args, err, exit.Stderr)
	}
	return strings.TrimSpace(string(out)), err
}

func (s *slurm) must(args ...string) string {
	s.t.Helper()
	out, err := s.command(args...)
	require.NoError(s.t, err)
	return out
}

func (s *slurm) until(what string, ok func() bool) {
	s.t.Helper()
	for deadline := time.Now().Add(5 * time.Minute); !ok(); time.Sleep(100 * time.Millisecond) {
		if time.Now().After(deadline) {
			s.t.Fatalf("no %s within five minutes", what)
		}
	}
}

// job is one that sbatch took.
type job struct {
	s  *slurm
	id string
}

// submit hands a script of deploy/slurm over, to train with this program. Options replace those that the script has.
func (s *slurm) submit(script, program string, options []string, args ...string) job {
	t := s.t
	t.Helper()
	path, err := filepath.Abs(filepath.Join("../../deploy/slurm", script))
	require.NoError(t, err)
	_ = os.Remove(filepath.Join(s.work, "train"))
	require.NoError(t, os.Symlink(program, filepath.Join(s.work, "train")))
	line := append([]string{"sbatch", "--parsable", "--gpus-per-node=0"}, options...)
	j := job{s, s.must(append(append(line, path), args...)...)}
	t.Cleanup(func() {
		if t.Failed() {
			state, err := s.command("scontrol", "-o", "show", "job", j.id)
			t.Logf("%s (%v)\n%s", state, err, j.output())
		}
		_, _ = s.command("scancel", j.id) // most have ended
	})
	return j
}

func (j job) output() string {
	text, err := os.ReadFile(filepath.Join(j.s.work, "slurm-"+j.id+".out"))
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		j.s.t.Error(err)
	}
	return string(text)
}

func (j job) state() string { return j.s.must("scontrol", "-o", "show", "job", j.id) }

var ended = regexp.MustCompile(`JobState=(COMPLETED|FAILED|CANCELLED|TIMEOUT|NODE_FAIL|OUT_OF_MEMORY)\b`)

// wait waits for the end and gives the job's state and what it wrote.
func (j job) wait() (state, output string) {
	j.s.t.Helper()
	j.s.until("end of job "+j.id, func() bool { state = j.state(); return ended.MatchString(state) })
	return state, j.output()
}

// lines are those that match, without the launchers' prefixes, in order.
func lines(text, pattern string) []string {
	found := regexp.MustCompile(pattern).FindAllString(text, -1)
	slices.Sort(found)
	return found
}

// Slurm itself starts the ranks and the scripts of deploy/slurm, on two nodes.
func TestSlurm(t *testing.T) {
	s := newSlurm(t)
	small := []string{"--cpus-per-task=1"}

	t.Run("srun", func(t *testing.T) {
		out := s.in(t).must("srun", "-N2", "--ntasks-per-node=2", "multigpu", "2", "1", "--backend", "gloo")
		assert.Equal(t, []string{"[CPU0] Epoch 1", "[CPU1] Epoch 1", "[CPU2] Epoch 1", "[CPU3] Epoch 1"}, lines(out, `\[CPU\d\] Epoch 1\b`))
	})

	mnist := []string{"--synthetic", "--size=6400", "--batch-size=16", "--epochs=4", "--log-every=2", "--resume", "--backend=gloo", "--all-ranks"}
	const last = `Rank \d, Epoch 4, Avg Loss: [\d.]+`
	trained := func(j job) bool { return strings.Contains(j.output(), "Epoch 1, Test Accuracy") }
	two := append([]string{"--nodes=2", "--ntasks-per-node=2"}, small...)
	launchers := append([]string{"--nodes=2"}, small...)
	if os.Getenv("GODDP_SLURM") != "1" {
		t.Log("the batch scripts, preemption and the loss of a node take some minutes: make long, or GODDP_SLURM=1")
		return
	}
	for _, l := range []struct {
		script  string
		options []string
		ranks   int
		signal  []string // to the steps, or with --full to the script as well
	}{
		{"one-node.sbatch", small, 2, []string{"--signal=USR1"}},
		{"srun.sbatch", two, 4, []string{"--signal=USR1", "--full"}},
		{"elastic.sbatch", launchers, 4, []string{"--signal=USR1", "--full"}},
	} {
		t.Run(l.script, func(t *testing.T) {
			s := s.in(t)
			state, out := s.submit(l.script, "mnist", l.options, append(mnist, "--snapshot="+t.TempDir())...).wait()
			require.Contains(t, state, "JobState=COMPLETED")
			whole := lines(out, last)
			require.Len(t, whole, l.ranks)

			// Told to go, the job saves, is put into the queue again, goes on, and ends as the one that nobody stopped.
			j := s.submit(l.script, "mnist", l.options, append(mnist, "--snapshot="+t.TempDir())...)
			s.until("first epoch", func() bool { return trained(j) })
			s.must(append(append([]string{"scancel"}, l.signal...), j.id)...)
			state, out = j.wait()
			require.Contains(t, state, "JobState=COMPLETED")
			require.Contains(t, state, "Restarts=1 ")
			require.Contains(t, out, "received SIGUSR1; saved as ")
			require.Len(t, lines(out, `msg="train: resumed" rank=\d`), l.ranks)
			require.Equal(t, whole, lines(out, last))
		})
	}

	// Ranks do not leave in the same moment. The first one's 75 must not have Slurm kill the others, whose status would hide it.
	t.Run("ranks leave one by one", func(t *testing.T) {
		program := filepath.Join(s.work, "leave")
		require.NoError(t, os.WriteFile(program, []byte(`#!/bin/sh
if [ "${SLURM_RESTART_COUNT:-0}" -gt 0 ]; then echo "rank $SLURM_PROCID again"; exit 0; fi
sleep "$SLURM_PROCID"
exit 75
`), 0o755))
		state, out := s.in(t).submit("srun.sbatch", program, two).wait()
		require.Contains(t, state, "JobState=COMPLETED")
		require.Contains(t, state, "Restarts=1 ")
		require.Equal(t, []string{"rank 0 again", "rank 1 again", "rank 2 again", "rank 3 again"}, lines(out, `rank \d again`))
	})

	// The last one: the node stays lost.
	t.Run("a node is lost", func(t *testing.T) {
		s := s.in(t)
		args := append(slices.Clone(mnist), "--epochs=12", "--snapshot="+t.TempDir())
		j := s.submit("elastic.sbatch", "mnist", launchers, args...)
		s.until("first epoch", func() bool { return trained(j) })
		s.stops[1]()
		state, out := j.wait()
		require.Contains(t, state, "JobState=COMPLETED")
		require.Contains(t, state, "Restarts=0 ")
		require.Len(t, lines(out, `msg="train: resumed" rank=\d`), 2)
		require.Len(t, lines(out, `Rank \d, Epoch 12, Avg Loss`), 2)
	})
}
