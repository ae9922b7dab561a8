package launch

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"go.uber.org/multierr"
	"golang.org/x/sys/unix"
)

// Defaults of [SpawnOptions].
const (
	DefaultGrace     = 3 * time.Second
	DefaultStopGrace = 10 * time.Second
)

// settle is how long Spawn waits after a first failure before it ends the others: the process that died first is not always seen first.
const settle = 200 * time.Millisecond

// SpawnOptions changes how [Spawn] starts and ends ranks. The zero value is right for most programs.
type SpawnOptions struct {
	// MasterPort is where rank 0's store listens, on the loopback address. 0 takes a free port. The parent binds it before any rank
	// starts and hands the socket to rank 0 ([Env.ListenFD]), so that no one can take it in between.
	MasterPort int

	Stdout, Stderr io.Writer // nil: the parent's own
	Prefix         Prefix

	// Grace is how long ranks have between SIGTERM and SIGKILL after another rank failed. 0: 3 s. More than 4.5 s is too much for
	// all to be over within 5 s.
	Grace time.Duration
	// StopGrace is the same after a signal to the parent or the end of its context: time to save. 0: 10 s.
	StopGrace time.Duration

	Env    []string     // more variables for the ranks, "NAME=value"; they win over the parent's
	Logger *slog.Logger // nil: slog.Default()
}

// Spawn starts n processes of this very program and calls fn in each, as mp.spawn does in Python. It returns when all of them have ended:
// nil when every rank's fn gave nil, or else the errors, the first failing rank's before the others' (see [RankError]).
//
// The ranks run the program from its beginning, with the same arguments, up to this call of Spawn; it does not
// return there. What comes before it (flags, checks) therefore runs in every rank and must lead to the same calls in the same order; an earlier
// call of Spawn gives the ranks of a later one the result it had. fn's own error is its rank's; files and
// variables of the parent are not shared.
//
// It must be called within [Main]. A process that is a rank already may not spawn: use [Run].
func Spawn(ctx context.Context, n int, fn func(context.Context, Env) error, opts ...SpawnOptions) error {
	if fn == nil {
		return errors.New("launch: Spawn: the rank's function is nil")
	}
	if c := process.spawned(); c != nil {
		return c.enter(ctx, fn)
	}
	return spawn(ctx, n, "", opts)
}

func spawn(ctx context.Context, n int, name string, opts []SpawnOptions) error {
	var o SpawnOptions
	switch {
	case n <= 0:
		return fmt.Errorf("launch: cannot spawn %d ranks: the world size must be 1 or more", n)
	case len(opts) > 1:
		return errors.New("launch: Spawn takes one SpawnOptions")
	case len(opts) == 1:
		o = opts[0]
	}
	if o.MasterPort < 0 || o.MasterPort > 65535 {
		return fmt.Errorf("launch: master port %d is not a port: give 1 to 65535, or 0 for a free one", o.MasterPort)
	}
	switch env, isRank, err := FromEnv(); {
	case err != nil:
		return err
	case isRank:
		return fmt.Errorf("%w: %v", ErrInRank, env)
	}
	ctx, cancel := process.watch(ctx)
	defer cancel()
	if err := context.Cause(ctx); err != nil {
		return fmt.Errorf("launch: no rank was started: %w", err)
	}
	call, past, sig, err := process.beginSpawn()
	if err != nil {
		return err
	}
	g := &group{opts: o, n: n, signals: sig, log: o.Logger, ooms: oomKills()}
	if g.log == nil {
		g.log = slog.Default()
	}
	g.marker = marker{Call: call, Name: name, Parent: os.Getpid(), Past: past}
	sig.use(1)
	err = g.run(ctx)
	sig.use(-1)
	process.endSpawn(err)
	return err
}

// group is the ranks of one Spawn.
type group struct {
	opts    SpawnOptions
	n       int
	marker  marker
	signals *signals
	log     *slog.Logger
	ooms    int

	dir   string
	ranks []*rank
	sinks []*sink
}

type rank struct {
	env   Env
	crash string
	proc  *proc
	tail  *tail // of standard error

	direct bool // its output is not seen here

	done  bool
	state *os.ProcessState
	ended time.Time
	fail  *RankError
	class int
}

func (g *group) run(ctx context.Context) (err error) {
	ln, err := listenMaster(g.opts.MasterPort)
	if err != nil {
		return err
	}
	defer ln.Close()
	port := ln.Addr().(*net.TCPAddr).Port
	if g.dir, err = os.MkdirTemp("", "goddp-spawn-*"); err != nil {
		return fmt.Errorf("launch: folder for the ranks' error files: %w", err)
	}
	defer os.RemoveAll(g.dir)
	alive, parent, err := os.Pipe()
	if err != nil {
		return fmt.Errorf("launch: %w", err)
	}
	defer parent.Close()
	defer alive.Close()

	for i := range g.n {
		g.ranks = append(g.ranks, &rank{tail: &tail{}, env: Env{
			Source: SourceSpawn, Rank: i, LocalRank: i, WorldSize: g.n, LocalWorldSize: g.n, GroupWorldSize: 1,
			RoleName: "default", RoleRank: i, RoleWorldSize: g.n, MasterAddr: "127.0.0.1", MasterPort: port,
			RunID:     fmt.Sprintf("spawn-%d-%d", os.Getpid(), g.marker.Call),
			ErrorFile: filepath.Join(g.dir, fmt.Sprintf("rank%d-error.json", i)),
		}, crash: filepath.Join(g.dir, fmt.Sprintf("rank%d-crash.txt", i))})
	}

	ends := make(chan *rank, g.n)
	started, over := make(chan error), make(chan struct{})
	starterGone := make(chan struct{})
	go func() {
		// The kernel sends the parent-death signal when this thread ends, so it stays until all ranks are gone, and ends with the goroutine.
		runtime.LockOSThread()
		defer close(starterGone)
		started <- g.start(ln, alive, ends)
		<-over
	}()
	startErr := <-started
	ln.Close() // rank 0 has its own copy
	defer func() { close(over); <-starterGone }()
	err = g.supervise(ctx, startErr, ends)
	for _, s := range g.sinks {
		if e := s.failed(); e != nil {
			g.log.Warn("launch: output of the ranks was lost", "error", e)
			break
		}
	}
	return err
}

// listenMaster binds the port on which rank 0's store is to listen.
func listenMaster(port int) (*net.TCPListener, error) {
	ln, err := net.Listen("tcp4", net.JoinHostPort("127.0.0.1", strconv.Itoa(port)))
	switch {
	case errors.Is(err, syscall.EADDRINUSE):
		return nil, fmt.Errorf("launch: master port %d is taken by another process, perhaps another job: choose another one, or 0 for a free one: %w", port, err)
	case err != nil:
		return nil, fmt.Errorf("launch: cannot listen on master port %d: %w", port, err)
	}
	return ln.(*net.TCPListener), nil
}

// start starts the ranks, in order. On an error those before it run.
func (g *group) start(ln *net.TCPListener, alive *os.File, ends chan<- *rank) error {
	self, err := selfPath()
	if err != nil {
		return err
	}
	socket, err := ln.File()
	if err != nil {
		return fmt.Errorf("launch: master socket: %w", err)
	}
	defer socket.Close()

	outW, errW := io.Writer(os.Stdout), io.Writer(os.Stderr)
	if g.opts.Stdout != nil {
		outW = g.opts.Stdout
	}
	if g.opts.Stderr != nil {
		errW = g.opts.Stderr
	}
	out := &sink{w: outW}
	errs := out
	if !sameWriter(outW, errW) {
		errs = &sink{w: errW}
	}
	g.sinks = []*sink{out, errs}
	// A single rank's output is the program's own: it gets the terminal itself, if one is there.
	direct := g.n == 1 && g.opts.Prefix != PrefixOn
	common := g.commonEnv()

	for _, r := range g.ranks {
		cmd := exec.Command(self, os.Args[1:]...)
		cmd.Args[0] = os.Args[0]
		m := g.marker
		m.Crash = r.crash
		if r.env.Rank == 0 {
			cmd.ExtraFiles = append(cmd.ExtraFiles, socket)
			r.env.ListenFD = 3
		}
		cmd.ExtraFiles = append(cmd.ExtraFiles, alive)
		m.Lifeline = 2 + len(cmd.ExtraFiles)
		text, err := json.Marshal(m)
		if err != nil {
			return fmt.Errorf("launch: %w", err)
		}
		cmd.Env = slices.Concat(common, g.opts.Env, r.env.Environ(), []string{envSpawn + "=" + string(text)})

		prefix := ""
		if g.opts.Prefix == PrefixOn || g.opts.Prefix == PrefixAuto && g.n > 1 {
			prefix = fmt.Sprintf("[rank%d] ", r.env.Rank)
		}
		stream := func(to *sink, t *tail, dst *io.Writer) *lines {
			if f, ok := to.w.(*os.File); ok && direct {
				*dst = f
				r.direct = true
				return nil
			}
			return &lines{to: to, prefix: prefix, endAll: g.n > 1, tail: t}
		}
		outLines := stream(out, nil, &cmd.Stdout)
		errLines := stream(errs, r.tail, &cmd.Stderr)
		if r.proc, err = startProc(cmd, outLines, errLines, syscall.SIGTERM); err != nil {
			return fmt.Errorf("launch: cannot start rank %d of %d: %w", r.env.Rank, g.n, err)
		}
		go func() {
			r.state, r.ended = r.proc.wait()
			ends <- r
		}()
	}
	return nil
}

func sameWriter(a, b io.Writer) (same bool) {
	defer func() { _ = recover() }() // writers of a type that cannot be compared are not the same
	return a == b
}

// commonEnv is the parent's environment for all ranks. torchrun's rule for OpenMP: one thread a rank unless told otherwise, because ranks that each
// take all cores slow one another down.
func (g *group) commonEnv() []string {
	env := os.Environ()
	set := os.Getenv("OMP_NUM_THREADS") != "" || slices.ContainsFunc(g.opts.Env, func(s string) bool { return strings.HasPrefix(s, "OMP_NUM_THREADS=") })
	if g.n > 1 && !set {
		env = append(env, "OMP_NUM_THREADS=1")
		process.noted.Do(func() {
			g.log.Info("launch: OMP_NUM_THREADS=1 for each rank, so that they do not overload the machine; set it to tune", "ranks", g.n)
		})
	}
	return env
}

// supervise waits for the end of all ranks and ends them when one fails or the job is to stop.
func (g *group) supervise(ctx context.Context, startErr error, ends <-chan *rank) error {
	grace, stopGrace := g.opts.Grace, g.opts.StopGrace
	if grace <= 0 {
		grace = DefaultGrace
	}
	if stopGrace <= 0 {
		stopGrace = DefaultStopGrace
	}

	alive := 0
	for _, r := range g.ranks {
		if r.proc != nil {
			alive++
		}
	}
	var (
		stopAt    <-chan time.Time // after a failure: now end the others
		killAt    <-chan time.Time // the grace time is over
		giveUp    <-chan time.Time // SIGKILL did not help
		cancels   = ctx.Done()
		stops     = g.signals.stopped
		forces    = g.signals.force
		failed    bool
		stopping  bool
		preempted bool  // the ranks were sent SIGUSR1
		why       error // what stopped the job from outside
	)
	each := func(sig unix.Signal, group bool) {
		for _, r := range g.ranks {
			if r.proc != nil && !r.done {
				r.proc.signal(sig, group)
			}
		}
	}
	stop := func(sig unix.Signal, within time.Duration) {
		stopping = true
		each(sig, true)
		stopAt, killAt = nil, time.After(within)
	}
	kill := func() {
		stopping = true
		each(unix.SIGKILL, true)
		stopAt, killAt, giveUp = nil, nil, time.After(10*time.Second)
	}
	interrupt := func(cause error, sig unix.Signal) {
		if why == nil {
			why = cause
		}
		cancels, stops = nil, nil
		if failed {
			return // the others are being ended already, sooner than this would
		}
		g.log.Warn("launch: stopping all ranks; another SIGINT or SIGTERM kills them at once", "cause", cause, "grace", stopGrace)
		stop(sig, stopGrace)
	}

	if startErr != nil {
		failed = true
		stop(unix.SIGTERM, grace)
	}
	for alive > 0 {
		select {
		case r := <-ends:
			alive--
			r.done = true
			r.judge(stopping, preempted, g.ooms)
			if r.fail == nil || stopping || alive == 0 {
				continue
			}
			if r.fail.ExitCode == ExitResume {
				// It saved and left in good order; the others are given the time to do the same.
				if !failed && stopAt == nil {
					stopAt = time.After(stopGrace)
				}
				continue
			}
			if !failed {
				failed = true
				g.log.Error("launch: a rank failed, ending the others", "rank", r.fail.Rank, "pid", r.fail.PID,
					"error", firstLine(r.fail.Message), "ended", r.fail.ending())
				stopAt = time.After(settle)
			}
		case <-stopAt:
			stop(unix.SIGTERM, grace)
		case <-killAt:
			kill()
		case <-cancels:
			cause := context.Cause(ctx)
			var s *SignalError
			switch isSignal := errors.As(cause, &s); {
			case isSignal && s.Signal == unix.SIGUSR1:
				// To the leaders only: other programs in their groups would die of it. No deadline; one comes with SIGTERM.
				cancels, why, preempted = nil, cause, true
				g.log.Warn("launch: asking all ranks to save and leave", "cause", cause)
				each(unix.SIGUSR1, false)
			case isSignal:
				interrupt(cause, s.Signal)
			default:
				interrupt(cause, unix.SIGTERM)
			}
		case <-stops:
			s := g.signals.which()
			interrupt(&SignalError{s}, s)
		case <-forces:
			forces = nil
			g.log.Warn("launch: killing all ranks")
			kill()
		case <-giveUp:
			var stuck []string
			for _, r := range g.ranks {
				if r.proc != nil && !r.done {
					stuck = append(stuck, fmt.Sprintf("rank %d (pid %d)", r.env.Rank, r.proc.pid))
				}
			}
			startErr = multierr.Append(startErr, fmt.Errorf("launch: %s did not end on SIGKILL: stuck in the kernel (a driver, a network file system)", strings.Join(stuck, ", ")))
			alive = 0
		}
	}
	return g.result(startErr, why)
}

// Classes of failures, the likelier root cause first.
const (
	classFirst   = iota // failed by itself
	classKilled         // found killed by someone else after we had begun to end the ranks
	classPeer           // complained that another rank went away
	classStopped        // failed after it was asked to end
	classNone
)

// judge looks at how a rank ended.
func (r *rank) judge(stopping, preempted bool, ooms int) {
	r.class = classNone
	ws := r.state.Sys().(syscall.WaitStatus)
	if ws.Exited() && ws.ExitStatus() == 0 {
		return
	}
	e := &RankError{ExitCode: ws.ExitStatus(), Time: r.ended}
	if recorded, err := ReadErrorFile(r.env.ErrorFile); err == nil {
		e = recorded
		e.ExitCode = ws.ExitStatus()
		if e.Time.IsZero() || e.Time.After(r.ended) {
			e.Time = r.ended
		}
	}
	e.Rank, e.LocalRank, e.WorldSize, e.PID = r.env.Rank, r.env.LocalRank, r.env.WorldSize, r.proc.pid
	var sig syscall.Signal
	if ws.Signaled() {
		sig = ws.Signal()
		e.ExitCode, e.Signal = -1, signalName(sig)
	}
	// What we sent, and so no failure: the signal itself, or the status of a rank that left because of it.
	sent := func(s unix.Signal) bool {
		return stopping && (s == unix.SIGTERM || s == unix.SIGINT || s == unix.SIGHUP) || preempted && s == unix.SIGUSR1
	}
	ours := sent(sig) || sig == unix.SIGKILL && r.proc.wasKilled() || e.ExitCode > 128 && sent(unix.Signal(e.ExitCode-128))
	if e.Message == "" {
		r.explain(e, sig, ooms)
	}
	switch {
	case ours:
		return
	case !stopping && e.PeerLost:
		r.class = classPeer
	case !stopping:
		r.class = classFirst
	case sig == unix.SIGKILL:
		r.class = classKilled
	default:
		r.class = classStopped
	}
	r.fail = e
}

// explain finds words for a rank that recorded no error: the Go runtime's crash report, the end of standard error, the signal.
func (r *rank) explain(e *RankError, sig syscall.Signal, ooms int) {
	const silent = "it said nothing on standard error"
	said := strings.TrimSpace(r.tail.String())
	if data, err := os.ReadFile(r.crash); err == nil && len(data) > 0 {
		e.Stack = clip(string(data), maxErrorText)
		e.Message = firstLine(e.Stack)
		e.Panic = strings.HasPrefix(e.Message, "panic: ")
		// C++ says what it threw before it aborts; the runtime only knows of the signal.
		if strings.HasPrefix(e.Message, "SIG") {
			for line := range strings.Lines(said) {
				if what := strings.TrimSpace(line); strings.HasPrefix(what, "what(): ") || strings.HasPrefix(what, "terminate called ") {
					e.Message += ": " + what
				}
			}
		}
	} else {
		e.Stack = lastLines(said, 20)
		if e.Message = lastLine(e.Stack); e.Message == "" {
			e.Message = silent
		}
		if r.direct {
			e.Message = "see its output above"
		}
	}
	e.PeerLost = peerLost(e.Message) || peerLost(lastLines(said, 20))
	switch sig {
	case 0:
		return
	case unix.SIGKILL:
		e.Message = "killed by SIGKILL"
		e.Hint = "a person, a scheduler or the kernel's out-of-memory killer did that: see dmesg"
		if now := oomKills(); ooms >= 0 && now > ooms {
			e.Hint = "the kernel's out-of-memory killer ended a process of this container meanwhile: use less memory, or raise the limit"
		}
	case unix.SIGBUS:
		e.Message = "killed by SIGBUS"
		e.Hint = "often shared memory that is too small: see df /dev/shm, in a container --shm-size"
	case unix.SIGTERM, unix.SIGINT, unix.SIGHUP:
		e.Message = "killed by " + e.Signal
		e.Hint = "sent by someone else than the launcher"
	default:
		if e.Message == silent || r.direct {
			e.Message = "killed by " + e.Signal
		}
	}
}

func firstLine(s string) string {
	s, _, _ = strings.Cut(strings.TrimSpace(s), "\n")
	return s
}

func lastLine(s string) string { return strings.TrimSpace(lastLines(s, 1)) }

func lastLines(s string, n int) string {
	s = strings.TrimSpace(s)
	at := len(s)
	for range n {
		if at = strings.LastIndexByte(s[:at], '\n'); at < 0 {
			return s
		}
	}
	return s[at+1:]
}

// result puts the root cause first.
func (g *group) result(startErr, why error) error {
	var fails []*rank
	resumes, clean := 0, 0
	for _, r := range g.ranks {
		switch {
		case r.fail == nil && r.done && r.state.ExitCode() == 0:
			clean++
		case r.fail == nil:
		case r.fail.ExitCode == ExitResume:
			resumes++
		default:
			fails = append(fails, r)
		}
	}
	slices.SortStableFunc(fails, func(a, b *rank) int {
		if a.class != b.class {
			return a.class - b.class
		}
		return a.fail.Time.Compare(b.fail.Time)
	})
	err := startErr
	preempted := false
	if s := (*SignalError)(nil); errors.As(why, &s) {
		preempted = s.Signal == unix.SIGUSR1
	}
	switch {
	case startErr == nil && resumes > 0 && resumes+clean == g.n:
		if why != nil {
			return fmt.Errorf("%w (%v)", ErrResume, why)
		}
		return ErrResume
	case why != nil && len(fails) > 0 && fails[0].class < classStopped:
		// It failed by itself before anyone asked it to end.
	case why != nil && !(preempted && clean == g.n):
		err = multierr.Append(err, fmt.Errorf("launch: stopped: %w", why))
	}
	for _, r := range fails {
		err = multierr.Append(err, r.fail)
	}
	return err
}
