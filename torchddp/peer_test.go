package torchddp

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"reflect"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/goddp/goddp/internal/tdp"
	"github.com/goddp/goddp/internal/testenv"
	"github.com/stretchr/testify/require"
	"github.com/sugarme/gotch"
	"github.com/sugarme/gotch/ts"
)

// startPython starts a script of testdata. Its output is there after wait.
func startPython(t testing.TB, ctx context.Context, script string, env []string, args ...string) (wait func() (string, error)) {
	cmd := exec.CommandContext(ctx, testenv.Python(t), append([]string{"testdata/" + script}, args...)...)
	cmd.Env = append(append(os.Environ(), "GLOO_SOCKET_IFNAME=lo", "OMP_NUM_THREADS=1", "PYTHONDONTWRITEBYTECODE=1"), env...)
	var out, stderr strings.Builder
	cmd.Stdout, cmd.Stderr = &out, &stderr
	require.NoError(t, cmd.Start())
	return func() (string, error) {
		if err := cmd.Wait(); err != nil {
			return "", fmt.Errorf("%w: %s", err, stderr.String())
		}
		return out.String(), nil
	}
}

// mixedCollectives is what collectives_peer.py does.
func mixedCollectives(g *ProcessGroup) error {
	n, me := g.Size(), g.Rank()
	of := func(v ...float64) *ts.Tensor { return tensorOf(gotch.Float, v...) }
	N, r := float64(n), float64(me)
	zeros := func(k int) *ts.Tensor { return of(make([]float64, k)...) }
	var errs []error
	try := func(what string, err error, x *ts.Tensor, want ...float64) {
		if err == nil && x != nil {
			err = wantValues(what, x, want...)
		}
		if err != nil {
			errs = append(errs, err)
		}
	}
	for _, c := range []struct {
		op   ReduceOp
		want float64
	}{{Sum, N * (N + 1) / 2}, {Max, N}, {Avg, (N + 1) / 2}} {
		x := of(r + 1)
		try("all_reduce", g.AllReduce(x, c.op), x, c.want)
	}
	x := of(r, 5)
	try("broadcast", g.Broadcast(x, n-1), x, N-1, 5)
	x = of(r + 1)
	err := g.Reduce(x, 0, Sum)
	if me != 0 {
		x = nil
	}
	try("reduce", err, x, N*(N+1)/2)
	outs := eachRank(n, func(int) *ts.Tensor { return of(0) })
	try("all_gather", g.AllGather(outs, of(10*r)), nil)
	for i, o := range outs {
		try("all_gather", nil, o, float64(10*i))
	}
	x = zeros(2 * n)
	var want []float64
	for i := range n {
		want = append(want, float64(i), float64(i+1))
	}
	try("all_gather_into_tensor", g.AllGatherIntoTensor(x, of(r, r+1)), x, want...)
	outs = nil
	if me == 0 {
		outs = eachRank(n, func(int) *ts.Tensor { return of(0) })
	}
	try("gather", g.Gather(outs, of(r), 0), nil)
	for i, o := range outs {
		try("gather", nil, o, float64(i))
	}
	var ins []*ts.Tensor
	if me == n-1 {
		ins = eachRank(n, func(i int) *ts.Tensor { return of(100 + float64(i)) })
	}
	x = of(0)
	try("scatter", g.Scatter(x, ins, n-1), x, 100+r)
	whole := make([]float64, n)
	for i := range whole {
		whole[i] = r + float64(i)
	}
	x = of(0)
	try("reduce_scatter_tensor", g.ReduceScatterTensor(x, of(whole...), Sum), x, N*(N-1)/2+N*r)
	x = of(0)
	try("reduce_scatter", g.ReduceScatter(x, eachRank(n, func(i int) *ts.Tensor { return of(r + float64(i)) }), Sum), x, N*(N-1)/2+N*r)
	var in []float64
	var inSplits, outSplits []int64
	want = nil
	for i := range n {
		in = append(in, slices.Repeat([]float64{10*r + float64(i)}, me+i+1)...)
		want = append(want, slices.Repeat([]float64{10*float64(i) + r}, me+i+1)...)
		inSplits, outSplits = append(inSplits, int64(me+i+1)), append(outSplits, int64(me+i+1))
	}
	x = zeros(len(want))
	try("all_to_all_single", g.AllToAllSingle(x, of(in...), outSplits, inSplits), x, want...)
	x, y := of(r), of(r, r)
	try("all_reduce_coalesced", g.AllReduceCoalesced([]*ts.Tensor{x, y}, Sum), x, N*(N-1)/2)
	try("all_reduce_coalesced", nil, y, N*(N-1)/2, N*(N-1)/2)
	c, err := tdp.FromSlice([]complex64{complex(float32(me), 1)}, []int64{1}, gotch.CPU)
	try("complex", err, nil)
	try("complex", g.AllReduce(c, Sum), nil)
	if v, err := tdp.ToSlice[complex64](c); err != nil || v[0] != complex(float32(n*(n-1))/2, float32(n)) {
		errs = append(errs, fmt.Errorf("all_reduce of complex numbers: %v %v", v, err))
	}
	after, before := (me+1)%n, (me+n-1)%n
	w, err := g.Isend(of(r), after, WithTag(3))
	try("isend", err, nil)
	x = of(0)
	_, err = g.Recv(x, before, WithTag(3))
	try("send and recv", err, x, float64(before))
	try("isend", w.Wait(bg), nil)
	x = of(0)
	w, err = g.BatchIsendIrecv([]P2P{{Send: true, Tensor: of(r + 7), Peer: after}, {Tensor: x, Peer: before}})
	try("batch", err, nil)
	try("batch_isend_irecv", w.Wait(bg), x, float64(before+7))
	w, err = g.BarrierAsync()
	try("barrier", err, nil)
	try("barrier", w.Wait(bg), nil)
	return errors.Join(errs...)
}

func mixedValue(r int) any {
	return map[string]any{
		"rank": int64(r), "name": strings.Repeat("x", r), "list": []any{int64(r), 0.5, nil, true}, "bytes": []byte{0, 255},
		"inner": map[string]any{"k": int64(-1)},
	}
}

func mixedObjects(g *ProcessGroup) error {
	n, me := g.Size(), g.Rank()
	o := ObjectOptions{Codec: Pickle}
	values := func(f func(i int) any) (list []any) {
		for i := range n {
			list = append(list, f(i))
		}
		return list
	}
	same := func(what string, err error, got, want any) error {
		if err == nil && !reflect.DeepEqual(got, want) {
			err = fmt.Errorf("%s: got %v, want %v", what, got, want)
		}
		return err
	}
	all, err := AllGatherObject(g, mixedValue(me), o)
	if err := same("all_gather_object", err, all, values(mixedValue)); err != nil {
		return err
	}
	all, err = GatherObject(g, mixedValue(me), 0, o)
	want := []any(nil)
	if me == 0 {
		want = values(mixedValue)
	}
	if err := same("gather_object", err, all, want); err != nil {
		return err
	}
	for src := range n {
		list := []any{mixedValue(me), mixedValue(me + 1)}
		err := BroadcastObjectList(g, list, src, o)
		if err := same("broadcast_object_list", err, list, []any{mixedValue(src), mixedValue(src + 1)}); err != nil {
			return err
		}
		var give []any
		if me == src {
			give = values(func(i int) any { return mixedValue(10*src + i) })
		}
		v, err := ScatterObject(g, give, src, o)
		if err := same("scatter_object_list", err, v, mixedValue(10*src+me)); err != nil {
			return err
		}
	}
	pair := []any{int64(1), "two"}
	got := make([]any, 2)
	switch me {
	case 0:
		if err := SendObjectList(g, []any{mixedValue(1), pair}, 1, o); err != nil {
			return err
		}
		_, err := RecvObjectList(g, got, 1, o)
		return same("recv_object_list", err, got, []any{mixedValue(2), pair})
	case 1:
		_, err := RecvObjectList(g, got, 0, o)
		if err := same("recv_object_list", err, got, []any{mixedValue(1), pair}); err != nil {
			return err
		}
		return SendObjectList(g, []any{mixedValue(2), pair}, 0, o)
	}
	return nil
}

// TestCollectivesWithPython: Go and Python ranks in one Gloo group, all collectives, object collectives and groups,
// also with TORCH_DISTRIBUTED_DEBUG=DETAIL, where both sides compare what they run.
func TestCollectivesWithPython(t *testing.T) {
	for _, c := range []struct {
		goRank, world int
		debug         string
	}{{1, 2, "OFF"}, {0, 2, "DETAIL"}, {2, 3, "OFF"}} {
		t.Run(fmt.Sprintf("Go is rank %d of %d, debug %s", c.goRank, c.world, c.debug), func(t *testing.T) {
			t.Setenv("TORCH_DISTRIBUTED_DEBUG", c.debug)
			ctx, cancel := context.WithTimeout(bg, 2*time.Minute)
			defer cancel()
			port := testenv.FreePort(t)
			var waits []func() (string, error)
			for r := range c.world {
				if r != c.goRank {
					waits = append(waits, startPython(t, ctx, "collectives_peer.py", nil, fmt.Sprint(r), fmt.Sprint(c.world), fmt.Sprint(port)))
				}
			}
			runtime.LockOSThread()
			defer runtime.UnlockOSThread()
			goErr := func() error {
				pg, err := InitProcessGroup(ctx, InitOptions{
					InitMethod: fmt.Sprintf("tcp://127.0.0.1:%d?rank=%d&world_size=%d", port, c.goRank, c.world), Timeout: time.Minute,
				})
				if err != nil {
					return err
				}
				defer pg.Destroy()
				if err := errors.Join(mixedCollectives(pg), mixedObjects(pg)); err != nil {
					return err
				}
				every, err := pg.NewGroup(ctx, nil, GroupOptions{})
				if err != nil {
					return err
				}
				if err := mixedCollectives(every); err != nil {
					return err
				}
				local, err := pg.NewGroup(ctx, seq(c.world), GroupOptions{LocalSync: true})
				if err != nil {
					return err
				}
				if err := mixedCollectives(local); err != nil {
					return err
				}
				part, err := pg.NewGroup(ctx, []int{c.world - 1, c.world - 2}, GroupOptions{})
				if err != nil {
					return err
				}
				if part.IsMember() {
					if err := errors.Join(mixedCollectives(part), mixedObjects(part)); err != nil {
						return err
					}
				}
				return errors.Join(pg.MonitoredBarrier(), pg.Barrier())
			}()
			if goErr != nil {
				t.Error(goErr)
				time.AfterFunc(5*time.Second, cancel)
			}
			for _, wait := range waits {
				out, err := wait()
				require.NoError(t, err)
				require.Equal(t, "OK\n", out)
			}
		})
	}
}

// allReduceSeconds times small all-reduces between this process and a child of it.
func allReduceSeconds(rank, port, calls int) (float64, error) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	pg, err := InitProcessGroup(bg, InitOptions{InitMethod: fmt.Sprintf("tcp://127.0.0.1:%d?rank=%d&world_size=2", port, rank)})
	if err != nil {
		return 0, err
	}
	defer pg.Destroy()
	x := tensorOf(gotch.Float, 1, 2)
	loop := func(n int) error {
		for range n {
			if err := pg.AllReduce(x, Sum); err != nil {
				return err
			}
		}
		return nil
	}
	if err := errors.Join(loop(200), pg.Barrier()); err != nil {
		return 0, err
	}
	start := time.Now()
	if err := loop(calls); err != nil {
		return 0, err
	}
	d := time.Since(start).Seconds() / float64(calls)
	return d, pg.Barrier()
}

const timeChildEnv = "TORCHDDP_TIME_CHILD"

// BenchmarkAllReduceAgainstPython times an all-reduce of two floats between two processes over Gloo, Go's and Python's
// by turns, and reports the ratio of the medians.
func BenchmarkAllReduceAgainstPython(b *testing.B) {
	const calls, rounds = 2000, 7
	if text := os.Getenv(timeChildEnv); text != "" {
		port, _ := strconv.Atoi(text)
		_, err := allReduceSeconds(1, port, calls)
		require.NoError(b, err)
		return
	}
	var goTimes, pyTimes []float64
	for range rounds {
		port := testenv.FreePort(b)
		child := exec.Command(os.Args[0], "-test.run=^$", "-test.bench=^BenchmarkAllReduceAgainstPython$", "-test.benchtime=1x")
		child.Env = append(os.Environ(), timeChildEnv+"="+fmt.Sprint(port))
		require.NoError(b, child.Start())
		s, err := allReduceSeconds(0, port, calls)
		require.NoError(b, err)
		require.NoError(b, child.Wait())
		goTimes = append(goTimes, s)

		port = testenv.FreePort(b)
		other := startPython(b, bg, "allreduce_time.py", nil, "1", fmt.Sprint(port), fmt.Sprint(calls))
		out, err := startPython(b, bg, "allreduce_time.py", nil, "0", fmt.Sprint(port), fmt.Sprint(calls))()
		require.NoError(b, err)
		_, err = other()
		require.NoError(b, err)
		s, err = strconv.ParseFloat(strings.TrimSpace(out), 64)
		require.NoError(b, err)
		pyTimes = append(pyTimes, s)
	}
	slices.Sort(goTimes)
	slices.Sort(pyTimes)
	for b.Loop() {
	}
	b.ReportMetric(1e6*goTimes[rounds/2], "go-us")
	b.ReportMetric(1e6*pyTimes[rounds/2], "python-us")
	b.ReportMetric(goTimes[rounds/2]/pyTimes[rounds/2], "go/python")
}
