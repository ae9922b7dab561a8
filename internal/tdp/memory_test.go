package tdp

import (
	"os"
	"os/exec"
	"runtime"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/sugarme/gotch"
	"github.com/sugarme/gotch/ts"
)

// TestKeepsMemory: memory of freed tensors is used again without the kernel, also by a thread that is not the first.
func TestKeepsMemory(t *testing.T) {
	const chosen = "GODDP_TEST_CHOSEN"
	if os.Getenv(chosen) != "" {
		require.False(t, keepsMemory(), "somebody has chosen")
		return
	}
	if !keepsMemory() {
		t.Skip("one of glibc's variables for malloc is set here, so memory is not kept")
	}
	pages := make(chan int64)
	go func() {
		runtime.LockOSThread() // never unlocked: a thread of its own
		use := func() {
			var all []*ts.Tensor
			for range 8 {
				all = append(all, ts.MustOnes([]int64{4 << 20}, gotch.Float, gotch.CPU)) // 16 MiB
			}
			for _, x := range all {
				x.MustDrop()
			}
		}
		for range 3 {
			use()
		}
		before := minorFaults()
		for range 4 {
			use()
		}
		pages <- minorFaults() - before
	}()
	require.Less(t, <-pages, int64(1000), "of 131,072 pages of 4 KiB that were written")

	cmd := exec.Command(os.Args[0], "-test.run=^TestKeepsMemory$")
	cmd.Env = append(os.Environ(), chosen+"=1", "MALLOC_ARENA_MAX=2")
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, "%s", out)
}

// minorFaults counts the pages that the kernel gave this thread so far.
func minorFaults() int64 {
	const thread = 1 // RUSAGE_THREAD
	var u syscall.Rusage
	if err := syscall.Getrusage(thread, &u); err != nil {
		panic(err)
	}
	return u.Minflt
}
