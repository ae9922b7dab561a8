package torchddp

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/goddp/goddp/internal/tdp"
	"github.com/stretchr/testify/require"
	"github.com/sugarme/gotch"
	"github.com/sugarme/gotch/ts"
)

// tensorOf makes a one-dimensional tensor of any dtype.
func tensorOf(dtype gotch.DType, v ...float64) *ts.Tensor {
	t, err := tdp.FromSlice(v, []int64{int64(len(v))}, place)
	if err != nil {
		panic(err)
	}
	if dtype == gotch.Double {
		return t
	}
	return t.MustTotype(dtype, true)
}

func doubles(t *ts.Tensor) []float64 {
	v, err := tdp.ToSlice[float64](t.MustTotype(gotch.Double, false))
	if err != nil {
		panic(err)
	}
	return v
}

func wantValues(what string, t *ts.Tensor, want ...float64) error {
	if got := doubles(t); !slices.Equal(got, want) {
		return fmt.Errorf("%s: got %v, want %v", what, got, want)
	}
	return nil
}

// eachRank makes a list with one tensor a rank.
func eachRank(n int, f func(rank int) *ts.Tensor) []*ts.Tensor {
	list := make([]*ts.Tensor, n)
	for i := range list {
		list[i] = f(i)
	}
	return list
}

// doBoth runs a collective once waiting and once asynchronously.
func doBoth(sync func() error, async func() (*Work, error), check func() error, reset func()) error {
	if err := errors.Join(sync(), check()); err != nil {
		return fmt.Errorf("sync: %w", err)
	}
	reset()
	w, err := async()
	if err != nil {
		return err
	}
	if err := errors.Join(w.Wait(context.Background()), check(), w.Close()); err != nil {
		return fmt.Errorf("async: %w", err)
	}
	return nil
}

// TestCollectivesTable: every collective, for every dtype that Gloo has, with 2 and 3 ranks, waiting and asynchronous.
func TestCollectivesTable(t *testing.T) {
	for _, size := range []int{2, 3} {
		for _, dtype := range []gotch.DType{gotch.Float, gotch.Double, gotch.Half, gotch.BFloat16, gotch.Int64, gotch.Int, gotch.Int8, gotch.Uint8} {
			t.Run(fmt.Sprintf("%d ranks, %s", size, tdp.DTypeName(dtype)), func(t *testing.T) {
				group(t, size, func(pg *ProcessGroup) error { return allCollectives(pg, dtype) })
			})
		}
	}
}

func allCollectives(pg *ProcessGroup, dtype gotch.DType) error {
	n, me := pg.Size(), pg.Rank()
	r := float64(me)
	of := func(v ...float64) *ts.Tensor { return tensorOf(dtype, v...) }
	floating := dtype == gotch.Float || dtype == gotch.Double || dtype == gotch.Half || dtype == gotch.BFloat16

	// One value of every rank, folded.
	fold := func(f func(a, b float64) float64, v func(rank int) float64) float64 {
		out := v(0)
		for i := 1; i < n; i++ {
			out = f(out, v(i))
		}
		return out
	}
	add := func(a, b float64) float64 { return a + b }
	bits := func(f func(a, b int) int) func(a, b float64) float64 {
		return func(a, b float64) float64 { return float64(f(int(a), int(b))) }
	}
	ops := []struct {
		op   ReduceOp
		name string
		f    func(a, b float64) float64
		skip bool
	}{
		{Sum, "sum", add, false},
		{Avg, "avg", add, !floating}, // the mean of integers is none
		{Product, "product", func(a, b float64) float64 { return a * b }, false},
		{Min, "min", func(a, b float64) float64 { return min(a, b) }, false},
		{Max, "max", func(a, b float64) float64 { return max(a, b) }, false},
		{BAnd, "band", bits(func(a, b int) int { return a & b }), floating},
		{BOr, "bor", bits(func(a, b int) int { return a | b }), floating},
		{BXor, "bxor", bits(func(a, b int) int { return a ^ b }), floating},
	}
	for _, o := range ops {
		if o.skip {
			continue
		}
		// Multiples of the world size, so that means are whole; small ones for products, which have to fit 8 bits.
		base := float64(n)
		if o.op == Product {
			base = 1
		}
		want := []float64{fold(o.f, func(i int) float64 { return base * float64(i+1) }), fold(o.f, func(i int) float64 { return 2 * base * float64(i+1) })}
		if o.op == Avg {
			want[0] /= float64(n)
			want[1] /= float64(n)
		}
		input := func() *ts.Tensor { return of(base*(r+1), 2*base*(r+1)) }
		x := input()
		err := doBoth(func() error { return pg.AllReduce(x, o.op) }, func() (*Work, error) { return pg.AllReduceAsync(x, o.op) },
			func() error { return wantValues("all_reduce "+o.name, x, want...) }, func() { x = input() })
		if err != nil {
			return err
		}
		x = input()
		root := n - 1
		err = doBoth(func() error { return pg.Reduce(x, root, o.op) }, func() (*Work, error) { return pg.ReduceAsync(x, root, o.op) },
			func() error {
				if me != root {
					return nil
				}
				return wantValues("reduce "+o.name, x, want...)
			}, func() { x = input() })
		if err != nil {
			return err
		}
		y := input()
		x = input()
		err = doBoth(func() error { return pg.AllReduceCoalesced([]*ts.Tensor{x, y}, o.op) },
			func() (*Work, error) { return pg.AllReduceCoalescedAsync([]*ts.Tensor{x, y}, o.op) },
			func() error {
				return errors.Join(wantValues("all_reduce_coalesced "+o.name, x, want...), wantValues("all_reduce_coalesced, second", y, want...))
			}, func() { x, y = input(), input() })
		if err != nil {
			return err
		}
		// The part of each rank: what all ranks give for it.
		part := fold(o.f, func(i int) float64 { return base*float64(i+1) + r })
		if o.op == Avg {
			part /= float64(n)
		}
		inputs := eachRank(n, func(to int) *ts.Tensor { return of(base*(r+1) + float64(to)) })
		out := of(0)
		err = doBoth(func() error { return pg.ReduceScatter(out, inputs, o.op) },
			func() (*Work, error) { return pg.ReduceScatterAsync(out, inputs, o.op) },
			func() error { return wantValues("reduce_scatter "+o.name, out, part) },
			func() {
				out = of(0)
				inputs = eachRank(n, func(to int) *ts.Tensor { return of(base*(r+1) + float64(to)) })
			})
		if err != nil {
			return err
		}
		whole := make([]float64, n)
		for to := range whole {
			whole[to] = base*(r+1) + float64(to)
		}
		in := of(whole...)
		err = doBoth(func() error { return pg.ReduceScatterTensor(out, in, o.op) },
			func() (*Work, error) { return pg.ReduceScatterTensorAsync(out, in, o.op) },
			func() error { return wantValues("reduce_scatter_tensor "+o.name, out, part) },
			func() { out, in = of(0), of(whole...) })
		if err != nil {
			return err
		}
		in, in2, out2 := of(whole...), of(whole...), of(0)
		err = doBoth(func() error {
			return pg.ReduceScatterTensorCoalesced([]*ts.Tensor{out, out2}, []*ts.Tensor{in, in2}, o.op)
		},
			func() (*Work, error) {
				return pg.ReduceScatterTensorCoalescedAsync([]*ts.Tensor{out, out2}, []*ts.Tensor{in, in2}, o.op)
			},
			func() error {
				return errors.Join(wantValues("reduce_scatter_tensor_coalesced "+o.name, out, part), wantValues("the second", out2, part))
			},
			func() { out, out2, in, in2 = of(0), of(0), of(whole...), of(whole...) })
		if err != nil {
			return err
		}
	}

	for root := range n {
		x := of(r+1, r+2)
		err := doBoth(func() error { return pg.Broadcast(x, root) }, func() (*Work, error) { return pg.BroadcastAsync(x, root) },
			func() error { return wantValues("broadcast", x, float64(root+1), float64(root+2)) }, func() { x = of(r+1, r+2) })
		if err != nil {
			return err
		}
		var outputs, inputs []*ts.Tensor
		reset := func() {
			if me == root {
				outputs = eachRank(n, func(int) *ts.Tensor { return of(0, 0) })
				inputs = eachRank(n, func(to int) *ts.Tensor { return of(float64(10*root+to), 1) })
			}
			x = of(r+1, r+2)
		}
		reset()
		err = doBoth(func() error { return pg.Gather(outputs, x, root) }, func() (*Work, error) { return pg.GatherAsync(outputs, x, root) },
			func() error {
				for i, o := range outputs {
					if err := wantValues("gather", o, float64(i+1), float64(i+2)); err != nil {
						return err
					}
				}
				return nil
			}, reset)
		if err != nil {
			return err
		}
		reset()
		err = doBoth(func() error { return pg.Scatter(x, inputs, root) }, func() (*Work, error) { return pg.ScatterAsync(x, inputs, root) },
			func() error { return wantValues("scatter", x, float64(10*root+me), 1) }, reset)
		if err != nil {
			return err
		}
	}

	var outputs []*ts.Tensor
	reset := func() { outputs = eachRank(n, func(int) *ts.Tensor { return of(0, 0) }) }
	reset()
	err := doBoth(func() error { return pg.AllGather(outputs, of(r, 7)) },
		func() (*Work, error) { return pg.AllGatherAsync(outputs, of(r, 7)) },
		func() error {
			for i, o := range outputs {
				if err := wantValues("all_gather", o, float64(i), 7); err != nil {
					return err
				}
			}
			return nil
		}, reset)
	if err != nil {
		return err
	}
	var all []float64
	for i := range n {
		all = append(all, float64(i), 7)
	}
	out := of(make([]float64, 2*n)...)
	err = doBoth(func() error { return pg.AllGatherIntoTensor(out, of(r, 7)) },
		func() (*Work, error) { return pg.AllGatherIntoTensorAsync(out, of(r, 7)) },
		func() error { return wantValues("all_gather_into_tensor", out, all...) }, func() { out = of(make([]float64, 2*n)...) })
	if err != nil {
		return err
	}
	stacked := of(make([]float64, 2*n)...).MustView([]int64{int64(n), 2}, true)
	if err := errors.Join(pg.AllGatherIntoTensor(stacked, of(r, 7)), wantValues("all_gather_into_tensor, stacked", stacked, all...)); err != nil {
		return err
	}
	out2 := of(make([]float64, n)...)
	err = doBoth(func() error {
		return pg.AllGatherIntoTensorCoalesced([]*ts.Tensor{out, out2}, []*ts.Tensor{of(r, 7), of(r)})
	},
		func() (*Work, error) {
			return pg.AllGatherIntoTensorCoalescedAsync([]*ts.Tensor{out, out2}, []*ts.Tensor{of(r, 7), of(r)})
		},
		func() error {
			ranks := make([]float64, n)
			for i := range ranks {
				ranks[i] = float64(i)
			}
			return errors.Join(wantValues("all_gather_into_tensor_coalesced", out, all...), wantValues("the second", out2, ranks...))
		}, func() { out, out2 = of(make([]float64, 2*n)...), of(make([]float64, n)...) })
	if err != nil {
		return err
	}

	// all_to_all: rank i sends i*10+j to rank j; unequal: j+1 of them.
	toAll := func(count func(from, to int) int) (inputs, outputs []*ts.Tensor) {
		inputs = eachRank(n, func(to int) *ts.Tensor { return of(slices.Repeat([]float64{10*r + float64(to)}, count(me, to))...) })
		outputs = eachRank(n, func(from int) *ts.Tensor { return of(make([]float64, count(from, me))...) })
		return
	}
	for _, count := range []func(from, to int) int{func(_, _ int) int { return 2 }, func(from, to int) int { return from + to + 1 }} {
		inputs, outputs := toAll(count)
		err = doBoth(func() error { return pg.AllToAll(outputs, inputs) },
			func() (*Work, error) { return pg.AllToAllAsync(outputs, inputs) },
			func() error {
				for from, o := range outputs {
					if err := wantValues("all_to_all", o, slices.Repeat([]float64{float64(10*from + me)}, count(from, me))...); err != nil {
						return err
					}
				}
				return nil
			}, func() { inputs, outputs = toAll(count) })
		if err != nil {
			return err
		}
		var inSplits, outSplits []int64
		var in, want []float64
		for i := range n {
			inSplits, outSplits = append(inSplits, int64(count(me, i))), append(outSplits, int64(count(i, me)))
			in = append(in, slices.Repeat([]float64{10*r + float64(i)}, count(me, i))...)
			want = append(want, slices.Repeat([]float64{float64(10*i + me)}, count(i, me))...)
		}
		single := of(make([]float64, len(want))...)
		err = doBoth(func() error { return pg.AllToAllSingle(single, of(in...), outSplits, inSplits) },
			func() (*Work, error) { return pg.AllToAllSingleAsync(single, of(in...), outSplits, inSplits) },
			func() error { return wantValues("all_to_all_single", single, want...) },
			func() { single = of(make([]float64, len(want))...) })
		if err != nil {
			return err
		}
		if count(0, 1) == count(1, 1) {
			if err := errors.Join(pg.AllToAllSingle(single, of(in...), nil, nil), wantValues("all_to_all_single, equal", single, want...)); err != nil {
				return err
			}
		}
	}

	// A ring of sends: rank r to r+1.
	next, before := (me+1)%n, (me+n-1)%n
	got := of(0)
	err = doBoth(func() error {
		w, err := pg.Isend(of(r+3), next, WithTag(5))
		if err != nil {
			return err
		}
		from, err := pg.Recv(got, before, WithTag(5))
		if err == nil && from != before {
			err = fmt.Errorf("recv from %d gave the sender %d", before, from)
		}
		return errors.Join(err, w.Wait(context.Background()))
	}, func() (*Work, error) {
		return pg.BatchIsendIrecv([]P2P{{Send: true, Tensor: of(r + 3), Peer: next, Tag: 6}, {Tensor: got, Peer: before, Tag: 6}})
	}, func() error { return wantValues("send and recv", got, float64(before+3)) }, func() { got = of(0) })
	if err != nil {
		return err
	}

	w, err := pg.BarrierAsync()
	if err != nil {
		return err
	}
	return errors.Join(w.Wait(context.Background()), pg.Barrier(), pg.MonitoredBarrier())
}

func TestComplexTravelsAsPairsOfReals(t *testing.T) {
	group(t, 2, func(pg *ProcessGroup) error {
		c := func(v complex64) *ts.Tensor {
			x, err := tdp.FromSlice([]complex64{v}, []int64{1}, gotch.CPU)
			if err != nil {
				panic(err)
			}
			return x
		}
		is := func(what string, x *ts.Tensor, want complex64) error {
			if v, err := tdp.ToSlice[complex64](x); err != nil || v[0] != want {
				return fmt.Errorf("%s: got %v %v, want %v", what, v, err, want)
			}
			return nil
		}
		r := float32(pg.Rank())
		x := c(complex(r+1, 10*r))
		if err := errors.Join(pg.AllReduce(x, Sum), is("all_reduce", x, complex(3, 10))); err != nil {
			return err
		}
		x = c(complex(r, 1))
		if err := errors.Join(pg.Broadcast(x, 1), is("broadcast", x, complex(1, 1))); err != nil {
			return err
		}
		outs := []*ts.Tensor{c(0), c(0)}
		if err := errors.Join(pg.AllGather(outs, c(complex(r, 2))), is("all_gather", outs[1], complex(1, 2))); err != nil {
			return err
		}
		out := c(0)
		if err := errors.Join(pg.ReduceScatter(out, []*ts.Tensor{c(complex(1, r)), c(complex(2, r))}, Sum), is("reduce_scatter", out, complex(2*(r+1), 1))); err != nil {
			return err
		}
		for _, op := range []ReduceOp{Product, Min, Max, BAnd, BOr, BXor} {
			if err := pg.AllReduce(c(1), op); !errors.Is(err, ErrValue) {
				return fmt.Errorf("op %d on complex numbers: %v", op, err)
			}
		}
		return nil
	})
}

func TestEmptyAndStridedTensors(t *testing.T) {
	group(t, 2, func(pg *ProcessGroup) error {
		empty := tensorOf(gotch.Float)
		if err := errors.Join(pg.AllReduce(empty, Sum), pg.Broadcast(empty, 0)); err != nil {
			return err
		}
		// A transposed matrix: every other element of its storage comes first.
		m := tensorOf(gotch.Float, 1, 2, 3, 4).MustView([]int64{2, 2}, true).MustTranspose(0, 1, true)
		if err := pg.AllReduce(m, Sum); err != nil {
			return err
		}
		return wantValues("all_reduce of a transposed matrix", m, 2, 6, 4, 8)
	})
}

func TestRecvFromAnySource(t *testing.T) {
	group(t, 3, func(pg *ProcessGroup) error {
		if pg.Rank() != 0 {
			return pg.Send(tensorOf(gotch.Float, float64(10*pg.Rank())), 0, WithTag(pg.Rank()))
		}
		// By tag first, then whoever.
		x := tensorOf(gotch.Float, 0)
		from, err := pg.Recv(x, AnySource, WithTag(2))
		if err != nil || from != 2 {
			return fmt.Errorf("from %d: %v", from, err)
		}
		if err := wantValues("recv with tag 2", x, 20); err != nil {
			return err
		}
		w, err := pg.Irecv(x, AnySource, WithTag(1))
		if err != nil {
			return err
		}
		if err := w.Wait(context.Background()); err != nil {
			return err
		}
		if from, err = w.Source(); err != nil || from != 1 {
			return fmt.Errorf("Source gives %d: %v", from, err)
		}
		return wantValues("irecv with tag 1", x, 10)
	})
}

func TestBadInputsAreErrors(t *testing.T) {
	undefined := ts.NewTensor()
	group(t, 2, func(pg *ProcessGroup) error {
		f := func(n int) *ts.Tensor { return tensorOf(gotch.Float, make([]float64, n)...) }
		d := tensorOf(gotch.Double, 0)
		// What is wrong is wrong on both ranks, or the other one would wait.
		cases := []struct {
			name string
			err  error
			text string
		}{
			{"undefined", pg.AllReduce(undefined, Sum), "undefined tensor"},
			{"nil", pg.Broadcast(nil, 0), "closed or was never made"},
			{"root outside", pg.Broadcast(f(1), 2), "root rank 2 is not in the group of 2 ranks"},
			{"negative root", pg.Reduce(f(1), -1, Sum), "root rank -1"},
			{"unknown op", pg.AllReduce(f(1), ReduceOp(77)), "unknown reduce operation number 77"},
			{"premul without factor", pg.AllReduce(f(1), PremulSum), "WithFactor"},
			{"all_gather count", pg.AllGather([]*ts.Tensor{f(1)}, f(1)), "one tensor a rank: the group has 2 ranks, the list 1"},
			{"all_gather dtype", pg.AllGather([]*ts.Tensor{f(1), d}, f(1)), "different dtypes: Float and, at index 1 of the list, Double"},
			{"all_gather size", pg.AllGather([]*ts.Tensor{f(1), f(2)}, f(1)), "invalid tensor size at index 1"},
			{"all_gather undefined", pg.AllGather([]*ts.Tensor{f(1), undefined}, f(1)), "undefined tensor"},
			{"all_gather_into size", pg.AllGatherIntoTensor(f(3), f(1)), "the output must be as large as the input times the 2 ranks"},
			{"all_gather_into dtype", pg.AllGatherIntoTensor(d, f(1)), "the output is Double and the input Float"},
			{"gather list missing or too much", pg.Gather(map[int][]*ts.Tensor{0: nil, 1: {f(1), f(1)}}[pg.Rank()], f(1), 0), "list of outputs"},
			{"scatter list missing or too much", pg.Scatter(f(1), map[int][]*ts.Tensor{0: nil, 1: {f(1), f(1)}}[pg.Rank()], 0), "list of inputs"},
			{"reduce_scatter count", pg.ReduceScatter(f(1), []*ts.Tensor{f(1)}, Sum), "one tensor a rank"},
			{"reduce_scatter dtype", pg.ReduceScatter(f(1), []*ts.Tensor{d, d}, Sum), "different dtypes"},
			{"reduce_scatter size", pg.ReduceScatter(f(1), []*ts.Tensor{f(1), f(3)}, Sum), "index 1 has the shape [3], but [1] is needed"},
			{"reduce_scatter_tensor size", pg.ReduceScatterTensor(f(2), f(3), Sum), "the input must be as large as the output times the 2 ranks"},
			{"all_to_all count", pg.AllToAll([]*ts.Tensor{f(1)}, []*ts.Tensor{f(1), f(1)}), "the lists 1 outputs and 2 inputs"},
			{"all_to_all dtype", pg.AllToAll([]*ts.Tensor{f(1), f(1)}, []*ts.Tensor{f(1), d}), "different dtypes"},
			{"all_to_all_single rows", pg.AllToAllSingle(f(3), f(3), nil, nil), "does not divide by the 2 ranks"},
			{"all_to_all_single splits", pg.AllToAllSingle(f(3), f(3), []int64{1, 1}, []int64{2, 1}), "split sizes (one a rank is needed) sum up to 2"},
			{"coalesced dtypes", pg.AllReduceCoalesced([]*ts.Tensor{f(1), d}, Sum), "different dtypes"},
			{"coalesced nothing", pg.AllReduceCoalesced(nil, Sum), "at least one tensor"},
			{"coalesced pairs", pg.AllGatherIntoTensorCoalesced([]*ts.Tensor{f(2)}, nil), "as many outputs as inputs"},
			{"send to self", pg.Send(f(1), pg.Rank()), "Invalid destination rank"},
			{"recv from self", second(pg.Recv(f(1), pg.Rank())), "Invalid source rank"},
			{"send outside", pg.Send(f(1), 5), "destination rank 5 is not in the group"},
			{"recv from -7", second(pg.Recv(f(1), -7)), "is not in the group"},
			{"batch of nothing", second(pg.BatchIsendIrecv(nil)), "at least one"},
			{"16-bit integers", pg.AllReduce(tensorOf(gotch.Int16, 1), Sum), "Invalid scalar type"},
			{"timeout 0", pg.SetTimeout(0), "timeout must be positive"},
		}
		for _, c := range cases {
			var re *RankError
			if !errors.Is(c.err, ErrValue) || !errors.As(c.err, &re) || re.Rank != pg.Rank() {
				return fmt.Errorf("%s: got %v, no ErrValue of rank %d", c.name, c.err, pg.Rank())
			}
			if err := contains(c.err, c.text); err != nil {
				return fmt.Errorf("%s: %w", c.name, err)
			}
		}
		if err := pg.AllReduce(f(1), PremulSum, WithFactor(2)); !errors.Is(err, ErrUnsupported) {
			return fmt.Errorf("PREMUL_SUM with Gloo: %v", err)
		}
		// None of it disturbed the group.
		x := f(1)
		return errors.Join(pg.AllReduce(x, Sum), wantValues("afterwards", x, 0), pg.Barrier())
	})
}

func second[T any](_ T, err error) error { return err }

func contains(err error, text string) error {
	if err == nil || !strings.Contains(err.Error(), text) {
		return fmt.Errorf("%q is not in: %w", text, err)
	}
	return nil
}

func TestTensorOnAnotherDevice(t *testing.T) {
	// A group that serves GPUs only, over Gloo, needs none to be made.
	store, err := NewHashStore()
	require.NoError(t, err)
	pg, err := InitProcessGroup(context.Background(), InitOptions{Backend: "cuda:gloo", Store: store, WorldSize: 1, GlooInterfaces: []string{"lo"}})
	require.NoError(t, err)
	defer pg.Destroy()
	err = pg.AllReduce(tensorOf(gotch.Float, 1), Sum)
	require.ErrorIs(t, err, ErrValue)
	require.ErrorContains(t, err, "the tensor lies on cpu, but the group's backends serve cuda")
}

func TestEverythingAfterDestroy(t *testing.T) {
	group(t, 1, func(pg *ProcessGroup) error {
		x := tensorOf(gotch.Float, 1)
		list := []*ts.Tensor{x}
		w, err := pg.AllReduceAsync(x, Sum)
		if err != nil {
			return err
		}
		if err := errors.Join(w.Wait(context.Background()), pg.Destroy(), pg.Destroy()); err != nil {
			return err
		}
		for name, err := range map[string]error{
			"all_reduce": pg.AllReduce(x, Sum), "broadcast": pg.Broadcast(x, 0), "reduce": pg.Reduce(x, 0, Sum), "all_gather": pg.AllGather(list, x),
			"all_gather_into": pg.AllGatherIntoTensor(x, x), "gather": pg.Gather(list, x, 0), "scatter": pg.Scatter(x, list, 0),
			"reduce_scatter": pg.ReduceScatter(x, list, Sum), "reduce_scatter_tensor": pg.ReduceScatterTensor(x, x, Sum),
			"all_to_all": pg.AllToAll(list, list), "all_to_all_single": pg.AllToAllSingle(x, x, nil, nil), "barrier": pg.Barrier(),
			"monitored_barrier": pg.MonitoredBarrier(), "send": pg.Send(x, 1), "recv": second(pg.Recv(x, 1)), "isend": second(pg.Isend(x, 0)),
			"batch": second(pg.BatchIsendIrecv([]P2P{{Send: true, Tensor: x}})), "abort": pg.Abort(), "shutdown": pg.Shutdown(),
			"health": pg.Health(), "timeout": pg.SetTimeout(time.Second), "history": second(pg.History()),
			"object": second(AllGatherObject(pg, 1)), "new_group": second(pg.NewGroup(context.Background(), nil, GroupOptions{})),
			"split": second(pg.Split(context.Background(), [][]int{{0}}, GroupOptions{})), "rebuild": second(pg.Rebuild(context.Background(), RebuildOptions{})),
		} {
			if !errors.Is(err, ErrDestroyed) && !errors.Is(err, ErrValue) {
				return fmt.Errorf("%s after Destroy: %v", name, err)
			}
		}
		return nil
	})
}

// TestWaitNamesTheCollective: a cancelled wait returns at once, and says what it waited for.
func TestWaitNamesTheCollective(t *testing.T) {
	group(t, 2, func(pg *ProcessGroup) error {
		if pg.Rank() == 1 {
			time.Sleep(500 * time.Millisecond)
			return pg.Broadcast(tensorOf(gotch.Float, 1), 1)
		}
		w, err := pg.BroadcastAsync(tensorOf(gotch.Float, 1), 1)
		if err != nil {
			return err
		}
		ctx, cancel := context.WithCancel(context.Background())
		time.AfterFunc(50*time.Millisecond, cancel)
		start := time.Now()
		err = w.Wait(ctx)
		if !errors.Is(err, ErrCancelled) || !errors.Is(err, context.Canceled) {
			return fmt.Errorf("got %v", err)
		}
		if d := time.Since(start); d > 400*time.Millisecond {
			return fmt.Errorf("Wait returned after %v", d)
		}
		if err := contains(err, "waiting for broadcast of process group 0 (gloo, rank 0 of 2)"); err != nil {
			return err
		}
		return w.Wait(context.Background())
	})
}

func TestTimeoutOfOneCall(t *testing.T) {
	group(t, 2, func(pg *ProcessGroup) error {
		if pg.Rank() == 1 {
			time.Sleep(1200 * time.Millisecond)
			return nil
		}
		start := time.Now()
		err := pg.AllReduce(tensorOf(gotch.Float, 1), Sum, WithTimeout(300*time.Millisecond))
		if !errors.Is(err, ErrTimeout) {
			return fmt.Errorf("got %v", err)
		}
		if d := time.Since(start); d > 300*time.Millisecond+patience+time.Second {
			return fmt.Errorf("the timeout of 300 ms took %v", d)
		}
		return nil
	})
}

// BenchmarkAllReduceSmall is the time of one all-reduce of 2 floats over Gloo's loopback.
func BenchmarkRecording(b *testing.B) {
	store, err := NewHashStore()
	require.NoError(b, err)
	pg, err := InitProcessGroup(context.Background(), InitOptions{Store: store, WorldSize: 1, GlooInterfaces: []string{"lo"}})
	require.NoError(b, err)
	defer pg.Destroy()
	x := tensorOf(gotch.Float, 1, 2)
	b.Run("all_reduce, 1 rank", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			if err := pg.AllReduce(x, Sum); err != nil {
				b.Fatal(err)
			}
		}
	})
	b.Run("call site", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			sink = site()
		}
	})
}

var sink callInfo

//go:noinline
func site() callInfo { return call(false, nil) }
