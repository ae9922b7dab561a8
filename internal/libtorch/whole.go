package libtorch

import (
	"bufio"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// manifestName is the file that makes a folder of the cache whole: a line "sha256 size path" for every other file.
const manifestName = ".goddp-manifest"

// make makes the folder dir whole by fill, which fills an empty folder beside it. A killed make leaves the folder
// beside, which the next one removes; dir appears at once, with all its content on disk.
//
// The caller holds the lock that guards dir.
func (s *setup) make(ctx context.Context, dir string, fill func(tmp string) (content, error)) (err error) {
	parent := filepath.Dir(dir)
	if err := os.MkdirAll(parent, 0o755); err != nil {
		return err
	}
	removeStale(dir)
	tmp, err := os.MkdirTemp(parent, "."+filepath.Base(dir)+tmpMark)
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			os.RemoveAll(tmp)
		}
	}()
	if err := os.Chmod(tmp, 0o755); err != nil {
		return err
	}
	known, err := fill(tmp)
	if err != nil {
		return err
	}
	if err := writeManifest(ctx, tmp, known); err != nil {
		return err
	}
	if err := publish(tmp, dir); err != nil {
		return err
	}
	for _, path := range known.spent {
		os.Remove(path)
	}
	return nil
}

// content is what fill knows of the files that it wrote.
type content struct {
	sums      map[string]string // hashes, by path, of files that it has checked already
	spent     []string          // files elsewhere that are of no more use once the folder has its name
	sizesOnly bool              // do not hash the others
}

// tmpMark is in the name of everything that is not whole yet.
const tmpMark = ".tmp-"

// removeStale removes what killed runs left beside dir. It needs the lock of dir.
func removeStale(dir string) {
	left, _ := filepath.Glob(filepath.Join(filepath.Dir(dir), "."+filepath.Base(dir)+tmpMark+"*"))
	for _, d := range left {
		os.RemoveAll(d)
	}
}

// publish flushes tmp to disk and gives it its name.
func publish(tmp, dir string) error {
	f, err := os.Open(tmp)
	if err != nil {
		return err
	}
	// One flush of the file system: a call for each of ten thousand files takes minutes on some disks.
	err = unix.Syncfs(int(f.Fd()))
	if err = errors.Join(err, f.Close()); err != nil {
		return fmt.Errorf("flush %s to disk: %w", tmp, err)
	}
	if _, err := os.Lstat(dir); err == nil { // damaged, or it would not be made anew
		old, err := os.MkdirTemp(filepath.Dir(dir), "."+filepath.Base(dir)+tmpMark)
		if err != nil {
			return err
		}
		defer os.RemoveAll(old)
		if err := os.Rename(dir, filepath.Join(old, "damaged")); err != nil {
			return err
		}
	}
	if err := os.Rename(tmp, dir); err != nil {
		return err
	}
	return syncDir(filepath.Dir(dir))
}

func syncDir(dir string) error {
	f, err := os.Open(dir)
	if err != nil {
		return err
	}
	defer f.Close()
	return f.Sync()
}

// writeManifest lists all files below dir. Hashes that are not known are computed.
func writeManifest(ctx context.Context, dir string, known content) error {
	type entry struct {
		path, sum string
		size      int64
	}
	var list []*entry
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		if known.sizesOnly && (d.Type()&fs.ModeSymlink != 0 || filepath.Base(filepath.Dir(path)) == "__pycache__") {
			return nil // links to the system's Python, and what Python writes anew by itself
		}
		if !d.Type().IsRegular() {
			return fmt.Errorf("%s is not a regular file", path)
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(dir, path)
		list = append(list, &entry{path: rel, size: info.Size(), sum: known.sums[rel]})
		return err
	})
	if err != nil {
		return err
	}
	group, ctx := newGroup(ctx, 4)
	for _, e := range list {
		if known.sizesOnly {
			e.sum = "-"
		} else if e.sum == "" {
			group.do(func() (err error) {
				e.sum, err = hashFile(ctx, filepath.Join(dir, e.path))
				return err
			})
		}
	}
	if err := group.wait(); err != nil {
		return err
	}
	var b strings.Builder
	for _, e := range list {
		fmt.Fprintf(&b, "%s %d %s\n", e.sum, e.size, e.path)
	}
	return os.WriteFile(filepath.Join(dir, manifestName), []byte(b.String()), 0o644)
}

// whole says whether dir holds all that its manifest names, of the same size, or with hashes of the same content. The
// error says what is wrong; it is fs.ErrNotExist when there is no such folder.
func whole(ctx context.Context, dir string, hashes bool) error {
	f, err := os.Open(filepath.Join(dir, manifestName))
	if err != nil {
		return err
	}
	defer f.Close()
	group, ctx := newGroup(ctx, 4)
	lines := bufio.NewScanner(f)
	for n := 1; lines.Scan(); n++ {
		sum, rest, _ := strings.Cut(lines.Text(), " ")
		num, path, ok := strings.Cut(rest, " ")
		size, err := strconv.ParseInt(num, 10, 64)
		if !ok || err != nil {
			return fmt.Errorf("%s: line %d makes no sense", f.Name(), n)
		}
		path = filepath.Join(dir, path)
		info, err := os.Lstat(path)
		switch {
		case err != nil:
			return fmt.Errorf("%s is missing", path)
		case info.Size() != size:
			return fmt.Errorf("%s has %d bytes, not %d", path, info.Size(), size)
		case hashes && sum != "-":
			group.do(func() error {
				switch got, err := hashFile(ctx, path); {
				case err != nil:
					return err
				case got != sum:
					return fmt.Errorf("%s is damaged: its sha256 is %s, not %s", path, got, sum)
				}
				return nil
			})
		}
	}
	return errors.Join(lines.Err(), group.wait())
}

func hashFile(ctx context.Context, path string) (string, error) {
	f, err := os.Open(path)
	if err != nil {
		return "", err
	}
	defer f.Close()
	h := sha256.New()
	if _, err := io.Copy(h, &untilDone{ctx, f}); err != nil {
		return "", fmt.Errorf("%s: %w", path, err)
	}
	return hex.EncodeToString(h.Sum(nil)), nil
}

// untilDone reads until the context ends.
type untilDone struct {
	ctx context.Context
	r   io.Reader
}

func (u *untilDone) Read(p []byte) (int, error) {
	if err := u.ctx.Err(); err != nil {
		return 0, context.Cause(u.ctx)
	}
	return u.r.Read(p)
}
