package torchddp

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/goddp/goddp/internal/tdp"
	"github.com/goddp/goddp/internal/testenv"
	"github.com/goddp/goddp/models/nn"
	"github.com/stretchr/testify/require"
	"github.com/sugarme/gotch"
	"github.com/sugarme/gotch/ts"
)

// options_peer.py has the other side of everything here, under the same names.

func liveNumbers(seed int, shape ...int64) *ts.Tensor {
	n := int64(1)
	for _, s := range shape {
		n *= s
	}
	v := make([]float32, n)
	for i := range v {
		v[i] = float32((i*37+11+29*seed)%64-32) / 37
	}
	return nn.Must(tdp.FromSlice(v, shape, gotch.CPU))
}

func liveParam(name string, seed int, shape ...int64) Named {
	return Named{name, nn.Must(nn.Trainable(liveNumbers(seed, shape...)))}
}

// liveRank is a Go rank of a mixed group.
type liveRank struct {
	pg          *ProcessGroup
	rank, world int
	lines       []string
}

func (r *liveRank) show(scenario, key string, t *ts.Tensor) {
	if t == nil {
		r.lines = append(r.lines, fmt.Sprintf("%s %s None", scenario, key))
		return
	}
	t = t.MustDetach(false)
	if info := nn.Must(tdp.Describe(t)); info.Sparse {
		t = ts.MustZeros(t.MustSize(), gotch.Float, gotch.CPU).MustAdd(t, true)
	} else if info.DType == gotch.ComplexFloat {
		t = t.MustViewAsReal(true)
	}
	raw := nn.Must(tdp.HostBytes(t.MustContiguous(true)))
	r.lines = append(r.lines, fmt.Sprintf("%s %s %x", scenario, key, raw))
}

func (r *liveRank) showAll(scenario, key string, t *ts.Tensor) {
	all := eachRank(r.world, func(int) *ts.Tensor { return t.MustEmptyLike(false) })
	nn.Check(r.pg.AllGather(all, t))
	r.show(scenario, key, ts.MustStack(all, 0))
}

func (r *liveRank) net(buffers bool) *toy {
	m := &toy{params: []Named{liveParam("a", 1+r.rank, 6, 4), liveParam("b", 2+r.rank, 4, 3), liveParam("c", 3+r.rank, 4, 3), liveParam("d", 4+r.rank, 5)}}
	if buffers {
		m.buffers = []Named{{"seen", tensorOf(gotch.Float, 10+float64(r.rank), 10+float64(r.rank))}}
	}
	return m
}

func liveForward(m *toy, x *ts.Tensor, use string) *ts.Tensor {
	h := x.MustMatmul(m.params[0].Tensor, false).MustTanh(true)
	var y *ts.Tensor
	plus := func(t *ts.Tensor) {
		if y == nil {
			y = t
		} else {
			y = y.MustAdd(t, true)
		}
	}
	if strings.Contains(use, "b") {
		plus(h.MustMatmul(m.params[1].Tensor, false))
	}
	if strings.Contains(use, "c") {
		plus(h.MustMatmul(m.params[2].Tensor, false))
	}
	if strings.Contains(use, "d") {
		plus(m.params[3].Tensor.MustSum(gotch.Float, false))
	}
	if strings.Contains(use, "2") {
		plus(h.MustTanh(false).MustMatmul(m.params[1].Tensor, true))
	}
	return y
}

func (r *liveRank) batch(k int) *ts.Tensor { return liveNumbers(100+10*k+r.rank, 7, 6) }

func (r *liveRank) forward(d *DDP, m *toy, k int, use string) *ts.Tensor {
	outs := nn.Must(d.Run(func() ([]*ts.Tensor, error) { return []*ts.Tensor{liveForward(m, r.batch(k), use)}, nil }))
	return outs[0]
}

func (r *liveRank) step(d *DDP, m *toy, k int, use string) {
	nn.Check(d.Backward(r.forward(d, m, k, use).MustPowTensorScalar(ts.FloatScalar(2), true).MustMean(gotch.Float, true)))
}

func (r *liveRank) grads(scenario string, m Module, k int) {
	for name, p := range m.NamedParameters() {
		r.show(scenario, fmt.Sprintf("%d.%s.grad", k, name), nn.Must(tdp.Grad(p)))
	}
}

func liveZero(m Module) {
	for _, p := range m.NamedParameters() {
		nn.Check(tdp.SetGrad(p, nil))
	}
}

func liveDescend(m Module) {
	nn.Check(NoGrad(func() error {
		for _, p := range m.NamedParameters() {
			if g := nn.Must(tdp.Grad(p)); g != nil {
				p.MustAdd_(g.MustMulScalar(ts.FloatScalar(-0.125), false))
			}
		}
		return nil
	}))
}

func (r *liveRank) state(scenario string, m *toy) {
	for _, p := range slices.Concat(m.params, m.buffers) {
		r.show(scenario, p.Name, p.Tensor)
	}
}

func (r *liveRank) train(scenario string, uses []string, o DDPOptions, hook ...BuiltinCommHook) {
	m := r.net(false)
	d := nn.Must(NewDDP(m, r.pg, o))
	defer d.Close()
	for _, h := range hook {
		nn.Check(d.RegisterBuiltinCommHook(h))
	}
	for k, use := range uses {
		liveZero(m)
		r.step(d, m, k, use)
		r.grads(scenario, m, k)
		liveDescend(m)
	}
	r.state(scenario, m)
}

func (r *liveRank) noSync(scenario string, view bool) {
	m := r.net(false)
	d := nn.Must(NewDDP(m, r.pg, DDPOptions{GradientAsBucketView: view}))
	defer d.Close()
	for k := range 9 {
		if k%3 == 0 {
			liveZero(m)
		}
		if k%3 < 2 {
			nn.Check(d.NoSync(func() error { r.step(d, m, k, "bcd"); return nil }))
			continue
		}
		r.step(d, m, k, "bcd")
		r.grads(scenario, m, k)
		liveDescend(m)
	}
}

func (r *liveRank) addSeen(m *toy) {
	nn.Check(tdp.Copy(m.buffers[0].Tensor, m.buffers[0].Tensor.MustAddScalar(ts.FloatScalar(float64(1+r.rank)), false), false))
}

func (r *liveRank) join(scenario string, byActive bool) {
	m := r.net(true)
	d := nn.Must(NewDDP(m, r.pg, DDPOptions{}))
	defer d.Close()
	nn.Check(d.Join(JoinOptions{DivideByActive: byActive}, func() error {
		for k := range 2 + 2*r.rank {
			liveZero(m)
			r.step(d, m, k, "bcd")
			if k < 2 {
				r.grads(scenario, m, k)
			}
			liveDescend(m)
			r.addSeen(m)
		}
		return nil
	}))
	r.state(scenario, m)
}

func (r *liveRank) buffers(scenario string, mode BufferMode) {
	m := r.net(true)
	d := nn.Must(NewDDP(m, r.pg, DDPOptions{Buffers: mode}))
	defer d.Close()
	for k := range 6 {
		r.addSeen(m)
		liveZero(m)
		if k == 2 || k == 3 {
			nn.Check(NoGrad(func() error { r.forward(d, m, k, "bcd"); return nil }))
		} else {
			r.step(d, m, k, "bcd")
			r.grads(scenario, m, k)
			liveDescend(m)
		}
		r.showAll(scenario, fmt.Sprintf("%d.seen", k), m.buffers[0].Tensor)
	}
}

func (r *liveRank) ignore(scenario string) {
	m := r.net(true)
	d := nn.Must(NewDDP(m, r.pg, DDPOptions{Ignore: []string{"c", "seen"}}))
	defer d.Close()
	nn.Check(tdp.Copy(m.params[2].Tensor, liveNumbers(5, 4, 3), false))
	for k := range 3 {
		liveZero(m)
		r.step(d, m, k, "bcd")
		for _, p := range m.params {
			if p.Name != "c" {
				r.show(scenario, fmt.Sprintf("%d.%s.grad", k, p.Name), nn.Must(tdp.Grad(p.Tensor)))
			}
		}
	}
	r.showAll(scenario, "seen", m.buffers[0].Tensor)
}

// sparseToy has an embedding of its own making.
type sparseToy struct{ toy }

func (*sparseToy) SparseParameters() iter.Seq[string] { return slices.Values([]string{"table.weight"}) }

func (r *liveRank) sparse(scenario string, view bool) {
	m := &sparseToy{toy{params: []Named{liveParam("w", 2+r.rank, 4, 2), liveParam("table.weight", 1+r.rank, 10, 4)}}}
	d := nn.Must(NewDDP(m, r.pg, DDPOptions{GradientAsBucketView: view}))
	defer d.Close()
	for k := range 4 {
		index := make([]int64, 6)
		for i := range index {
			index[i] = int64(i*(3+r.rank)+k) % 10
		}
		liveZero(m)
		outs := nn.Must(d.Run(func() ([]*ts.Tensor, error) {
			rows := ts.MustEmbedding(m.params[1].Tensor, ts.MustOfSlice(index), -1, false, true)
			return []*ts.Tensor{rows.MustMatmul(m.params[0].Tensor, true)}, nil
		}))
		nn.Check(d.Backward(outs[0].MustPowTensorScalar(ts.FloatScalar(2), true).MustMean(gotch.Float, true)))
		if g := nn.Must(tdp.Grad(m.params[1].Tensor)); !nn.Must(tdp.Describe(g)).Sparse {
			nn.Check(errors.New("the embedding's gradient is not sparse"))
		}
		r.grads(scenario, m, k)
	}
}

func (r *liveRank) complex(scenario string, view bool) {
	z := ts.MustComplex(liveNumbers(1+r.rank, 6, 4), liveNumbers(2+r.rank, 6, 4))
	m := &toy{params: []Named{{"z", nn.Must(nn.Trainable(z))}, liveParam("w", 3+r.rank, 4, 2)}}
	m.forward = func(x *ts.Tensor) *ts.Tensor {
		y := x.MustTotype(gotch.ComplexFloat, false).MustMatmul(m.params[0].Tensor, true)
		return y.MustMul(y.MustConj(false), false).MustReal(true).MustMatmul(m.params[1].Tensor, true)
	}
	d := nn.Must(NewDDP(m, r.pg, DDPOptions{GradientAsBucketView: view}))
	defer d.Close()
	for k := range 4 {
		liveZero(m)
		nn.Check(d.Backward(nn.Must(d.Forward(r.batch(k))).MustMean(gotch.Float, true)))
		r.grads(scenario, m, k)
		liveDescend(m)
	}
}

// all runs every scenario, in the order of options_peer.py.
func (r *liveRank) all() {
	byRank := func(uses ...string) []string {
		if r.rank%2 == 1 {
			for i, use := range uses {
				uses[i] = strings.NewReplacer("b", "c", "c", "b").Replace(use)
			}
		}
		return uses
	}
	for _, name := range []string{"copy", "view"} {
		view := name == "view"
		o := func(o DDPOptions) DDPOptions { o.GradientAsBucketView = view; return o }
		r.train("unused-"+name, byRank("b", "b", "bc", "c", "bd"), o(DDPOptions{FindUnusedParameters: true}))
		r.train("static-"+name, slices.Repeat([]string{"bc2"}, 5), o(DDPOptions{StaticGraph: true}))
		r.train("small-"+name, slices.Repeat([]string{"bcd"}, 4), o(DDPOptions{BucketCapMB: 0.0001}))
		r.noSync("no_sync-"+name, view)
		r.train("fp16-"+name, slices.Repeat([]string{"bcd"}, 4), o(DDPOptions{}), FP16CompressHook)
		r.train("bf16-"+name, slices.Repeat([]string{"bcd"}, 4), o(DDPOptions{}), BF16CompressHook)
		r.sparse("sparse-"+name, view)
		r.complex("complex-"+name, view)
	}
	r.join("join-world", false)
	r.join("join-active", true)
	r.buffers("buffers-broadcast", BufferBroadcast)
	r.buffers("buffers-local", BufferLocal)
	r.ignore("ignore")
	nn.Check(r.pg.Barrier())
}

// runLiveRank joins the group at port and gives the lines of a Go rank.
func runLiveRank(rank, world, port int) ([]string, error) {
	pg, err := InitProcessGroup(context.Background(), InitOptions{
		InitMethod: fmt.Sprintf("tcp://127.0.0.1:%d?rank=%d&world_size=%d", port, rank, world), Timeout: 2 * time.Minute,
	})
	if err != nil {
		return nil, err
	}
	r := &liveRank{pg: pg, rank: rank, world: world}
	_, err = protect(func() (any, error) { r.all(); return nil, nil })
	return r.lines, errors.Join(err, pg.Destroy())
}

// liveGroup runs all scenarios with live Python ranks, and a Go one where goRank is not negative. It gives what rank 0
// had to say, which must be what all say.
func liveGroup(t *testing.T, world, goRank int) []string {
	port := testenv.FreePort(t)
	ctx, cancel := context.WithTimeout(t.Context(), 8*time.Minute)
	defer cancel()
	type result struct {
		lines []string
		err   error
	}
	results := make([]chan result, world)
	for rank := range world {
		results[rank] = make(chan result, 1)
		if rank == goRank {
			go func() {
				runtime.LockOSThread()
				got, err := runLiveRank(rank, world, port)
				if err != nil {
					cancel() // nobody answers the others any more
				}
				results[rank] <- result{got, err}
			}()
			continue
		}
		wait := startPython(t, ctx, "options_peer.py", []string{"PYTHONWARNINGS=ignore"}, fmt.Sprint(rank), fmt.Sprint(world), fmt.Sprint(port))
		go func() {
			out, err := wait()
			results[rank] <- result{lines(out), err}
		}()
	}
	got := make([]result, world)
	for rank := range got {
		got[rank] = <-results[rank]
	}
	if goRank >= 0 { // its error says more than those of the ranks that it left behind
		require.NoError(t, got[goRank].err, "the Go rank")
	}
	for rank, r := range got {
		require.NoError(t, r.err, "rank %d", rank)
		sameLines(t, fmt.Sprintf("rank %d against rank 0", rank), got[0].lines, r.lines)
	}
	return got[0].lines
}

// sameLines names the scenarios and keys that differ.
func sameLines(t *testing.T, what string, want, got []string) {
	t.Helper()
	require.NotEmpty(t, got)
	for i := range min(len(want), len(got)) {
		if want[i] != got[i] {
			require.Equal(t, want[i], got[i], what)
		}
	}
	require.Len(t, got, len(want), what)
}

// TestDDPOptionsWithPythonRanks: in one Gloo group with live Python ranks, every option gives on all ranks, the Go rank
// too, the bits that a group of Python ranks alone gives.
func TestDDPOptionsWithPythonRanks(t *testing.T) {
	testenv.Python(t)
	require.NoError(t, SetNumThreads(1))
	t.Run("rank 1 of 3", func(t *testing.T) {
		want := liveGroup(t, 3, -1)
		sameLines(t, "against Python ranks alone", want, liveGroup(t, 3, 1))
	})
	t.Run("rank 0 of 2", func(t *testing.T) { liveGroup(t, 2, 0) })
}
