// Package atomicfile replaces files so that readers, and a machine that crashes, see the old or the new one and
// nothing between.
package atomicfile

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
)

// TempMark is part of the names of unfinished files. What carries it can be deleted when its writer is gone.
const TempMark = ".goddp-tmp-"

// IsTemp tells whether a file name belongs to an unfinished write.
func IsTemp(name string) bool { return strings.Contains(filepath.Base(name), TempMark) }

// Options are the choices of Write.
type Options struct {
	Perm   os.FileMode // 0 stands for those of the file that is replaced, or 0666 less umask for a new one
	NoSync bool        // do not wait for the disk
}

// Write creates or replaces path with what fill writes. On any error path is as it was.
func Write(path string, opt Options, fill func(io.Writer) error) (err error) {
	if info, err := os.Stat(path); err == nil && info.IsDir() {
		return &fs.PathError{Op: "save", Path: path, Err: errors.New("is a directory")}
	}
	// A link keeps pointing where it did: its target is what is replaced.
	if target, err := filepath.EvalSymlinks(path); err == nil {
		path = target
	}
	f, err := create(path, opt.Perm)
	if err != nil {
		return err
	}
	temp := f.Name()
	if info, err := os.Stat(path); err == nil && opt.Perm == 0 {
		_ = f.Chmod(info.Mode().Perm())
	}
	defer func() {
		if err != nil {
			f.Close()
			os.Remove(temp)
		}
	}()
	if err := fill(&starter{f: f, ahead: !opt.NoSync}); err != nil {
		return err
	}
	if !opt.NoSync {
		if err := f.Sync(); err != nil {
			return fmt.Errorf("sync: %w", err)
		}
	}
	if err := f.Close(); err != nil {
		return err
	}
	if err := os.Rename(temp, path); err != nil {
		return err
	}
	if opt.NoSync {
		return nil
	}
	// From here on the new file is in place; only its survival of a power cut is still open.
	return SyncDir(filepath.Dir(path))
}

func create(path string, perm os.FileMode) (*os.File, error) {
	if perm == 0 {
		perm = 0o666
	}
	dir, base := filepath.Split(path)
	for i := range 10000 {
		name := filepath.Join(dir, fmt.Sprintf(".%s%s%d-%d", base, TempMark, os.Getpid(), i))
		f, err := os.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, perm)
		if !errors.Is(err, fs.ErrExist) {
			return f, err
		}
	}
	return nil, fmt.Errorf("too many unfinished files beside %s", path)
}

// SyncDir makes the names in a folder durable.
func SyncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	defer d.Close()
	if err := d.Sync(); err != nil && !errors.Is(err, errors.ErrUnsupported) && !notSupported(err) {
		return fmt.Errorf("sync of the folder: %w", err)
	}
	return nil
}

// Check tells whether Write could write to path.
func Check(path string) error {
	if path == "" {
		return errors.New("no path is given")
	}
	info, err := os.Stat(path)
	switch {
	case err == nil && info.IsDir():
		return errors.New("it is a folder; give a file name in it")
	case err == nil && !info.Mode().IsRegular():
		return errors.New("it is not a regular file")
	}
	if target, err := filepath.EvalSymlinks(path); err == nil {
		path = target
	}
	f, err := create(path, 0)
	if err != nil {
		if errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("the folder %s does not exist", filepath.Dir(path))
		}
		return err
	}
	_, err = f.Write([]byte{0})
	if cerr := f.Close(); err == nil {
		err = cerr
	}
	if rerr := os.Remove(f.Name()); err == nil {
		err = rerr
	}
	return err
}
