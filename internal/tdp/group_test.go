package tdp

import (
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/sugarme/gotch"
)

// ranks runs fn for every rank of a Gloo group over one in-process store, each on its own thread.
func ranks(t *testing.T, n int, fn func(rank int, pg *ProcessGroup)) {
	t.Helper()
	store, err := NewHashStore()
	require.NoError(t, err)
	var wg sync.WaitGroup
	for rank := range n {
		wg.Go(func() {
			runtime.LockOSThread()
			pg, err := NewProcessGroup(store, rank, n, "test", "")
			if err == nil {
				err = pg.AddGloo(CPU, store, GlooOptions{Hostnames: []string{"127.0.0.1"}, Timeout: 20 * time.Second, GlobalRanks: make([]int64, n)})
			}
			if err == nil {
				err = pg.SetDefaultBackend(Gloo)
			}
			if err != nil {
				t.Errorf("rank %d: %v", rank, err)
				return
			}
			fn(rank, pg)
			if err := pg.Close(); err != nil {
				t.Errorf("rank %d: %v", rank, err)
			}
		})
	}
	wg.Wait()
}

func TestCollectives(t *testing.T) {
	ranks(t, 3, func(rank int, pg *ProcessGroup) {
		x, _ := FromSlice([]float32{float32(rank + 1)}, []int64{1}, gotch.CPU)
		w, err := pg.AllReduce(x, Sum, -1, true)
		if err == nil {
			err = w.Wait(-1)
		}
		got, err2 := ToSlice[float32](x)
		if err != nil || err2 != nil || got[0] != 6 {
			t.Errorf("rank %d: %v %v %v", rank, got, err, err2)
		}
		if err := w.Close(); err != nil {
			t.Error(err)
		}
	})
}

func TestClosedHandlesAreErrors(t *testing.T) {
	store, err := NewHashStore()
	require.NoError(t, err)
	require.NoError(t, store.Close())
	require.ErrorIs(t, store.Set("k", nil), ErrValue)
	require.NoError(t, store.Close(), "closing twice is allowed")
}
