package vision

import (
	"errors"
	"os"
	"testing"

	"github.com/stretchr/testify/require"
)

// The real sets, where somebody has put them: their counts, first labels and mean.
func TestPublishedFiles(t *testing.T) {
	root := os.Getenv("GODDP_DATA")
	if root == "" {
		t.Skip("GODDP_DATA names no folder with the published sets")
	}
	for _, c := range []struct {
		load  func(o Options) (*Images, error)
		test  bool
		count int
		first []byte
		mean  float64 // 0 is not compared
	}{
		{func(o Options) (*Images, error) { return MNIST(ctx, o) }, false, 60000, []byte{5, 0, 4, 1, 9}, 0.1307},
		{func(o Options) (*Images, error) { return MNIST(ctx, o) }, true, 10000, []byte{7, 2, 1, 0, 4}, 0},
		{func(o Options) (*Images, error) { return FashionMNIST(ctx, o) }, false, 60000, []byte{9, 0, 0, 3, 0}, 0.2860},
		{func(o Options) (*Images, error) { return CIFAR10(ctx, o) }, false, 50000, []byte{6, 9, 9, 4, 1}, 0.4734},
		{func(o Options) (*Images, error) { return CIFAR10(ctx, o) }, true, 10000, []byte{3, 8, 8, 0, 6}, 0},
	} {
		d, err := c.load(Options{Root: root, Test: c.test})
		var missing *MissingError
		if errors.As(err, &missing) {
			t.Log(err)
			continue
		}
		require.NoError(t, err)
		require.Equal(t, c.count, d.Len())
		require.Equal(t, c.first, d.labels[:5], d.Name())
		if c.mean > 0 {
			sum := 0.0
			for _, v := range d.pix {
				sum += float64(v)
			}
			require.InDelta(t, c.mean, sum/255/float64(len(d.pix)), 1e-4, d.Name())
		}
	}
}
