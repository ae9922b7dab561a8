package rendezvous

import (
	"cmp"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"time"
)

// Config is what a [Coordinator] goes by. Its zero durations get torchrun's defaults.
type Config struct {
	Min, Max    int  // nodes
	Static      bool // the nodes have their ranks from outside, and all are needed
	MaxRestarts int

	JoinTimeout time.Duration // until Min nodes are there; 600 s
	LastCall    time.Duration // for more, once Min are there; 30 s
	KeepAlive   time.Duration // without a word a node is dead; 15 s
	StopTimeout time.Duration // for a node to stop its workers; 60 s
	Settle      time.Duration // after a failure that looks like another's consequence; 0.5 s

	// NewStore makes the fresh store for the workers of a round and gives its address ("": the host's as each node knows it) and port.
	NewStore func(round int) (addr string, port int, err error)
	Logger   *slog.Logger
}

func (c *Config) defaults() {
	set := func(d *time.Duration, otherwise time.Duration) {
		if *d <= 0 {
			*d = otherwise
		}
	}
	set(&c.JoinTimeout, 600*time.Second)
	set(&c.LastCall, 30*time.Second)
	set(&c.KeepAlive, 15*time.Second)
	set(&c.StopTimeout, 60*time.Second)
	set(&c.Settle, 500*time.Millisecond)
	if c.Logger == nil {
		c.Logger = slog.Default()
	}
}

type phase int

const (
	gathering phase = iota
	running
	stopping
	over
)

type memberState int

const (
	idle      memberState = iota // in no round: waits for the next
	working                      // its workers run
	ended                        // its workers failed or left to resume, and none is left
	succeeded                    // likewise, well
)

type member struct {
	id     string
	info   Info
	joined int // order
	seen   time.Time
	state  memberState
	rank   int // in the last round it was in; -1: none

	leaving  bool
	failures []Failure // of the round
	resumes  int
}

// Coordinator decides for all nodes of a job. It is not safe for concurrent use: one goroutine feeds it.
type Coordinator struct {
	cfg  Config
	host string // the id of the node that runs this one
	send func(node string, m Message)

	phase    phase
	members  map[string]*member
	order    int
	round    int
	restarts int
	active   []*member // of the round, by rank

	since    time.Time // begin of gathering
	lastCall time.Time // when it is over; zero: fewer than Min are there
	stopBy   time.Time
	settle   time.Time // when the failures so far will be judged; zero: none
	lost     []Failure // nodes lost in the round
	preempt  string
	final    *Outcome // what stopping leads to; nil: another round
}

// NewCoordinator makes a coordinator whose own node is host. send must not block and not call back.
func NewCoordinator(cfg Config, host string, now time.Time, send func(node string, m Message)) *Coordinator {
	cfg.defaults()
	return &Coordinator{cfg: cfg, host: host, send: send, members: map[string]*member{}, since: now}
}

// Over says whether the job has ended, and how.
func (c *Coordinator) Over() (Outcome, bool) {
	if c.phase != over {
		return Outcome{}, false
	}
	return *c.final, true
}

// Members counts the nodes that are there.
func (c *Coordinator) Members() int { return len(c.members) }

// sorted gives the members in an order that does not change by itself: the host, then those with ranks of their own, those of the last round, by arrival.
func (c *Coordinator) sorted() []*member {
	all := make([]*member, 0, len(c.members))
	for _, m := range c.members {
		all = append(all, m)
	}
	const none = 1 << 30
	rank := func(m *member) int {
		switch {
		case m.id == c.host:
			return -1
		case c.cfg.Static:
			return m.info.NodeRank
		case m.rank >= 0:
			return m.rank
		}
		return none
	}
	slices.SortFunc(all, func(a, b *member) int {
		return cmp.Or(cmp.Compare(rank(a), rank(b)), cmp.Compare(a.joined, b.joined))
	})
	return all
}

// Handle takes a node's message.
func (c *Coordinator) Handle(now time.Time, in Message) {
	m := c.members[in.Node]
	if in.Kind == Join {
		c.join(now, in)
		return
	}
	if m == nil {
		// Declared dead, and heard of again: it is to stop what it runs and join anew.
		c.send(in.Node, Message{Kind: Refuse, Text: "this node was taken for lost", Round: in.Round})
		return
	}
	m.seen = now
	switch in.Kind {
	case Beat:
		c.send(m.id, Message{Kind: Beat})
	case Leave:
		c.leave(now, m, in)
	case Preempt:
		if c.preempt == "" {
			c.preempt = in.Signal
			for _, o := range c.sorted() {
				c.send(o.id, Message{Kind: Preempt, Signal: in.Signal})
			}
		}
	case Failing, Failed, Succeeded, Resume, Stopped:
		c.report(now, m, in)
	}
	c.Tick(now)
}

// report takes what became of a node's workers.
func (c *Coordinator) report(now time.Time, m *member, in Message) {
	if in.Round != c.round || m.state != working {
		return // of a round that is over
	}
	if m.resumes = in.Resumes; len(in.Failures) >= len(m.failures) {
		m.failures = in.Failures
	}
	for i := range m.failures {
		m.failures[i].Host = cmp.Or(m.failures[i].Host, m.info.Host)
	}
	switch in.Kind {
	case Failing:
	case Succeeded:
		m.state = succeeded
	default:
		m.state = ended
	}
	if c.phase != running {
		return
	}
	switch in.Kind {
	case Resume:
		c.stop(now, &Outcome{Result: ResultResume}, "a worker saved its state and left, to be resumed")
	case Failing, Failed, Stopped:
		if len(m.failures) == 0 { // they left because they were asked to, without saving
			c.stop(now, &Outcome{Result: ResultStopped, Signal: c.preempt, Text: "workers left on " + cmp.Or(c.preempt, "a signal")}, "workers left")
			break
		}
		settle := now
		if !slices.ContainsFunc(m.failures, func(f Failure) bool { return f.Class < Peer }) {
			settle = now.Add(c.cfg.Settle) // of which it is the consequence may still be on its way
		}
		if c.settle.IsZero() || settle.Before(c.settle) {
			c.settle = settle
		}
	}
}

// failures are those of the round, the root cause first.
func (c *Coordinator) failures() []Failure {
	all := slices.Clone(c.lost)
	for _, m := range c.active {
		all = append(all, m.failures...)
	}
	slices.SortStableFunc(all, func(a, b Failure) int {
		return cmp.Or(cmp.Compare(a.Class, b.Class), a.Time.Compare(b.Time))
	})
	return all
}

func (c *Coordinator) resumes() (n int) {
	for _, m := range c.active {
		n += m.resumes
	}
	return n
}

// Gone takes the news that a node's connection has ended.
func (c *Coordinator) Gone(now time.Time, node string) {
	if m := c.members[node]; m != nil {
		c.lose(now, m, "its connection ended")
		c.Tick(now)
	}
}

func (c *Coordinator) join(now time.Time, in Message) {
	if c.phase == over {
		c.send(in.Node, Message{Kind: Finish, Outcome: c.final})
		return
	}
	info := *in.Info
	for _, o := range c.sorted() {
		switch {
		case o.info.Agent == info.Agent && o.id != in.Node:
			c.lose(now, o, "it joined again")
		case o.id == in.Node:
			return
		}
	}
	refuse := func(format string, args ...any) {
		c.send(in.Node, Message{Kind: Refuse, Text: fmt.Sprintf(format, args...)})
	}
	if info.Min != c.cfg.Min || info.Max != c.cfg.Max {
		refuse("this node was started with --nnodes %d:%d, the host with %d:%d", info.Min, info.Max, c.cfg.Min, c.cfg.Max)
		return
	}
	if c.cfg.Static {
		if info.NodeRank < 0 || info.NodeRank >= c.cfg.Max {
			refuse("node rank %d is outside 0 to %d", info.NodeRank, c.cfg.Max-1)
			return
		}
		for _, o := range c.sorted() {
			if o.info.NodeRank == info.NodeRank {
				refuse("node rank %d is taken by %s (pid %d): give each node its own --node-rank", info.NodeRank, o.info.Host, o.info.PID)
				return
			}
		}
	}
	c.order++
	m := &member{id: in.Node, info: info, joined: c.order, seen: now, rank: -1}
	c.members[m.id] = m
	c.restarts, c.round = max(c.restarts, info.Restarts), max(c.round, info.Round)
	c.cfg.Logger.Info("rendezvous: a node joined", "host", info.Host, "workers", info.Workers, "nodes", len(c.members))
	switch {
	case c.phase == running && c.settle.IsZero() && !c.cfg.Static && len(c.active) < c.cfg.Max:
		c.send(m.id, Message{Kind: Wait, Text: "the running workers are stopped to make room"})
		c.stop(now, nil, fmt.Sprintf("node %s joined", info.Host))
	case c.phase == running:
		c.send(m.id, Message{Kind: Wait, Text: fmt.Sprintf("%d nodes, the most that are wanted, are at work; this one is a spare", len(c.active))})
	default:
		c.send(m.id, Message{Kind: Wait, Text: fmt.Sprintf("%d of %d to %d nodes are there", len(c.members), c.cfg.Min, c.cfg.Max)})
	}
	c.Tick(now)
}

// leave takes a node's word that it goes. Its workers, if it has any, it stops first, and says so by Stopped.
func (c *Coordinator) leave(now time.Time, m *member, in Message) {
	c.cfg.Logger.Warn("rendezvous: a node leaves", "host", m.info.Host, "why", in.Text)
	m.leaving = true
	if m.id == c.host {
		o := &Outcome{Result: ResultStopped, Signal: in.Signal, Text: in.Text}
		switch c.phase {
		case gathering:
			c.finish(o)
		case running:
			c.stop(now, o, "the host leaves: "+in.Text)
		case stopping:
			c.final = cmp.Or(c.final, o)
		}
		return
	}
	if c.phase == running && slices.Contains(c.active, m) {
		c.stop(now, nil, fmt.Sprintf("node %s leaves", m.info.Host))
	}
	if m.state != working {
		delete(c.members, m.id)
	}
}

// lose forgets a node that is dead.
func (c *Coordinator) lose(now time.Time, m *member, why string) {
	delete(c.members, m.id)
	if c.phase == over {
		return
	}
	at := slices.Index(c.active, m)
	c.cfg.Logger.Warn("rendezvous: a node is lost", "host", m.info.Host, "why", why)
	wasWorking := m.state == working
	m.state = ended
	if at < 0 || c.phase != running && c.phase != stopping || !wasWorking {
		return
	}
	if c.phase == stopping && c.final == nil {
		return // a round that ends anyway
	}
	c.lost = append(c.lost, Failure{Class: Lost, Node: m.id, Rank: -1, Host: m.info.Host, PID: m.info.PID, Time: now, ExitCode: 1,
		Message: fmt.Sprintf("node %d (%s) was lost: %s", at, m.info.Host, why)})
	if c.phase == running {
		c.settle = now
	}
}

// stop ends the round; final is nil if another one is to follow.
func (c *Coordinator) stop(now time.Time, final *Outcome, why string) {
	c.phase, c.final, c.settle = stopping, final, time.Time{}
	c.stopBy = now.Add(c.cfg.StopTimeout)
	c.cfg.Logger.Info("rendezvous: stopping all workers", "why", why, "round", c.round)
	for _, m := range c.active {
		if m.state == working {
			c.send(m.id, Message{Kind: Stop, Round: c.round, Text: why})
		}
	}
}

func (c *Coordinator) finish(o *Outcome) {
	o.Restarts = c.restarts
	if o.Result != ResultOK {
		o.Failures = c.failures()
	}
	c.phase, c.final = over, o
	for _, m := range c.sorted() {
		c.send(m.id, Message{Kind: Finish, Outcome: o})
	}
}

// Next is when Tick has something to do, if nothing comes before; zero: nothing is due.
func (c *Coordinator) Next() time.Time {
	var next time.Time
	due := func(t time.Time) {
		if !t.IsZero() && (next.IsZero() || t.Before(next)) {
			next = t
		}
	}
	for _, m := range c.members {
		if m.id != c.host {
			due(m.seen.Add(c.cfg.KeepAlive))
		}
	}
	switch c.phase {
	case gathering:
		due(c.lastCall)
		if c.lastCall.IsZero() {
			due(c.since.Add(c.cfg.JoinTimeout))
		}
	case running:
		due(c.settle)
	case stopping:
		due(c.stopBy)
	case over:
		return time.Time{}
	}
	return next
}

// Tick does what is due.
func (c *Coordinator) Tick(now time.Time) {
	if c.phase == over {
		return
	}
	for _, m := range c.sorted() {
		if m.id != c.host && !now.Before(m.seen.Add(c.cfg.KeepAlive)) {
			c.lose(now, m, fmt.Sprintf("nothing was heard from it for %v", now.Sub(m.seen).Round(100*time.Millisecond)))
		}
	}
	if c.phase == running {
		c.tickRunning(now)
	}
	if c.phase == stopping {
		c.tickStopping(now)
	}
	if c.phase == gathering {
		c.tickGathering(now)
	}
}

func (c *Coordinator) tickRunning(now time.Time) {
	if !c.settle.IsZero() && !now.Before(c.settle) {
		root := c.failures()[0]
		why := root.Message
		if root.Rank >= 0 {
			why = fmt.Sprintf("rank %d on %s failed: %s", root.Rank, root.Host, firstLine(root.Message))
		}
		if c.restarts < c.cfg.MaxRestarts {
			c.restarts++
			c.cfg.Logger.Warn("rendezvous: restarting all workers", "cause", why, "restart", c.restarts, "of", c.cfg.MaxRestarts)
			c.stop(now, nil, why)
		} else {
			c.stop(now, &Outcome{Result: ResultFailed}, why)
		}
		return
	}
	if c.settle.IsZero() && !slices.ContainsFunc(c.active, func(m *member) bool { return m.state != succeeded }) {
		c.finish(&Outcome{Result: ResultOK})
	}
}

func (c *Coordinator) tickStopping(now time.Time) {
	for _, m := range c.active {
		if m.state == working {
			if now.Before(c.stopBy) {
				return
			}
			c.lose(now, m, "it did not stop its workers in time")
		}
	}
	if c.final != nil {
		fs := c.failures()
		switch real := len(fs) > 0 && fs[0].Class <= Lost; {
		case c.final.Result == ResultResume && real:
			c.final.Result = ResultFailed
		case c.final.Result == ResultStopped && !real && c.resumes() > 0:
			c.final.Result = ResultResume
		}
		c.finish(c.final)
		return
	}
	c.phase, c.since, c.lastCall, c.active = gathering, now, time.Time{}, nil
	for _, m := range c.sorted() {
		m.state = idle
		if m.leaving {
			delete(c.members, m.id)
		}
	}
}

func (c *Coordinator) tickGathering(now time.Time) {
	have := c.sorted()
	enough := len(have) >= c.cfg.Min && c.members[c.host] != nil
	switch {
	case !enough:
		c.lastCall = time.Time{}
		if now.Before(c.since.Add(c.cfg.JoinTimeout)) {
			return
		}
		c.finish(&Outcome{Result: ResultNoQuorum, Text: c.missing(have)})
	case len(have) >= c.cfg.Max || !c.lastCall.IsZero() && !now.Before(c.lastCall):
		c.begin(now, have[:min(len(have), c.cfg.Max)])
	case c.lastCall.IsZero():
		c.lastCall = now.Add(c.cfg.LastCall)
		c.cfg.Logger.Info("rendezvous: enough nodes are there; last call for more", "nodes", len(have), "max", c.cfg.Max, "wait", c.cfg.LastCall)
	}
}

func (c *Coordinator) missing(have []*member) string {
	var hosts []string
	there := map[int]bool{}
	for _, m := range have {
		hosts = append(hosts, m.info.Host)
		there[m.info.NodeRank] = true
	}
	text := fmt.Sprintf("only %d of %d nodes came within %v (%s)", len(have), c.cfg.Min, c.cfg.JoinTimeout, strings.Join(hosts, ", "))
	if c.cfg.Static {
		var ranks []string
		for i := range c.cfg.Max {
			if !there[i] {
				ranks = append(ranks, fmt.Sprint(i))
			}
		}
		text += "; missing --node-rank " + strings.Join(ranks, ", ")
	}
	return text + ": are the others started, with the same endpoint and --rdzv-id, and can they reach it?"
}

// begin starts a round with these nodes, in the order of their ranks.
func (c *Coordinator) begin(now time.Time, nodes []*member) {
	c.round++
	addr, port, err := c.cfg.NewStore(c.round)
	if err != nil {
		c.finish(&Outcome{Result: ResultNoQuorum, Text: fmt.Sprintf("no store for the workers: %v", err)})
		return
	}
	c.phase, c.active = running, slices.Clone(nodes)
	c.lost, c.settle = nil, time.Time{}
	world, roles := 0, map[string]int{}
	for _, m := range nodes {
		world += m.info.Workers
		roles[m.info.Role] += m.info.Workers
	}
	first, firstRole := 0, map[string]int{}
	for i, m := range nodes {
		m.state, m.rank, m.failures, m.resumes = working, i, nil, 0
		c.send(m.id, Message{Kind: Start, Round: c.round, Assign: &Assign{
			GroupRank: i, GroupSize: len(nodes), FirstRank: first, WorldSize: world,
			FirstRoleRank: firstRole[m.info.Role], RoleSize: roles[m.info.Role],
			MasterAddr: addr, MasterPort: port, Restarts: c.restarts,
		}})
		first += m.info.Workers
		firstRole[m.info.Role] += m.info.Workers
	}
	c.cfg.Logger.Info("rendezvous: complete", "round", c.round, "nodes", len(nodes), "workers", world, "restarts", c.restarts)
	if c.preempt != "" {
		for _, m := range nodes {
			c.send(m.id, Message{Kind: Preempt, Signal: c.preempt})
		}
	}
}

func firstLine(s string) string {
	s, _, _ = strings.Cut(strings.TrimSpace(s), "\n")
	return s
}
