package torchddp

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"os"
	"os/exec"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/goddp/goddp/internal/tdp"
	"github.com/goddp/goddp/internal/testenv"
	"github.com/goddp/goddp/models/nn"
	"github.com/goddp/goddp/torchddp/amp"
	"github.com/goddp/goddp/torchddp/optim"
	"github.com/stretchr/testify/require"
	"github.com/sugarme/gotch"
	"github.com/sugarme/gotch/ts"
)

// place is where the tests' tensors lie.
var place = gotch.CPU

// onGPU lets a test's tensors lie on the first GPU, or skips the test.
func onGPU(t *testing.T) {
	t.Helper()
	testenv.NeedGPU(t, tdp.CUDAAvailable)
	place = gotch.CudaBuilder(0)
	t.Cleanup(func() { place = gotch.CPU })
}

const (
	gpuRankVar = "TORCHDDP_TEST_RANK" // "RANK/SIZE/PORT": this process is a rank of the test that it runs
	liveVar    = "TORCHDDP_TEST_LIVE" // what Python said, for the ranks
)

// processes runs fn in processes of their own, the ranks of a group whose tensors lie on one GPU. Two ranks in one process
// would share the thread that runs a device's backward passes, and one would wait on it for the other.
func processes(t *testing.T, size int, backend string, fn func(pg *ProcessGroup) error) {
	t.Helper()
	if text := os.Getenv(gpuRankVar); text != "" {
		var rank, world, port int
		_, err := fmt.Sscanf(text, "%d/%d/%d", &rank, &world, &port)
		require.NoError(t, err)
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		pg, err := InitProcessGroup(bg, InitOptions{
			Backend: backend, Device: place, Timeout: time.Minute, GlooInterfaces: []string{"lo"},
			InitMethod: fmt.Sprintf("tcp://127.0.0.1:%d?rank=%d&world_size=%d", port, rank, world),
		})
		require.NoError(t, err)
		require.NoError(t, errors.Join(fn(pg), pg.Destroy()))
		return
	}
	port := testenv.FreePort(t)
	ctx, cancel := context.WithTimeout(bg, 4*time.Minute)
	defer cancel()
	only := "^" + strings.ReplaceAll(regexp.QuoteMeta(t.Name()), "/", "$/^") + "$"
	outputs, errs := make([]string, size), make([]error, size)
	var wg sync.WaitGroup
	for rank := range size {
		wg.Go(func() {
			cmd := exec.CommandContext(ctx, os.Args[0], "-test.run="+only, "-test.v", "-test.timeout=4m")
			cmd.Env = append(os.Environ(), "OMP_NUM_THREADS=1", fmt.Sprintf("%s=%d/%d/%d", gpuRankVar, rank, size, port))
			out, err := cmd.CombinedOutput()
			if err == nil && !strings.Contains(string(out), "--- PASS: "+t.Name()) {
				err = errors.New("the rank has not run the test")
			}
			outputs[rank], errs[rank] = string(out), err
		})
	}
	wg.Wait()
	for rank, err := range errs {
		if err != nil {
			t.Errorf("rank %d: %v\n%s", rank, err, outputs[rank])
		}
	}
	if !t.Failed() {
		t.Logf("rank 0:\n%s", outputs[0])
	}
}

// named gives an error the name of what failed.
func named(what string, errs ...error) error {
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("%s: %w", what, err)
	}
	return nil
}

// collectivesOnGPU are those that NCCL has, and Gloo for tensors on a GPU.
func collectivesOnGPU(g *ProcessGroup) error {
	n, me := g.Size(), g.Rank()
	N, r := float64(n), float64(me)
	of := func(v ...float64) *ts.Tensor { return tensorOf(gotch.Float, v...) }
	var errs []error
	try := func(what string, err error, x *ts.Tensor, want ...float64) {
		if err == nil && x != nil {
			err = wantValues(what, x, want...)
		}
		errs = append(errs, named(what, err))
	}
	factorial := 1.0
	for i := range n {
		factorial *= float64(i + 1)
	}
	for _, c := range []struct {
		op   ReduceOp
		want float64
	}{{Sum, N * (N + 1) / 2}, {Product, factorial}, {Min, 1}, {Max, N}, {Avg, (N + 1) / 2}} {
		x := of(r + 1)
		try(fmt.Sprint("all_reduce ", c.op), g.AllReduce(x, c.op), x, c.want)
	}
	for _, dtype := range []gotch.DType{gotch.Half, gotch.BFloat16, gotch.Double, gotch.Int64} {
		x := tensorOf(dtype, r+1)
		try("all_reduce of "+tdp.DTypeName(dtype), g.AllReduce(x, Sum), x, N*(N+1)/2)
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
	var all, own, theirs []float64
	for i := range n {
		all, own, theirs = append(all, float64(i), float64(i+1)), append(own, 10*r+float64(i)), append(theirs, float64(10*i)+r)
	}
	x = of(make([]float64, 2*n)...)
	try("all_gather_into_tensor", g.AllGatherIntoTensor(x, of(r, r+1)), x, all...)
	x = of(make([]float64, n)...)
	try("all_to_all_single", g.AllToAllSingle(x, of(own...), nil, nil), x, theirs...)
	try("barrier", g.Barrier(), nil)
	objects, err := AllGatherObject(g, fmt.Sprint("rank ", me))
	if err == nil && (len(objects) != n || objects[n-1] != fmt.Sprint("rank ", n-1)) {
		err = fmt.Errorf("got %q", objects)
	}
	try("all_gather_object", err, nil)
	return errors.Join(errs...)
}

// TestCUDACollectivesOfNCCL proves that every collective of NCCL runs and is right in a group of one rank.
func TestCUDACollectivesOfNCCL(t *testing.T) {
	onGPU(t)
	processes(t, 1, NCCL, func(g *ProcessGroup) error {
		of := func(v ...float64) *ts.Tensor { return tensorOf(gotch.Float, v...) }
		errs := []error{collectivesOnGPU(g)}
		check := func(what string, err error, x *ts.Tensor, want ...float64) {
			errs = append(errs, named(what, err, wantValues(what, x, want...)))
		}
		x := of(3)
		check("premul_sum", g.AllReduce(x, PremulSum, WithFactor(2)), x, 6)
		x = of(0, 0)
		check("reduce_scatter", g.ReduceScatter(x, []*ts.Tensor{of(1, 2)}, Sum), x, 1, 2)
		check("reduce_scatter_tensor", g.ReduceScatterTensor(x, of(3, 4), Sum), x, 3, 4)
		check("reduce_scatter_tensor_coalesced",
			g.ReduceScatterTensorCoalesced([]*ts.Tensor{x}, []*ts.Tensor{of(5, 6)}, Sum), x, 5, 6)
		check("all_gather_into_tensor_coalesced",
			g.AllGatherIntoTensorCoalesced([]*ts.Tensor{x}, []*ts.Tensor{of(7, 8)}), x, 7, 8)
		check("all_reduce_coalesced", g.AllReduceCoalesced([]*ts.Tensor{x, of(1)}, Sum), x, 7, 8)
		check("all_to_all", g.AllToAll([]*ts.Tensor{x}, []*ts.Tensor{of(9, 10)}), x, 9, 10)
		w, err := g.AllReduceAsync(x, Sum)
		if err == nil {
			err = errors.Join(w.Wait(bg), w.WaitTimeout(time.Minute), w.Close())
		}
		check("all_reduce_async", err, x, 9, 10)
		// To itself: NCCL takes that only as one operation.
		x = of(0)
		w, err = g.BatchIsendIrecv([]P2P{{Send: true, Tensor: of(11), Peer: 0}, {Tensor: x, Peer: 0}})
		if err == nil {
			err = errors.Join(w.Wait(bg), w.Close())
		}
		check("batch_isend_irecv", err, x, 11)
		if err := g.AllReduce(x, BAnd); err == nil {
			errs = append(errs, errors.New("NCCL took a bitwise reduction"))
		}
		return errors.Join(append(errs, g.Health())...)
	})
}

// TestCUDACollectivesOfGloo proves that Gloo groups of several ranks reduce, broadcast and gather tensors on one GPU.
// What libtorch's Gloo may lack for GPUs is right or an error, and the log says which.
func TestCUDACollectivesOfGloo(t *testing.T) {
	onGPU(t)
	for _, size := range []int{2, 3} {
		t.Run(fmt.Sprint(size), func(t *testing.T) {
			processes(t, size, Gloo, func(g *ProcessGroup) error {
				err := collectivesOnGPU(g)
				n := float64(size)
				x := tensorOf(gotch.Float, 0)
				part := tensorOf(gotch.Float, slices.Repeat([]float64{1}, size)...)
				if e := g.ReduceScatterTensor(x, part, Sum); e == nil {
					err = errors.Join(err, wantValues("reduce_scatter_tensor", x, n))
				} else {
					t.Log("reduce_scatter_tensor:", e)
				}
				return err
			})
		})
	}
}

// TestCUDANCCLRefusesTwoRanksOnAGPU proves that two NCCL ranks on one GPU get an error that says so, and do not hang.
func TestCUDANCCLRefusesTwoRanksOnAGPU(t *testing.T) {
	onGPU(t)
	processes(t, 2, NCCL, func(g *ProcessGroup) error {
		err := g.AllReduce(tensorOf(gotch.Float, 1), Sum)
		if !errors.Is(err, ErrBackend) {
			return fmt.Errorf("want ErrBackend, got %v", err)
		}
		t.Log(err)
		return contains(err, "Duplicate GPU")
	})
}

// cudaRun is what testdata/cuda.py prints.
type cudaRun struct {
	Losses []float64
	State  map[string][]float64
}

// live runs testdata/cuda.py. The ranks get what it printed from their test.
func live(t *testing.T, args ...string) (r cudaRun) {
	t.Helper()
	if os.Getenv(gpuRankVar) == "" {
		ctx, cancel := context.WithTimeout(bg, 3*time.Minute)
		defer cancel()
		out, err := startPython(t, ctx, "cuda.py", nil, args...)()
		require.NoError(t, err)
		t.Setenv(liveVar, out)
	}
	require.NoError(t, json.Unmarshal([]byte(os.Getenv(liveVar)), &r))
	return r
}

// cudaNet trains what testdata/cuda.py trains.
func cudaNet(pg *ProcessGroup, kind string) (r cudaRun, err error) {
	built, err := build(func() nn.Module {
		if err := ManualSeed(0); err != nil {
			panic(err)
		}
		return nn.NewSequential(denseLayer(6, 16), nn.Must(nn.NewBatchNorm1d(16, nn.BatchNormOptions{})), nn.NewReLU(),
			denseLayer(16, 3))
	}, gotch.Float)
	if err != nil {
		return r, err
	}
	if err := built.To(place, gotch.Float); err != nil {
		return r, err
	}
	if kind == "sync" {
		if n, err := ConvertSyncBatchNorm(built, pg); err != nil || n != 1 {
			return r, fmt.Errorf("converted %d layers: %w", n, err)
		}
	}
	d, err := NewDDP(built, pg, DDPOptions{})
	if err != nil {
		return r, err
	}
	defer func() { err = errors.Join(err, d.Close()) }()
	opt, err := optim.NewSGD(built.NamedParameters(), optim.SGDOptions{LR: 0.1, Momentum: 0.9})
	if err != nil {
		return r, err
	}
	defer func() { err = errors.Join(err, opt.Close()) }()
	for step := range 5 {
		v := make([]float32, 48)
		for i := range v {
			v[i] = float32((i*13+pg.Rank()*7+step*5)%19-9) / 7
		}
		x, err := tdp.FromSlice(v, []int64{8, 6}, place)
		if err != nil {
			return r, err
		}
		var loss *ts.Tensor
		forward := func() error {
			out, err := d.Forward(x)
			if err != nil {
				return err
			}
			out = out.MustTotype(gotch.Float, true)
			loss = out.MustMul(out, false).MustMean(gotch.Float, true)
			out.MustDrop()
			return nil
		}
		if kind == "bf16" {
			err = amp.Autocast(amp.Options{Device: place, DType: gotch.BFloat16}, forward)
		} else {
			err = forward()
		}
		x.MustDrop()
		if err := errors.Join(err, opt.ZeroGrad(true)); err != nil {
			return r, err
		}
		if err := errors.Join(d.Backward(loss), opt.Step()); err != nil {
			return r, err
		}
		r.Losses = append(r.Losses, doubles(loss)...)
		loss.MustDrop()
	}
	r.State = map[string][]float64{}
	for name, p := range built.NamedState() {
		r.State[name] = elements(p)
	}
	return r, d.Audit()
}

// furthest is how far two lists of numbers are from one another, as a part of the larger.
func furthest(a, b []float64) (d float64) {
	if len(a) != len(b) {
		return math.Inf(1)
	}
	for i := range a {
		d = max(d, math.Abs(a[i]-b[i])/max(1, math.Abs(b[i])))
	}
	return d
}

// trainsAsPython holds a run of Go against the same one of Python.
func trainsAsPython(t *testing.T, backend string, size int, kind string, tol float64) {
	device := "cpu"
	if place != gotch.CPU {
		device = "cuda"
	}
	want := live(t, device, backend, fmt.Sprint(size), fmt.Sprint(testenv.FreePort(t)), kind)
	processes(t, size, backend, func(pg *ProcessGroup) error {
		got, err := cudaNet(pg, kind)
		if err != nil || pg.Rank() != 0 {
			return err
		}
		away := furthest(got.Losses, want.Losses)
		if len(got.State) != len(want.State) {
			return fmt.Errorf("%d tensors, Python has %d", len(got.State), len(want.State))
		}
		for name, v := range want.State {
			away = max(away, furthest(got.State[name], v))
		}
		t.Logf("away from Python by %g, losses %v", away, got.Losses)
		if !(away <= tol) {
			return fmt.Errorf("away from Python by %g; losses %v, Python's %v", away, got.Losses, want.Losses)
		}
		return nil
	})
}

// TestCUDATrainingIsPythons proves that DDP on a GPU is Python's: over NCCL as one rank, over Gloo as two processes, with
// SyncBatchNorm's own CUDA kernels, and under autocast. The log says how far the two are apart; 0 is bit for bit.
func TestCUDATrainingIsPythons(t *testing.T) {
	onGPU(t)
	for _, c := range []struct {
		backend string
		size    int
		kind    string
		tol     float64
	}{
		{NCCL, 1, "plain", 1e-5}, {NCCL, 1, "bf16", 1e-2},
		{Gloo, 2, "plain", 1e-5}, {Gloo, 2, "sync", 1e-5}, {Gloo, 2, "bf16", 1e-2},
	} {
		t.Run(fmt.Sprintf("%s-%d-%s", c.backend, c.size, c.kind), func(t *testing.T) {
			trainsAsPython(t, c.backend, c.size, c.kind, c.tol)
		})
	}
}

// TestRanksAsProcesses runs on the CPU what the tests on a GPU are made of: what fails there and not here is the GPU's.
func TestRanksAsProcesses(t *testing.T) {
	t.Run("collectives", func(t *testing.T) { processes(t, 2, Gloo, collectivesOnGPU) })
	t.Run("plain", func(t *testing.T) { trainsAsPython(t, Gloo, 2, "plain", 0) })
	t.Run("bf16", func(t *testing.T) { trainsAsPython(t, Gloo, 2, "bf16", 0) })
}

// TestCUDASyncBatchNormIsTheWholeBatch proves that two ranks with SyncBatchNorm train as one with both batches does.
// Python's agreement alone would not show a mistake that both make.
func TestCUDASyncBatchNormIsTheWholeBatch(t *testing.T) {
	onGPU(t)
	processes(t, 2, Gloo, func(pg *ProcessGroup) error {
		forward := func(sync bool, x *ts.Tensor) (*ts.Tensor, error) {
			m, err := build(func() nn.Module { return nn.Must(nn.NewBatchNorm1d(4, nn.BatchNormOptions{})) }, gotch.Float)
			if err == nil {
				err = m.To(place, gotch.Float)
			}
			if err == nil && sync {
				_, err = ConvertSyncBatchNorm(m, pg)
			}
			if err != nil {
				return nil, err
			}
			return nn.Forward(m, x, true)
		}
		whole := make([]float64, 24)
		for i := range whole {
			whole[i] = float64((i*i*7)%23) / 5
		}
		all := tensorOf(gotch.Float, whole...).MustView([]int64{6, 4}, true)
		shares := []int64{4, 2}
		want, err := forward(false, all)
		if err != nil {
			return err
		}
		got, err := forward(true, share(all, shares, pg.Rank()))
		if err != nil {
			return err
		}
		return near("normalised", got, share(want, shares, pg.Rank()), 1e-6)
	})
}

// TestCUDAModes runs tests of DDP that say in exact numbers what must come out, with their tensors on a GPU and their
// ranks over Gloo: mixed precision, optimizers in the backward, and communication hooks.
func TestCUDAModes(t *testing.T) {
	onGPU(t)
	t.Run("MixedPrecision", TestMixedPrecision)
	t.Run("StepInBackward", TestStepInBackward)
	t.Run("CommHook", TestCommHook)
}

// TestCUDAMismatch proves that ranks whose models on the GPU differ get the error that names the parameter.
func TestCUDAMismatch(t *testing.T) {
	onGPU(t)
	processes(t, 2, Gloo, func(pg *ProcessGroup) error {
		m := &toy{params: []Named{param("a", []int64{2}, 1), param("b", []int64{int64(2 + pg.Rank())}, 1)}}
		_, err := NewDDP(m, pg, DDPOptions{})
		var mismatch *MismatchError
		if !errors.As(err, &mismatch) || mismatch.What != "shape" || mismatch.Parameter != "b" {
			return fmt.Errorf("want a mismatch in the shape of b, got %v", err)
		}
		return nil
	})
}

// busy queues some seconds of work on the current stream.
func busy() error {
	const n = 16384
	a := ts.MustOnes([]int64{n, n}, gotch.Double, place)
	defer a.MustDrop()
	multiply := func() { a.MustMm(a, false).MustDrop() }
	sync := func() error { _, err := tdp.ToSlice[float32](tensorOf(gotch.Float, 1)); return err }
	multiply()
	if err := sync(); err != nil {
		return err
	}
	start := time.Now()
	multiply()
	if err := sync(); err != nil {
		return err
	}
	one := time.Since(start)
	for range min(int(10*time.Second/one)+1, 500) {
		multiply()
	}
	return nil
}

// TestCUDATimeoutIsAnError proves that an NCCL operation that does not come to its end within its timeout is an error of
// the group instead of the end of the process, that aborting ends it, and that a rebuilt group works. One GPU has no
// second rank to be late: the operation waits behind computations on its stream.
func TestCUDATimeoutIsAnError(t *testing.T) {
	onGPU(t)
	processes(t, 1, NCCL, func(pg *ProcessGroup) error {
		x := tensorOf(gotch.Float, 1)
		if err := errors.Join(pg.AllReduce(x, Sum), pg.Barrier()); err != nil {
			return err
		}
		if err := busy(); err != nil {
			return err
		}
		if err := pg.AllReduce(x, Sum, WithTimeout(time.Second)); err != nil {
			return err
		}
		var err error
		for end := time.Now().Add(time.Minute); err == nil && time.Now().Before(end); time.Sleep(50 * time.Millisecond) {
			err = pg.Health()
		}
		if !errors.Is(err, ErrTimeout) {
			return fmt.Errorf("want ErrTimeout of Health, got %v", err)
		}
		t.Log(err)
		if err := pg.AllReduce(x, Sum); err == nil {
			return errors.New("the broken group works")
		}
		next, err := pg.Rebuild(bg, RebuildOptions{Patience: time.Second})
		if err != nil {
			return err
		}
		y := tensorOf(gotch.Float, 4)
		return errors.Join(next.AllReduce(y, Sum), wantValues("all_reduce after Rebuild", y, 4), next.Health(), next.Destroy())
	})
}

// TestCUDAAbort proves that Abort breaks an NCCL group without ending the process, and that Rebuild mends it, also for
// DDP made anew.
func TestCUDAAbort(t *testing.T) {
	onGPU(t)
	processes(t, 1, NCCL, func(pg *ProcessGroup) error {
		x := tensorOf(gotch.Float, 1)
		if err := errors.Join(pg.AllReduce(x, Sum), pg.Abort()); err != nil {
			return err
		}
		if err := pg.AllReduce(x, Sum); err == nil {
			return errors.New("the aborted group works")
		}
		next, err := pg.Rebuild(bg, RebuildOptions{Patience: time.Second})
		if err != nil {
			return err
		}
		defer next.Destroy()
		m := product(1)
		d, err := NewDDP(m, next, DDPOptions{})
		if err != nil {
			return err
		}
		return errors.Join(step(d, 12, 1), expectGradient(m.params[0], 12), d.Close())
	})
}
