package rendezvous

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"github.com/goddp/goddp/launch/tcpstore"
)

// ErrLostHost is matched by a node's error when it lost the rendezvous's host, which may come back.
var ErrLostHost = errors.New("rendezvous: the host is gone")

// ErrOtherJob is matched by the error of joining a rendezvous that serves another job.
var ErrOtherJob = errors.New("rendezvous: another job is at this endpoint")

// NewID makes a name for a node.
func NewID() string {
	var b [8]byte
	rand.Read(b[:])
	return hex.EncodeToString(b[:])
}

// Node is one node's connection to its job's coordinator.
type Node struct {
	id       string
	tx, rx   *tcpstore.Client
	messages chan Message
	cancel   context.CancelFunc
	heard    atomic.Int64 // when, in nanoseconds
	wg       sync.WaitGroup

	mu  sync.Mutex
	err error
}

// Connect joins a job's rendezvous; dial is called twice. Without a word from the host for the time keepAlive the host counts as lost.
func Connect(ctx context.Context, dial func(context.Context) (*tcpstore.Client, error), job, id string, info Info, beat, keepAlive time.Duration) (*Node, error) {
	n := &Node{id: id, messages: make(chan Message, 16)}
	err := n.connect(ctx, dial, job, info, keepAlive)
	if err != nil {
		for _, c := range []*tcpstore.Client{n.tx, n.rx} {
			if c != nil {
				c.Close()
			}
		}
		return nil, err
	}
	n.heard.Store(time.Now().UnixNano())
	run, cancel := context.WithCancel(context.Background())
	n.cancel = cancel
	n.wg.Go(func() { n.receive(run) })
	n.wg.Go(func() { n.beat(run, beat, keepAlive) })
	return n, nil
}

func (n *Node) connect(ctx context.Context, dial func(context.Context) (*tcpstore.Client, error), job string, info Info, keepAlive time.Duration) (err error) {
	if n.tx, err = dial(ctx); err != nil {
		return err
	}
	short, cancel := context.WithTimeout(ctx, 3*time.Second)
	defer cancel()
	is, err := n.tx.Get(short, jobKey)
	switch {
	case errors.Is(err, tcpstore.ErrTimeout) && ctx.Err() == nil:
		return fmt.Errorf("%w: the store there belongs to no goddp rendezvous (is it Python's torchrun, or a training program's?)", ErrOtherJob)
	case err != nil:
		return err
	case string(is) != job:
		return fmt.Errorf("%w: it has --rdzv-id %q, this node %q", ErrOtherJob, is, job)
	}
	if n.rx, err = dial(ctx); err != nil {
		return err
	}
	if err := n.tx.Set(ctx, hereKey+n.id, []byte(info.Host)); err != nil {
		return err
	}
	return n.send(ctx, Message{Kind: Join, Info: &info})
}

// Addr is the address of this node that the host can be reached from.
func (n *Node) Addr() net.Addr { return n.tx.LocalAddr() }

// Messages are the coordinator's. The channel is closed when the host is lost, see Err, or by Close.
func (n *Node) Messages() <-chan Message { return n.messages }

// Err says why Messages was closed.
func (n *Node) Err() error {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.err
}

// Send tells the coordinator something.
func (n *Node) Send(m Message) error {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	return n.send(ctx, m)
}

func (n *Node) send(ctx context.Context, m Message) error {
	m.Node = n.id
	data, err := json.Marshal(m)
	if err != nil {
		return fmt.Errorf("rendezvous: %w", err)
	}
	if err := n.tx.QueuePush(ctx, inQueue, data); err != nil {
		return fmt.Errorf("%w: %w", ErrLostHost, err)
	}
	return nil
}

// Close ends the connection. The coordinator takes a node that did not say Leave before for lost, unless the job is over.
func (n *Node) Close() {
	n.cancel()
	n.tx.Close()
	n.rx.Close()
	n.wg.Wait()
}

func (n *Node) receive(ctx context.Context) {
	defer close(n.messages)
	for {
		data, err := n.rx.QueuePop(ctx, outQueue+n.id)
		if err != nil {
			if ctx.Err() == nil {
				n.lost(err)
			}
			return
		}
		n.heard.Store(time.Now().UnixNano())
		var m Message
		if json.Unmarshal(data, &m) != nil || m.Kind == Beat {
			continue
		}
		select {
		case n.messages <- m:
		case <-ctx.Done():
			return
		}
	}
}

// lost keeps the first reason.
func (n *Node) lost(err error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.err == nil {
		n.err = fmt.Errorf("%w: %w", ErrLostHost, err)
	}
}

// beat tells the host that this node is alive, and notices when it does not answer.
func (n *Node) beat(ctx context.Context, every, keepAlive time.Duration) {
	tick := time.NewTicker(every)
	defer tick.Stop()
	// Sending may block on a link that was cut, so that is not where the time is watched.
	n.wg.Go(func() {
		for {
			left := keepAlive - time.Since(time.Unix(0, n.heard.Load()))
			if left <= 0 {
				n.lost(fmt.Errorf("nothing was heard from it for %v", keepAlive))
				n.rx.Close()
				n.tx.Close()
				return
			}
			select {
			case <-ctx.Done():
				return
			case <-time.After(left):
			}
		}
	})
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			if err := n.send(ctx, Message{Kind: Beat}); err != nil && ctx.Err() == nil {
				n.lost(err)
				n.rx.Close() // receive ends
				return
			}
		}
	}
}
