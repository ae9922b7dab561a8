package data_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"iter"
	"math/rand/v2"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/goddp/goddp/checkpoint/pickle"
	"github.com/goddp/goddp/data"
	"github.com/goddp/goddp/internal/tdp"
	"github.com/stretchr/testify/require"
	"github.com/sugarme/gotch"
	"github.com/sugarme/gotch/ts"
)

// probe is a Source whose sample i is [i, a random number], and which can be made to misbehave.
type probe struct {
	n     int
	write func(ctx context.Context, i int) error
}

func (p probe) Len() int { return p.n }
func (p probe) Fields() ([]data.Field, error) {
	return []data.Field{{Name: "i", DType: gotch.Int64}, {Name: "r", DType: gotch.Double, Shape: []int64{2}}}, nil
}
func (p probe) Write(ctx context.Context, i int, dst data.Row, rng *rand.Rand) error {
	if p.write != nil {
		if err := p.write(ctx, i); err != nil {
			return err
		}
	}
	idx, err := data.Elements[int64](dst, 0)
	if err != nil {
		return err
	}
	r, err := data.Elements[float64](dst, 1)
	if err != nil {
		return err
	}
	idx[0], r[0], r[1] = int64(i), rng.Float64(), rng.Float64()
	return nil
}

// values reads what a batch holds as text.
func values(t testing.TB, b *data.Batch) string {
	i, err := tdp.ToSlice[int64](b.Tensor(0))
	require.NoError(t, err)
	r, err := tdp.ToSlice[float64](b.Tensor(1))
	require.NoError(t, err)
	return fmt.Sprint(i, r)
}

func pass(t testing.TB, l *data.DataLoader[*data.Batch]) (out []string) {
	for b, err := range l.All(context.Background()) {
		require.NoError(t, err)
		require.Equal(t, b.Len(), len(b.Indices()))
		out = append(out, values(t, b))
	}
	return out
}

// noGoroutines fails when the test leaves goroutines behind.
func noGoroutines(t *testing.T) {
	before := runtime.NumGoroutine()
	t.Cleanup(func() {
		for range 100 {
			if runtime.NumGoroutine() <= before {
				return
			}
			time.Sleep(10 * time.Millisecond)
		}
		buf := make([]byte, 1<<16)
		t.Errorf("goroutines left: %d, before %d\n%s", runtime.NumGoroutine(), before, buf[:runtime.Stack(buf, true)])
	})
}

// Batches, their order and their random numbers do not depend on workers, prefetch depth or reuse.
func TestLoaderDoesNotDependOnWorkers(t *testing.T) {
	noGoroutines(t)
	var want []string
	for _, o := range []data.Options{{}, {Reuse: true}, {Workers: 1}, {Workers: 4, Prefetch: 1}, {Workers: 3, Prefetch: 7, Reuse: true},
		{Workers: 16, Prefetch: 2}, {PinMemory: true}} {
		require.NoError(t, tdp.ManualSeed(1))
		o.BatchSize, o.Shuffle = 8, true
		l, err := data.NewDataLoader(probe{n: 61}, o)
		require.NoError(t, err)
		require.Equal(t, 8, l.Len())
		got := append(pass(t, l), pass(t, l)...)
		if want == nil {
			want = got
			require.NotEqual(t, got[0], got[8], "two passes must differ")
		}
		require.Equal(t, want, got, "%+v", o)
		require.NoError(t, l.Close())
		for _, err := range l.All(context.Background()) {
			require.ErrorIs(t, err, data.ErrClosed)
		}
	}
	// Unordered: the same batches in any order.
	require.NoError(t, tdp.ManualSeed(1))
	l, err := data.NewDataLoader(probe{n: 61}, data.Options{BatchSize: 8, Shuffle: true, Workers: 4, Unordered: true})
	require.NoError(t, err)
	got := append(pass(t, l), pass(t, l)...)
	require.ElementsMatch(t, want, got)
}

func TestLoaderErrorsNameTheSample(t *testing.T) {
	noGoroutines(t)
	broken := errors.New("broken")
	for _, workers := range []int{0, 1, 5} {
		for _, unordered := range []bool{false, workers > 0} {
			for _, fault := range []func() error{func() error { return broken }, func() error { panic("ouch") }} {
				l, err := data.NewDataLoader(probe{n: 50, write: func(_ context.Context, i int) error {
					if i == 23 || i == 24 {
						return fault()
					}
					return nil
				}}, data.Options{BatchSize: 5, Workers: workers, Unordered: unordered})
				require.NoError(t, err)
				batches, fails := 0, 0
				for _, err := range l.All(context.Background()) {
					if err == nil {
						batches++
						continue
					}
					fails++
					var item *data.ItemError
					require.ErrorAs(t, err, &item)
					require.Equal(t, 23, item.Index)
					require.Equal(t, 4, item.Batch)
					var p *data.PanicError
					if errors.As(err, &p) {
						require.Equal(t, "ouch", p.Value)
						require.Contains(t, string(p.Stack), "loader_test.go")
					} else {
						require.ErrorIs(t, err, broken)
					}
				}
				require.Equal(t, 1, fails)
				if !unordered {
					require.Equal(t, 4, batches)
				}
			}
		}
	}
}

func TestLoaderEndsEarly(t *testing.T) {
	noGoroutines(t)
	for _, o := range []data.Options{{}, {Workers: 3}, {Workers: 3, Unordered: true, Prefetch: 4}} {
		o.BatchSize = 4
		l, err := data.NewDataLoader(probe{n: 1000}, o)
		require.NoError(t, err)
		for stop := range 5 {
			seen := 0
			for _, err := range l.All(context.Background()) {
				require.NoError(t, err)
				if seen == stop {
					break
				}
				seen++
			}
		}
		ctx, cancel := context.WithCancelCause(context.Background())
		defer cancel(nil)
		why := errors.New("enough")
		var last error
		seen := 0
		for _, err := range l.All(ctx) {
			if last = err; err != nil {
				continue
			}
			if seen++; seen == 3 {
				cancel(why)
			}
		}
		require.ErrorIs(t, last, why)
		require.Less(t, seen, 10)
		for _, err := range l.All(ctx) {
			require.ErrorIs(t, err, why)
		}
		func() {
			defer func() { require.Equal(t, "loop body", recover()) }()
			for range l.All(context.Background()) {
				panic("loop body")
			}
		}()
	}
}

// A sample that hangs: cancelling, closing and the timeout all end the loop.
func TestLoaderHangingSample(t *testing.T) {
	noGoroutines(t)
	hang := probe{n: 10, write: func(ctx context.Context, i int) error {
		if i == 5 {
			<-ctx.Done()
			return ctx.Err()
		}
		return nil
	}}
	l, err := data.NewDataLoader(hang, data.Options{Workers: 2, Timeout: 2 * time.Second}) // far above what five samples take
	require.NoError(t, err)
	var last error
	seen := 0
	for _, err := range l.All(context.Background()) {
		if last = err; err == nil {
			seen++
		}
	}
	require.ErrorIs(t, last, data.ErrTimeout)
	require.Equal(t, 5, seen)

	l, err = data.NewDataLoader(hang, data.Options{Workers: 2})
	require.NoError(t, err)
	time.AfterFunc(50*time.Millisecond, func() { l.Close() })
	for _, err := range l.All(context.Background()) {
		last = err
	}
	require.ErrorIs(t, last, data.ErrClosed)
}

// At most Prefetch batches are in the making or waiting, beside the one in the loop's hands.
func TestLoaderMemoryBound(t *testing.T) {
	for _, prefetch := range []int{1, 2, 5} {
		for _, unordered := range []bool{false, true} {
			var ahead, peak, given atomic.Int64
			l, err := data.NewDataLoader(probe{n: 400, write: func(_ context.Context, i int) error {
				if i%4 == 0 { // the first of a batch: it was begun
					n := ahead.Add(1) - given.Load()
					for p := peak.Load(); n > p && !peak.CompareAndSwap(p, n); p = peak.Load() {
					}
				}
				return nil
			}}, data.Options{BatchSize: 4, Workers: 16, Prefetch: prefetch, Unordered: unordered})
			require.NoError(t, err)
			for _, err := range l.All(context.Background()) {
				require.NoError(t, err)
				time.Sleep(200 * time.Microsecond) // let the workers run as far ahead as they can
				given.Add(1)
			}
			require.LessOrEqual(t, peak.Load(), int64(prefetch+1))
			require.Equal(t, int64(prefetch+1), peak.Load())
		}
	}
}

// With Reuse a pass allocates no more memory than its depth needs, however long it is.
func TestLoaderReusesMemory(t *testing.T) {
	for _, workers := range []int{0, 4} {
		l, err := data.NewDataLoader(probe{n: 997}, data.Options{BatchSize: 10, Workers: workers, Reuse: true})
		require.NoError(t, err)
		places := map[uint64]bool{}
		for range 3 {
			for b, err := range l.All(context.Background()) {
				require.NoError(t, err)
				info, err := tdp.Describe(b.Tensor(0))
				require.NoError(t, err)
				require.Equal(t, []int64{int64(b.Len())}, info.Shape)
				places[info.Storage] = true
			}
		}
		limit := 1
		if workers > 0 {
			limit = 3
		}
		require.LessOrEqual(t, len(places), limit)
		require.NoError(t, l.Close())
	}
}

func TestBatchKeep(t *testing.T) {
	for _, o := range []data.Options{{}, {Reuse: true}, {Workers: 2, Reuse: true}} {
		o.BatchSize = 4
		l, err := data.NewDataLoader(probe{n: 10}, o)
		require.NoError(t, err)
		var kept [][]*ts.Tensor
		var batches []*data.Batch
		for b, err := range l.All(context.Background()) {
			require.NoError(t, err)
			kept = append(kept, b.Keep())
			batches = append(batches, b)
		}
		require.NoError(t, l.Close())
		for k, want := range [][]int64{{0, 1, 2, 3}, {4, 5, 6, 7}, {8, 9}} {
			got, err := tdp.ToSlice[int64](kept[k][0])
			require.NoError(t, err)
			require.Equal(t, want, got)
			require.Nil(t, batches[k].Input(), "a batch must not give tensors after its loop body")
			for i, v := range batches[k].Indices() {
				require.Equal(t, want[i], int64(v))
			}
			for _, x := range kept[k] {
				x.MustDrop()
			}
		}
	}
}

// What autograd or a view holds outlives the batch, since by default memory is not written again.
func TestViewOutlivesBatch(t *testing.T) {
	l, err := data.NewDataLoader(probe{n: 100}, data.Options{BatchSize: 5})
	require.NoError(t, err)
	var views []*ts.Tensor
	for b, err := range l.All(context.Background()) {
		require.NoError(t, err)
		views = append(views, b.Input().MustView([]int64{5, 1}, false))
	}
	for k, v := range views {
		got, err := tdp.ToSlice[int64](v)
		require.NoError(t, err)
		require.Equal(t, int64(5*k), got[0])
		v.MustDrop()
	}
}

// A job stopped in mid-epoch continues with the very next batch, with the same random numbers.
func TestResume(t *testing.T) {
	samplers := map[string]func() data.Sampler{
		"sequential": func() data.Sampler { return data.NewSequentialSampler(53) },
		"random": func() data.Sampler {
			s, err := data.NewRandomSampler(53, data.RandomOptions{})
			require.NoError(t, err)
			return s
		},
		"random own": func() data.Sampler {
			s, err := data.NewRandomSampler(53, data.RandomOptions{Generator: data.NewGenerator(3), Replacement: true, NumSamples: 60})
			require.NoError(t, err)
			return s
		},
		"subset": func() data.Sampler { return data.NewSubsetRandomSampler([]int{4, 8, 15, 16, 23, 42, 1, 2, 3, 5}, nil) },
		"weighted": func() data.Sampler {
			w := make([]float64, 53)
			for i := range w {
				w[i] = float64(i)
			}
			s, err := data.NewWeightedRandomSampler(w, data.WeightedOptions{})
			require.NoError(t, err)
			return s
		},
		"distributed": func() data.Sampler {
			s, err := data.NewDistributedSampler(53, data.DistributedOptions{Replicas: 2, Rank: 1})
			require.NoError(t, err)
			s.SetEpoch(4)
			return s
		},
	}
	for name, make := range samplers {
		for _, workers := range []int{0, 3} {
			for _, stop := range []int{0, 1, 3, 1000} {
				open := func() *data.DataLoader[*data.Batch] {
					l, err := data.NewDataLoader(probe{n: 53}, data.Options{BatchSize: 3, Sampler: make(), Workers: workers})
					require.NoError(t, err)
					return l
				}
				require.NoError(t, tdp.ManualSeed(77))
				whole := open()
				want := append(pass(t, whole), pass(t, whole)...)

				require.NoError(t, tdp.ManualSeed(77))
				first := open()
				var got []string
				saved := func() []byte {
					st, err := first.State()
					require.NoError(t, err)
					text, err := json.Marshal(st)
					require.NoError(t, err)
					return text
				}
				var state []byte
				if stop == 0 {
					state = saved()
				}
				for b, err := range first.All(context.Background()) {
					if stop == 0 {
						break
					}
					require.NoError(t, err)
					got = append(got, values(t, b))
					if len(got) == stop || stop == 1000 {
						state = saved()
					}
					if len(got) == stop {
						break
					}
				}
				generator, err := tdp.DefaultGenerator(gotch.CPU)
				require.NoError(t, err)
				rngState, err := generator.State() // a checkpoint holds it too
				require.NoError(t, err)
				if stop == 0 { // nothing was begun: the first pass draws
					require.NoError(t, tdp.ManualSeed(77))
					rngState, err = generator.State()
					require.NoError(t, err)
				}

				require.NoError(t, tdp.ManualSeed(1234)) // another process
				require.NoError(t, generator.SetState(rngState))
				var st data.State
				require.NoError(t, json.Unmarshal(state, &st))
				second := open()
				require.NoError(t, second.Restore(st))
				again, err := second.State()
				require.NoError(t, err)
				require.Equal(t, st, again, "%s: a state survives being restored", name)
				require.Equal(t, (len(want)/2)-len(got), second.Len())
				got = append(got, pass(t, second)...)
				got = append(got, pass(t, second)...)
				require.Equal(t, want, got, "%s, %d workers, stopped after %d", name, workers, stop)
			}
		}
	}
}

// The world size may change in mid-epoch: together the ranks before and after visit what an undisturbed epoch visits,
// in its order, each place once.
func TestResumeWithOtherWorldSize(t *testing.T) {
	const n, epoch = 103, 3
	order := data.NewGenerator(5 + epoch).Perm(n)
	worlds := [][]int{{2, 3}, {4, 1}, {3, 8, 2}, {1, 4}, {5, 5}}
	for _, plan := range worlds {
		for _, drop := range []bool{false, true} {
			var visited []int // in global order
			var st *data.State
			for leg, world := range plan {
				perRank := make([][]int, world)
				var next data.State
				for rank := range world {
					s, err := data.NewDistributedSampler(n, data.DistributedOptions{Replicas: world, Rank: rank, Seed: 5, DropLast: drop})
					require.NoError(t, err)
					l, err := data.NewCollated(ints(n), collect, data.Options{BatchSize: 4, Sampler: s})
					require.NoError(t, err)
					if st != nil {
						require.NoError(t, l.Restore(*st))
					}
					l.SetEpoch(epoch)
					k := 0
					for b, err := range l.All(context.Background()) {
						require.NoError(t, err)
						perRank[rank] = append(perRank[rank], b...)
						if k++; k == 3 && leg < len(plan)-1 {
							break
						}
					}
					state, err := l.State()
					require.NoError(t, err)
					if rank > 0 {
						require.Equal(t, next.Sampler, state.Sampler, "all ranks must agree on the state")
					}
					next = state
				}
				for k := range perRank[0] {
					for rank := range world {
						visited = append(visited, perRank[rank][k])
					}
				}
				if st = &next; !next.Running {
					break // the epoch is over
				}
			}
			want := order
			if drop {
				want = order[:min(len(visited), n)]
				require.Greater(t, len(visited), n-slices.Max(plan))
			}
			require.Equal(t, want, visited[:len(want)], "%v", plan)
			for k, i := range visited[len(want):] { // padding repeats from the front
				require.Equal(t, order[k], i)
			}
			require.Less(t, len(visited)-len(want), slices.Max(plan))
		}
	}
}

func TestStateDoesNotFit(t *testing.T) {
	s, err := data.NewDistributedSampler(10, data.DistributedOptions{Replicas: 2})
	require.NoError(t, err)
	good := s.State(2)
	for _, change := range []func(*data.SamplerState){
		func(s *data.SamplerState) { s.Kind = "random" }, func(s *data.SamplerState) { s.Length = 11 },
		func(s *data.SamplerState) { s.Cursor = -1 }, func(s *data.SamplerState) { s.Seed = 9 }} {
		st := good
		change(&st)
		require.ErrorIs(t, s.Restore(st), data.ErrState)
	}
	require.NoError(t, s.Restore(good))
	r, err := data.NewRandomSampler(10, data.RandomOptions{})
	require.NoError(t, err)
	require.ErrorIs(t, r.Restore(data.SamplerState{Kind: "random", Length: 10, Cursor: 11}), data.ErrState)
	require.ErrorIs(t, r.Restore(data.SamplerState{Kind: "random", Length: 10, Generator: []byte{1}}), data.ErrState)
	l, err := data.NewDataLoader(probe{n: 3}, data.Options{Batches: fixed{{0, 1}, {2}}})
	require.NoError(t, err)
	_, err = l.State()
	require.ErrorIs(t, err, data.ErrNotResumable)
	require.Equal(t, 2, len(pass(t, l)))
}

type fixed [][]int

func (f fixed) Len() int { return len(f) }
func (f fixed) All() iter.Seq[[]int] {
	return func(yield func([]int) bool) {
		for _, x := range f {
			if !yield(x) {
				return
			}
		}
	}
}

func TestOptions(t *testing.T) {
	seq := data.NewSequentialSampler(3)
	for want, o := range map[string]data.Options{
		"num_workers":            {Workers: -1},
		"timeout":                {Timeout: -1},
		"Prefetch":               {Prefetch: 2},
		"sampler option":         {Sampler: seq, Shuffle: true},
		"batch_sampler option":   {Batches: fixed{}, DropLast: true},
		"positive integer value": {BatchSize: -3},
		"Unordered":              {Unordered: true},
		"the device":             {Device: gotch.Device{Name: "TPU"}},
	} {
		_, err := data.NewDataLoader(probe{n: 3}, o)
		require.ErrorIs(t, err, data.ErrOptions)
		require.ErrorContains(t, err, want)
	}
	_, err := data.NewDataLoader(probe{n: 3}, data.Options{Device: gotch.CudaBuilder(0)})
	if err != nil { // no GPU here: an error that says so, not a crash at the first batch
		require.NotEmpty(t, err.Error())
	}
}

// An empty data set is a pass without batches.
func TestEmpty(t *testing.T) {
	for _, o := range []data.Options{{}, {Workers: 2}, {Shuffle: true}, {DropLast: true, BatchSize: 4}} {
		l, err := data.NewDataLoader(probe{}, o)
		require.NoError(t, err)
		require.Empty(t, pass(t, l))
	}
}

func TestConcatAndSubset(t *testing.T) {
	a, b := ints(3), ints(4)
	c, err := data.NewConcat[int](a, ints(0), b)
	require.NoError(t, err)
	require.Equal(t, 7, c.Len())
	var got []int
	for i := range c.Len() {
		x, err := c.Item(context.Background(), i)
		require.NoError(t, err)
		got = append(got, x)
	}
	require.Equal(t, []int{0, 1, 2, 0, 1, 2, 3}, got)
	_, err = c.Item(context.Background(), 7)
	require.Error(t, err)
	_, err = c.Fields()
	require.ErrorContains(t, err, "data.Encoded")

	toy, err := data.NewRandomToy(10)
	require.NoError(t, err)
	sub, err := data.NewSubset(toy, []int{7, 2})
	require.NoError(t, err)
	both, err := data.NewConcat[[]*ts.Tensor](sub, toy)
	require.NoError(t, err)
	l, err := data.NewDataLoader(both, data.Options{BatchSize: 12})
	require.NoError(t, err)
	for batch, err := range l.All(context.Background()) {
		require.NoError(t, err)
		x, err := tdp.ToSlice[float32](batch.Input())
		require.NoError(t, err)
		all, err := tdp.ToSlice[float32](toy.Tensors()[0])
		require.NoError(t, err)
		require.Equal(t, all[7*20:8*20], x[:20])
		require.Equal(t, all[2*20:3*20], x[20:40])
		require.Equal(t, all, x[40:])
	}
	item, err := toy.Item(context.Background(), 3)
	require.NoError(t, err)
	require.Equal(t, []int64{20}, item[0].MustSize())
	_, err = toy.Item(context.Background(), 10)
	require.Error(t, err)
}

// Several loaders over one data set at once, for the race detector; a loader that is in use says so.
func TestConcurrentLoops(t *testing.T) {
	var wg sync.WaitGroup
	for range 3 {
		l, err := data.NewDataLoader(probe{n: 200}, data.Options{BatchSize: 7, Workers: 4, Reuse: true})
		require.NoError(t, err)
		wg.Go(func() {
			if n := len(pass(t, l)); n != 29 {
				t.Errorf("%d batches", n)
			}
		})
	}
	wg.Wait()
	l, err := data.NewDataLoader(probe{n: 20}, data.Options{})
	require.NoError(t, err)
	for _, err := range l.All(context.Background()) {
		require.NoError(t, err)
		for _, err := range l.All(context.Background()) {
			require.ErrorIs(t, err, data.ErrBusy)
		}
		break
	}
	require.Len(t, pass(t, l), 20)
}

// A loader is a part of a snapshot: its state goes through a checkpoint's dict and back.
func TestStateDict(t *testing.T) {
	for _, sampler := range []func() data.Sampler{
		func() data.Sampler {
			s, err := data.NewDistributedSampler(53, data.DistributedOptions{Replicas: 2, Rank: 1, Seed: 4})
			require.NoError(t, err)
			return s
		},
		func() data.Sampler {
			s, err := data.NewRandomSampler(53, data.RandomOptions{Generator: data.NewGenerator(8)})
			require.NoError(t, err)
			return s
		},
	} {
		open := func() *data.DataLoader[*data.Batch] {
			l, err := data.NewDataLoader(probe{n: 53}, data.Options{BatchSize: 3, Sampler: sampler(), Workers: 2})
			require.NoError(t, err)
			l.SetEpoch(3)
			return l
		}
		require.NoError(t, tdp.ManualSeed(5))
		want := pass(t, open())
		require.NoError(t, tdp.ManualSeed(5))
		first := open()
		var got []string
		var state *pickle.Dict
		for b, err := range first.All(context.Background()) {
			require.NoError(t, err)
			if got = append(got, values(t, b)); len(got) == 4 {
				state, err = first.StateDict()
				require.NoError(t, err)
				break
			}
		}
		require.NoError(t, first.Close())
		bytes, err := pickle.Marshal(state, pickle.EncodeOptions{})
		require.NoError(t, err)
		read, err := pickle.Unmarshal(bytes, pickle.DecodeOptions{})
		require.NoError(t, err)
		for _, d := range []*pickle.Dict{state, read.(*pickle.Dict)} {
			second := open()
			require.NoError(t, second.LoadStateDict(d))
			second.SetEpoch(3)
			require.Equal(t, want, slices.Concat(got, pass(t, second)))
			require.NoError(t, second.Close())
		}
	}
	l, err := data.NewDataLoader(probe{n: 3}, data.Options{})
	require.NoError(t, err)
	for want, d := range map[string]*pickle.Dict{
		`"running"`: pickle.NewDict(),
		`"kind"`:    pickle.NewDict().Set("running", true).Set("base_seed", int64(1)).Set("sampler", pickle.NewDict()),
		`"sampler"`: pickle.NewDict().Set("running", true).Set("base_seed", int64(1)).Set("sampler", "x"),
	} {
		err := l.LoadStateDict(d)
		require.ErrorIs(t, err, data.ErrState)
		require.ErrorContains(t, err, want)
	}
	require.ErrorIs(t, l.LoadStateDict(nil), data.ErrState)
}
