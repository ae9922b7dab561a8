package tcpstore

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"strings"
	"sync"
	"time"
)

var (
	// ErrTimeout is matched by the error of an operation that waited for a key until its context's deadline.
	ErrTimeout = errors.New("tcpstore: timeout")
	// ErrEmpty is returned by QueueTryPop for a queue without anything in it.
	ErrEmpty = errors.New("tcpstore: the queue is empty")
	// ErrClosed is matched by the error of an operation on a connection that is gone.
	ErrClosed = errors.New("tcpstore: the connection to the store is gone")
)

// Client is a connection to a store. Its methods may be called from several goroutines, one works at a time: one that waits for a key holds up the
// others, so use a client each where that matters.
type Client struct {
	addr string
	nc   net.Conn
	r    reader

	turn chan struct{} // holds one token

	mu  sync.Mutex
	err error // why the connection is of no use any more
}

// Dial connects to a store, "host:port", and makes sure that it is one. While nobody listens there it tries again until ctx ends, because the
// one who serves may start later.
func Dial(ctx context.Context, addr string) (*Client, error) {
	var last error
	delay := 20 * time.Millisecond
	for try := 1; ; try++ {
		var d net.Dialer
		d.Timeout = 10 * time.Second
		nc, err := d.DialContext(ctx, "tcp", addr)
		if err == nil {
			var c *Client
			if c, err = NewClient(ctx, nc); err == nil {
				return c, nil
			}
		}
		if ctx.Err() == nil || last == nil {
			last = err // the reason, and not that time was up
		}
		// Not all at once: many ranks start in the same moment.
		select {
		case <-ctx.Done():
			return nil, fmt.Errorf("tcpstore: no store at %s after %d attempts: %w", addr, try, errors.Join(last, timeout(ctx.Err())))
		case <-time.After(delay/2 + rand.N(delay)):
		}
		delay = min(delay*3/2, time.Second)
	}
}

// NewClient speaks to a store on a connection, which it takes over.
func NewClient(ctx context.Context, nc net.Conn) (*Client, error) {
	c := &Client{addr: nc.RemoteAddr().String(), nc: nc, turn: make(chan struct{}, 1)}
	c.r.Reader = bufio.NewReader(nc)
	c.turn <- struct{}{}
	nonce := uint32(os.Getpid())
	var back uint32
	hello := appendUint32([]byte{byte(cmdValidate)}, magic)
	hello = appendUint32(append(hello, byte(cmdPing)), nonce)
	if err := c.call(ctx, hello, func(r *reader) { back = r.uint32() }); err != nil {
		nc.Close()
		return nil, err
	}
	if back != nonce {
		nc.Close()
		return nil, protocolf("%s answers a ping with the wrong number: is that a TCPStore?", c.addr)
	}
	return c, nil
}

// Close ends the connection; a method that waits returns.
func (c *Client) Close() error {
	c.fail(net.ErrClosed)
	return nil
}

// LocalAddr is this side's address, the one the store's host can be reached from.
func (c *Client) LocalAddr() net.Addr { return c.nc.LocalAddr() }

func (c *Client) fail(err error) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.err == nil {
		c.err = err
		c.nc.Close()
	}
	return fmt.Errorf("%w (%s): %w", ErrClosed, c.addr, c.err)
}

func timeout(err error) error {
	if errors.Is(err, context.DeadlineExceeded) {
		return fmt.Errorf("%w: %w", ErrTimeout, err)
	}
	return err
}

// lock takes the client's turn.
func (c *Client) lock(ctx context.Context) error {
	select {
	case <-c.turn:
	case <-ctx.Done():
		return timeout(ctx.Err())
	}
	c.mu.Lock()
	err := c.err
	c.mu.Unlock()
	if err != nil {
		c.turn <- struct{}{}
		return c.fail(nil)
	}
	return nil
}

func (c *Client) unlock() { c.turn <- struct{}{} }

// call sends a request and reads its answer. If ctx ends meanwhile, the connection is lost: an answer may be half read.
func (c *Client) call(ctx context.Context, request []byte, answer func(*reader)) error {
	if err := c.lock(ctx); err != nil {
		return err
	}
	defer c.unlock()
	return c.exchange(ctx, request, answer)
}

func (c *Client) exchange(ctx context.Context, request []byte, answer func(*reader)) error {
	stop := context.AfterFunc(ctx, func() { c.nc.SetDeadline(time.Unix(1, 0)) })
	defer func() {
		if !stop() {
			c.fail(ctx.Err())
		}
	}()
	if _, err := c.nc.Write(request); err != nil {
		return c.lost(ctx, err)
	}
	if answer != nil {
		if answer(&c.r); c.r.err != nil {
			return c.lost(ctx, c.r.err)
		}
	}
	return nil
}

func (c *Client) lost(ctx context.Context, err error) error {
	if errors.Is(err, io.ErrUnexpectedEOF) {
		err = io.EOF
	}
	if ctx.Err() != nil {
		c.fail(ctx.Err())
		return timeout(ctx.Err())
	}
	return c.fail(err)
}

// wait blocks until all keys are there; the client's turn is taken. If ctx ends, the wait is withdrawn and the connection stays good.
func (c *Client) wait(ctx context.Context, keys []string) error {
	if err := ctx.Err(); err != nil {
		return waitError(err, keys)
	}
	request := appendInt64([]byte{byte(cmdWait)}, int64(len(keys)))
	for _, key := range keys {
		request = appendKey(request, key)
	}
	// Cancelling writes on the same connection while this reads; the server's answers stay in order.
	cancelled := make(chan error, 1)
	if _, err := c.nc.Write(request); err != nil {
		return c.fail(err)
	}
	stop := context.AfterFunc(ctx, func() {
		_, err := c.nc.Write([]byte{byte(cmdCancelWait)})
		// A server that is gone without a word does not answer this either.
		c.nc.SetReadDeadline(time.Now().Add(10 * time.Second))
		cancelled <- err
	})
	reply := c.r.byte()
	if stop() {
		switch {
		case c.r.err != nil:
			return c.lost(ctx, c.r.err)
		case reply != replyStopWaiting:
			return c.fail(protocolf("the store answers %d to a wait", reply))
		}
		return nil
	}
	if err := <-cancelled; err != nil {
		return c.fail(err)
	}
	ready := reply == replyStopWaiting // it crossed the cancellation, whose answer follows
	if c.r.err == nil && ready {
		reply = c.r.byte()
	}
	if c.r.err != nil || reply != replyWaitCanceled {
		return c.lost(context.Background(), errors.Join(c.r.err, ctx.Err()))
	}
	c.nc.SetReadDeadline(time.Time{})
	return waitError(ctx.Err(), keys)
}

func waitError(err error, keys []string) error {
	names := strings.Join(keys, ", ")
	if len(names) > 200 {
		names = names[:200] + "…"
	}
	return fmt.Errorf("tcpstore: waiting for %s: %w", names, timeout(err))
}

// Set stores a value.
func (c *Client) Set(ctx context.Context, key string, value []byte) error {
	return c.call(ctx, appendBytes(appendKey([]byte{byte(cmdSet)}, key), value), nil)
}

// Get waits for a key and gives its value.
func (c *Client) Get(ctx context.Context, key string) (value []byte, err error) {
	if err := c.lock(ctx); err != nil {
		return nil, err
	}
	defer c.unlock()
	if err := c.wait(ctx, []string{key}); err != nil {
		return nil, err
	}
	err = c.exchange(ctx, appendKey([]byte{byte(cmdGet)}, key), func(r *reader) { value = r.value() })
	return value, err
}

// Wait blocks until all keys are there.
func (c *Client) Wait(ctx context.Context, keys ...string) error {
	if err := c.lock(ctx); err != nil {
		return err
	}
	defer c.unlock()
	return c.wait(ctx, keys)
}

// Check says whether all keys are there.
func (c *Client) Check(ctx context.Context, keys ...string) (bool, error) {
	request := appendInt64([]byte{byte(cmdCheck)}, int64(len(keys)))
	for _, key := range keys {
		request = appendKey(request, key)
	}
	var reply byte
	err := c.call(ctx, request, func(r *reader) { reply = r.byte() })
	return reply == replyReady && err == nil, err
}

// Add adds to a number, which is 0 before the first Add, and gives the sum.
func (c *Client) Add(ctx context.Context, key string, by int64) (sum int64, err error) {
	err = c.call(ctx, appendInt64(appendKey([]byte{byte(cmdAdd)}, key), by), func(r *reader) { sum = r.int64() })
	return sum, err
}

// CompareSet stores value if the key holds want, or if want is empty and the key is not there. It gives what the key holds then; for a key
// that is not there and a want that is not empty, c10d gives want.
func (c *Client) CompareSet(ctx context.Context, key string, want, value []byte) (now []byte, err error) {
	request := appendBytes(appendBytes(appendKey([]byte{byte(cmdCompareSet)}, key), want), value)
	err = c.call(ctx, request, func(r *reader) { now = r.value() })
	return now, err
}

// Delete removes a key and says whether it was there.
func (c *Client) Delete(ctx context.Context, key string) (bool, error) {
	var n int64
	err := c.call(ctx, appendKey([]byte{byte(cmdDelete)}, key), func(r *reader) { n = r.int64() })
	return n == 1, err
}

// NumKeys counts the keys.
func (c *Client) NumKeys(ctx context.Context) (n int64, err error) {
	err = c.call(ctx, []byte{byte(cmdNumKeys)}, func(r *reader) { n = r.int64() })
	return n, err
}

// ListKeys gives the keys, in no order.
func (c *Client) ListKeys(ctx context.Context) (keys []string, err error) {
	err = c.call(ctx, []byte{byte(cmdListKeys)}, func(r *reader) {
		for _, key := range r.keys() {
			if key, ok := strings.CutPrefix(key, keyPrefix); ok {
				keys = append(keys, key)
			}
		}
	})
	return keys, err
}

// Append adds to the end of a value.
func (c *Client) Append(ctx context.Context, key string, value []byte) error {
	return c.call(ctx, appendBytes(appendKey([]byte{byte(cmdAppend)}, key), value), nil)
}

// MultiGet waits for keys and gives their values.
func (c *Client) MultiGet(ctx context.Context, keys ...string) ([][]byte, error) {
	if err := c.lock(ctx); err != nil {
		return nil, err
	}
	defer c.unlock()
	if err := c.wait(ctx, keys); err != nil {
		return nil, err
	}
	request := appendInt64([]byte{byte(cmdMultiGet)}, int64(len(keys)))
	for _, key := range keys {
		request = appendKey(request, key)
	}
	values := make([][]byte, len(keys))
	err := c.exchange(ctx, request, func(r *reader) {
		for i := range values {
			values[i] = r.value()
		}
	})
	return values, err
}

// MultiSet stores values[i] at keys[i].
func (c *Client) MultiSet(ctx context.Context, keys []string, values [][]byte) error {
	if len(keys) != len(values) {
		return fmt.Errorf("tcpstore: MultiSet of %d keys and %d values", len(keys), len(values))
	}
	request := appendInt64([]byte{byte(cmdMultiSet)}, int64(len(keys)))
	for i, key := range keys {
		request = appendBytes(appendKey(request, key), values[i])
	}
	return c.call(ctx, request, nil)
}

// QueuePush adds to the end of a queue.
func (c *Client) QueuePush(ctx context.Context, key string, value []byte) error {
	return c.call(ctx, appendBytes(appendKey([]byte{byte(cmdQueuePush)}, key), value), nil)
}

// QueuePop takes the first of a queue, and waits while there is none.
func (c *Client) QueuePop(ctx context.Context, key string) ([]byte, error) {
	if err := c.lock(ctx); err != nil {
		return nil, err
	}
	defer c.unlock()
	for {
		if err := c.wait(ctx, []string{key}); err != nil {
			return nil, err
		}
		value, err := c.tryPop(ctx, key)
		if !errors.Is(err, ErrEmpty) { // another client may have been faster
			return value, err
		}
	}
}

// QueueTryPop takes the first of a queue, or gives [ErrEmpty].
func (c *Client) QueueTryPop(ctx context.Context, key string) ([]byte, error) {
	if err := c.lock(ctx); err != nil {
		return nil, err
	}
	defer c.unlock()
	return c.tryPop(ctx, key)
}

func (c *Client) tryPop(ctx context.Context, key string) (value []byte, err error) {
	n := int64(0)
	err = c.exchange(ctx, appendKey([]byte{byte(cmdQueuePop)}, key), func(r *reader) {
		if n = r.int64(); n > 0 {
			value = r.value()
		}
	})
	if err == nil && n == 0 {
		err = ErrEmpty
	}
	return value, err
}

// QueueLen counts what is in a queue.
func (c *Client) QueueLen(ctx context.Context, key string) (n int64, err error) {
	err = c.call(ctx, appendKey([]byte{byte(cmdQueueLen)}, key), func(r *reader) { n = r.int64() })
	return n, err
}

// Local connects to the server within its own process.
func (s *Server) Local(ctx context.Context) (*Client, error) {
	here, there := net.Pipe()
	s.ServeConn(there)
	return NewClient(ctx, here)
}
