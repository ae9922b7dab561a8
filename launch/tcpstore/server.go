package tcpstore

import (
	"bufio"
	"bytes"
	"errors"
	"net"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

// Options changes a [Server]. The zero value serves one key space, as Python's store does.
type Options struct {
	// Lasting is the prefix of keys that [Server.Fresh] leaves alone. "": none.
	Lasting string
	// Presence is the prefix of keys that vanish with the connection that set them.
	Presence string
	// Gone is called with a presence key when its connection has ended, from a goroutine of the server.
	Gone func(key string)
}

// Stats counts what a server has done.
type Stats struct {
	Connections int64 // now
	Accepted    int64 // ever
	Commands    int64
	BytesIn     int64
	BytesOut    int64
	Keys        int64 // now
}

// Server serves a store. Make one by [Listen] or [Serve].
type Server struct {
	ln   net.Listener
	opts Options

	mu      sync.Mutex
	lasting *space
	current *space
	conns   map[*conn]struct{}
	closed  bool

	accepted, commands, in, out atomic.Int64
	wg                          sync.WaitGroup
}

// space is one set of keys.
type space struct {
	values  map[string][]byte
	queues  map[string][][]byte
	waiting map[string][]*wait
}

func newSpace() *space {
	return &space{values: map[string][]byte{}, queues: map[string][][]byte{}, waiting: map[string][]*wait{}}
}

// wait is a connection's WAIT that is not over.
type wait struct {
	c    *conn
	keys []string // those that were not there
	left int      // how many of them still are not
}

// Listen binds a TCP address, such as ":29500" or "127.0.0.1:0", and serves a store there until Close.
func Listen(addr string, opts Options) (*Server, error) {
	ln, err := net.Listen("tcp", addr)
	if err != nil {
		return nil, err
	}
	return Serve(ln, opts), nil
}

// Serve serves a store on a listener, which it takes over.
func Serve(ln net.Listener, opts Options) *Server {
	s := &Server{ln: ln, opts: opts, lasting: newSpace(), current: newSpace(), conns: map[*conn]struct{}{}}
	s.wg.Go(s.accept)
	return s
}

// Addr is where the server listens.
func (s *Server) Addr() net.Addr { return s.ln.Addr() }

// Port is the TCP port, or 0 for another kind of listener.
func (s *Server) Port() int {
	if a, ok := s.ln.Addr().(*net.TCPAddr); ok {
		return a.Port
	}
	return 0
}

// Close ends the server and its connections.
func (s *Server) Close() error {
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		return nil
	}
	s.closed = true
	conns := s.conns
	s.conns = map[*conn]struct{}{}
	s.mu.Unlock()
	err := s.ln.Close()
	for c := range conns {
		c.close()
	}
	s.wg.Wait()
	return err
}

// Fresh empties the store, all but the lasting keys, and ends the connections that have used what is gone: a client of an
// earlier attempt cannot reach into the next one.
func (s *Server) Fresh() {
	s.mu.Lock()
	old := s.current
	s.current = newSpace()
	var stale []*conn
	for c := range s.conns {
		if c.space == old {
			stale = append(stale, c)
		}
	}
	s.mu.Unlock()
	for _, c := range stale {
		c.close()
	}
}

// Stats gives the counts so far.
func (s *Server) Stats() Stats {
	s.mu.Lock()
	defer s.mu.Unlock()
	return Stats{
		Connections: int64(len(s.conns)), Accepted: s.accepted.Load(), Commands: s.commands.Load(),
		BytesIn: s.in.Load(), BytesOut: s.out.Load(), Keys: int64(len(s.current.values) + len(s.lasting.values)),
	}
}

func (s *Server) accept() {
	for {
		nc, err := s.ln.Accept()
		if err != nil {
			if errors.Is(err, net.ErrClosed) {
				return
			}
			time.Sleep(10 * time.Millisecond) // too many open files, or a connection that was reset before it was accepted
			continue
		}
		s.ServeConn(nc)
	}
}

// ServeConn serves one connection that came by another way, such as a net.Pipe. It returns at once.
func (s *Server) ServeConn(nc net.Conn) {
	c := &conn{s: s, nc: nc}
	c.r.Reader = bufio.NewReader(&counter{nc, &s.in})
	c.wake = sync.NewCond(&c.mu)
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		nc.Close()
		return
	}
	s.conns[c] = struct{}{}
	s.accepted.Add(1)
	s.wg.Go(c.serve)
	s.wg.Go(c.write)
}

type counter struct {
	net.Conn
	n *atomic.Int64
}

func (c *counter) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	c.n.Add(int64(n))
	return n, err
}

// conn is one client's connection: a goroutine reads commands, another writes answers, so that whoever sets a key never waits for those who wait for it.
type conn struct {
	s  *Server
	nc net.Conn
	r  reader

	// Under s.mu:
	space    *space // the one it used first
	waits    *wait
	presence []string

	mu     sync.Mutex
	wake   *sync.Cond
	out    []byte
	closed bool
}

// maxPending bounds the answers that a client does not fetch.
const maxPending = 2 * maxPayload

func (c *conn) send(b []byte) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return
	}
	if len(c.out) > maxPending {
		c.closed = true
		c.nc.Close()
	}
	c.out = append(c.out, b...)
	c.wake.Signal()
}

func (c *conn) close() {
	c.mu.Lock()
	c.closed = true
	c.wake.Signal()
	c.mu.Unlock()
	c.nc.Close()
}

func (c *conn) write() {
	var buf []byte
	for {
		c.mu.Lock()
		for len(c.out) == 0 && !c.closed {
			c.wake.Wait()
		}
		if c.closed {
			c.mu.Unlock()
			return
		}
		buf, c.out = c.out, buf[:0]
		c.mu.Unlock()
		n, err := c.nc.Write(buf)
		c.s.out.Add(int64(n))
		if err != nil {
			c.close()
			return
		}
		if cap(buf) > 1<<20 {
			buf = nil
		}
	}
}

func (c *conn) serve() {
	defer func() {
		c.close()
		c.s.forget(c)
	}()
	if command(c.r.byte()) != cmdValidate || c.r.uint32() != magic || c.r.err != nil {
		return // not a client of ours: a port scanner, a browser
	}
	for {
		cmd := command(c.r.byte())
		if c.r.err != nil {
			return
		}
		c.s.commands.Add(1)
		if !c.do(cmd) || c.r.err != nil {
			return
		}
	}
}

func (s *Server) forget(c *conn) {
	s.mu.Lock()
	delete(s.conns, c)
	s.cancel(c)
	var gone []string
	if !s.closed {
		gone = c.presence
	}
	for _, key := range gone {
		delete(s.spaceOf(c, key).values, key)
	}
	s.mu.Unlock()
	if s.opts.Gone != nil {
		for _, key := range gone {
			s.opts.Gone(strings.TrimPrefix(key, keyPrefix))
		}
	}
}

// spaceOf finds the key space for a key; s.mu is held.
func (s *Server) spaceOf(c *conn, key string) *space {
	if s.opts.Lasting != "" && strings.HasPrefix(key, keyPrefix+s.opts.Lasting) {
		return s.lasting
	}
	if c.space == nil {
		c.space = s.current
	}
	return c.space
}

// do reads the fields of a command and answers it; false ends the connection.
func (c *conn) do(cmd command) bool {
	s, r := c.s, &c.r
	switch cmd {
	case cmdPing:
		if nonce := r.uint32(); r.err == nil {
			c.send(appendUint32(nil, nonce))
		}
	case cmdSet:
		key, value := r.key(), r.value()
		if r.err == nil {
			s.mu.Lock()
			s.set(c, key, value)
			s.mu.Unlock()
		}
	case cmdCompareSet:
		key, want, value := r.key(), r.value(), r.value()
		if r.err == nil {
			c.send(appendBytes(nil, s.compareSet(c, key, want, value)))
		}
	case cmdGet:
		if key := r.key(); r.err == nil {
			c.send(appendBytes(nil, s.get(c, key)))
		}
	case cmdAdd:
		key, by := r.key(), r.int64()
		if r.err == nil {
			v, ok := s.add(c, key, by)
			if !ok {
				return false // the value is no number
			}
			c.send(appendInt64(nil, v))
		}
	case cmdCheck:
		if keys := r.keys(); r.err == nil {
			s.mu.Lock()
			left := s.missing(c, keys)
			s.mu.Unlock()
			reply := replyReady
			if len(left) > 0 {
				reply = replyNotReady
			}
			c.send([]byte{reply})
		}
	case cmdWait:
		if keys := r.keys(); r.err == nil && s.wait(c, keys) {
			c.send([]byte{replyStopWaiting})
		}
	case cmdCancelWait:
		s.mu.Lock()
		s.cancel(c)
		s.mu.Unlock()
		c.send([]byte{replyWaitCanceled})
	case cmdNumKeys:
		s.mu.Lock()
		n := len(s.spaceOf(c, "").values)
		s.mu.Unlock()
		c.send(appendInt64(nil, int64(n)))
	case cmdDelete:
		if key := r.key(); r.err == nil {
			var n int64
			s.mu.Lock()
			sp := s.spaceOf(c, key)
			if _, ok := sp.values[key]; ok {
				delete(sp.values, key)
				n = 1
			}
			s.mu.Unlock()
			c.send(appendInt64(nil, n))
		}
	case cmdAppend:
		key, value := r.key(), r.value()
		if r.err == nil {
			s.mu.Lock()
			s.set(c, key, slices.Concat(s.spaceOf(c, key).values[key], value))
			s.mu.Unlock()
		}
	case cmdMultiGet:
		if keys := r.keys(); r.err == nil {
			var b []byte
			for _, key := range keys {
				b = appendBytes(b, s.get(c, key))
			}
			c.send(b)
		}
	case cmdMultiSet:
		n := r.count()
		for range n {
			key, value := r.key(), r.value()
			if r.err != nil {
				break
			}
			s.mu.Lock()
			s.set(c, key, value)
			s.mu.Unlock()
		}
	case cmdQueuePush:
		key, value := r.key(), r.value()
		if r.err == nil {
			s.push(c, key, value)
		}
	case cmdQueuePop:
		if key := r.key(); r.err == nil {
			c.send(s.pop(c, key))
		}
	case cmdQueueLen:
		if key := r.key(); r.err == nil {
			s.mu.Lock()
			n := len(s.spaceOf(c, key).queues[key])
			s.mu.Unlock()
			c.send(appendInt64(nil, int64(n)))
		}
	case cmdListKeys:
		s.mu.Lock()
		values := s.spaceOf(c, "").values
		b := appendInt64(nil, int64(len(values)))
		for key := range values {
			b = appendBytes(b, key)
		}
		s.mu.Unlock()
		c.send(b)
	default:
		return false
	}
	return true
}

// set stores a value and wakes those who wait for it; s.mu is held.
func (s *Server) set(c *conn, key string, value []byte) {
	sp := s.spaceOf(c, key)
	sp.values[key] = value
	if p := s.opts.Presence; p != "" && strings.HasPrefix(key, keyPrefix+p) && !slices.Contains(c.presence, key) {
		c.presence = append(c.presence, key)
	}
	sp.wakeAll(key)
}

func (sp *space) wakeAll(key string) {
	ws := sp.waiting[key]
	delete(sp.waiting, key)
	for _, w := range ws {
		w.found()
	}
}

func (w *wait) found() {
	if w.left--; w.left == 0 && w.c.waits == w {
		w.c.waits = nil
		w.c.send([]byte{replyStopWaiting})
	}
}

func (s *Server) get(c *conn, key string) []byte {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.spaceOf(c, key).values[key]
}

func (s *Server) compareSet(c *conn, key string, want, value []byte) []byte {
	s.mu.Lock()
	defer s.mu.Unlock()
	old, ok := s.spaceOf(c, key).values[key]
	switch {
	case !ok && len(want) > 0:
		return want // what c10d answers for a key that is not there
	case !ok || bytes.Equal(old, want):
		s.set(c, key, value)
		return value
	}
	return old
}

func (s *Server) add(c *conn, key string, by int64) (int64, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if old, ok := s.spaceOf(c, key).values[key]; ok {
		v, err := strconv.ParseInt(string(old), 10, 64)
		if err != nil {
			return 0, false
		}
		by += v
	}
	s.set(c, key, strconv.AppendInt(nil, by, 10))
	return by, true
}

// missing gives the keys that hold neither a value nor a queue with something in it; s.mu is held.
func (s *Server) missing(c *conn, keys []string) []string {
	var left []string
	for _, key := range keys {
		sp := s.spaceOf(c, key)
		if _, ok := sp.values[key]; !ok && len(sp.queues[key]) == 0 {
			left = append(left, key)
		}
	}
	return left
}

// wait says whether all keys are there, and otherwise notes that c waits for the rest.
func (s *Server) wait(c *conn, keys []string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.cancel(c)
	left := s.missing(c, keys)
	if len(left) == 0 {
		return true
	}
	c.waits = &wait{c: c, keys: left, left: len(left)}
	for _, key := range left {
		sp := s.spaceOf(c, key)
		sp.waiting[key] = append(sp.waiting[key], c.waits)
	}
	return false
}

// cancel ends c's wait; s.mu is held.
func (s *Server) cancel(c *conn) {
	w := c.waits
	if w == nil {
		return
	}
	c.waits = nil
	for _, key := range w.keys {
		sp := s.spaceOf(c, key)
		if ws := slices.DeleteFunc(sp.waiting[key], func(o *wait) bool { return o == w }); len(ws) == 0 {
			delete(sp.waiting, key)
		} else {
			sp.waiting[key] = ws
		}
	}
}

// push adds to a queue and wakes one of those who wait for it.
func (s *Server) push(c *conn, key string, value []byte) {
	s.mu.Lock()
	defer s.mu.Unlock()
	sp := s.spaceOf(c, key)
	sp.queues[key] = append(sp.queues[key], value)
	ws := sp.waiting[key]
	if len(ws) == 0 {
		return
	}
	if sp.waiting[key] = ws[1:]; len(ws) == 1 {
		delete(sp.waiting, key)
	}
	ws[0].found()
}

func (s *Server) pop(c *conn, key string) []byte {
	s.mu.Lock()
	defer s.mu.Unlock()
	sp := s.spaceOf(c, key)
	q := sp.queues[key]
	b := appendInt64(nil, int64(len(q)))
	if len(q) == 0 {
		return b
	}
	b = appendBytes(b, q[0])
	if sp.queues[key] = q[1:]; len(q) == 1 {
		delete(sp.queues, key)
	}
	return b
}
