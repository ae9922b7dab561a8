package torchddp

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/goddp/goddp/internal/testenv"
	"github.com/stretchr/testify/require"
	"github.com/sugarme/gotch"
)

// lateRank lets rank 1 be somewhere else while the others meet, so that they time out, and gives their errors.
func timedOut(t *testing.T, size int, meet, elsewhere func(pg *ProcessGroup) error) map[int]*CollectiveError {
	var mu sync.Mutex
	found := map[int]*CollectiveError{}
	group(t, size, func(pg *ProcessGroup) error {
		if err := errors.Join(pg.Barrier(), pg.SetTimeout(700*time.Millisecond)); err != nil {
			return err
		}
		if pg.Rank() == 1 {
			return elsewhere(pg)
		}
		err := meet(pg)
		var c *CollectiveError
		if !errors.As(err, &c) || !errors.Is(err, ErrTimeout) && !errors.Is(err, ErrPeer) {
			return fmt.Errorf("no CollectiveError: %v", err)
		}
		mu.Lock()
		defer mu.Unlock()
		found[pg.Rank()] = c
		return nil
	})
	return found
}

// TestTimeoutShowsAllRanks: the error of a rank that timed out shows what the others do, those in a collective and
// those that compute.
func TestTimeoutShowsAllRanks(t *testing.T) {
	found := timedOut(t, 3, func(pg *ProcessGroup) error {
		return pg.AllReduce(tensorOf(gotch.Float, 1, 2), Sum)
	}, func(*ProcessGroup) error {
		time.Sleep(3 * time.Second)
		return nil
	})
	require.Len(t, found, 2)
	for rank, c := range found {
		text := c.Error()
		t.Logf("rank %d: %s", rank, text)
		require.Equal(t, "0", c.Group)
		require.Equal(t, uint64(2), c.Op.Seq, "the barrier was 1")
		require.Equal(t, "all_reduce", c.Op.Op)
		require.Equal(t, []int64{2}, c.Op.Shape)
		require.Contains(t, c.Op.Site, "torchddp/failure_test.go:")
		require.Equal(t, "rank 1 has not come to collective #2", c.Diagnosis())
		require.Len(t, c.Ranks, 3)
		for r, report := range c.Ranks {
			require.Equal(t, r, report.Rank)
			require.Empty(t, report.Missing, "rank %d answers, in a collective or not", r)
		}
		last, _ := c.Ranks[1].last(false)
		require.Equal(t, "barrier", last.Op)
		require.Equal(t, "done", last.State)
		other, _ := c.Ranks[2-rank].last(false)
		require.Equal(t, "all_reduce", other.Op)
	}
}

// TestDifferentCollectivesWithoutDetail: both sides are shown, with their places.
func TestDifferentCollectivesWithoutDetail(t *testing.T) {
	var theirs error
	found := timedOut(t, 2, func(pg *ProcessGroup) error {
		return pg.AllReduce(tensorOf(gotch.Float, 1, 2), Sum)
	}, func(pg *ProcessGroup) error {
		theirs = pg.AllGatherIntoTensor(tensorOf(gotch.Double, 1, 2, 3, 4, 5, 6, 7, 8), tensorOf(gotch.Double, 1, 2, 3, 4))
		return nil
	})
	require.Len(t, found, 1)
	t.Log(found[0])
	require.Contains(t, found[0].Diagnosis(), "the ranks differ in collective #2: this rank ran all_reduce float32[2], but rank 1 ran all_gather_into_tensor float64[4] at torchddp/failure_test.go:")
	var c *CollectiveError
	require.ErrorAs(t, theirs, &c)
	require.Contains(t, c.Diagnosis(), "this rank ran all_gather_into_tensor float64[4], but rank 0 ran all_reduce float32[2]")
}

// TestGroupIsRebuiltAfterTimeout: a timeout closes Gloo's connections; a rebuilt group works.
func TestGroupIsRebuiltAfterTimeout(t *testing.T) {
	group(t, 3, func(pg *ProcessGroup) error {
		if err := errors.Join(pg.Barrier(), pg.SetTimeout(500*time.Millisecond)); err != nil {
			return err
		}
		sub, err := pg.NewGroup(bg, nil, GroupOptions{Timeout: 20 * time.Second})
		if err != nil {
			return err
		}
		if pg.Rank() != 1 {
			if err := pg.AllReduce(tensorOf(gotch.Float, 1), Sum); !errors.Is(err, ErrTimeout) && !errors.Is(err, ErrPeer) {
				return fmt.Errorf("no timeout: %v", err)
			}
			if err := pg.AllReduce(tensorOf(gotch.Float, 1), Sum); err == nil {
				return errors.New("the broken group works")
			}
		}
		start := time.Now()
		next, err := pg.Rebuild(bg, RebuildOptions{Patience: 10 * time.Second})
		if err != nil {
			return err
		}
		defer next.Destroy()
		if d := time.Since(start); d > 9*time.Second {
			return fmt.Errorf("Rebuild waited %v although all ranks came", d)
		}
		if err := errors.Join(pg.Barrier(), sub.Barrier()); !errors.Is(err, ErrDestroyed) {
			return fmt.Errorf("the old groups: %v", err)
		}
		if err := next.SetTimeout(20 * time.Second); err != nil {
			return err
		}
		if err := sumOfRanks(next, next.Rank(), 0, 1, 2); err != nil {
			return err
		}
		// Again, without rank 0: the others go on as two.
		if next.Rank() == 0 {
			return nil
		}
		small, err := next.Rebuild(bg, RebuildOptions{Patience: time.Second})
		if err != nil {
			return err
		}
		defer small.Destroy()
		if small.Size() != 2 || small.Rank() != next.Rank()-1 {
			return fmt.Errorf("%v", small)
		}
		return sumOfRanks(small, small.Rank(), 0, 1)
	})
}

func TestMonitoredBarrierNamesMissingRanks(t *testing.T) {
	for _, all := range []bool{false, true} {
		t.Run(fmt.Sprintf("wait for all ranks: %t", all), func(t *testing.T) {
			group(t, 4, func(pg *ProcessGroup) error {
				if err := pg.MonitoredBarrier(); err != nil {
					return err
				}
				if r := pg.Rank(); r == 1 || r == 3 {
					time.Sleep(2500 * time.Millisecond)
					return nil
				}
				opts := []CallOption{WithTimeout(600 * time.Millisecond)}
				want, text := []int{1}, "Rank 1 failed to pass monitored_barrier in 600ms"
				if all {
					opts = append(opts, WithAllRanks())
					want, text = []int{1, 3}, "Ranks 1, 3 failed to pass monitored_barrier in 600ms"
				}
				err := pg.MonitoredBarrier(opts...)
				var m *MissingRanksError
				if !errors.As(err, &m) || !slices.Equal(m.Ranks, want) || !errors.Is(err, ErrTimeout) {
					return fmt.Errorf("rank %d got %v", pg.Rank(), err)
				}
				return contains(err, text)
			})
		})
	}
}

// detail makes a group with DebugDetail.
func detail(t *testing.T, size int, fn func(pg *ProcessGroup) error) {
	t.Helper()
	store, err := NewHashStore()
	require.NoError(t, err)
	defer store.Close()
	var wg sync.WaitGroup
	for rank := range size {
		wg.Go(func() {
			runtime.LockOSThread()
			pg, err := InitProcessGroup(bg, InitOptions{Store: store, Rank: rank, WorldSize: size, Timeout: 3 * time.Second, GlooInterfaces: []string{"lo"}, Debug: DebugDetail})
			if err == nil {
				err = errors.Join(fn(pg), pg.Destroy())
			}
			if err != nil {
				t.Errorf("rank %d: %v", rank, err)
			}
		})
	}
	wg.Wait()
}

func TestDetailShowsBothCollectives(t *testing.T) {
	type call func(pg *ProcessGroup) error
	reduceOf := func(n int) call {
		return func(pg *ProcessGroup) error {
			return pg.AllReduce(tensorOf(gotch.Float, make([]float64, n)...), Sum)
		}
	}
	for name, c := range map[string]struct {
		calls [2]call
		texts []string
	}{
		"another shape": {[2]call{reduceOf(2), reduceOf(3)}, []string{"TensorShape=[2]", "TensorShape=[3]"}},
		"another collective": {[2]call{reduceOf(2), func(pg *ProcessGroup) error { return pg.Broadcast(tensorOf(gotch.Float, 1, 2), 0) }},
			[]string{"OpType=ALLREDUCE", "OpType=BROADCAST"}},
		"another dtype": {[2]call{reduceOf(2), func(pg *ProcessGroup) error { return pg.AllReduce(tensorOf(gotch.Double, 1, 2), Sum) }},
			[]string{"TensorDtypes=Float", "TensorDtypes=Double"}},
	} {
		t.Run(name, func(t *testing.T) {
			detail(t, 2, func(pg *ProcessGroup) error {
				if err := reduceOf(1)(pg); err != nil {
					return err
				}
				err := c.calls[pg.Rank()](pg)
				if !errors.Is(err, ErrDesync) {
					return fmt.Errorf("got %v", err)
				}
				for _, text := range c.texts {
					if err := contains(err, text); err != nil {
						return err
					}
				}
				return contains(err, "Detected mismatch between collectives on ranks")
			})
		})
	}
	// The same collectives as without it, the coalesced ones included, and timeouts and aborts pass through.
	detail(t, 2, func(pg *ProcessGroup) error {
		return errors.Join(allCollectives(pg, gotch.Float), pg.SetTimeout(time.Second), pg.Barrier())
	})
	detail(t, 2, func(pg *ProcessGroup) error {
		if pg.Rank() == 1 {
			time.Sleep(2 * time.Second)
			return nil
		}
		err := pg.AllReduce(tensorOf(gotch.Float, 1), Sum, WithTimeout(500*time.Millisecond))
		if err == nil {
			return errors.New("no error although rank 1 did not come")
		}
		return nil
	})
}

func TestDebugLevelOfEnvironment(t *testing.T) {
	for text, want := range map[string]DebugLevel{"": DebugOff, "OFF": DebugOff, "INFO": DebugInfo, "DETAIL": DebugDetail} {
		got, err := DebugFromEnv.resolve(func(string) string { return text })
		require.NoError(t, err)
		require.Equal(t, want, got)
	}
	_, err := DebugFromEnv.resolve(func(string) string { return "LOUD" })
	require.ErrorIs(t, err, ErrValue)
	require.ErrorContains(t, err, "must be one of OFF, INFO, or DETAIL")
}

// childEnv makes the test binary a rank that says it is ready and then waits to be killed.
const childEnv = "TORCHDDP_TEST_CHILD"

func TestKilledPeerIsAnError(t *testing.T) {
	if addr := os.Getenv(childEnv); addr != "" {
		runtime.LockOSThread()
		pg, err := InitProcessGroup(bg, InitOptions{InitMethod: addr + "?rank=1&world_size=2", Timeout: time.Minute})
		require.NoError(t, err)
		require.NoError(t, pg.Barrier())
		fmt.Println("READY")
		time.Sleep(time.Minute)
		return
	}
	addr := fmt.Sprintf("tcp://127.0.0.1:%d", testenv.FreePort(t))
	cmd := exec.Command(os.Args[0], "-test.run=^TestKilledPeerIsAnError$", "-test.v")
	cmd.Env = append(os.Environ(), childEnv+"="+addr)
	require.NoError(t, cmd.Start())
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	pg, err := InitProcessGroup(bg, InitOptions{InitMethod: addr + "?rank=0&world_size=2", Timeout: time.Minute})
	require.NoError(t, err)
	require.NoError(t, pg.Barrier())
	time.AfterFunc(300*time.Millisecond, func() { _ = cmd.Process.Kill() })
	start := time.Now()
	err = pg.AllReduce(tensorOf(gotch.Float, 1), Sum)
	require.Less(t, time.Since(start), 15*time.Second)
	require.ErrorIs(t, err, ErrPeer)
	var c *CollectiveError
	require.ErrorAs(t, err, &c)
	require.NotEmpty(t, c.Ranks[1].Missing, "a killed rank does not answer")
	t.Log(err)
	_ = cmd.Wait()

	// The survivor goes on alone.
	next, err := pg.Rebuild(bg, RebuildOptions{Patience: 200 * time.Millisecond})
	require.NoError(t, err)
	require.Equal(t, 1, next.Size())
	require.NoError(t, sumOfRanks(next, 0, 0))
	require.NoError(t, next.Destroy())
}

func TestHistory(t *testing.T) {
	group(t, 2, func(pg *ProcessGroup) error {
		for range 70 {
			if err := pg.Barrier(); err != nil {
				return err
			}
		}
		if pg.Rank() == 0 {
			if err := pg.Send(tensorOf(gotch.Double, 1, 2, 3), 1); err != nil {
				return err
			}
		} else if _, err := pg.Recv(tensorOf(gotch.Double, 1, 2, 3), 0); err != nil {
			return err
		}
		if err := pg.Broadcast(tensorOf(gotch.Int64, 5), 1); err != nil {
			return err
		}
		h, err := pg.History()
		if err != nil || len(h) != 64 {
			return fmt.Errorf("%d entries, %v", len(h), err)
		}
		last, p2p := h[63], h[62]
		if last.Op != "broadcast" || last.Seq != 71 || last.State != "done" || last.Peer != 1 || last.DType != "int64" || !slices.Equal(last.Shape, []int64{1}) ||
			!strings.HasPrefix(last.Site, "torchddp/failure_test.go:") {
			return fmt.Errorf("%+v", last)
		}
		want := []string{"send float64[3] to 1", "recv float64[3] from 0"}[pg.Rank()]
		if p2p.what() != want || p2p.Seq != 1 {
			return fmt.Errorf("%v", p2p)
		}
		return nil
	})
}

// TestFlightRecorder runs in a process of its own, where the recorder is on.
func TestFlightRecorder(t *testing.T) {
	if os.Getenv("TORCH_FR_BUFFER_SIZE") != "100" {
		_, err := FlightRecorderDump(FlightRecorderOptions{})
		require.ErrorIs(t, err, ErrUnsupported)
		require.ErrorContains(t, err, "TORCH_FR_BUFFER_SIZE")
		cmd := exec.Command(os.Args[0], "-test.run=^TestFlightRecorder$", "-test.v")
		cmd.Env = append(os.Environ(), "TORCH_FR_BUFFER_SIZE=100")
		out, err := cmd.CombinedOutput()
		require.NoError(t, err, string(out))
		require.Contains(t, string(out), "DUMPED")
		return
	}
	for range 20 { // groups that start together must not disturb the recorder
		group(t, 4, func(pg *ProcessGroup) error { return pg.AllReduce(tensorOf(gotch.Float, 1, 2), Sum) })
	}
	dump, err := FlightRecorderDump(FlightRecorderOptions{})
	require.NoError(t, err)
	require.Contains(t, string(dump), "gloo:all_reduce")
	require.Contains(t, string(dump), `"entries"`)
	raw, err := FlightRecorderDump(FlightRecorderOptions{Pickle: true})
	require.NoError(t, err)
	require.NotEmpty(t, raw)
	fmt.Println("DUMPED", len(dump), len(raw))
}

func TestShutdownLeavesHistory(t *testing.T) {
	group(t, 2, func(pg *ProcessGroup) error {
		if err := errors.Join(pg.Barrier(), pg.Health(), pg.Shutdown()); err != nil {
			return err
		}
		h, err := pg.History()
		if err != nil || len(h) != 1 {
			return fmt.Errorf("%v %v", h, err)
		}
		return nil
	})
}

// TestStoreQueuesAndLists: the store's calls that process groups do not use.
func TestStoreQueuesAndLists(t *testing.T) {
	tcp, err := NewTCPStore(bg, TCPStoreOptions{Serve: true, WorldSize: 1, Timeout: 2 * time.Second})
	require.NoError(t, err)
	hash, err := NewHashStore()
	require.NoError(t, err)
	for name, s := range map[string]*Store{"tcp": tcp, "hash": hash} {
		t.Run(name, func(t *testing.T) {
			defer s.Close()
			require.NoError(t, s.MultiSet([]string{"a", "b"}, [][]byte{[]byte("1"), nil}))
			require.NoError(t, s.Append("a", []byte("23")))
			v, err := s.MultiGet("a", "b")
			require.NoError(t, err)
			require.Equal(t, [][]byte{[]byte("123"), {}}, v)
			require.ErrorIs(t, s.MultiSet([]string{"a"}, nil), ErrValue)
			require.NoError(t, s.QueuePush("q", []byte("x")))
			require.NoError(t, s.QueuePush("q", []byte("y")))
			n, err := s.QueueLen("q")
			require.NoError(t, err)
			require.EqualValues(t, 2, n)
			for _, want := range []string{"x", "y"} {
				got, err := s.QueuePop("q", true)
				require.NoError(t, err)
				require.Equal(t, want, string(got))
			}
			_, err = s.QueuePop("q", false)
			require.Error(t, err, "an empty queue")
			keys, err := s.Keys()
			require.NoError(t, err)
			require.Contains(t, keys, "a")
			require.Contains(t, keys, "b")
			clone, err := s.clone()
			require.NoError(t, err)
			got, err := clone.Get(context.Background(), "a")
			require.NoError(t, err)
			require.Equal(t, "123", string(got))
			require.NoError(t, clone.Close())
		})
	}
}
