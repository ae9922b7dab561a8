package rendezvous

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"testing"
	"time"

	"github.com/goddp/goddp/launch/tcpstore"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func host(t *testing.T, cfg Config) (*Host, func(context.Context) (*tcpstore.Client, error)) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	addr := ln.Addr().String()
	cfg.Logger = slog.New(slog.DiscardHandler)
	if cfg.NewStore == nil {
		cfg.NewStore = func(int) (string, int, error) { return "", 1, nil }
	}
	h, err := Serve(ln, "job", "h", cfg)
	require.NoError(t, err)
	t.Cleanup(func() { h.Close() })
	return h, func(ctx context.Context) (*tcpstore.Client, error) { return tcpstore.Dial(ctx, addr) }
}

func connect(t *testing.T, dial func(context.Context) (*tcpstore.Client, error), id string, nodes int, keepAlive time.Duration) *Node {
	n, err := Connect(t.Context(), dial, "job", id, Info{Agent: id, Host: id, Workers: 1, NodeRank: -1, Min: nodes, Max: nodes}, keepAlive/4, keepAlive)
	require.NoError(t, err)
	return n
}

func next(t *testing.T, n *Node, kind Kind) Message {
	t.Helper()
	for {
		select {
		case m, ok := <-n.Messages():
			require.True(t, ok, "%v", n.Err())
			if m.Kind == kind {
				return m
			}
		case <-time.After(10 * time.Second):
			t.Fatalf("no %s within 10 s", kind)
		}
	}
}

func TestNodesOverTheStore(t *testing.T) {
	const nodes = 16
	h, dial := host(t, Config{Min: nodes, Max: nodes})
	var all []*Node
	for i := range nodes {
		id, d := fmt.Sprint("n", i), dial
		if i == 0 {
			id, d = "h", h.Server().Local
		}
		n := connect(t, d, id, nodes, 5*time.Second)
		all = append(all, n)
	}
	for i, n := range all {
		m := next(t, n, Start)
		assert.Equal(t, i, m.Assign.GroupRank)
		assert.NoError(t, n.Send(Message{Kind: Succeeded, Round: m.Round}))
	}
	for _, n := range all {
		assert.Equal(t, ResultOK, next(t, n, Finish).Outcome.Result)
		n.Close()
	}
	begin := time.Now()
	h.Close(5 * time.Second)
	assert.Less(t, time.Since(begin), 4*time.Second, "all had gone")
}

// A node whose connection ends is lost at once; one that only keeps silent after the keep-alive time. A node that hears nothing gives up by itself.
func TestDeadNodesAndHosts(t *testing.T) {
	h, dial := host(t, Config{Min: 2, Max: 2, KeepAlive: time.Minute})
	a, b := connect(t, h.Server().Local, "h", 2, time.Minute), connect(t, dial, "b", 2, time.Minute)
	defer a.Close()
	next(t, a, Start)
	next(t, b, Start)
	b.Close()
	assert.Contains(t, next(t, a, Stop).Text, "its connection ended")

	h, dial = host(t, Config{Min: 2, Max: 2, KeepAlive: 500 * time.Millisecond})
	a = connect(t, h.Server().Local, "h", 2, time.Minute)
	defer a.Close()
	silent, err := Connect(t.Context(), dial, "job", "s", Info{Agent: "s", Host: "s", Workers: 1, NodeRank: -1, Min: 2, Max: 2}, time.Hour, time.Hour)
	require.NoError(t, err)
	defer silent.Close()
	next(t, a, Start)
	assert.Contains(t, next(t, a, Stop).Text, "nothing was heard from it")

	// A host that does not answer: its server is there and nobody is behind it.
	s, err := tcpstore.Listen("127.0.0.1:0", tcpstore.Options{})
	require.NoError(t, err)
	defer s.Close()
	c, err := s.Local(t.Context())
	require.NoError(t, err)
	require.NoError(t, c.Set(t.Context(), jobKey, []byte("job")))
	dead := connect(t, func(ctx context.Context) (*tcpstore.Client, error) { return tcpstore.Dial(ctx, s.Addr().String()) }, "d", 2, 300*time.Millisecond)
	defer dead.Close()
	select {
	case _, ok := <-dead.Messages():
		require.False(t, ok)
	case <-time.After(5 * time.Second):
		t.Fatal("it still waits")
	}
	assert.ErrorIs(t, dead.Err(), ErrLostHost)
	assert.ErrorContains(t, dead.Err(), "nothing was heard")
}

func TestOtherJobs(t *testing.T) {
	_, dial := host(t, Config{Min: 2, Max: 2})
	_, err := Connect(t.Context(), dial, "another", "x", Info{}, time.Second, time.Second)
	assert.ErrorIs(t, err, ErrOtherJob)
	assert.ErrorContains(t, err, `--rdzv-id "job", this node "another"`)
}

// Two jobs' worth of events in order: the example of the package.
func ExampleCoordinator() {
	c := NewCoordinator(Config{Min: 1, Max: 1, Logger: slog.New(slog.DiscardHandler),
		NewStore: func(int) (string, int, error) { return "10.0.0.1", 29400, nil }}, "host", time.Now(),
		func(node string, m Message) { fmt.Println("to", node+":", m.Kind) })
	now := time.Now()
	c.Handle(now, Message{Kind: Join, Node: "host", Info: &Info{Workers: 2, Min: 1, Max: 1}})
	c.Handle(now, Message{Kind: Succeeded, Node: "host", Round: 1})
	// Output:
	// to host: wait
	// to host: start
	// to host: finish
}
