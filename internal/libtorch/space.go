package libtorch

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// ErrDiskFull: the disk that holds the cache has no room for what is to be made.
var ErrDiskFull = errors.New("disk full")

// needSpace fails before a long download when the disk cannot hold what comes of it.
func (s *setup) needSpace(what string, bytes int64) error {
	if err := os.MkdirAll(s.cfg.Cache, 0o755); err != nil {
		return err
	}
	free, err := s.cfg.seams.free(s.cfg.Cache)
	if err != nil || free >= bytes { // an unknown amount is not a reason to refuse
		return nil
	}
	return fmt.Errorf("%w: %s takes %.1f GB in %s, and %.1f GB are free there: make room, or set %s to a folder on another disk",
		ErrDiskFull, what, float64(bytes)/1e9, s.cfg.Cache, float64(free)/1e9, EnvCache)
}

func freeBytes(dir string) (int64, error) {
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil {
		return 0, err
	}
	return int64(st.Bavail) * st.Bsize, nil
}

// explain adds what to do to an error that a full disk caused, here or in a program that set-up ran.
func (s *setup) explain(err error) error {
	if err == nil || errors.Is(err, ErrDiskFull) {
		return err
	}
	if errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT) || strings.Contains(err.Error(), "No space left on device") {
		return fmt.Errorf("%w: make room in %s, or set %s to a folder on another disk, and run this again: %w",
			ErrDiskFull, s.cfg.Cache, EnvCache, err)
	}
	return err
}

// sizeBelow adds up the files below a folder, as far as they can be seen.
func sizeBelow(dir string) (n int64) {
	filepath.WalkDir(dir, func(_ string, d os.DirEntry, err error) error {
		if err == nil && d.Type().IsRegular() {
			if info, err := d.Info(); err == nil {
				n += info.Size()
			}
		}
		return nil
	})
	return n
}
