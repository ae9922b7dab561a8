package launch

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/goddp/goddp/launch/rendezvous"
	"golang.org/x/sys/unix"
)

// workers are an agent's processes of one round.
type workers struct {
	agent *agent
	round int
	dir   string
	ranks []*rank
	ends  chan *rank
	alive int
	files []*os.File

	stopAt    <-chan time.Time // after a failure: now end the others
	stopFor   time.Duration    // with this grace; 0: the usual
	killAt    <-chan time.Time // the grace time is over
	giveUp    <-chan time.Time // SIGKILL did not help
	stopping  bool
	failed    bool
	ordered   bool // the coordinator, or a signal, said so
	preempted bool
}

// keepsLogs says whether output goes to files.
func (e *Elastic) keepsLogs() bool {
	if e.LogDir != "" || e.RedirectAll != 0 || e.TeeAll != 0 || len(e.OutFilter)+len(e.ErrFilter) > 0 {
		return true
	}
	for _, m := range []map[int]Std{e.Redirects, e.Tee} {
		for _, s := range m {
			if s != 0 {
				return true
			}
		}
	}
	return false
}

func (e *Elastic) streams(local int) (redirect, tee Std) {
	redirect, tee = e.RedirectAll, e.TeeAll
	if s, ok := e.Redirects[local]; ok {
		redirect = s
	}
	if s, ok := e.Tee[local]; ok {
		tee = s
	}
	return redirect, tee
}

// start starts the processes, in order.
func (g *workers) start() error {
	a := g.agent
	common := a.commonEnv()
	var picked [2]*sink
	for i, words := range [][]string{a.OutFilter, a.ErrFilter} {
		if len(words) > 0 {
			f, err := g.create([]string{"filtered_stdout.log", "filtered_stderr.log"}[i])
			if err != nil {
				return err
			}
			picked[i] = &sink{w: f}
		}
	}
	for _, r := range g.ranks {
		local := strconv.Itoa(r.env.LocalRank)
		folder := filepath.Join(g.dir, local)
		if err := os.MkdirAll(folder, 0o755); err != nil {
			return fmt.Errorf("launch: log folder: %w", err)
		}
		r.env.ErrorFile = filepath.Join(folder, "error.json")
		os.Remove(r.env.ErrorFile)

		args := slices.Clone(a.Command[1:])
		for i := range args {
			args[i] = strings.ReplaceAll(args[i], "${local_rank}", local)
		}
		cmd := exec.Command(a.Command[0], args...)
		shown := r.env
		if a.VirtualLocalRank {
			device, err := virtualDevice(r.env.LocalRank, os.LookupEnv)
			if err != nil {
				return err
			}
			shown.LocalRank = 0
			cmd.Env = append(cmd.Env, "CUDA_VISIBLE_DEVICES="+device)
		}
		cmd.Env = slices.Concat(common, a.Env, cmd.Env, shown.Environ())

		redirect, tee := a.streams(r.env.LocalRank)
		console := a.ShowRanks == nil || slices.Contains(a.ShowRanks, r.env.LocalRank)
		prefix := a.prefix(r.env)
		stream := func(i int, s Std, name string, t *tail, dst *io.Writer) (*lines, error) {
			to := a.sinks[i]
			toFile := (redirect|tee)&s != 0
			if !console || redirect&s != 0 && tee&s == 0 {
				to = nil
			}
			if f, ok := a.sinks[i].w.(*os.File); ok && to != nil && !toFile && prefix == "" && a.Workers == 1 && picked[i] == nil {
				*dst = f
				r.direct = true
				return nil, nil
			}
			l := &lines{to: to, prefix: prefix, endAll: prefix != "", tail: t}
			if toFile {
				f, err := g.create(filepath.Join(local, name))
				if err != nil {
					return nil, err
				}
				l.copy = f
			}
			if picked[i] != nil && tee&s != 0 {
				words := [][]string{a.OutFilter, a.ErrFilter}[i]
				l.picked = picked[i]
				l.filter = func(line []byte) bool {
					return slices.ContainsFunc(words, func(w string) bool { return bytes.Contains(line, []byte(w)) })
				}
			}
			return l, nil
		}
		out, err := stream(0, StdOut, "stdout.log", nil, &cmd.Stdout)
		if err != nil {
			return err
		}
		errs, err := stream(1, StdErr, "stderr.log", r.tail, &cmd.Stderr)
		if err != nil {
			return err
		}
		if r.proc, err = startProc(cmd, out, errs, syscall.SIGKILL); err != nil {
			return fmt.Errorf("launch: cannot start rank %d (%s): %w", r.env.Rank, a.Command[0], err)
		}
		a.warden.started(r.proc.pid)
		r.proc.onEnd = func() { a.warden.ended(r.proc.pid) }
		g.alive++
		go func() {
			r.state, r.ended = r.proc.wait()
			g.ends <- r
		}()
	}
	return nil
}

func (g *workers) create(name string) (*os.File, error) {
	f, err := os.Create(filepath.Join(g.dir, name))
	if err != nil {
		return nil, fmt.Errorf("launch: log file: %w", err)
	}
	g.files = append(g.files, f)
	return f, nil
}

func (g *workers) close() {
	for _, f := range g.files {
		f.Close()
	}
	g.files = nil
}

// commonEnv is what all workers have from this process, with torchrun's additions.
func (e *Elastic) commonEnv() []string {
	env := slices.DeleteFunc(os.Environ(), func(s string) bool { return strings.HasPrefix(s, envSpawn+"=") })
	add := func(name, value string) bool {
		has := func(s string) bool { return strings.HasPrefix(s, name+"=") && len(s) > len(name)+1 }
		if slices.ContainsFunc(env, has) || slices.ContainsFunc(e.Env, has) {
			return false
		}
		env = append(env, name+"="+value)
		return true
	}
	if e.Workers > 1 && add("OMP_NUM_THREADS", "1") {
		process.noted.Do(func() {
			e.Logger.Warn("launch: OMP_NUM_THREADS=1 for each worker, so that they do not overload the machine; set it to tune", "workers", e.Workers)
		})
	}
	add("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
	add("PYTHONUNBUFFERED", "1") // what torchrun does by python -u
	var names []string
	for _, s := range e.Signals {
		names = append(names, signalName(s))
	}
	return append(env, "TORCHELASTIC_SIGNALS_TO_HANDLE="+strings.Join(names, ","))
}

func (e *Elastic) prefix(env Env) string {
	if e.PrefixTemplate != "" && e.Prefix != PrefixOff {
		return strings.NewReplacer("${role_name}", env.RoleName, "${rank}", strconv.Itoa(env.Rank), "${local_rank}", strconv.Itoa(env.LocalRank)).Replace(e.PrefixTemplate)
	}
	if e.Prefix == PrefixOn || e.Prefix == PrefixAuto && (e.Workers > 1 || e.MaxNodes > 1) {
		return fmt.Sprintf("[rank%d] ", env.Rank)
	}
	return ""
}

// virtualDevice is the one GPU that a worker with a virtual local rank sees.
func virtualDevice(local int, lookup func(string) (string, bool)) (string, error) {
	list, ok := lookup("CUDA_VISIBLE_DEVICES")
	if !ok {
		return strconv.Itoa(local), nil
	}
	devices := strings.Split(list, ",")
	if local >= len(devices) || strings.TrimSpace(devices[local]) == "" {
		return "", fmt.Errorf("launch: local rank %d has no GPU in CUDA_VISIBLE_DEVICES=%q", local, list)
	}
	return strings.TrimSpace(devices[local]), nil
}

func (g *workers) each(sig unix.Signal, group bool) {
	for _, r := range g.ranks {
		if r.proc != nil && !r.done {
			r.proc.signal(sig, group)
		}
	}
}

func (g *workers) stop(sig unix.Signal, within time.Duration) {
	g.stopping = true
	g.each(sig, true)
	g.stopAt, g.killAt = nil, time.After(within)
}

func (g *workers) kill() {
	g.stopping = true
	g.each(unix.SIGKILL, true)
	g.stopAt, g.killAt, g.giveUp = nil, nil, time.After(10*time.Second)
}

// preempt tells the workers to save and leave, without a deadline. To the leaders only: other programs in their groups would die of it.
func (g *workers) preempt(sig unix.Signal) {
	if g.preempted {
		return
	}
	g.preempted = true
	g.each(sig, false)
}

// end takes the end of a worker.
func (g *workers) end(r *rank) {
	a := g.agent
	g.alive--
	r.done = true
	r.judge(g.stopping, g.preempted, a.ooms)
	if r.fail == nil {
		return
	}
	if _, err := os.Stat(r.env.ErrorFile); err == nil && a.logs.kept {
		r.fail.ErrorFile = r.env.ErrorFile
	}
	switch {
	case r.fail.ExitCode == ExitResume:
		// It saved and left in good order; the others are given the time to do the same.
		if !g.stopping && !g.failed && g.stopAt == nil && g.alive > 0 {
			g.stopAt, g.stopFor = time.After(a.StopGrace), a.Grace
		}
	case !g.stopping && !g.failed:
		g.failed = true
		a.Logger.Error("launch: a worker failed", "rank", r.fail.Rank, "pid", r.fail.PID, "ended", r.fail.ending(), "error", firstLine(r.fail.Message))
		if g.alive > 0 {
			g.stopAt, g.stopFor = time.After(settle), 0
		}
	}
}

// told says whether a worker left because of a signal from here, and neither well nor to be resumed.
func (g *workers) told() bool {
	return slices.ContainsFunc(g.ranks, func(r *rank) bool { return r.fail == nil && r.done && !r.state.Success() })
}

func (g *workers) resumes() (n int) {
	for _, r := range g.ranks {
		if r.fail != nil && r.fail.ExitCode == ExitResume {
			n++
		}
	}
	return n
}

// failures are the workers' that failed so far.
func (g *workers) failures() []rendezvous.Failure {
	classes := map[int]rendezvous.Class{classFirst: rendezvous.ByItself, classKilled: rendezvous.Killed, classPeer: rendezvous.Peer, classStopped: rendezvous.Told}
	var all []rendezvous.Failure
	for _, r := range g.ranks {
		if r.fail == nil || r.fail.ExitCode == ExitResume {
			continue
		}
		f := r.fail
		all = append(all, rendezvous.Failure{Class: classes[r.class], Rank: f.Rank, LocalRank: f.LocalRank, WorldSize: f.WorldSize, PID: f.PID,
			ExitCode: f.ExitCode, Signal: f.Signal, Message: f.Message, Stack: f.Stack, Hint: f.Hint, ErrorFile: f.ErrorFile, Time: f.Time, Panic: f.Panic})
	}
	return all
}

// logDir is where the workers' files go: DIR/RUNID_random/attempt_N/LOCALRANK/, as with torchrun.
type logDir struct {
	dir  string
	kept bool // or else removed in the end
}

func newLogDir(base, runID string, keep bool) (*logDir, error) {
	if base != "" {
		if err := os.MkdirAll(base, 0o755); err != nil {
			return nil, fmt.Errorf("launch: log folder: %w", err)
		}
	}
	name := strings.Map(func(r rune) rune {
		if r == '/' || r == '*' || r == 0 {
			return '_'
		}
		return r
	}, runID)
	if base == "" {
		name = "goddp-run-" + name
	}
	dir, err := os.MkdirTemp(base, name+"_*")
	if err != nil {
		return nil, fmt.Errorf("launch: log folder: %w", err)
	}
	return &logDir{dir: dir, kept: keep}, nil
}

func (l *logDir) round(n int) (string, error) {
	dir := filepath.Join(l.dir, fmt.Sprintf("attempt_%d", n))
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return "", fmt.Errorf("launch: log folder: %w", err)
	}
	return dir, nil
}

func (l *logDir) close() {
	if !l.kept {
		os.RemoveAll(l.dir)
	}
}
