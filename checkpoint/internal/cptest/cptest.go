// Package cptest is the ground that the tests of the checkpoint packages share: files that live Python writes, and
// their comparison.
package cptest

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"testing"

	"github.com/goddp/goddp/checkpoint/internal/zipfile"
	"github.com/goddp/goddp/internal/testenv"
)

var corpus struct {
	once sync.Once
	dir  string
	err  error
	out  []byte
}

// Main runs a package's tests and removes the corpus.
func Main(m *testing.M) {
	code := m.Run()
	if corpus.dir != "" {
		os.RemoveAll(corpus.dir)
	}
	os.Exit(code)
}

func here() string {
	_, file, _, _ := runtime.Caller(0)
	return filepath.Dir(file)
}

// Corpus has Python write its files, once per test binary, and gives their paths.
func Corpus(t testing.TB) []string {
	t.Helper()
	python := testenv.Python(t)
	corpus.once.Do(func() {
		if corpus.dir, corpus.err = os.MkdirTemp("", "goddp-corpus"); corpus.err == nil {
			cmd := exec.Command(python, filepath.Join(here(), "../../ptfile/testdata/gen_corpus.py"), corpus.dir)
			corpus.out, corpus.err = cmd.CombinedOutput()
		}
	})
	if corpus.err != nil {
		t.Fatalf("gen_corpus.py: %v\n%s", corpus.err, corpus.out)
	}
	return glob(t, filepath.Join(corpus.dir, "*.pt"), 20)
}

// Committed gives the small files that lie beside their generator.
func Committed(t testing.TB) []string {
	t.Helper()
	return glob(t, filepath.Join(here(), "../../ptfile/testdata/*.ckpt"), 15)
}

func glob(t testing.TB, pattern string, least int) []string {
	files, err := filepath.Glob(pattern)
	if err != nil || len(files) < least {
		t.Fatalf("%s: %d files, %v", pattern, len(files), err)
	}
	return files
}

// FirstDifference fails with the place where two byte strings differ.
func FirstDifference(t testing.TB, name string, want, got []byte) {
	t.Helper()
	for i := range min(len(want), len(got)) {
		if want[i] != got[i] {
			t.Fatalf("%s: byte %d differs\nwant …%q\ngot  …%q", name, i, want[max(0, i-40):min(i+40, len(want))], got[max(0, i-40):min(i+40, len(got))])
		}
	}
	if len(want) != len(got) {
		t.Fatalf("%s: %d bytes, not %d", name, len(got), len(want))
	}
}

// SameButID compares two archives byte for byte, the serialization_id and its two CRCs aside.
func SameButID(t testing.TB, name string, want, got []byte) {
	t.Helper()
	w, g := open(t, name, want), open(t, name, got)
	for _, rec := range w.Records { // the message is about a record where it can be
		if rec.Name == ".data/serialization_id" {
			continue
		}
		if o := g.Find(rec.Name); o == nil {
			t.Fatalf("%s: record %s is missing", name, rec.Name)
		} else {
			FirstDifference(t, name+": "+rec.Name, want[rec.Offset:rec.Offset+rec.Size], got[o.Offset:o.Offset+o.Size])
		}
	}
	FirstDifference(t, name, mask(w, want), mask(g, got))
}

func open(t testing.TB, name string, data []byte) *zipfile.Reader {
	z, err := zipfile.NewReader(bytes.NewReader(data), int64(len(data)))
	if err != nil {
		t.Fatalf("%s: %v", name, err)
	}
	return z
}

func mask(z *zipfile.Reader, b []byte) []byte {
	b = bytes.Clone(b)
	rec := z.Find(".data/serialization_id")
	copy(b[rec.Offset:], strings.Repeat("#", 40))
	copy(b[rec.Offset+44:], "####") // in the data descriptor
	at := bytes.LastIndex(b, []byte(z.Prefix+"/.data/serialization_id"))
	copy(b[at-30:], "####") // in the directory
	return b
}
