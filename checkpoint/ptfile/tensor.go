package ptfile

import (
	"errors"
	"fmt"
	"io"
	"math"
	"math/bits"
	"slices"

	"github.com/goddp/goddp/checkpoint/internal/zipfile"
)

// ErrFormat: the file is not what torch.save writes, or is damaged.
var ErrFormat = errors.New("invalid checkpoint file")

// Tensor says what a tensor is and where its elements lie. Tensors that share memory share the Storage pointer.
type Tensor struct {
	DType         DType
	Shape, Stride []int64
	Offset        int64    // of the first element in the storage, in elements
	Storage       *Storage // nil for tensors on the meta device
	RequiresGrad  bool
	Conj, Neg     bool // the elements are to be conjugated or negated on reading
}

// Parameter is torch.nn.Parameter around a tensor.
type Parameter struct {
	Data         *Tensor
	RequiresGrad bool
	State        any // attributes that Python code set on it, or nil
}

// Numel is the number of elements.
func (t *Tensor) Numel() int64 {
	n := int64(1)
	for _, s := range t.Shape {
		n *= s
	}
	return n
}

// Contiguous tells whether the elements lie in row-major order without gaps.
func (t *Tensor) Contiguous() bool {
	step := int64(1)
	for i := len(t.Shape) - 1; i >= 0; i-- {
		if t.Shape[i] != 1 && t.Stride[i] != step {
			return t.Numel() == 0
		}
		step *= t.Shape[i]
	}
	return true
}

// ContiguousStride gives the strides of a row-major tensor as PyTorch computes them.
func ContiguousStride(shape []int64) []int64 {
	stride := make([]int64, len(shape))
	step := int64(1)
	for i := len(shape) - 1; i >= 0; i-- {
		stride[i] = step
		step *= max(shape[i], 1)
	}
	return stride
}

func (t *Tensor) String() string {
	return fmt.Sprintf("%s%v", t.DType, t.Shape)
}

const maxDims = 64

// validate makes sure that every element lies inside the storage, without overflow.
func (t *Tensor) validate() error {
	if !t.DType.Valid() {
		return fmt.Errorf("%w: a tensor of an unknown dtype", ErrFormat)
	}
	if len(t.Shape) != len(t.Stride) {
		return fmt.Errorf("%w: a tensor with %d sizes but %d strides", ErrFormat, len(t.Shape), len(t.Stride))
	}
	if len(t.Shape) > maxDims {
		return fmt.Errorf("%w: a tensor of %d dimensions", ErrFormat, len(t.Shape))
	}
	if t.Offset < 0 {
		return fmt.Errorf("%w: a tensor with offset %d", ErrFormat, t.Offset)
	}
	last, numel := uint64(t.Offset), uint64(1)
	empty := slices.Contains(t.Shape, 0)
	for i, n := range t.Shape {
		if n < 0 || t.Stride[i] < 0 {
			return fmt.Errorf("%w: a tensor with sizes %v and strides %v", ErrFormat, t.Shape, t.Stride)
		}
		if empty {
			continue
		}
		hi, total := bits.Mul64(numel, uint64(n))
		hi2, span := bits.Mul64(uint64(n-1), uint64(t.Stride[i]))
		next, carry := bits.Add64(last, span, 0)
		if hi|hi2|carry != 0 || total > math.MaxInt64/16 || next > math.MaxInt64/16 {
			return fmt.Errorf("%w: a tensor with sizes %v and strides %v is too large", ErrFormat, t.Shape, t.Stride)
		}
		numel, last = total, next
	}
	if t.Storage == nil || empty {
		return nil
	}
	if held := uint64(t.Storage.Bytes) / uint64(t.DType.Size()); last >= held {
		return fmt.Errorf("%w: a tensor reaches element %d of a storage with %d", ErrFormat, last, held)
	}
	return nil
}

// Storage is a block of bytes that tensors view.
type Storage struct {
	Bytes    int64
	Location string // the device it was on: "cpu", "cuda:0"
	Key      string // its name in the file it was read from

	src  source
	word int // reverse the bytes of words of this size on reading; 0 or 1 for none
}

// source is where a storage's bytes come from.
type source interface {
	readInto(dst []byte) error
	writeTo(w io.Writer) error
}

// NewStorage makes a storage of bytes in memory, little endian.
func NewStorage(data []byte, location string) *Storage {
	return &Storage{Bytes: int64(len(data)), Location: location, src: memory(data)}
}

// NewStorageFunc makes a storage whose bytes write produces when they are needed, always the same n.
func NewStorageFunc(n int64, location string, write func(io.Writer) error) *Storage {
	return &Storage{Bytes: n, Location: location, src: generator(write)}
}

// NewStorageAt makes a storage of n bytes of r, little endian, without a checksum.
func NewStorageAt(r io.ReaderAt, offset, n int64, location, key string) *Storage {
	return &Storage{Bytes: n, Location: location, Key: key, src: sectionSource{r: r, offset: offset, bytes: n}}
}

// Freeze replaces where the storage's bytes come from by data, which holds them and must not change any more.
func (s *Storage) Freeze(data []byte) { s.src, s.word = memory(data), 0 }

type memory []byte

func (m memory) readInto(dst []byte) error { copy(dst, m); return nil }
func (m memory) writeTo(w io.Writer) error { _, err := w.Write(m); return err }

type generator func(io.Writer) error

func (g generator) readInto(dst []byte) error {
	w := &fixed{dst}
	if err := g(w); err != nil {
		return err
	}
	if len(w.left) > 0 {
		return io.ErrUnexpectedEOF
	}
	return nil
}
func (g generator) writeTo(w io.Writer) error { return g(w) }

type fixed struct{ left []byte }

func (f *fixed) Write(b []byte) (int, error) {
	n := copy(f.left, b)
	f.left = f.left[n:]
	if n < len(b) {
		return n, io.ErrShortBuffer
	}
	return n, nil
}

// zipSource is a record of the archive.
type zipSource struct{ rec *zipfile.Record }

func (z zipSource) readInto(dst []byte) error { return z.rec.ReadInto(dst) }
func (z zipSource) writeTo(w io.Writer) error { _, err := z.rec.WriteTo(w); return err }

// sectionSource is a part of a file without a checksum, as the old format has them.
type sectionSource struct {
	r      io.ReaderAt
	offset int64
	bytes  int64
}

func (s sectionSource) readInto(dst []byte) error {
	if _, err := s.r.ReadAt(dst, s.offset); err != nil {
		return fmt.Errorf("%w: %v", ErrFormat, err)
	}
	return nil
}

func (s sectionSource) writeTo(w io.Writer) error {
	_, err := io.Copy(w, io.NewSectionReader(s.r, s.offset, s.bytes))
	return err
}

// ReadInto fills dst, of exactly s.Bytes, with the storage's bytes in little endian, and checks their CRC where the
// file has one.
func (s *Storage) ReadInto(dst []byte) error {
	if int64(len(dst)) != s.Bytes {
		return fmt.Errorf("storage %s has %d bytes, not %d", s.Key, s.Bytes, len(dst))
	}
	if s.Bytes == 0 {
		return nil
	}
	if s.src == nil {
		return fmt.Errorf("%w: storage %s has no data in the file", ErrFormat, s.Key)
	}
	if err := s.src.readInto(dst); err != nil {
		return err
	}
	swap(dst, s.word)
	return nil
}

// Data reads the whole storage.
func (s *Storage) Data() ([]byte, error) {
	b := make([]byte, s.Bytes)
	return b, s.ReadInto(b)
}

// WriteTo streams the storage's bytes, little endian.
func (s *Storage) WriteTo(w io.Writer) (int64, error) {
	if s.Bytes == 0 {
		return 0, nil
	}
	if s.word > 1 {
		b, err := s.Data()
		if err != nil {
			return 0, err
		}
		n, err := w.Write(b)
		return int64(n), err
	}
	if s.src == nil {
		return 0, fmt.Errorf("%w: storage %s has no data in the file", ErrFormat, s.Key)
	}
	return s.Bytes, s.src.writeTo(w)
}

// Section tells where the bytes lie in the file as they are, for mapping. ok is false for storages that are packed,
// in the other byte order or not in a file.
func (s *Storage) Section() (offset int64, ok bool) {
	if s.word > 1 || s.Bytes == 0 {
		return 0, false
	}
	switch src := s.src.(type) {
	case zipSource:
		return src.rec.Offset, src.rec.Stored
	case sectionSource:
		return src.offset, true
	}
	return 0, false
}

// HasCRC tells whether the file has a checksum of the storage's bytes.
func (s *Storage) HasCRC() bool {
	z, ok := s.src.(zipSource)
	return ok && z.rec.HasCRC()
}

// CheckCRC compares the CRC-32 (IEEE) of the bytes that Section names, read in some other way, with the file's. It is nil
// where the file has none.
func (s *Storage) CheckCRC(sum uint32) error {
	if z, ok := s.src.(zipSource); ok {
		return z.rec.CheckCRC(sum)
	}
	return nil
}

// Rows streams t's elements in row-major order, whatever its strides, in little endian.
func (t *Tensor) Rows(w io.Writer) error {
	if t.Storage == nil {
		return errors.New("a tensor on the meta device has no elements")
	}
	if t.Conj || t.Neg {
		return errors.New("a tensor with a pending conjugation or negation: resolve it before saving (tensor.resolve_conj())")
	}
	size := int64(t.DType.Size())
	if t.Contiguous() && t.Offset == 0 && t.Numel()*size == t.Storage.Bytes {
		_, err := t.Storage.WriteTo(w)
		return err
	}
	data, err := t.Storage.Data()
	if err != nil {
		return err
	}
	if t.Contiguous() {
		_, err := w.Write(data[t.Offset*size : (t.Offset+t.Numel())*size])
		return err
	}
	return t.gather(w, data, size)
}

func (t *Tensor) gather(w io.Writer, data []byte, size int64) error {
	const flush = 64 << 10
	buf := make([]byte, 0, flush+int(size))
	at := make([]int64, len(t.Shape))
	for n := t.Numel(); n > 0; n-- {
		pos := t.Offset
		for i, k := range at {
			pos += k * t.Stride[i]
		}
		buf = append(buf, data[pos*size:(pos+1)*size]...)
		if len(buf) >= flush {
			if _, err := w.Write(buf); err != nil {
				return err
			}
			buf = buf[:0]
		}
		for i := len(at) - 1; i >= 0; i-- {
			if at[i]++; at[i] < t.Shape[i] {
				break
			}
			at[i] = 0
		}
	}
	_, err := w.Write(buf)
	return err
}

// swap reverses every word of the given size in place.
func swap(b []byte, word int) {
	if word <= 1 {
		return
	}
	for ; len(b) >= word; b = b[word:] {
		slices.Reverse(b[:word])
	}
}

// Swapped tells whether the bytes lie in the file in the other byte order.
func (s *Storage) Swapped() bool { return s.word > 1 }
