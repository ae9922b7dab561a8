package tdp

import (
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/sugarme/gotch"
)

func TestSliceRoundTrip(t *testing.T) {
	x, err := FromSlice([]float32{1, 2, 3, 4, 5, 6}, []int64{2, 3}, gotch.CPU)
	require.NoError(t, err)
	info, err := Describe(x)
	require.NoError(t, err)
	require.Equal(t, []int64{2, 3}, info.Shape)
	require.Equal(t, []int64{3, 1}, info.Stride)
	back, err := ToSlice[float32](x.MustT(false))
	require.NoError(t, err)
	require.Equal(t, []float32{1, 4, 2, 5, 3, 6}, back)
	_, err = FromSlice([]float32{1}, []int64{2}, gotch.CPU)
	require.ErrorIs(t, err, ErrValue)
	_, err = ToSlice[int64](x)
	require.ErrorIs(t, err, ErrValue)
}
