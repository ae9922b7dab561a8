package checkpoint

import (
	"unsafe"

	"golang.org/x/sys/unix"
)

// hugePage is the size that the processor maps at once where the system lets it.
const hugePage = 2 << 20

// wantHugePages asks for large pages under b before it is first touched. Reading a file into fresh memory costs more
// for the page faults, one every 4 KiB, than for the copying. It is advice: without it only time is lost.
func wantHugePages(b []byte) {
	start := uintptr(unsafe.Pointer(unsafe.SliceData(b)))
	skip := -start & (hugePage - 1)
	if uintptr(len(b)) < skip+hugePage {
		return
	}
	_ = unix.Madvise(b[skip:skip+(uintptr(len(b))-skip)&^(hugePage-1)], unix.MADV_HUGEPAGE)
}
