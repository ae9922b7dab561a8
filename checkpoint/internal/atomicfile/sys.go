package atomicfile

import (
	"errors"
	"os"
	"syscall"

	"golang.org/x/sys/unix"
)

// notSupported: some file systems cannot sync a folder.
func notSupported(err error) bool {
	return errors.Is(err, syscall.EINVAL) || errors.Is(err, syscall.ENOTSUP)
}

// starter writes and, when the file will be synced at the end, has the system begin with what is already there, so
// that the disk works beside the processor.
type starter struct {
	f         *os.File
	ahead     bool
	off, sent int64
}

const startEvery = 8 << 20

func (s *starter) Write(b []byte) (int, error) {
	n, err := s.f.Write(b)
	s.off += int64(n)
	if s.ahead && s.off-s.sent >= startEvery {
		// Only advice: a file system without it is none the worse.
		_ = unix.SyncFileRange(int(s.f.Fd()), s.sent, s.off-s.sent, unix.SYNC_FILE_RANGE_WRITE)
		s.sent = s.off
	}
	return n, err
}
