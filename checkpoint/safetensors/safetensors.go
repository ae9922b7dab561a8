// Package safetensors reads and writes the .safetensors files of Hugging Face without libtorch.
//
// A file is the length of a JSON header (eight bytes), the header, and the tensors' bytes. The header gives every
// tensor its dtype, shape and place; here each is checked against the file and the others before it is used.
package safetensors

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"math/bits"
	"os"
	"slices"
	"strings"

	"github.com/goddp/goddp/checkpoint/pickle"
	"github.com/goddp/goddp/checkpoint/ptfile"
)

// ErrFormat: the file is not a safetensors file, or a damaged or forged one.
var ErrFormat = errors.New("invalid safetensors file")

// maxHeader is the format's own limit on the header.
const maxHeader = 100_000_000

// The dtypes in the order of the format's reference implementation, which sorts tensors by it.
var dtypes = []struct {
	name string
	d    ptfile.DType
}{
	{"BOOL", ptfile.Bool}, {"U8", ptfile.Uint8}, {"I8", ptfile.Int8}, {"F8_E5M2", ptfile.Float8E5M2},
	{"F8_E4M3", ptfile.Float8E4M3FN}, {"F8_E8M0", ptfile.Float8E8M0FNU}, {"I16", ptfile.Int16}, {"U16", ptfile.Uint16},
	{"F16", ptfile.Float16}, {"BF16", ptfile.BFloat16}, {"I32", ptfile.Int32}, {"U32", ptfile.Uint32},
	{"F32", ptfile.Float32}, {"C64", ptfile.Complex64}, {"F64", ptfile.Float64}, {"I64", ptfile.Int64}, {"U64", ptfile.Uint64},
}

func rank(d ptfile.DType) int {
	for i, x := range dtypes {
		if x.d == d {
			return i
		}
	}
	return -1
}

// Tensor is a named tensor of a file.
type Tensor struct {
	Name string
	*ptfile.Tensor
}

// File is an open file.
type File struct {
	Tensors  []Tensor          // in the order of their bytes
	Metadata map[string]string // free text, or nil
	Size     int64
	f        *os.File
}

// Open opens a file and reads its header.
func Open(path string) (*File, error) {
	// Opening a pipe would wait for its other end.
	if info, err := os.Stat(path); err == nil && !info.Mode().IsRegular() {
		return nil, fmt.Errorf("%s is not a regular file", path)
	}
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	info, err := f.Stat()
	if err != nil {
		f.Close()
		return nil, err
	}
	out, err := Read(f, info.Size())
	if err != nil {
		f.Close()
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	out.f = f
	return out, nil
}

// Close closes the file. Tensors cannot be read afterwards.
func (f *File) Close() error {
	if f.f == nil {
		return nil
	}
	return f.f.Close()
}

// AsFile gives the same file in the shape of a checkpoint: a dict of its tensors.
func (f *File) AsFile() *ptfile.File {
	d := pickle.NewOrderedDict()
	storages := make([]*ptfile.Storage, len(f.Tensors))
	for i, t := range f.Tensors {
		d.Set(t.Name, t.Tensor)
		storages[i] = t.Storage
	}
	return ptfile.NewFile(d, storages, f.f, f.Size)
}

func bad(format string, args ...any) error {
	return fmt.Errorf("%w: %s", ErrFormat, fmt.Sprintf(format, args...))
}

type entry struct {
	DType   *string  `json:"dtype"`
	Shape   *[]int64 `json:"shape"`
	Offsets *[]int64 `json:"data_offsets"`
}

// Read reads the header of a file that is open already.
func Read(r io.ReaderAt, size int64) (*File, error) {
	var head [8]byte
	if size < 8 {
		return nil, bad("it has only %d bytes", size)
	}
	if _, err := r.ReadAt(head[:], 0); err != nil {
		return nil, bad("%v", err)
	}
	n := binary.LittleEndian.Uint64(head[:])
	if n > maxHeader || int64(n) > size-8 {
		return nil, bad("a header of %d bytes in a file of %d", n, size)
	}
	text := make([]byte, n)
	if _, err := r.ReadAt(text, 8); err != nil {
		return nil, bad("%v", err)
	}
	if len(text) == 0 || text[0] != '{' {
		return nil, bad("the header is not a JSON object")
	}
	f := &File{Size: size}
	if err := f.header(text, r, 8+int64(n), size-8-int64(n)); err != nil {
		return nil, err
	}
	return f, nil
}

// header reads {"name": {"dtype", "shape", "data_offsets"}, …, "__metadata__": {…}} token by token, for encoding/json
// lets the last of two equal names win.
func (f *File) header(text []byte, r io.ReaderAt, start, held int64) error {
	d := json.NewDecoder(bytes.NewReader(text))
	if _, err := d.Token(); err != nil {
		return bad("the header: %v", err)
	}
	type span struct {
		from, to int64
		t        Tensor
	}
	var spans []span
	seen := make(map[string]bool)
	for d.More() {
		token, err := d.Token()
		if err != nil {
			return bad("the header: %v", err)
		}
		name, ok := token.(string)
		if !ok {
			return bad("the header: a name is expected")
		}
		if seen[name] {
			return bad("tensor %.80q occurs twice", name)
		}
		seen[name] = true
		if name == "__metadata__" {
			if err := d.Decode(&f.Metadata); err != nil {
				return bad("the metadata: %v", err)
			}
			continue
		}
		var e entry
		if err := d.Decode(&e); err != nil {
			return bad("tensor %.80q: %v", name, err)
		}
		if e.DType == nil || e.Shape == nil || e.Offsets == nil || len(*e.Offsets) != 2 {
			return bad("tensor %.80q lacks its dtype, shape or data_offsets", name)
		}
		dtype := ptfile.DType(-1)
		for _, x := range dtypes {
			if x.name == *e.DType {
				dtype = x.d
			}
		}
		if dtype < 0 {
			return bad("tensor %.80q has the unknown dtype %.20q", name, *e.DType)
		}
		need, ok := bytesOf(*e.Shape, dtype)
		from, to := (*e.Offsets)[0], (*e.Offsets)[1]
		switch {
		case !ok:
			return bad("tensor %.80q has the shape %v", name, *e.Shape)
		case from < 0 || to < from || to > held:
			return bad("tensor %.80q lies at %d to %d of %d bytes", name, from, to, held)
		case to-from != need:
			return bad("tensor %.80q has %d bytes where its shape %v needs %d", name, to-from, *e.Shape, need)
		}
		t := &ptfile.Tensor{DType: dtype, Shape: *e.Shape, Stride: ptfile.ContiguousStride(*e.Shape),
			Storage: ptfile.NewStorageAt(r, start+from, need, "cpu", name)}
		spans = append(spans, span{from, to, Tensor{name, t}})
	}
	if _, err := d.Token(); err != nil {
		return bad("the header: %v", err)
	}
	if rest := bytes.TrimLeft(text[d.InputOffset():], " \t\r\n"); len(rest) > 0 {
		return bad("text after the header's object")
	}
	slices.SortStableFunc(spans, func(a, b span) int {
		if a.from != b.from {
			return int(min(max(a.from-b.from, -1), 1))
		}
		return int(min(max(a.to-b.to, -1), 1))
	})
	at := int64(0)
	for _, s := range spans {
		if s.from != at {
			return bad("tensor %.80q begins at byte %d, expected %d: tensors overlap or leave a gap", s.t.Name, s.from, at)
		}
		at = s.to
		f.Tensors = append(f.Tensors, s.t)
	}
	if at != held {
		return bad("%d bytes belong to no tensor", held-at)
	}
	return nil
}

func bytesOf(shape []int64, d ptfile.DType) (int64, bool) {
	if len(shape) > 64 {
		return 0, false
	}
	n := uint64(d.Size())
	empty := slices.Contains(shape, 0)
	for _, s := range shape {
		if s < 0 {
			return 0, false
		}
		if empty {
			continue
		}
		hi, lo := bits.Mul64(n, uint64(s))
		if hi != 0 || lo > math.MaxInt64/16 {
			return 0, false
		}
		n = lo
	}
	if empty {
		return 0, true
	}
	return int64(n), true
}

// Write writes tensors and free text. As the reference implementation does, it sorts them by dtype, widest first, and
// name. Strides are made plain, and shared memory is written once for every tensor: the format knows neither.
func Write(w io.Writer, tensors []Tensor, metadata map[string]string) error {
	order := slices.Clone(tensors)
	seen := make(map[string]bool)
	for _, t := range order {
		switch {
		case t.Name == "__metadata__":
			return fmt.Errorf("a tensor cannot have the name %q", t.Name)
		case seen[t.Name]:
			return fmt.Errorf("tensor %q occurs twice", t.Name)
		case rank(t.DType) < 0:
			return fmt.Errorf("tensor %q: safetensors has no dtype %v", t.Name, t.DType)
		}
		seen[t.Name] = true
	}
	slices.SortStableFunc(order, func(a, b Tensor) int {
		if c := rank(b.DType) - rank(a.DType); c != 0 {
			return c
		}
		return strings.Compare(a.Name, b.Name)
	})
	var head bytes.Buffer
	head.WriteByte('{')
	if metadata != nil {
		text, err := encode(metadata)
		if err != nil {
			return err
		}
		fmt.Fprintf(&head, `"__metadata__":%s`, text)
	}
	at := int64(0)
	for _, t := range order {
		if head.Len() > 1 {
			head.WriteByte(',')
		}
		name, err := encode(t.Name)
		if err != nil {
			return err
		}
		shape, err := encode(append([]int64{}, t.Shape...))
		if err != nil {
			return err
		}
		n, ok := bytesOf(t.Shape, t.DType)
		if !ok || n > math.MaxInt64-at {
			return fmt.Errorf("tensor %q has the shape %v", t.Name, t.Shape)
		}
		fmt.Fprintf(&head, `%s:{"dtype":"%s","shape":%s,"data_offsets":[%d,%d]}`, name, dtypes[rank(t.DType)].name, shape, at, at+n)
		at += n
	}
	head.WriteByte('}')
	for head.Len()%8 != 0 {
		head.WriteByte(' ')
	}
	if head.Len() > maxHeader {
		return fmt.Errorf("a header of %d bytes is more than the format allows", head.Len())
	}
	if _, err := w.Write(binary.LittleEndian.AppendUint64(nil, uint64(head.Len()))); err != nil {
		return err
	}
	if _, err := w.Write(head.Bytes()); err != nil {
		return err
	}
	for _, t := range order {
		if t.Numel() == 0 {
			continue
		}
		if err := t.Rows(w); err != nil {
			return fmt.Errorf("tensor %q: %w", t.Name, err)
		}
	}
	return nil
}

// encode is json.Marshal without its escapes for HTML.
func encode(v any) ([]byte, error) {
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	if err := e.Encode(v); err != nil {
		return nil, err
	}
	return bytes.TrimSpace(b.Bytes()), nil
}
