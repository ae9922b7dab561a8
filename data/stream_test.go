package data_test

import (
	"context"
	"errors"
	"iter"
	"math/rand/v2"
	"testing"

	"github.com/goddp/goddp/data"
	"github.com/goddp/goddp/internal/tdp"
	"github.com/stretchr/testify/require"
	"github.com/sugarme/gotch"
)

// count streams 0 to n-1 and then fails with err, if any.
func count(n int, err error) data.Iterable[int] {
	return data.IterFunc[int](func(context.Context) iter.Seq2[int, error] {
		return func(yield func(int, error) bool) {
			for i := range n {
				if !yield(i, nil) {
					return
				}
			}
			if err != nil {
				yield(0, err)
			}
		}
	})
}

type intEncoder struct{}

func (intEncoder) Fields() ([]data.Field, error) {
	return []data.Field{{Name: "i", DType: gotch.Int64}, {Name: "r", DType: gotch.Double, Shape: []int64{2}}}, nil
}
func (intEncoder) Encode(i int, dst data.Row, rng *rand.Rand) error {
	return probe{}.Write(context.Background(), i, dst, rng)
}

func TestStream(t *testing.T) {
	noGoroutines(t)
	var want []string
	for _, o := range []data.Options{{}, {Workers: 3}, {Workers: 2, Prefetch: 5, Reuse: true}} {
		o.BatchSize = 4
		require.NoError(t, tdp.ManualSeed(1))
		l, err := data.NewStreamLoader(count(14, nil), intEncoder{}, o)
		require.NoError(t, err)
		require.Equal(t, -1, l.Len())
		got := append(pass(t, l), pass(t, l)...)
		require.Len(t, got, 8)
		if want == nil {
			want = got
		}
		require.Equal(t, want, got)

		require.NoError(t, tdp.ManualSeed(1))
		var st data.State
		for b, err := range l.All(context.Background()) {
			require.NoError(t, err)
			if b.Indices()[0] == 4 {
				st, err = l.State()
				require.NoError(t, err)
				break
			}
		}
		again, err := data.NewStreamLoader(count(14, nil), intEncoder{}, o)
		require.NoError(t, err)
		require.NoError(t, again.Restore(st))
		require.Equal(t, want[2:], append(pass(t, again), pass(t, again)...))
	}
	broken := errors.New("broken")
	for _, workers := range []int{0, 2} {
		l, err := data.NewCollatedStream(count(6, broken), collect, data.Options{BatchSize: 4, Workers: workers, DropLast: true})
		require.NoError(t, err)
		seen := 0
		for b, err := range l.All(context.Background()) {
			if seen++; seen == 1 {
				require.NoError(t, err)
				require.Equal(t, []int{0, 1, 2, 3}, b)
				continue
			}
			var item *data.ItemError
			require.ErrorAs(t, err, &item)
			require.Equal(t, 6, item.Index)
			require.ErrorIs(t, err, broken)
		}
		require.Equal(t, 2, seen)
	}
	_, err := data.NewCollatedStream(count(1, nil), collect, data.Options{Shuffle: true})
	require.ErrorIs(t, err, data.ErrOptions)
	for rank := range 3 {
		var got []int
		for i, err := range data.Shard(count(11, nil), 3, rank).Iter(context.Background()) {
			require.NoError(t, err)
			got = append(got, i)
		}
		require.Equal(t, []int{rank, rank + 3, rank + 6}, got)
	}
}
