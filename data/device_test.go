package data

import (
	"context"
	"errors"
	"math/rand/v2"
	"testing"

	"github.com/goddp/goddp/internal/tdp"
	"github.com/stretchr/testify/require"
	"github.com/sugarme/gotch"
	"github.com/sugarme/gotch/ts"
)

// rows is a Source of n numbers.
type rows int

func (n rows) Len() int                 { return int(n) }
func (n rows) Fields() ([]Field, error) { return []Field{{Name: "i", DType: gotch.Int64}}, nil }
func (n rows) Write(_ context.Context, i int, dst Row, _ *rand.Rand) error {
	v, err := Elements[int64](dst, 0)
	if err == nil {
		v[0] = int64(i)
	}
	return err
}

// Batches for a GPU, with a stand-in for the copy, so that it runs anywhere: host memory is used again at once, the
// loop's thread joins each batch before it sees it, and what a loop does not take is freed.
func TestStaging(t *testing.T) {
	for _, workers := range []int{0, 3} {
		l, err := NewDataLoader(rows(103), Options{BatchSize: 10, Workers: workers})
		require.NoError(t, err)
		m := l.maker.(*tensorMaker)
		m.device, m.reuse = gotch.CudaBuilder(0), true
		hosts := make(chan uint64, 1000)
		joined := 0
		m.stage = func(dev gotch.Device, src []*ts.Tensor) ([]*ts.Tensor, func() error, error) {
			if dev != gotch.CudaBuilder(0) {
				return nil, nil, errors.New("another device")
			}
			info, err := tdp.Describe(src[0])
			if err != nil {
				return nil, nil, err
			}
			hosts <- info.Storage
			moved, _, err := stageAside(gotch.CPU, src)
			return moved, func() error { joined++; return nil }, err // joined: the loop's goroutine alone
		}
		n := 0
		for b, err := range l.All(context.Background()) {
			require.NoError(t, err)
			n++
			require.Equal(t, n, joined)
			v, err := tdp.ToSlice[int64](b.Input())
			require.NoError(t, err)
			for k, x := range v {
				require.EqualValues(t, b.Indices()[k], x)
			}
		}
		require.Equal(t, 11, n)
		close(hosts)
		places := map[uint64]bool{}
		for h := range hosts {
			places[h] = true
		}
		require.LessOrEqual(t, len(places), 3)

		broken := errors.New("no stream")
		m.stage = func(_ gotch.Device, src []*ts.Tensor) ([]*ts.Tensor, func() error, error) {
			moved, _, err := stageAside(gotch.CPU, src)
			return moved, func() error { return broken }, err
		}
		for _, err := range l.All(context.Background()) {
			require.ErrorIs(t, err, broken)
		}
		m.stage = func(gotch.Device, []*ts.Tensor) ([]*ts.Tensor, func() error, error) { return nil, nil, broken }
		for _, err := range l.All(context.Background()) {
			require.ErrorIs(t, err, broken)
			require.ErrorContains(t, err, "batch 0")
		}
		require.NoError(t, l.Close())
	}
}
