package download

import (
	"bytes"
	"context"
	"crypto/md5"
	"encoding/hex"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// origin serves one file and counts requests. rule may answer instead; it returns true when it did.
type origin struct {
	*httptest.Server
	hits   atomic.Int64
	ranges atomic.Int64
}

func serve(t *testing.T, content []byte, rule func(hit int64, w http.ResponseWriter, r *http.Request) bool) *origin {
	o := &origin{}
	o.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		hit := o.hits.Add(1)
		if r.Header.Get("Range") != "" {
			o.ranges.Add(1)
		}
		if rule != nil && rule(hit, w, r) {
			return
		}
		http.ServeContent(w, r, "", time.Time{}, bytes.NewReader(content))
	}))
	t.Cleanup(o.Close)
	return o
}

func file(n int) ([]byte, string) {
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(i * i >> 3)
	}
	h := md5.Sum(b)
	return b, hex.EncodeToString(h[:])
}

func TestFile(t *testing.T) {
	content, sum := file(300000)
	o := serve(t, content, nil)
	var last, total int64
	r := Request{URL: o.URL, Path: filepath.Join(t.TempDir(), "sub", "x.gz"), MD5: strings.ToUpper(sum), Size: 300000,
		Progress: func(d, n int64) { last, total = d, n }}
	require.NoError(t, File(context.Background(), r))
	got, err := os.ReadFile(r.Path)
	require.NoError(t, err)
	require.Equal(t, content, got)
	require.Equal(t, [2]int64{300000, 300000}, [2]int64{last, total})
	require.NoFileExists(t, r.Path+".part")
	require.NoError(t, File(context.Background(), r))
	require.EqualValues(t, 1, o.hits.Load(), "a file that is there must not be fetched")
}

// The connection breaks again and again: each attempt goes on where the last one ended.
func TestResume(t *testing.T) {
	content, sum := file(100000)
	o := serve(t, content, func(hit int64, w http.ResponseWriter, r *http.Request) bool {
		if hit > 3 {
			return false
		}
		var from int
		fmt.Sscanf(r.Header.Get("Range"), "bytes=%d-", &from)
		if from != int(hit-1)*20000 {
			t.Errorf("attempt %d asks for the bytes from %d on", hit, from)
		}
		w.Header().Set("Content-Length", fmt.Sprint(len(content)-from))
		if from > 0 {
			w.Header().Set("Content-Range", fmt.Sprintf("bytes %d-%d/%d", from, len(content)-1, len(content)))
			w.WriteHeader(http.StatusPartialContent)
		}
		w.Write(content[from : from+20000])
		w.(http.Flusher).Flush()
		panic(http.ErrAbortHandler)
	})
	r := Request{URL: o.URL, Path: filepath.Join(t.TempDir(), "x"), MD5: sum, Backoff: time.Millisecond}
	require.NoError(t, File(context.Background(), r))
	require.EqualValues(t, 4, o.hits.Load())
	require.EqualValues(t, 3, o.ranges.Load())

	// Another process left the first half; a server that cannot resume sends all of it.
	for _, resumes := range []bool{true, false} {
		o := serve(t, content, func(_ int64, w http.ResponseWriter, _ *http.Request) bool {
			if !resumes {
				w.Write(content)
			}
			return !resumes
		})
		r := Request{URL: o.URL, Path: filepath.Join(t.TempDir(), "x"), MD5: sum}
		require.NoError(t, os.WriteFile(r.Path+".part", content[:50000], 0o600))
		require.NoError(t, File(context.Background(), r))
		got, err := os.ReadFile(r.Path)
		require.NoError(t, err)
		require.Equal(t, content, got)
		require.EqualValues(t, 1, o.hits.Load())
	}
	// What was left is whole already, too long, or of another file.
	for _, left := range [][]byte{content, append(bytes.Clone(content), 1, 2), make([]byte, 70000)} {
		o := serve(t, content, nil)
		r := Request{URL: o.URL, Path: filepath.Join(t.TempDir(), "x"), MD5: sum, Backoff: time.Millisecond}
		require.NoError(t, os.WriteFile(r.Path+".part", left, 0o600))
		require.NoError(t, File(context.Background(), r))
		got, err := os.ReadFile(r.Path)
		require.NoError(t, err)
		require.Equal(t, content, got)
	}
}

func TestRefusals(t *testing.T) {
	content, sum := file(1000)
	path := func() string { return filepath.Join(t.TempDir(), "x") }
	ctx := context.Background()
	o := serve(t, content, nil)
	err := File(ctx, Request{URL: o.URL, Path: path(), MD5: "00" + sum[2:]})
	require.ErrorIs(t, err, ErrChecksum)
	require.EqualValues(t, 1, o.hits.Load())
	require.ErrorIs(t, File(ctx, Request{URL: o.URL, Path: path(), Size: 999}), ErrSize)
	require.ErrorIs(t, File(ctx, Request{URL: o.URL, Path: path(), Size: 1001}), ErrSize)
	endless := serve(t, nil, func(_ int64, w http.ResponseWriter, r *http.Request) bool {
		for r.Context().Err() == nil {
			if _, err := w.Write(content); err != nil {
				break
			}
		}
		return true
	})
	p := path()
	require.ErrorIs(t, File(ctx, Request{URL: endless.URL, Path: p, Size: 5000}), ErrSize)
	require.NoFileExists(t, p)

	missing := serve(t, nil, func(_ int64, w http.ResponseWriter, r *http.Request) bool {
		http.NotFound(w, r)
		return true
	})
	err = File(ctx, Request{URL: missing.URL, Path: path()})
	var status *StatusError
	require.ErrorAs(t, err, &status)
	require.Equal(t, 404, status.Code)
	require.EqualValues(t, 1, missing.hits.Load(), "a 404 is not tried again")

	busy := serve(t, content, func(hit int64, w http.ResponseWriter, _ *http.Request) bool {
		if hit < 3 {
			w.WriteHeader(http.StatusServiceUnavailable)
		}
		return hit < 3
	})
	require.NoError(t, File(ctx, Request{URL: busy.URL, Path: path(), MD5: sum, Backoff: time.Millisecond}))
	require.Error(t, File(ctx, Request{URL: "http://127.0.0.1:1/x", Path: path(), Attempts: 2, Backoff: time.Millisecond}))
	require.Error(t, File(ctx, Request{Path: path()}))

	slow := serve(t, nil, func(_ int64, w http.ResponseWriter, r *http.Request) bool {
		w.(http.Flusher).Flush()
		<-r.Context().Done()
		return true
	})
	limited, cancel := context.WithTimeout(ctx, 50*time.Millisecond)
	defer cancel()
	require.ErrorIs(t, File(limited, Request{URL: slow.URL, Path: path()}), context.DeadlineExceeded)
}

// Several processes want the file: one fetches, the others wait, and a killed one leaves no lock behind.
func TestOneProcessFetches(t *testing.T) {
	if url := os.Getenv("DOWNLOAD_TEST_URL"); url != "" {
		if err := File(context.Background(), Request{URL: url, Path: os.Getenv("DOWNLOAD_TEST_PATH"), MD5: os.Getenv("DOWNLOAD_TEST_MD5")}); err != nil {
			t.Fatal(err)
		}
		return
	}
	content, sum := file(200000)
	started := make(chan struct{}, 10)
	hang := atomic.Bool{}
	hang.Store(true)
	o := serve(t, content, func(_ int64, _ http.ResponseWriter, r *http.Request) bool {
		started <- struct{}{}
		if hang.Load() {
			<-r.Context().Done()
			return true
		}
		time.Sleep(100 * time.Millisecond)
		return false
	})
	path := filepath.Join(t.TempDir(), "x")
	process := func() *exec.Cmd {
		cmd := exec.Command(os.Args[0], "-test.run=^TestOneProcessFetches$")
		cmd.Env = append(os.Environ(), "DOWNLOAD_TEST_URL="+o.URL, "DOWNLOAD_TEST_PATH="+path, "DOWNLOAD_TEST_MD5="+sum)
		require.NoError(t, cmd.Start())
		return cmd
	}
	first := process()
	<-started
	waiting, cancel := context.WithTimeout(context.Background(), 50*time.Millisecond)
	defer cancel()
	err := File(waiting, Request{URL: o.URL, Path: path})
	require.ErrorIs(t, err, context.DeadlineExceeded)
	require.ErrorContains(t, err, "another process")
	others := []*exec.Cmd{process(), process(), process()}
	hang.Store(false)
	require.NoError(t, first.Process.Kill())
	first.Wait()
	for _, c := range others {
		require.NoError(t, c.Wait())
	}
	require.EqualValues(t, 2, o.hits.Load(), "the killed process and one other")
	got, err := os.ReadFile(path)
	require.NoError(t, err)
	require.Equal(t, content, got)
}
