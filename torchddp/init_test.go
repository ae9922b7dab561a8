package torchddp

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/sugarme/gotch/ts"
)

func TestInitRefusesNonsense(t *testing.T) {
	store, err := NewHashStore()
	require.NoError(t, err)
	cases := map[string]struct {
		o    InitOptions
		env  map[string]string
		text string
	}{
		"no environment": {InitOptions{}, nil, "env:// rendezvous: environment variable RANK expected, but not set"},
		"rank no number": {InitOptions{}, map[string]string{"RANK": "one"}, `RANK must be an integer, got "one"`},
		"world size 0": {InitOptions{}, map[string]string{"RANK": "0", "WORLD_SIZE": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"},
			"world size must be at least 1, got 0"},
		"rank too large": {InitOptions{}, map[string]string{"RANK": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"},
			"rank must lie between 0 and 1 (world size 2), got 2"},
		"no master":          {InitOptions{}, map[string]string{"RANK": "0", "WORLD_SIZE": "1"}, "MASTER_ADDR expected, but not set"},
		"store and method":   {InitOptions{Store: store, InitMethod: "env://"}, nil, "cannot specify both InitMethod and Store"},
		"store without size": {InitOptions{Store: store}, nil, "WorldSize must be positive when a Store is given"},
		"unknown scheme":     {InitOptions{InitMethod: "etcd://h:1"}, nil, "no rendezvous handler for etcd://"},
		"tcp without port":   {InitOptions{InitMethod: "tcp://h?rank=0&world_size=1"}, nil, "port number missing"},
		"tcp without rank":   {InitOptions{InitMethod: "tcp://h:1?world_size=1"}, nil, "rank parameter missing"},
		"file without path":  {InitOptions{InitMethod: "file://?rank=0&world_size=1"}, nil, "path missing"},
		"unknown backend":    {InitOptions{Backend: "mpi", Store: store, WorldSize: 1}, nil, `unknown backend "mpi" (known: gloo, nccl`},
		"device twice":       {InitOptions{Backend: "cpu:gloo,cpu:gloo", Store: store, WorldSize: 1}, nil, "twice"},
		"nccl on cpu":        {InitOptions{Backend: "cpu:nccl", Store: store, WorldSize: 1}, nil, "NCCL cannot serve CPU tensors"},
		"negative timeout":   {InitOptions{Timeout: -1, Store: store, WorldSize: 1}, nil, "timeout must not be negative"},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			for _, v := range []string{"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} {
				t.Setenv(v, c.env[v])
			}
			_, err := InitProcessGroup(context.Background(), c.o)
			require.ErrorContains(t, err, c.text)
			require.ErrorIs(t, err, ErrValue)
		})
	}
}

func TestNCCLWithoutGPU(t *testing.T) {
	if hasGPU() {
		t.Skip("this machine has a GPU")
	}
	store, err := NewHashStore()
	require.NoError(t, err)
	_, err = InitProcessGroup(context.Background(), InitOptions{Backend: NCCL, Store: store, WorldSize: 1})
	require.Error(t, err)
	require.Contains(t, err.Error(), "NCCL")
	t.Log(err)
}

func TestUnreachableMaster(t *testing.T) {
	// A port that was just free: nobody listens there.
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	addr := l.Addr().String()
	require.NoError(t, l.Close())
	start := time.Now()
	_, err = InitProcessGroup(context.Background(), InitOptions{InitMethod: "tcp://" + addr + "?rank=1&world_size=2", ConnectTimeout: 2 * time.Second})
	require.ErrorContains(t, err, "cannot reach the master at "+addr)
	require.ErrorIs(t, err, ErrTimeout)
	require.Less(t, time.Since(start), 20*time.Second)
	t.Log(err)
}

func TestTakenPort(t *testing.T) {
	l, err := net.Listen("tcp", ":0")
	require.NoError(t, err)
	defer l.Close()
	port := l.Addr().(*net.TCPAddr).Port
	_, err = InitProcessGroup(context.Background(), InitOptions{
		InitMethod: fmt.Sprintf("tcp://127.0.0.1:%d?rank=0&world_size=1", port), ConnectTimeout: 2 * time.Second,
	})
	require.ErrorContains(t, err, "the port is taken by another process")
}

func TestMissingRank(t *testing.T) {
	start := time.Now()
	_, err := InitProcessGroup(context.Background(), InitOptions{InitMethod: "tcp://127.0.0.1:0?rank=0&world_size=2", ConnectTimeout: time.Second})
	require.ErrorIs(t, err, ErrTimeout)
	require.Less(t, time.Since(start), 20*time.Second)
	t.Log(err)
}

func TestCancelWhileWaiting(t *testing.T) {
	ctx, cancel := context.WithTimeout(context.Background(), 300*time.Millisecond)
	defer cancel()
	store, err := NewHashStore()
	require.NoError(t, err)
	start := time.Now()
	_, err = InitProcessGroup(ctx, InitOptions{Store: store, Rank: 0, WorldSize: 2, ConnectTimeout: 3 * time.Second})
	require.ErrorIs(t, err, ErrCancelled)
	require.ErrorIs(t, err, context.DeadlineExceeded)
	require.Less(t, time.Since(start), 2*time.Second)
}

func TestFileRendezvous(t *testing.T) {
	path := t.TempDir() + "/store"
	var wg sync.WaitGroup
	for rank := range 2 {
		wg.Go(func() {
			runtime.LockOSThread()
			pg, err := InitProcessGroup(context.Background(), InitOptions{
				InitMethod: fmt.Sprintf("file://%s?rank=%d&world_size=2", path, rank), GlooInterfaces: []string{"lo"}, Timeout: 20 * time.Second,
			})
			if err == nil {
				err = errors.Join(pg.Barrier(), pg.Destroy())
			}
			if err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
}

func TestCollectiveTimeoutIsAnError(t *testing.T) {
	group(t, 2, func(pg *ProcessGroup) error {
		if err := pg.SetTimeout(time.Second); err != nil {
			return err
		}
		if pg.Rank() == 1 {
			time.Sleep(2 * time.Second)
			return nil
		}
		err := pg.AllReduce(ts.MustOfSlice([]float32{1}), Sum)
		var re *RankError
		if !errors.Is(err, ErrTimeout) || !errors.As(err, &re) || re.Rank != 0 || re.Op != "all_reduce" {
			return fmt.Errorf("got %v", err)
		}
		return nil
	})
}

func TestWaitIsCancellable(t *testing.T) {
	group(t, 2, func(pg *ProcessGroup) error {
		if pg.Rank() == 1 {
			time.Sleep(700 * time.Millisecond)
			return pg.AllReduce(ts.MustOfSlice([]float32{1}), Sum)
		}
		w, err := pg.AllReduceAsync(ts.MustOfSlice([]float32{1}), Sum)
		if err != nil {
			return err
		}
		ctx, cancel := context.WithTimeout(context.Background(), 100*time.Millisecond)
		defer cancel()
		if err := w.Wait(ctx); !errors.Is(err, ErrCancelled) {
			return fmt.Errorf("got %v", err)
		}
		return w.Wait(context.Background())
	})
}

func TestUseAfterDestroy(t *testing.T) {
	group(t, 1, func(pg *ProcessGroup) error {
		if err := pg.Destroy(); err != nil {
			return err
		}
		if err := pg.Barrier(); !errors.Is(err, ErrValue) {
			return fmt.Errorf("got %v", err)
		}
		return nil
	})
}

func TestBaseCollectives(t *testing.T) {
	group(t, 3, func(pg *ProcessGroup) error {
		r := float32(pg.Rank())
		tensor := func() *ts.Tensor { return ts.MustOfSlice([]float32{r, 10 * r}) }
		check := func(what string, x *ts.Tensor, want ...float32) error {
			if got := values(x); got[0] != want[0] || got[1] != want[1] {
				return fmt.Errorf("%s: got %v, want %v", what, got, want)
			}
			return nil
		}
		for _, c := range []struct {
			op   ReduceOp
			want [2]float32
		}{{Sum, [2]float32{3, 30}}, {Avg, [2]float32{1, 10}}, {Product, [2]float32{0, 0}}, {Min, [2]float32{0, 0}}, {Max, [2]float32{2, 20}}} {
			x := tensor()
			if err := errors.Join(pg.AllReduce(x, c.op), check("all_reduce", x, c.want[:]...)); err != nil {
				return err
			}
		}
		x := tensor()
		if err := errors.Join(pg.Broadcast(x, 2), check("broadcast", x, 2, 20)); err != nil {
			return err
		}
		x = tensor()
		if err := pg.Reduce(x, 1, Sum); err != nil {
			return err
		}
		if pg.Rank() == 1 {
			if err := check("reduce", x, 3, 30); err != nil {
				return err
			}
		}
		outputs := []*ts.Tensor{tensor(), tensor(), tensor()}
		if err := pg.AllGather(outputs, tensor()); err != nil {
			return err
		}
		for i, o := range outputs {
			if err := check("all_gather", o, float32(i), 10*float32(i)); err != nil {
				return err
			}
		}
		if err := pg.Broadcast(x, 3); !errors.Is(err, ErrValue) {
			return fmt.Errorf("a root outside the group: %v", err)
		}
		return pg.Barrier()
	})
}

func hasGPU() bool {
	_, err := os.Stat("/proc/driver/nvidia/version")
	return err == nil
}
