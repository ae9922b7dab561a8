package tdp

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
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

// TestGlooIsPolite: the thread that reads for Gloo does not interrupt others, see Polite in group.cpp.
func TestGlooIsPolite(t *testing.T) {
	if out, err := exec.Command("chrt", "--batch", "0", "true").CombinedOutput(); err != nil {
		t.Skipf("no thread here may be of the batch class, so Gloo's is like any other: %v %s", err, out)
	}
	before := batchThreads(t)
	ranks(t, 1, func(_ int, pg *ProcessGroup) {
		if got := batchThreads(t) - before; got != 1 {
			t.Errorf("%d threads more of the batch class, not 1", got)
		}
		if policy := schedulingPolicy(t, "/proc/thread-self/stat"); policy != 0 {
			t.Errorf("the rank's own thread is of class %d", policy)
		}
	})
	require.Equal(t, before, batchThreads(t), "after the group's end")
}

func batchThreads(t *testing.T) (n int) {
	t.Helper()
	threads, err := filepath.Glob("/proc/self/task/*/stat")
	require.NoError(t, err)
	for _, file := range threads {
		if schedulingPolicy(t, file) == 3 {
			n++
		}
	}
	return n
}

// schedulingPolicy is a thread's, by the number that sched(7) gives it; -1 if the thread has ended.
func schedulingPolicy(t *testing.T, file string) int {
	t.Helper()
	text, err := os.ReadFile(file)
	if err != nil {
		return -1
	}
	// The 41st field; the 2nd is a name in parentheses that may hold anything.
	fields := strings.Fields(string(text[bytes.LastIndexByte(text, ')')+1:]))
	policy, err := strconv.Atoi(fields[41-3])
	if err != nil {
		t.Error(err)
	}
	return policy
}

func TestClosedHandlesAreErrors(t *testing.T) {
	store, err := NewHashStore()
	require.NoError(t, err)
	require.NoError(t, store.Close())
	require.ErrorIs(t, store.Set("k", nil), ErrValue)
	require.NoError(t, store.Close(), "closing twice is allowed")
}
