package ptfile

import (
	"bytes"
	"errors"
	"os"
	"testing"

	"github.com/goddp/goddp/checkpoint/internal/cptest"
	"github.com/goddp/goddp/checkpoint/internal/zipfile"
	"github.com/goddp/goddp/checkpoint/pickle"
)

// small keeps one fuzzed input from costing much time; the limits themselves are tested elsewhere.
var small = ReadOptions{Limits: pickle.Limits{Bytes: 1 << 20, Values: 1 << 16}}

// FuzzRead: whatever a file holds, reading it ends in a value or an error, and a value can be written and read again.
func FuzzRead(f *testing.F) {
	for _, path := range cptest.Committed(f) {
		data, err := os.ReadFile(path)
		if err != nil {
			f.Fatal(err)
		}
		if len(data) < 5000 {
			f.Add(data)
		}
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		file, err := ReadBytes(data, small)
		if err != nil {
			return
		}
		for _, s := range file.Storages {
			if s.Bytes < 1<<20 {
				_, _ = s.Data()
			}
		}
		_ = file.Verify()
		again(t, file.Value)
	})
}

// FuzzPickle is FuzzRead for the pickle alone, which a fuzzer of whole files seldom gets past the CRC to.
func FuzzPickle(f *testing.F) {
	for _, path := range cptest.Committed(f) {
		data, err := os.ReadFile(path)
		if err != nil {
			f.Fatal(err)
		}
		z, err := zipfile.NewReader(bytes.NewReader(data), int64(len(data)))
		if err != nil {
			continue // the old format
		}
		rec := z.Find("data.pkl")
		f.Add(data[rec.Offset : rec.Offset+rec.Size])
	}
	f.Add(pkl("ctorch\nFloatStorage\n")) // found by fuzzing: a class as a value
	f.Fuzz(func(t *testing.T, data []byte) {
		u := &unpickler{file: &File{Legacy: true}, byKey: make(map[string]*Storage)}
		v, err := pickle.Unmarshal(data, u.options(small.Limits))
		if err != nil {
			return
		}
		again(t, v)
	})
}

func again(t *testing.T, v any) {
	for _, s := range collect(v, nil, make(map[any]bool)) {
		if s.Bytes > 1<<20 {
			return
		}
		s.Freeze(make([]byte, s.Bytes))
	}
	var out bytes.Buffer
	if err := Write(&out, "x", v, WriteOptions{}); err != nil {
		if errors.Is(err, ErrAlias) || errors.Is(err, ErrFormat) {
			return
		}
		t.Fatalf("what was read cannot be written: %v", err)
	}
	if _, err := ReadBytes(out.Bytes(), ReadOptions{}); err != nil {
		t.Fatalf("what was written cannot be read: %v", err)
	}
}

func collect(v any, out []*Storage, seen map[any]bool) []*Storage {
	switch x := v.(type) {
	case *Tensor:
		if x.Storage != nil {
			out = append(out, x.Storage)
		}
		return out
	case *Parameter:
		if x.Data != nil {
			out = collect(x.Data, out, seen)
		}
		return collect(x.State, out, seen)
	case *storageRef:
		return append(out, x.s)
	case *pickle.List:
		if !seen[x] {
			seen[x] = true
			for _, i := range x.Items {
				out = collect(i, out, seen)
			}
		}
	case *pickle.Tuple:
		if !seen[x] {
			seen[x] = true
			for _, i := range x.Items {
				out = collect(i, out, seen)
			}
		}
	case *pickle.Dict:
		if x != nil && !seen[x] {
			seen[x] = true
			for k, i := range x.All() {
				out = collect(i, collect(k, out, seen), seen)
			}
			out = collect(x.Attrs, out, seen)
		}
	case *pickle.Object:
		if !seen[x] {
			seen[x] = true
			out = collect(x.State, collect(x.Args, out, seen), seen)
		}
	}
	return out
}
