// Package download fetches the files of data sets: once a machine, checked against a published MD5, and going on where
// a former attempt stopped.
//
// What is fetched lies beside its place as NAME.part until it is whole and right; only then it gets its name. A lock
// file makes all ranks of a node wait for the first one, which fetches:
//
//	err := download.File(ctx, download.Request{URL: mirror + "train.gz", Path: "data/train.gz", MD5: "…"})
package download

import (
	"context"
	"crypto/md5"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// Request is one file to fetch. URL and Path are needed.
type Request struct {
	URL  string
	Path string // where the file is to be
	MD5  string // in hex; "" is not checked
	Size int64  // in bytes; 0 is not known, and at most MaxSize is taken
	// Client is what fetches; nil is http.DefaultClient.
	Client *http.Client
	// Attempts is how often a connection is tried, each going on where the last one broke off; 0 is 5.
	Attempts int
	// Backoff is the pause before the second attempt, doubled for each further one; 0 is a second.
	Backoff time.Duration
	// Progress is told how much of the file is here; total is -1 where it is not known. May be nil.
	Progress func(done, total int64)
}

// MaxSize is the most that is taken of a file whose size is not known.
const MaxSize = 16 << 30

var (
	// ErrChecksum is wrapped when the file that came is not the published one.
	ErrChecksum = errors.New("checksum mismatch")
	// ErrSize is wrapped when a file is longer or shorter than it should be.
	ErrSize = errors.New("unexpected size")
)

// StatusError is an answer that is not the file.
type StatusError struct {
	URL  string
	Code int
}

func (e *StatusError) Error() string {
	return fmt.Sprintf("%s answers %d %s", e.URL, e.Code, http.StatusText(e.Code))
}

// File makes sure that the file is at its path. A file that is there already is taken as right: it got its name only
// after its check.
func File(ctx context.Context, r Request) error {
	if r.URL == "" || r.Path == "" {
		return errors.New("download: a request needs a URL and a path")
	}
	if there(r.Path) {
		return nil
	}
	if err := os.MkdirAll(filepath.Dir(r.Path), 0o755); err != nil {
		return fmt.Errorf("download: %w", err)
	}
	unlock, err := lock(ctx, r.Path+".lock")
	if err != nil {
		return fmt.Errorf("download: waiting for another process that fetches %s: %w", r.Path, err)
	}
	defer unlock()
	if there(r.Path) { // another rank has fetched it
		return nil
	}
	if err := r.fetch(ctx); err != nil {
		return fmt.Errorf("download: %s: %w", r.URL, err)
	}
	return nil
}

func there(path string) bool {
	info, err := os.Stat(path)
	return err == nil && info.Mode().IsRegular()
}

// lock waits until this process alone holds the lock file. The kernel gives it up when the process ends, however it ends.
func lock(ctx context.Context, path string) (func(), error) {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o644)
	if err != nil {
		return nil, err
	}
	for pause := 5 * time.Millisecond; ; pause = min(2*pause, 500*time.Millisecond) {
		err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
		if err == nil {
			// The file stays: removing it would let a third process lock another file of the same name.
			return func() { f.Close() }, nil
		}
		if !errors.Is(err, syscall.EWOULDBLOCK) && !errors.Is(err, syscall.EINTR) {
			f.Close()
			return nil, err
		}
		select {
		case <-ctx.Done():
			f.Close()
			return nil, context.Cause(ctx)
		case <-time.After(pause):
		}
	}
}

// fetch tries until the file is whole. A wrong checksum gets one more try from the start: the rest of a former
// attempt may have been another file's.
func (r Request) fetch(ctx context.Context) error {
	part := r.Path + ".part"
	attempts, pause := r.Attempts, r.Backoff
	if attempts <= 0 {
		attempts = 5
	}
	if pause <= 0 {
		pause = time.Second
	}
	fresh := false // the part holds nothing of a former run
	for try := 1; ; try++ {
		info, err := os.Stat(part)
		if err != nil || info.Size() == 0 {
			fresh = true
		}
		err = r.once(ctx, part)
		if err == nil {
			if err = r.check(part); err == nil {
				return os.Rename(part, r.Path)
			}
			os.Remove(part)
			if fresh {
				return err // it was fetched whole, and is wrong
			}
			continue
		}
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		var status *StatusError
		if errors.As(err, &status) && status.Code < 500 && status.Code != http.StatusTooManyRequests || errors.Is(err, ErrSize) {
			return err // trying again will not help
		}
		if try >= attempts {
			return fmt.Errorf("after %d attempts: %w", try, err)
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-time.After(pause):
		}
		pause *= 2
	}
}

// once makes one connection and appends what comes to the part.
func (r Request) once(ctx context.Context, part string) (err error) {
	f, err := os.OpenFile(part, os.O_CREATE|os.O_WRONLY, 0o644)
	if err != nil {
		return err
	}
	defer func() {
		if e := f.Close(); err == nil {
			err = e
		}
	}()
	have, err := f.Seek(0, io.SeekEnd)
	if err != nil {
		return err
	}
	if r.Size > 0 && have >= r.Size {
		return nil // whole, or too long: the check tells
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, r.URL, nil)
	if err != nil {
		return err
	}
	req.Header.Set("Accept-Encoding", "identity") // the checksum is of the file as it lies there
	if have > 0 {
		req.Header.Set("Range", fmt.Sprintf("bytes=%d-", have))
	}
	client := r.Client
	if client == nil {
		client = http.DefaultClient
	}
	resp, err := client.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	total := int64(-1)
	switch {
	case resp.StatusCode == http.StatusPartialContent && have > 0:
		from, size, ok := contentRange(resp.Header.Get("Content-Range"))
		if !ok || from != have {
			return fmt.Errorf("asked for the bytes from %d on, got %q", have, resp.Header.Get("Content-Range"))
		}
		total = size
	case resp.StatusCode == http.StatusOK:
		have = 0 // the server does not resume: from the start
		if err := f.Truncate(0); err != nil {
			return err
		}
		if _, err := f.Seek(0, io.SeekStart); err != nil {
			return err
		}
		total = resp.ContentLength
	case resp.StatusCode == http.StatusRequestedRangeNotSatisfiable && have > 0:
		_, size, ok := contentRange(resp.Header.Get("Content-Range"))
		if ok && size == have {
			return nil // nothing was missing
		}
		if err := f.Truncate(0); err != nil {
			return err
		}
		return errors.New("the part at hand is longer than the file: starting again")
	default:
		return &StatusError{r.URL, resp.StatusCode}
	}
	limit := int64(MaxSize)
	if r.Size > 0 {
		limit = r.Size
		if total >= 0 && total != r.Size {
			return fmt.Errorf("%w: the server offers %d bytes, published are %d", ErrSize, total, r.Size)
		}
	}
	n, err := io.Copy(&counter{f, have, total, r.Progress}, io.LimitReader(resp.Body, limit-have+1))
	have += n
	switch {
	case err != nil:
		return err
	case have > limit:
		return fmt.Errorf("%w: more than %d bytes came", ErrSize, limit)
	case total >= 0 && have < total, r.Size > 0 && have < r.Size:
		return io.ErrUnexpectedEOF
	}
	return f.Sync()
}

// contentRange reads "bytes 5-9/10" and "bytes */10". size is -1 where it is not known.
func contentRange(s string) (from, size int64, ok bool) {
	s, found := strings.CutPrefix(s, "bytes ")
	span, all, slash := strings.Cut(s, "/")
	if !found || !slash {
		return 0, 0, false
	}
	size = -1
	if all != "*" {
		var err error
		if size, err = strconv.ParseInt(all, 10, 64); err != nil || size < 0 {
			return 0, 0, false
		}
	}
	if span == "*" {
		return -1, size, true
	}
	first, _, _ := strings.Cut(span, "-")
	from, err := strconv.ParseInt(first, 10, 64)
	return from, size, err == nil && from >= 0
}

// counter tells progress about what goes through.
type counter struct {
	w           io.Writer
	done, total int64
	progress    func(done, total int64)
}

func (c *counter) Write(b []byte) (int, error) {
	n, err := c.w.Write(b)
	c.done += int64(n)
	if c.progress != nil {
		c.progress(c.done, c.total)
	}
	return n, err
}

func (r Request) check(path string) error {
	info, err := os.Stat(path)
	if err != nil {
		return err
	}
	if r.Size > 0 && info.Size() != r.Size {
		return fmt.Errorf("%w: %d bytes came, published are %d", ErrSize, info.Size(), r.Size)
	}
	if r.MD5 == "" {
		return nil
	}
	sum, err := MD5(path)
	if err != nil {
		return err
	}
	if !strings.EqualFold(sum, r.MD5) {
		return fmt.Errorf("%w: the file has MD5 %s, published is %s: the mirror serves another file", ErrChecksum, sum, r.MD5)
	}
	return nil
}

// MD5 is a file's checksum in hex.
func MD5(path string) (string, error) {
	f, err := os.Open(path)
	if err != nil {
		return "", err
	}
	defer f.Close()
	h := md5.New()
	if _, err := io.Copy(h, f); err != nil {
		return "", err
	}
	return hex.EncodeToString(h.Sum(nil)), nil
}
