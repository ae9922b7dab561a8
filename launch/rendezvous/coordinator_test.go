package rendezvous

import (
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// sim drives a coordinator by hand: its time is what the test says.
type sim struct {
	t    *testing.T
	c    *Coordinator
	now  time.Time
	sent map[string][]Message // since the last look
	port int
}

func newSim(t *testing.T, cfg Config) *sim {
	s := &sim{t: t, now: time.Unix(1e9, 0), sent: map[string][]Message{}, port: 5000}
	cfg.Logger = slog.New(slog.DiscardHandler)
	if cfg.NewStore == nil {
		cfg.NewStore = func(int) (string, int, error) { s.port++; return "10.0.0.1", s.port, nil }
	}
	s.c = NewCoordinator(cfg, "h", s.now, func(node string, m Message) { s.sent[node] = append(s.sent[node], m) })
	return s
}

func (s *sim) tell(node string, m Message) {
	m.Node = node
	s.c.Handle(s.now, m)
}

func (s *sim) join(node string, change ...func(*Info)) {
	info := Info{Agent: node, Host: "host-" + node, Workers: 2, Role: "default", NodeRank: -1, Min: s.c.cfg.Min, Max: s.c.cfg.Max}
	for _, f := range change {
		f(&info)
	}
	s.tell(node, Message{Kind: Join, Info: &info})
}

// pass lets time go by, with signs of life from these nodes.
func (s *sim) pass(d time.Duration, alive ...string) {
	for end := s.now.Add(d); s.now.Before(end); {
		s.now = s.now.Add(time.Second)
		for _, n := range alive {
			s.tell(n, Message{Kind: Beat})
		}
		s.c.Tick(s.now)
	}
}

// got takes what a node was sent, without answers to signs of life.
func (s *sim) got(node string) (kinds string, last Message) {
	var all []string
	for _, m := range s.sent[node] {
		if m.Kind != Beat {
			all, last = append(all, string(m.Kind)), m
		}
	}
	delete(s.sent, node)
	return strings.Join(all, " "), last
}

func (s *sim) expect(node, kinds string) Message {
	s.t.Helper()
	k, last := s.got(node)
	assert.Equal(s.t, kinds, k, "to "+node)
	return last
}

func (s *sim) fail(node string, rank int, class Class) {
	s.tell(node, Message{Kind: Failed, Round: s.c.round, Failures: []Failure{{Class: class, Rank: rank, Message: fmt.Sprint("rank ", rank), ExitCode: 3, Time: s.now}}})
}

func TestRoundFromJoinToSuccess(t *testing.T) {
	s := newSim(t, Config{Min: 2, Max: 2})
	s.join("b", func(i *Info) { i.Workers = 1; i.Role = "other" })
	s.expect("b", "wait")
	s.join("h", func(i *Info) { i.Workers = 3 })
	h, b := s.expect("h", "wait start").Assign, s.expect("b", "start").Assign
	require.NotNil(t, h)
	assert.Equal(t, Assign{GroupRank: 0, GroupSize: 2, FirstRank: 0, WorldSize: 4, RoleSize: 3, MasterAddr: "10.0.0.1", MasterPort: 5001}, *h)
	assert.Equal(t, Assign{GroupRank: 1, GroupSize: 2, FirstRank: 3, WorldSize: 4, RoleSize: 1, MasterAddr: "10.0.0.1", MasterPort: 5001}, *b)
	s.tell("h", Message{Kind: Succeeded, Round: 1})
	_, over := s.c.Over()
	assert.False(t, over)
	s.tell("b", Message{Kind: Succeeded, Round: 1})
	assert.Equal(t, ResultOK, s.expect("b", "finish").Outcome.Result)
	assert.Equal(t, ResultOK, s.expect("h", "finish").Outcome.Result)
	s.join("late")
	assert.Equal(t, ResultOK, s.expect("late", "finish").Outcome.Result)
}

func TestLastCall(t *testing.T) {
	s := newSim(t, Config{Min: 1, Max: 3, LastCall: 10 * time.Second})
	s.join("h")
	s.pass(9 * time.Second)
	s.expect("h", "wait")
	s.join("b")
	s.pass(time.Second, "b")
	assert.Equal(t, 2, s.expect("h", "start").Assign.GroupSize)

	s = newSim(t, Config{Min: 1, Max: 2, LastCall: 10 * time.Second})
	s.join("h")
	s.join("b") // full: no need to wait
	s.expect("h", "wait start")
	s.join("spare")
	assert.Contains(t, s.expect("spare", "wait").Text, "spare")
}

func TestJoinTimeout(t *testing.T) {
	s := newSim(t, Config{Min: 2, Max: 3, Static: true, JoinTimeout: 5 * time.Second})
	s.join("h", func(i *Info) { i.NodeRank = 0 })
	s.pass(5 * time.Second)
	o := s.expect("h", "wait finish").Outcome
	assert.Equal(t, ResultNoQuorum, o.Result)
	assert.Contains(t, o.Text, "only 1 of 2 nodes came within 5s (host-h)")
	assert.Contains(t, o.Text, "missing --node-rank 1, 2")
}

func start(t *testing.T, cfg Config, nodes ...string) *sim {
	s := newSim(t, cfg)
	for i, n := range nodes {
		s.join(n, func(info *Info) {
			if cfg.Static {
				info.NodeRank = i
			}
		})
	}
	s.pass(cfg.LastCall, nodes...)
	for _, n := range nodes {
		s.expect(n, "wait start")
	}
	return s
}

func TestFailureRestartsUntilTheCountIsUsedUp(t *testing.T) {
	s := start(t, Config{Min: 2, Max: 2, MaxRestarts: 1}, "h", "b")
	s.fail("b", 2, ByItself)
	s.expect("b", "") // it has stopped already
	assert.Contains(t, s.expect("h", "stop").Text, "rank 2 on host-b failed")
	s.pass(3*time.Second, "b")
	s.expect("b", "") // the other one's workers are still there
	s.tell("h", Message{Kind: Stopped, Round: 1})
	a := s.expect("b", "start").Assign
	assert.Equal(t, []int{1, 1, 5002}, []int{a.GroupRank, a.Restarts, a.MasterPort}, "the same place, a fresh store")
	s.expect("h", "start")

	s.tell("b", Message{Kind: Failed, Round: 1}) // late news of the round before
	s.fail("h", 0, ByItself)
	s.expect("b", "stop")
	s.tell("b", Message{Kind: Stopped, Round: 2})
	o := s.expect("b", "finish").Outcome
	assert.Equal(t, ResultFailed, o.Result)
	assert.Equal(t, 1, o.Restarts)
	assert.Equal(t, 0, o.Failures[0].Rank)
	assert.Equal(t, "host-h", o.Failures[0].Host)
}

// The worker that complains first is not the one to blame.
func TestRootCause(t *testing.T) {
	s := start(t, Config{Min: 2, Max: 2}, "h", "b")
	s.fail("h", 1, Peer)
	s.expect("b", "") // not yet: the cause may be on its way
	s.now = s.now.Add(100 * time.Millisecond)
	s.tell("b", Message{Kind: Failing, Round: 1, Failures: []Failure{{Class: ByItself, Rank: 3, Message: "boom", Time: s.now}}})
	s.expect("b", "stop")
	s.tell("b", Message{Kind: Stopped, Round: 1, Failures: []Failure{{Class: ByItself, Rank: 3, Message: "boom", Time: s.now}}})
	o := s.expect("h", "finish").Outcome
	require.Len(t, o.Failures, 2)
	assert.Equal(t, []int{3, 1}, []int{o.Failures[0].Rank, o.Failures[1].Rank})

	// Nothing better comes: then it is the cause.
	s = start(t, Config{Min: 1, Max: 1}, "h")
	s.fail("h", 1, Peer)
	s.now = s.now.Add(time.Second)
	s.c.Tick(s.now)
	assert.Equal(t, 1, s.expect("h", "finish").Outcome.Failures[0].Rank)
}

func TestLostNodes(t *testing.T) {
	cfg := Config{Min: 2, Max: 3, MaxRestarts: 2, LastCall: 5 * time.Second, KeepAlive: 4 * time.Second}
	s := start(t, cfg, "h", "b", "c")
	s.pass(3*time.Second, "b")
	s.expect("h", "")
	s.pass(2*time.Second, "b") // nothing from c
	assert.Contains(t, s.expect("h", "stop").Text, "node 2 (host-c) was lost: nothing was heard from it for 4s")
	s.expect("b", "stop")
	s.tell("c", Message{Kind: Beat})
	assert.Contains(t, s.expect("c", "refuse").Text, "lost")
	s.tell("h", Message{Kind: Stopped, Round: 1})
	s.tell("b", Message{Kind: Stopped, Round: 1})
	s.pass(4*time.Second, "b")
	s.expect("b", "")
	s.pass(time.Second, "b") // the last call is over
	a := s.expect("b", "start").Assign
	assert.Equal(t, []int{2, 4, 1}, []int{a.GroupSize, a.WorldSize, a.Restarts})

	// It comes again: there is room, and that is no restart.
	s.got("h")
	s.join("c2", func(i *Info) { i.Agent = "c" })
	s.expect("h", "stop")
	s.tell("h", Message{Kind: Stopped, Round: 2})
	s.tell("b", Message{Kind: Stopped, Round: 2})
	assert.Equal(t, []int{3, 1}, []int{s.expect("h", "start").Assign.GroupSize, s.c.restarts})

	// Gone while the others stop: nobody waits for it, and nothing is counted twice.
	s.c.Gone(s.now, "b")
	s.c.Gone(s.now, "c2")
	s.tell("h", Message{Kind: Stopped, Round: 3})
	assert.Equal(t, 2, s.c.restarts)
	s.expect("h", "stop")
	s.pass(700 * time.Second) // too few
	o := s.expect("h", "finish").Outcome
	assert.Equal(t, ResultNoQuorum, o.Result)
	assert.Contains(t, o.Text, "only 1 of 2 nodes")
}

func TestANodeThatDoesNotStopIsLost(t *testing.T) {
	s := start(t, Config{Min: 1, Max: 2, MaxRestarts: 1, StopTimeout: 5 * time.Second, LastCall: time.Second}, "h", "b")
	s.fail("h", 0, ByItself)
	s.pass(6*time.Second, "b")
	s.pass(time.Second)
	k, m := s.got("h")
	assert.Equal(t, "start", k)
	assert.Equal(t, 1, m.Assign.GroupSize)
}

func TestTheSameLauncherJoiningAgainReplacesItself(t *testing.T) {
	s := start(t, Config{Min: 2, Max: 2, MaxRestarts: 3}, "h", "b")
	s.join("b2", func(i *Info) { i.Agent = "b"; i.Restarts = 2; i.Round = 7 })
	s.expect("h", "stop")
	s.tell("h", Message{Kind: Stopped, Round: 7})
	assert.Equal(t, 2, s.c.Members())
	assert.GreaterOrEqual(t, s.c.restarts, 2, "what it knows of an earlier host counts")
}

func TestLeaving(t *testing.T) {
	s := start(t, Config{Min: 1, Max: 2, LastCall: time.Second}, "h", "b")
	s.tell("b", Message{Kind: Leave, Signal: "SIGTERM"})
	s.expect("h", "stop")
	s.tell("h", Message{Kind: Stopped, Round: 1})
	s.pass(2*time.Second, "b")
	s.expect("h", "") // b still saves
	s.tell("b", Message{Kind: Stopped, Round: 1, Resumes: 2})
	s.pass(2 * time.Second)
	assert.Equal(t, []int{1, 0}, []int{s.expect("h", "start").Assign.GroupSize, s.c.restarts})

	s.tell("h", Message{Kind: Leave, Signal: "SIGTERM"})
	s.expect("h", "stop")
	s.tell("h", Message{Kind: Stopped, Round: 2, Resumes: 2})
	assert.Equal(t, ResultResume, s.expect("h", "finish").Outcome.Result)

	s = start(t, Config{Min: 2, Max: 2}, "h", "b")
	s.tell("h", Message{Kind: Leave, Signal: "SIGINT"})
	s.expect("b", "stop")
	s.tell("b", Message{Kind: Stopped, Round: 1})
	s.tell("h", Message{Kind: Stopped, Round: 1})
	o := s.expect("b", "finish").Outcome
	assert.Equal(t, []string{"stopped", "SIGINT"}, []string{string(o.Result), o.Signal})

	s = newSim(t, Config{Min: 2, Max: 2})
	s.join("h")
	s.tell("h", Message{Kind: Leave, Signal: "SIGTERM"})
	assert.Equal(t, ResultStopped, s.expect("h", "wait finish").Outcome.Result)
}

func TestPreemption(t *testing.T) {
	s := start(t, Config{Min: 2, Max: 2}, "h", "b")
	s.tell("b", Message{Kind: Preempt, Signal: "SIGUSR1"})
	assert.Equal(t, "SIGUSR1", s.expect("h", "preempt").Signal)
	s.tell("h", Message{Kind: Resume, Round: 1, Resumes: 2})
	s.expect("b", "preempt stop")
	s.tell("b", Message{Kind: Stopped, Round: 1, Resumes: 2})
	assert.Equal(t, ResultResume, s.expect("b", "finish").Outcome.Result)

	s = start(t, Config{Min: 1, Max: 1}, "h")
	s.tell("h", Message{Kind: Preempt, Signal: "SIGUSR1"})
	s.tell("h", Message{Kind: Stopped, Round: 1}) // the workers died of it
	assert.Equal(t, ResultStopped, s.expect("h", "preempt finish").Outcome.Result)
}

func TestRefusals(t *testing.T) {
	s := newSim(t, Config{Min: 2, Max: 2, Static: true})
	s.join("h", func(i *Info) { i.NodeRank = 0 })
	s.join("b", func(i *Info) { i.NodeRank = 0 })
	assert.Contains(t, s.expect("b", "refuse").Text, "node rank 0 is taken by host-h")
	s.join("b", func(i *Info) { i.NodeRank = 5 })
	assert.Contains(t, s.expect("b", "refuse").Text, "outside")
	s.join("b", func(i *Info) { i.NodeRank = 1; i.Max = 3 })
	assert.Contains(t, s.expect("b", "refuse").Text, "--nnodes 2:3")
	s.tell("stranger", Message{Kind: Succeeded, Round: 1})
	s.expect("stranger", "refuse")

	s = newSim(t, Config{Min: 1, Max: 1, NewStore: func(int) (string, int, error) { return "", 0, errors.New("no port") }})
	s.join("h")
	assert.Contains(t, s.expect("h", "wait finish").Outcome.Text, "no port")
}

// Whatever comes in whatever order, the coordinator goes on or ends, and never starts what is still running.
func TestRandomEvents(t *testing.T) {
	for seed := range 300 {
		random := uint64(seed)*0x9E3779B97F4A7C15 + 1
		next := func(n int) int {
			random ^= random << 13
			random ^= random >> 7
			random ^= random << 17
			return int(random % uint64(n))
		}
		s := newSim(t, Config{Min: 1, Max: 3, MaxRestarts: 4, LastCall: 2 * time.Second, KeepAlive: 5 * time.Second, StopTimeout: 6 * time.Second})
		nodes := []string{"h", "a", "b", "c"}
		working := map[string]int{}
		s.join("h")
		for range 400 {
			n := nodes[next(len(nodes))]
			kinds := []Kind{Join, Beat, Beat, Beat, Failing, Failed, Succeeded, Stopped, Resume, Leave}
			k := kinds[next(len(kinds))]
			if n == "h" && (k == Leave || k == Join || k == Resume) {
				continue
			}
			switch k {
			case Join:
				s.join(n)
			case Failing, Failed:
				s.tell(n, Message{Kind: k, Round: working[n], Failures: []Failure{{Class: Class(next(5)), Rank: 1, Time: s.now}}})
			default:
				s.tell(n, Message{Kind: k, Round: working[n]})
			}
			if k == Failed || k == Succeeded || k == Stopped || k == Resume {
				delete(working, n)
			}
			if next(3) == 0 {
				s.pass(time.Second, "h")
			}
			for _, n := range nodes {
				for _, m := range s.sent[n] {
					if m.Kind == Start {
						working[n] = m.Round
						require.Equal(t, s.c.round, m.Round)
						require.LessOrEqual(t, m.Assign.FirstRank+2, m.Assign.WorldSize)
					}
				}
				delete(s.sent, n)
			}
			require.LessOrEqual(t, s.c.restarts, 4)
			if _, over := s.c.Over(); over {
				break
			}
		}
	}
}
