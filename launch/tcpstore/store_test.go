package tcpstore

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/goddp/goddp/internal/testenv"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func serve(t *testing.T, opts Options) *Server {
	s, err := Listen("127.0.0.1:0", opts)
	require.NoError(t, err)
	t.Cleanup(func() { s.Close() })
	return s
}

func dial(t *testing.T, s *Server) *Client {
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	c, err := Dial(ctx, s.Addr().String())
	require.NoError(t, err)
	t.Cleanup(func() { c.Close() })
	return c
}

func short(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	t.Cleanup(cancel)
	return ctx
}

func TestOperations(t *testing.T) {
	c := dial(t, serve(t, Options{}))
	exercise(t, c)
}

// exercise does everything a client can do; it is run against our server and against Python's.
func exercise(t *testing.T, c *Client) {
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	before, err := c.NumKeys(ctx)
	require.NoError(t, err)

	require.NoError(t, c.Set(ctx, "a", []byte("1\x00\xff")))
	v, err := c.Get(ctx, "a")
	require.NoError(t, err)
	assert.Equal(t, []byte("1\x00\xff"), v)
	big := slices.Repeat([]byte("0123456789abcdef"), 1<<14)
	require.NoError(t, c.Set(ctx, "big", big))
	v, err = c.Get(ctx, "big")
	require.NoError(t, err)
	assert.Equal(t, big, v)

	sum, err := c.Add(ctx, "n", 40)
	require.NoError(t, err)
	assert.EqualValues(t, 40, sum)
	sum, err = c.Add(ctx, "n", -50)
	require.NoError(t, err)
	assert.EqualValues(t, -10, sum)
	v, err = c.Get(ctx, "n")
	require.NoError(t, err)
	assert.Equal(t, "-10", string(v))

	for _, step := range []struct{ key, want, value, now string }{
		{"cas", "x", "1", "x"}, // not there, and something is wanted
		{"cas", "", "1", "1"},
		{"cas", "", "2", "1"},
		{"cas", "1", "2", "2"},
	} {
		v, err = c.CompareSet(ctx, step.key, []byte(step.want), []byte(step.value))
		require.NoError(t, err)
		assert.Equal(t, step.now, string(v), "%+v", step)
	}

	ok, err := c.Check(ctx, "a", "n")
	require.NoError(t, err)
	assert.True(t, ok)
	ok, err = c.Check(ctx, "a", "nothing")
	require.NoError(t, err)
	assert.False(t, ok)

	require.NoError(t, c.Append(ctx, "app", []byte("x")))
	require.NoError(t, c.Append(ctx, "app", []byte("yz")))
	require.NoError(t, c.MultiSet(ctx, []string{"m1", "m2"}, [][]byte{[]byte("one"), []byte("")}))
	vs, err := c.MultiGet(ctx, "m1", "m2", "app")
	require.NoError(t, err)
	assert.Equal(t, []string{"one", "", "xyz"}, []string{string(vs[0]), string(vs[1]), string(vs[2])})

	n, err := c.NumKeys(ctx)
	require.NoError(t, err)
	assert.EqualValues(t, 7, n-before)
	keys, err := c.ListKeys(ctx)
	require.NoError(t, err)
	for _, key := range []string{"a", "big", "n", "cas", "app", "m1", "m2"} {
		assert.Contains(t, keys, key)
	}
	was, err := c.Delete(ctx, "a")
	require.NoError(t, err)
	assert.True(t, was)
	was, err = c.Delete(ctx, "a")
	require.NoError(t, err)
	assert.False(t, was)

	require.NoError(t, c.QueuePush(ctx, "q", []byte("first")))
	require.NoError(t, c.QueuePush(ctx, "q", []byte("second")))
	n, err = c.QueueLen(ctx, "q")
	require.NoError(t, err)
	assert.EqualValues(t, 2, n)
	for _, want := range []string{"first", "second"} {
		v, err = c.QueuePop(ctx, "q")
		require.NoError(t, err)
		assert.Equal(t, want, string(v))
	}
	_, err = c.QueueTryPop(ctx, "q")
	assert.ErrorIs(t, err, ErrEmpty)

	// A wait that times out is withdrawn, and the connection is good afterwards.
	_, err = c.Get(short(t), "never")
	assert.ErrorIs(t, err, ErrTimeout)
	assert.ErrorContains(t, err, "never")
	_, err = c.QueuePop(short(t), "q")
	assert.ErrorIs(t, err, ErrTimeout)
	v, err = c.Get(ctx, "n")
	require.NoError(t, err)
	assert.Equal(t, "-10", string(v))
}

func TestWaitersAreWoken(t *testing.T) {
	s := serve(t, Options{})
	a := dial(t, s)
	var wg sync.WaitGroup
	for range 20 {
		c := dial(t, s)
		wg.Go(func() {
			vs, err := c.MultiGet(t.Context(), "x", "y")
			assert.NoError(t, err)
			assert.Equal(t, "[[49] [50]]", fmt.Sprint(vs))
		})
	}
	time.Sleep(20 * time.Millisecond)
	require.NoError(t, a.Set(t.Context(), "x", []byte("1")))
	require.NoError(t, a.Set(t.Context(), "x", []byte("1")))
	require.NoError(t, a.Set(t.Context(), "y", []byte("2")))
	wg.Wait()

	// Each thing in a queue goes to one.
	got := make(chan string, 10)
	for range 10 {
		c := dial(t, s)
		wg.Go(func() {
			v, err := c.QueuePop(t.Context(), "q")
			assert.NoError(t, err)
			got <- string(v)
		})
	}
	for i := range 10 {
		require.NoError(t, a.QueuePush(t.Context(), "q", []byte{byte('0' + i)}))
	}
	wg.Wait()
	close(got)
	var all []string
	for v := range got {
		all = append(all, v)
	}
	slices.Sort(all)
	assert.Equal(t, "0123456789", strings.Join(all, ""))
}

func TestFreshKeepsLastingKeysOnly(t *testing.T) {
	s := serve(t, Options{Lasting: "keep/"})
	agent, worker := dial(t, s), dial(t, s)
	ctx := t.Context()
	require.NoError(t, agent.Set(ctx, "keep/a", []byte("1")))
	require.NoError(t, worker.Set(ctx, "w", []byte("1")))
	_, err := worker.Get(ctx, "w")
	require.NoError(t, err)
	late := dial(t, s) // connected before, used after

	s.Fresh()
	_, err = worker.Get(ctx, "w")
	assert.ErrorIs(t, err, ErrClosed)
	v, err := agent.Get(ctx, "keep/a")
	require.NoError(t, err)
	assert.Equal(t, "1", string(v))
	ok, err := late.Check(ctx, "w")
	require.NoError(t, err)
	assert.False(t, ok)
	assert.EqualValues(t, 1, s.Stats().Keys)
}

func TestPresence(t *testing.T) {
	gone := make(chan string, 1)
	s := serve(t, Options{Lasting: "r/", Presence: "r/here/", Gone: func(key string) { gone <- key }})
	a, b := dial(t, s), dial(t, s)
	require.NoError(t, a.Set(t.Context(), "r/here/a", []byte("1")))
	_, err := b.Get(t.Context(), "r/here/a")
	require.NoError(t, err)
	a.Close()
	select {
	case key := <-gone:
		assert.Equal(t, "r/here/a", key)
	case <-time.After(5 * time.Second):
		t.Fatal("the end of the connection was not noticed")
	}
	ok, err := b.Check(t.Context(), "r/here/a")
	require.NoError(t, err)
	assert.False(t, ok)
}

func TestClosingEndsWaits(t *testing.T) {
	s := serve(t, Options{})
	c := dial(t, s)
	done := make(chan error)
	go func() { done <- c.Wait(t.Context(), "never") }()
	time.Sleep(20 * time.Millisecond)
	s.Close()
	assert.ErrorIs(t, <-done, ErrClosed)
	assert.ErrorIs(t, c.Set(t.Context(), "x", nil), ErrClosed)

	c = dial(t, serve(t, Options{}))
	go func() { done <- c.Wait(t.Context(), "never") }()
	time.Sleep(20 * time.Millisecond)
	c.Close()
	assert.ErrorIs(t, <-done, ErrClosed)
}

func TestServerRefusesNonsense(t *testing.T) {
	s := serve(t, Options{})
	for name, text := range map[string]string{
		"no store client": "GET / HTTP/1.1\r\n\r\n",
		"wrong number":    "\x00\x01\x02\x03\x04\x0d\x00\x00\x00\x00",
		"no such command": "\x00\xce\xf7\x85\x3c\xc8",
		"key too long":    "\x00\xce\xf7\x85\x3c\x03\xff\xff\xff\xff\x00\x00\x00\x00",
		"negative length": "\x00\xce\xf7\x85\x3c\x03\xff\xff\xff\xff\xff\xff\xff\xff",
		"too many keys":   "\x00\xce\xf7\x85\x3c\x05\xff\xff\xff\xff\xff\x00\x00\x00",
	} {
		nc, err := net.Dial("tcp", s.Addr().String())
		require.NoError(t, err)
		_, err = nc.Write([]byte(text))
		require.NoError(t, err)
		nc.SetReadDeadline(time.Now().Add(5 * time.Second))
		_, err = nc.Read(make([]byte, 1))
		require.Error(t, err, name)
		assert.False(t, errors.Is(err, os.ErrDeadlineExceeded), name)
		nc.Close()
	}
	c := dial(t, s)
	require.NoError(t, c.Set(t.Context(), "word", []byte("abc")))
	_, err := c.Add(t.Context(), "word", 1)
	assert.ErrorIs(t, err, ErrClosed)
}

func TestDialWaitsForTheServer(t *testing.T) {
	_, err := Dial(short(t), "127.0.0.1:1")
	assert.ErrorContains(t, err, "connection refused")
	assert.ErrorIs(t, err, ErrTimeout)

	ln, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	addr := ln.Addr().String()
	ln.Close()
	time.AfterFunc(100*time.Millisecond, func() {
		if s, err := Listen(addr, Options{}); assert.NoError(t, err) {
			time.AfterFunc(time.Second, func() { s.Close() })
		}
	})
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	c, err := Dial(ctx, addr)
	require.NoError(t, err)
	c.Close()
}

// Python's client does to our server, with both of its backends' settings, what the torch documentation shows, and waits with us for one another.
func TestPythonClient(t *testing.T) {
	python := testenv.Python(t)
	s := serve(t, Options{})
	cmd := exec.Command(python, "-c", `
import sys, datetime
import torch.distributed as dist
port = int(sys.argv[1])
for uv in (True, False):
    p = "uv" if uv else "legacy"
    s = dist.TCPStore("127.0.0.1", port, 2, False, timeout=datetime.timedelta(seconds=10), use_libuv=uv, wait_for_workers=False)
    s.set(p + "a", "1"); assert s.get(p + "a") == b"1"
    assert s.add(p + "n", 5) == 5 and s.add(p + "n", 2) == 7
    assert s.compare_set(p + "c", "", "x") == b"x" and s.compare_set(p + "c", "y", "z") == b"x"
    assert s.check([p + "a"]) and not s.check([p + "zz"])
    s.append(p + "ap", "a"); s.append(p + "ap", "b"); assert s.get(p + "ap") == b"ab"
    s.multi_set([p + "1", p + "2"], ["x", "y"]); assert s.multi_get([p + "1", p + "2"]) == [b"x", b"y"]
    assert s.delete_key(p + "1") and not s.delete_key(p + "1")
    assert s.num_keys() >= 4
    assert p + "a" in s.list_keys()
    try:
        s.wait([p + "never"], datetime.timedelta(milliseconds=100)); raise SystemExit("no timeout")
    except dist.DistStoreError as e:
        assert "wait timeout after 100ms" in str(e), e
    if uv:
        s.queue_push("q", "v"); assert s.queue_len("q") == 1 and s.queue_pop("q") == b"v"
    s.set(p + "from python", b"\x00\xff")
    assert s.get(p + "from go") == b"go"
c = s.clone(); assert c.get("uva") == b"1"
print("done")
`, strconv.Itoa(s.Port()))
	c := dial(t, s)
	go func() {
		for _, p := range []string{"uv", "legacy"} {
			v, err := c.Get(t.Context(), p+"from python")
			assert.NoError(t, err)
			assert.Equal(t, "\x00\xff", string(v))
			assert.NoError(t, c.Set(t.Context(), p+"from go", []byte("go")))
		}
	}()
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, "%s", out)
	assert.True(t, strings.HasSuffix(string(out), "done\n"), "%s", out)
}

func TestPythonServer(t *testing.T) {
	python := testenv.Python(t)
	cmd := exec.Command(python, "-c", `
import sys
import torch.distributed as dist
s = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
print(s.port, flush=True)
sys.stdin.read()
`)
	in, err := cmd.StdinPipe()
	require.NoError(t, err)
	out, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	defer func() { in.Close(); cmd.Wait() }()
	line, err := bufio.NewReader(out).ReadString('\n')
	require.NoError(t, err)
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	c, err := Dial(ctx, "127.0.0.1:"+strings.TrimSpace(line))
	require.NoError(t, err)
	defer c.Close()
	exercise(t, c)
}

func ExampleListen() {
	s, err := Listen("127.0.0.1:0", Options{})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer s.Close()
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	go func() {
		if c, err := Dial(ctx, s.Addr().String()); err == nil {
			defer c.Close()
			c.Set(ctx, "address", []byte("10.0.0.1"))
		}
	}()
	c, err := Dial(ctx, s.Addr().String())
	if err != nil {
		fmt.Println(err)
		return
	}
	defer c.Close()
	v, err := c.Get(ctx, "address") // waits until it is there
	fmt.Println(string(v), err)
	// Output: 10.0.0.1 <nil>
}
