package data

import (
	"context"
	"math/rand/v2"
	"testing"

	"github.com/goddp/goddp/internal/tdp"
	"github.com/goddp/goddp/internal/testenv"
	"github.com/stretchr/testify/require"
	"github.com/sugarme/gotch"
	"github.com/sugarme/gotch/ts"
)

// wide is a source of n samples of many equal numbers: sample i has i+1.
type wide int

const wideRow = 4096

func (n wide) Len() int { return int(n) }
func (n wide) Fields() ([]Field, error) {
	return []Field{{Name: "x", DType: gotch.Float, Shape: []int64{wideRow}}}, nil
}
func (n wide) Write(_ context.Context, i int, dst Row, _ *rand.Rand) error {
	v, err := Elements[float32](dst, 0)
	for k := range v {
		v[k] = float32(i + 1)
	}
	return err
}

// TestCUDABatchesUnderStress proves that batches for a GPU are whole when computations read them, though their pinned
// memory is written again as soon as it was copied, and their memory on the GPU is given away while computations on it
// are still queued: the loop runs far ahead of the GPU, which has a product of matrices to do before each sum.
func TestCUDABatchesUnderStress(t *testing.T) {
	testenv.NeedGPU(t, tdp.CUDAAvailable)
	gpu := gotch.CudaBuilder(0)
	weight := ts.MustOnes([]int64{4096, 4096}, gotch.Float, gpu)
	defer weight.MustDrop()
	for _, workers := range []int{0, 4} {
		const n, size = 3200, 16
		l, err := NewDataLoader(wide(n), Options{BatchSize: size, Workers: workers, Device: gpu})
		require.NoError(t, err)
		var sums []*ts.Tensor
		var want []float32
		for b, err := range l.All(context.Background()) {
			require.NoError(t, err)
			info, err := tdp.Describe(b.Input())
			require.NoError(t, err)
			require.Equal(t, gpu, info.Device)
			for range 3 {
				weight.MustMm(weight, false).MustDrop() // the sum waits behind these on the stream
			}
			// Memory of the same size class that the allocator may hand out meanwhile, filled with what must not be seen.
			sums = append(sums, b.Input().MustAmax([]int64{0, 1}, false, false), b.Input().MustAmin([]int64{0, 1}, false, false))
			poison := ts.MustFull([]int64{size, wideRow}, ts.FloatScalar(-1), gotch.Float, gpu)
			poison.MustDrop()
			low, high := float32(n), float32(0)
			for _, i := range b.Indices() {
				low, high = min(low, float32(i+1)), max(high, float32(i+1))
			}
			want = append(want, high, low)
		}
		require.NoError(t, l.Close())
		require.Len(t, sums, 2*n/size)
		for k, s := range sums {
			got, err := tdp.ToSlice[float32](s)
			require.NoError(t, err)
			require.Equal(t, want[k], got[0], "workers %d, batch %d", workers, k/2)
			s.MustDrop()
		}
	}
}

// TestCUDAPinnedBatches proves that PinMemory gives page-locked tensors on a machine with a GPU, and that a copy of them
// without waiting has the right values once the stream is done.
func TestCUDAPinnedBatches(t *testing.T) {
	testenv.NeedGPU(t, tdp.CUDAAvailable)
	gpu := gotch.CudaBuilder(0)
	l, err := NewDataLoader(wide(64), Options{BatchSize: 16, Workers: 2, PinMemory: true})
	require.NoError(t, err)
	defer l.Close()
	batches := 0
	for b, err := range l.All(context.Background()) {
		require.NoError(t, err)
		info, err := tdp.Describe(b.Input())
		require.NoError(t, err)
		require.True(t, info.Pinned)
		require.Equal(t, gotch.CPU, info.Device)
		dst, err := tdp.Empty(info.Shape, info.DType, gpu, false)
		require.NoError(t, err)
		require.NoError(t, tdp.Copy(dst, b.Input(), true))
		got, err := tdp.ToSlice[float32](dst) // it waits for the stream
		dst.MustDrop()
		require.NoError(t, err)
		for k, i := range b.Indices() {
			require.EqualValues(t, i+1, got[k*wideRow])
			require.EqualValues(t, i+1, got[(k+1)*wideRow-1])
		}
		batches++
	}
	require.Equal(t, 4, batches)
}
