package launch

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/goddp/goddp/launch/rendezvous"
	"github.com/goddp/goddp/launch/tcpstore"
	"golang.org/x/sys/unix"
)

// agent is an [Elastic] at work. One goroutine does all, on one thread that lives until the workers are gone: the parent-death signal is tied to it.
type agent struct {
	Elastic
	name string // of this launcher
	ooms int

	hostName string // the endpoint's host as this node was told it
	port     int
	host     *rendezvous.Host // nil: elsewhere
	store    *tcpstore.Server // for the workers of this round, where that is not the rendezvous's own
	node     *rendezvous.Node
	joined   bool // the coordinator has answered

	round, restarts int
	group           *workers // nil: none run
	leaving         *rendezvous.Message
	preempted       unix.Signal

	sinks  [2]*sink
	logs   *logDir
	warden *warden
	stats  ElasticStats
}

func (a *agent) run(ctx context.Context) (err error) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	sig := watchSignals(cancel, nil, a.Signals)
	sig.use(1)
	defer sig.stop()

	if a.logs, err = newLogDir(a.LogDir, a.RunID, a.keepsLogs()); err != nil {
		return err
	}
	defer a.logs.close()
	if a.logs.kept && a.LogDir == "" {
		a.Logger.Warn("launch: the workers' files are kept in a temporary folder; --log-dir names another", "folder", a.logs.dir)
	}
	a.sinks[0] = &sink{w: a.Stdout}
	a.sinks[1] = a.sinks[0]
	if !sameWriter(a.Stdout, a.Stderr) {
		a.sinks[1] = &sink{w: a.Stderr}
	}
	if a.hostName, a.port, err = a.endpoint(); err != nil {
		return err
	}
	a.warden = startWarden()
	defer a.warden.close()
	defer a.closeHost()

	deadline := time.Now().Add(a.JoinTimeout)
	for {
		if err := a.join(ctx, deadline); err != nil {
			return cmp.Or(a.stopped(ctx, sig), err)
		}
		out, err := a.serve(ctx, sig)
		switch {
		case err == nil:
			err = a.outcome(out)
			a.node.Close()
			return err
		case !errors.Is(err, rendezvous.ErrLostHost) && !errors.Is(err, errOutOfRound):
			a.node.Close()
			return err
		}
		a.node.Close()
		a.Logger.Warn("launch: the workers were stopped; looking for the rendezvous's host again", "cause", err, "for", a.RejoinTimeout)
		deadline = time.Now().Add(a.RejoinTimeout)
	}
}

// stopped is the error after a signal that came before there was anything to stop.
func (a *agent) stopped(ctx context.Context, sig *signals) error {
	if ctx.Err() == nil {
		return nil
	}
	if s := sig.which(); s != 0 {
		return fmt.Errorf("launch: stopped: %w", &SignalError{s})
	}
	return fmt.Errorf("launch: stopped: %w", context.Cause(ctx))
}

func (a *agent) keepAliveFor() time.Duration { return a.KeepAlive * time.Duration(a.KeepAliveTry) }

// join becomes the host if this is its node, and joins the rendezvous.
func (a *agent) join(ctx context.Context, deadline time.Time) error {
	within, cancel := context.WithDeadline(ctx, deadline)
	defer cancel()
	if a.host == nil {
		if err := a.tryHost(); err != nil {
			return err
		}
	}
	id := rendezvous.NewID()
	dial := func(ctx context.Context) (*tcpstore.Client, error) {
		return tcpstore.Dial(ctx, net.JoinHostPort(a.hostName, strconv.Itoa(a.port)))
	}
	if a.host != nil {
		id, dial = a.name, a.host.Server().Local
	}
	hostname, err := os.Hostname()
	if err != nil {
		hostname = "unknown"
	}
	if a.LocalAddr != "" {
		hostname = a.LocalAddr
	}
	info := rendezvous.Info{Agent: a.name, Host: hostname, PID: os.Getpid(), Workers: a.Workers, Role: a.Role, NodeRank: -1,
		Restarts: a.restarts, Round: a.round, Min: a.MinNodes, Max: a.MaxNodes}
	if a.Static {
		info.NodeRank = a.NodeRank
	}
	a.joined = false
	for {
		// In pieces: a name may get its address only now (a pod's, from its Service), and then this node may turn out to be the host.
		piece, cancel := context.WithTimeout(within, 5*time.Second)
		a.node, err = rendezvous.Connect(piece, dial, a.RunID, id, info, a.KeepAlive, a.keepAliveFor())
		cancel()
		if err == nil || within.Err() != nil || errors.Is(err, rendezvous.ErrOtherJob) {
			break
		}
		if err = a.tryHost(); err != nil {
			return err
		}
		if a.host != nil {
			id, dial = a.name, a.host.Server().Local
		}
	}
	if err != nil {
		return fmt.Errorf("launch: cannot join the rendezvous at %s:%d: %w", a.hostName, a.port, err)
	}
	return nil
}

// tryHost opens the rendezvous here when this node is the one to do so.
func (a *agent) tryHost() error {
	local, isLoopback := isOwnAddress(a.hostName)
	is := local
	switch {
	case a.Host != nil:
		is = *a.Host
	case a.Static:
		is = a.NodeRank == 0
	}
	if !is {
		return nil
	}
	bind := ""
	if isLoopback {
		bind = "127.0.0.1"
		if strings.Contains(a.hostName, ":") {
			bind = "::1"
		}
	}
	ln, err := net.Listen("tcp", net.JoinHostPort(bind, strconv.Itoa(a.port)))
	if errors.Is(err, unix.EADDRINUSE) {
		if a.Host == nil && !a.Static && a.MaxNodes > 1 {
			return nil // several agents of the job on one machine: the first is the host
		}
		return fmt.Errorf("launch: port %d is taken by another process, perhaps another job: choose another --master-port or --rdzv-endpoint, or use --standalone: %w", a.port, err)
	}
	if err != nil {
		return fmt.Errorf("launch: cannot open the rendezvous on port %d: %w", a.port, err)
	}
	a.port = ln.Addr().(*net.TCPAddr).Port
	addr := a.hostName
	if isLoopback && net.ParseIP(a.hostName) == nil {
		addr = "127.0.0.1"
	}
	addr = cmp.Or(a.LocalAddr, addr)
	if a.MaxNodes > 1 && a.LocalAddr == "" {
		addr = "" // as each node knows it
	}
	var h *rendezvous.Host
	h, err = rendezvous.Serve(ln, a.RunID, a.name, rendezvous.Config{
		Min: a.MinNodes, Max: a.MaxNodes, Static: a.Static, MaxRestarts: a.MaxRestarts,
		JoinTimeout: a.JoinTimeout, LastCall: a.LastCall, KeepAlive: a.keepAliveFor(),
		StopTimeout: a.StopGrace + a.Grace + 15*time.Second, Logger: a.Logger,
		NewStore: func(int) (string, int, error) {
			if a.Static {
				// Its port is the one that was asked for, for the workers as well.
				h.Server().Fresh()
				return addr, h.Server().Port(), nil
			}
			// A port of its own each time: workers of an earlier round that are out of reach cannot come back to this one.
			if a.store != nil {
				a.store.Close()
			}
			a.store, err = tcpstore.Listen(net.JoinHostPort(bind, "0"), tcpstore.Options{})
			if err != nil {
				return "", 0, err
			}
			return addr, a.store.Port(), nil
		},
	})
	if err != nil {
		return err
	}
	a.host = h
	return nil
}

func (a *agent) closeHost() {
	if a.host == nil {
		return
	}
	a.host.Close(5 * time.Second)
	switch {
	case a.store != nil:
		a.stats.Store = a.store.Stats()
		a.store.Close()
	default:
		a.stats.Store = a.host.Server().Stats()
	}
}

// isOwnAddress says whether a name or an address is this machine's.
func isOwnAddress(host string) (own, loopback bool) {
	ips := []net.IP{net.ParseIP(host)}
	if ips[0] == nil {
		ips, _ = net.LookupIP(host)
		if name, err := os.Hostname(); err == nil {
			short, _, _ := strings.Cut(host, ".") // a pod's host name, and its name in the Service
			own = host == name || short == name
		}
	}
	addrs, _ := net.InterfaceAddrs()
	for _, ip := range ips {
		if ip.IsLoopback() {
			return true, host == "localhost" || net.ParseIP(host) != nil
		}
		own = own || slices.ContainsFunc(addrs, func(a net.Addr) bool {
			n, ok := a.(*net.IPNet)
			return ok && n.IP.Equal(ip)
		})
	}
	return own, false
}

// errOutOfRound says that the coordinator took this node for lost.
var errOutOfRound = errors.New("launch: the host took this node for lost")

// serve follows the coordinator's orders until the job's outcome is known.
func (a *agent) serve(ctx context.Context, sig *signals) (*rendezvous.Outcome, error) {
	var lost error // why the workers are being stopped without an order
	messages, preempt, stopped, force, cancelled := a.node.Messages(), sig.preempt, sig.stopped, sig.force, ctx.Done()
	if a.preempted != 0 {
		preempt = nil
	}
	for {
		g := a.group
		var ends chan *rank
		var stopAt, killAt, giveUp <-chan time.Time
		if g != nil {
			ends, stopAt, killAt, giveUp = g.ends, g.stopAt, g.killAt, g.giveUp
		}
		select {
		case m, ok := <-messages:
			if !ok {
				messages, lost = nil, a.node.Err()
				break
			}
			a.joined = a.joined || m.Kind != rendezvous.Refuse
			switch m.Kind {
			case rendezvous.Wait:
				a.Logger.Debug("launch: waiting for the rendezvous", "why", m.Text)
			case rendezvous.Start:
				if a.leaving != nil {
					break
				}
				if err := a.start(m); err != nil {
					a.node.Send(rendezvous.Message{Kind: rendezvous.Failed, Round: m.Round, Failures: []rendezvous.Failure{{ //nolint:errcheck // then it is lost as well
						Rank: m.Assign.FirstRank, WorldSize: m.Assign.WorldSize, PID: os.Getpid(), ExitCode: 1, Message: err.Error(), Time: time.Now()}}})
				}
			case rendezvous.Stop:
				if g != nil && g.round == m.Round {
					a.Logger.Info("launch: stopping the workers", "why", m.Text)
					g.ordered = true
					if !g.stopping {
						g.stop(unix.SIGTERM, a.StopGrace)
					}
				} else {
					a.node.Send(rendezvous.Message{Kind: rendezvous.Stopped, Round: m.Round}) //nolint:errcheck // noticed by Messages
				}
			case rendezvous.Preempt:
				s := unix.SignalNum(m.Signal)
				a.preempted = s
				if g != nil {
					g.preempt(s)
				}
			case rendezvous.Finish:
				return m.Outcome, nil
			case rendezvous.Refuse:
				if !a.joined {
					return nil, fmt.Errorf("launch: the rendezvous at %s:%d refuses this node: %s", a.hostName, a.port, m.Text)
				}
				messages, lost = nil, fmt.Errorf("%w: %s", errOutOfRound, m.Text)
			}
		case r := <-ends:
			g.end(r)
		case <-stopAt:
			g.stop(unix.SIGTERM, cmp.Or(g.stopFor, a.Grace))
			if g.failed {
				a.node.Send(rendezvous.Message{Kind: rendezvous.Failing, Round: g.round, Failures: g.failures()}) //nolint:errcheck // noticed by Messages
			}
		case <-killAt:
			g.kill()
		case <-giveUp:
			return nil, errors.New("launch: workers did not end on SIGKILL: stuck in the kernel (a driver, a network file system)")
		case <-preempt:
			preempt = nil
			s := unix.SIGUSR1
			var cause *SignalError
			if errors.As(context.Cause(ctx), &cause) && (cause.Signal == unix.SIGUSR1 || cause.Signal == unix.SIGUSR2) {
				s = cause.Signal
			}
			a.Logger.Warn("launch: asking all workers of the job to save and leave", "cause", signalName(s))
			a.preempted, cancelled = s, nil
			a.node.Send(rendezvous.Message{Kind: rendezvous.Preempt, Signal: signalName(s)}) //nolint:errcheck // noticed by Messages
			if g != nil {
				g.preempt(s)
			}
		case <-stopped:
			stopped, cancelled = nil, nil
			a.leave(g, sig.which())
		case <-cancelled:
			cancelled = nil
			if errors.As(context.Cause(ctx), new(*SignalError)) {
				break // comes by its own channel
			}
			stopped = nil
			a.leave(g, unix.SIGTERM)
		case <-force:
			force = nil
			a.Logger.Warn("launch: killing all workers")
			if g != nil {
				g.kill()
			}
		}

		g = a.group
		switch {
		case g != nil && g.alive == 0:
			a.report(g)
			a.group = nil
			if a.leaving != nil && a.host == nil {
				return nil, a.left(g)
			}
		case g != nil && lost != nil && !g.stopping:
			a.Logger.Warn("launch: stopping the workers", "cause", lost)
			g.stop(unix.SIGTERM, a.StopGrace)
		}
		if a.group == nil && lost != nil {
			if a.leaving != nil {
				return nil, a.left(g)
			}
			return nil, lost
		}
		if a.group == nil && a.leaving != nil && a.host == nil {
			return nil, a.left(nil)
		}
	}
}

// leave stops this node's workers and tells the coordinator.
func (a *agent) leave(g *workers, s unix.Signal) {
	if a.leaving != nil {
		return
	}
	a.Logger.Warn("launch: stopping all workers; another SIGINT or SIGTERM kills them at once", "cause", "received "+signalName(s), "grace", a.StopGrace)
	a.leaving = &rendezvous.Message{Kind: rendezvous.Leave, Signal: signalName(s), Text: "it received " + signalName(s)}
	a.node.Send(*a.leaving) //nolint:errcheck // noticed by Messages
	if g != nil {
		g.ordered = true
		g.stop(s, a.StopGrace)
	}
}

// left is this launcher's end after it was told to leave.
func (a *agent) left(g *workers) error {
	if g != nil && g.resumes() > 0 {
		return fmt.Errorf("%w (received %s)", ErrResume, a.leaving.Signal)
	}
	return fmt.Errorf("launch: stopped: %w", &SignalError{unix.SignalNum(a.leaving.Signal)})
}

// report tells the coordinator how the round's workers ended here.
func (a *agent) report(g *workers) {
	g.close()
	m := rendezvous.Message{Round: g.round, Failures: g.failures(), Resumes: g.resumes()}
	switch {
	case g.ordered:
		m.Kind = rendezvous.Stopped
	case len(m.Failures) > 0:
		m.Kind = rendezvous.Failed
	case m.Resumes > 0:
		m.Kind = rendezvous.Resume
	case g.told():
		m.Kind = rendezvous.Stopped
	default:
		m.Kind = rendezvous.Succeeded
	}
	a.node.Send(m) //nolint:errcheck // noticed by Messages
}

// outcome turns the job's end into this launcher's.
func (a *agent) outcome(o *rendezvous.Outcome) error {
	a.stats.Restarts = o.Restarts
	var fails []*RankError
	for _, f := range o.Failures {
		fails = append(fails, &RankError{Rank: f.Rank, LocalRank: f.LocalRank, WorldSize: f.WorldSize, PID: f.PID, Host: f.Host, ErrorFile: f.ErrorFile,
			ExitCode: f.ExitCode, Signal: f.Signal, Message: f.Message, Stack: f.Stack, Hint: f.Hint, Time: f.Time, Panic: f.Panic,
			PeerLost: f.Class == rendezvous.Peer})
	}
	switch o.Result {
	case rendezvous.ResultOK:
		return nil
	case rendezvous.ResultResume:
		return ErrResume
	case rendezvous.ResultStopped:
		if s := unix.SignalNum(o.Signal); s != 0 {
			return fmt.Errorf("launch: stopped: %w", &SignalError{s})
		}
		return fmt.Errorf("launch: stopped: %s", o.Text)
	}
	return &JobError{Program: a.Command[0], Restarts: o.Restarts, Text: o.Text, Failures: fails}
}

// start starts the workers of a round.
func (a *agent) start(m rendezvous.Message) error {
	as := m.Assign
	if a.group != nil {
		return errors.New("launch: ordered to start workers while others run")
	}
	if as.MasterAddr == "" {
		as.MasterAddr = a.hostName
	}
	begin := time.Now()
	a.round, a.restarts = m.Round, as.Restarts
	a.stats.Rounds++
	a.stats.Restarts = as.Restarts
	dir, err := a.logs.round(m.Round - 1)
	if err != nil {
		return err
	}
	a.Logger.Info("launch: starting the workers", "round", m.Round, "restarts", as.Restarts, "node", as.GroupRank, "of", as.GroupSize,
		"ranks", fmt.Sprintf("%d-%d of %d", as.FirstRank, as.FirstRank+a.Workers-1, as.WorldSize), "master", net.JoinHostPort(as.MasterAddr, strconv.Itoa(as.MasterPort)))
	g := &workers{agent: a, round: m.Round, dir: dir, ends: make(chan *rank, a.Workers)}
	for i := range a.Workers {
		g.ranks = append(g.ranks, &rank{tail: &tail{}, env: Env{
			Source: SourceTorchrun, Rank: as.FirstRank + i, LocalRank: i, WorldSize: as.WorldSize, LocalWorldSize: a.Workers,
			GroupRank: as.GroupRank, GroupWorldSize: as.GroupSize, RoleName: a.Role, RoleRank: as.FirstRoleRank + i, RoleWorldSize: as.RoleSize,
			MasterAddr: as.MasterAddr, MasterPort: as.MasterPort, UseAgentStore: true,
			RestartCount: as.Restarts, MaxRestarts: a.MaxRestarts, RunID: a.RunID,
		}})
	}
	if err := g.start(); err != nil {
		g.kill()
		for g.alive > 0 {
			g.end(<-g.ends)
		}
		g.close()
		return err
	}
	a.stats.Starting = time.Since(begin)
	a.group = g
	if a.preempted != 0 {
		g.preempt(a.preempted)
	}
	return nil
}
