package rendezvous

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"strings"
	"sync"
	"time"

	"github.com/goddp/goddp/launch/tcpstore"
)

// Names in the store.
const (
	prefix   = "goddp.rendezvous/"
	jobKey   = prefix + "job"
	inQueue  = prefix + "in"
	outQueue = prefix + "out/"
	hereKey  = prefix + "here/"
)

// Host serves the rendezvous of one job: its store and its coordinator.
type Host struct {
	server *tcpstore.Server
	c      *Coordinator // used by loop's goroutine only

	mu     sync.Mutex
	events []func(now time.Time)
	wake   chan struct{}

	cancel context.CancelFunc
	wg     sync.WaitGroup
	empty  chan struct{} // the job is over and every node has heard it and gone
}

// Serve serves the rendezvous of a job on a listener, which it takes over. id names the host's own node.
func Serve(ln net.Listener, job, id string, cfg Config) (*Host, error) {
	h := &Host{wake: make(chan struct{}, 1), empty: make(chan struct{})}
	h.server = tcpstore.Serve(ln, tcpstore.Options{Lasting: prefix, Presence: hereKey, Gone: func(key string) {
		node := strings.TrimPrefix(key, hereKey)
		h.event(func(now time.Time) { h.c.Gone(now, node) })
	}})
	ctx, cancel := context.WithCancel(context.Background())
	h.cancel = cancel
	in, err := h.server.Local(ctx)
	if err != nil {
		h.Close()
		return nil, fmt.Errorf("rendezvous: %w", err)
	}
	out, err := h.server.Local(ctx)
	if err == nil {
		err = out.Set(ctx, jobKey, []byte(job))
	}
	if err != nil {
		h.Close()
		return nil, fmt.Errorf("rendezvous: %w", err)
	}
	h.c = NewCoordinator(cfg, id, time.Now(), func(node string, m Message) {
		if data, err := json.Marshal(m); err == nil {
			out.QueuePush(ctx, outQueue+node, data) //nolint:errcheck // fails only when the host is being closed
		}
	})
	h.wg.Go(func() { h.receive(ctx, in) })
	h.wg.Go(func() { h.loop(ctx) })
	return h, nil
}

// Server is the store, for its figures and for [tcpstore.Server.Fresh].
func (h *Host) Server() *tcpstore.Server { return h.server }

// Close waits until all nodes have gone, at most for the given time, and ends the service.
func (h *Host) Close(within ...time.Duration) {
	if len(within) > 0 && h.c != nil {
		select {
		case <-h.empty:
		case <-time.After(within[0]):
		}
	}
	h.cancel()
	h.server.Close()
	h.wg.Wait()
}

func (h *Host) event(do func(now time.Time)) {
	h.mu.Lock()
	h.events = append(h.events, do)
	h.mu.Unlock()
	select {
	case h.wake <- struct{}{}:
	default:
	}
}

func (h *Host) receive(ctx context.Context, in *tcpstore.Client) {
	for {
		data, err := in.QueuePop(ctx, inQueue)
		if err != nil {
			return
		}
		var m Message
		if json.Unmarshal(data, &m) != nil || m.Node == "" || m.Kind == Join && m.Info == nil {
			continue // not ours
		}
		h.event(func(now time.Time) { h.c.Handle(now, m) })
	}
}

func (h *Host) loop(ctx context.Context) {
	timer := time.NewTimer(0)
	defer timer.Stop()
	told := false
	for {
		select {
		case <-ctx.Done():
			return
		case <-h.wake:
		case <-timer.C:
		}
		h.mu.Lock()
		events := h.events
		h.events = nil
		h.mu.Unlock()
		for _, do := range events {
			do(time.Now())
		}
		h.c.Tick(time.Now())
		if _, over := h.c.Over(); over && h.c.Members() == 0 && !told {
			told = true
			close(h.empty)
		}
		if next := h.c.Next(); next.IsZero() {
			timer.Reset(time.Hour)
		} else {
			timer.Reset(time.Until(next))
		}
	}
}
