package safetensors

import (
	"bytes"
	"encoding/binary"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/goddp/goddp/checkpoint/ptfile"
)

func file(header string, data int) []byte {
	return append(append(binary.LittleEndian.AppendUint64(nil, uint64(len(header))), header...), make([]byte, data)...)
}

func read(b []byte) (*File, error) { return Read(bytes.NewReader(b), int64(len(b))) }

func TestRoundTrip(t *testing.T) {
	storage := ptfile.NewStorage([]byte{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12}, "cpu")
	in := []Tensor{
		{"b", &ptfile.Tensor{DType: ptfile.Uint8, Shape: []int64{2, 3}, Stride: []int64{1, 2}, Offset: 1, Storage: storage}},
		{"scalar", &ptfile.Tensor{DType: ptfile.Float32, Shape: []int64{}, Stride: []int64{}, Offset: 1, Storage: storage}},
		{"empty", &ptfile.Tensor{DType: ptfile.Int64, Shape: []int64{0, 4}, Stride: []int64{4, 1}, Storage: ptfile.NewStorage(nil, "cpu")}},
		{"a<&é", &ptfile.Tensor{DType: ptfile.Float32, Shape: []int64{3}, Stride: []int64{1}, Storage: storage}},
	}
	var out bytes.Buffer
	require.NoError(t, Write(&out, in, map[string]string{"format": "pt"}))
	text := out.String()[8:]
	require.True(t, strings.HasPrefix(text, `{"__metadata__":{"format":"pt"},"empty":{"dtype":"I64","shape":[0,4],"data_offsets":[0,0]},`+
		`"a<&é":{"dtype":"F32","shape":[3],"data_offsets":[0,12]},"scalar":{"dtype":"F32","shape":[],"data_offsets":[12,16]},`+
		`"b":{"dtype":"U8","shape":[2,3],"data_offsets":[16,22]}}`), text)
	require.Zero(t, binary.LittleEndian.Uint64(out.Bytes())%8)

	path := filepath.Join(t.TempDir(), "x.safetensors")
	require.NoError(t, os.WriteFile(path, out.Bytes(), 0o666))
	f, err := Open(path)
	require.NoError(t, err)
	defer f.Close()
	require.Equal(t, map[string]string{"format": "pt"}, f.Metadata)
	want := map[string][]byte{"a<&é": {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12}, "scalar": {5, 6, 7, 8}, "b": {2, 4, 6, 3, 5, 7}, "empty": {}}
	require.Len(t, f.Tensors, 4)
	for _, x := range f.Tensors {
		data, err := x.Storage.Data()
		require.NoError(t, err)
		require.Equal(t, want[x.Name], data, x.Name)
	}
}

// A file as the format's documentation shows it.
func TestDocumentedLayout(t *testing.T) {
	f, err := read(file(`{"x":{"dtype":"F16","shape":[1,2],"data_offsets":[0,4]},"__metadata__":{"a":"b"}}   `, 4))
	require.NoError(t, err)
	require.Equal(t, "x", f.Tensors[0].Name)
	require.Equal(t, ptfile.Float16, f.Tensors[0].DType)
	f, err = read(file(`{}`, 0))
	require.NoError(t, err)
	require.Empty(t, f.Tensors)
}

func TestHostileFiles(t *testing.T) {
	x := func(s string) string { return `{"x":` + s + `}` }
	for name, b := range map[string][]byte{
		"empty": {}, "seven bytes": make([]byte, 7), "no header": make([]byte, 8),
		"header longer than file": binary.LittleEndian.AppendUint64(nil, 1<<40), "header of 2^64": bytes.Repeat([]byte{0xff}, 16),
		"not JSON": file("hello", 0), "array": file("[]", 0), "cut off": file(`{"x":`, 0), "deep": file(x(strings.Repeat("[", 100000)), 0),
		"text after":      file(`{} x`, 0),
		"number":          file(x("1"), 0),
		"no dtype":        file(x(`{"shape":[1],"data_offsets":[0,1]}`), 1),
		"unknown dtype":   file(x(`{"dtype":"X","shape":[1],"data_offsets":[0,1]}`), 1),
		"no shape":        file(x(`{"dtype":"U8","data_offsets":[0,1]}`), 1),
		"negative shape":  file(x(`{"dtype":"U8","shape":[-1,-1],"data_offsets":[0,1]}`), 1),
		"fraction":        file(x(`{"dtype":"U8","shape":[1.5],"data_offsets":[0,1]}`), 1),
		"overflow":        file(x(`{"dtype":"U8","shape":[4294967296,4294967296],"data_offsets":[0,0]}`), 0),
		"overflow by one": file(x(`{"dtype":"F64","shape":[2305843009213693952],"data_offsets":[0,0]}`), 0),
		"one offset":      file(x(`{"dtype":"U8","shape":[1],"data_offsets":[0]}`), 1),
		"backwards":       file(x(`{"dtype":"U8","shape":[1],"data_offsets":[1,0]}`), 1),
		"outside":         file(x(`{"dtype":"U8","shape":[2],"data_offsets":[0,2]}`), 1),
		"far outside":     file(x(`{"dtype":"U8","shape":[1],"data_offsets":[9223372036854775806,9223372036854775807]}`), 1),
		"negative offset": file(x(`{"dtype":"U8","shape":[1],"data_offsets":[-1,0]}`), 1),
		"wrong size":      file(x(`{"dtype":"F32","shape":[1],"data_offsets":[0,3]}`), 3),
		"gap":             file(x(`{"dtype":"U8","shape":[1],"data_offsets":[1,2]}`), 2),
		"rest":            file(x(`{"dtype":"U8","shape":[1],"data_offsets":[0,1]}`), 2),
		"overlap":         file(`{"x":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"y":{"dtype":"U8","shape":[2],"data_offsets":[1,3]}}`, 3),
		"twice":           file(`{"x":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"x":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}}`, 2),
		"same bytes":      file(`{"x":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"y":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}`, 1),
		"metadata":        file(`{"__metadata__":{"a":1}}`, 0),
		"dimensions":      file(x(`{"dtype":"U8","shape":[`+strings.Repeat("1,", 99)+`1],"data_offsets":[0,1]}`), 1),
	} {
		_, err := read(b)
		require.ErrorIs(t, err, ErrFormat, name)
	}
	good := file(`{"x":{"dtype":"U8","shape":[3],"data_offsets":[0,3]}}`, 3)
	for n := range good {
		_, err := read(good[:n])
		require.ErrorIs(t, err, ErrFormat, "cut off at byte %d", n)
	}
}

func TestWriteErrors(t *testing.T) {
	x := &ptfile.Tensor{DType: ptfile.Uint8, Shape: []int64{1}, Stride: []int64{1}, Storage: ptfile.NewStorage([]byte{1}, "cpu")}
	var out bytes.Buffer
	require.ErrorContains(t, Write(&out, []Tensor{{"a", x}, {"a", x}}, nil), "twice")
	require.ErrorContains(t, Write(&out, []Tensor{{"__metadata__", x}}, nil), "cannot have the name")
	require.ErrorContains(t, Write(&out, []Tensor{{"a", &ptfile.Tensor{DType: ptfile.Complex128}}}, nil), "no dtype complex128")
}

func FuzzRead(f *testing.F) {
	f.Add(file(`{"x":{"dtype":"F16","shape":[1,2],"data_offsets":[0,4]},"__metadata__":{"a":"b"}}   `, 4))
	f.Add(file(`{"x":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"y":{"dtype":"I64","shape":[1,0],"data_offsets":[2,2]}}`, 2))
	f.Add(file(`{}`, 0))
	f.Fuzz(func(t *testing.T, b []byte) {
		x, err := read(b)
		if err != nil {
			return
		}
		total := int64(0)
		for _, s := range x.Tensors {
			total += s.Storage.Bytes
			if _, err := s.Storage.Data(); err != nil {
				t.Fatalf("%s: %v", s.Name, err)
			}
		}
		if total > int64(len(b)) {
			t.Fatalf("%d bytes of tensors in a file of %d", total, len(b))
		}
		var out bytes.Buffer
		if err := Write(&out, x.Tensors, x.Metadata); err != nil {
			t.Fatal(err)
		}
		if _, err := read(out.Bytes()); err != nil {
			t.Fatal(err)
		}
	})
}
