package vision

import (
	"bufio"
	"compress/gzip"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
)

// maxSet is the most that one set's content may take. The largest published one has 187 MB. Tests lower it.
var maxSet int64 = 256 << 20

// source is the content of a file, unpacked where it is packed, and where reading stands.
type source struct {
	name string
	r    io.Reader
	at   int64
}

func (s *source) Read(b []byte) (int, error) {
	n, err := s.r.Read(b)
	s.at += int64(n)
	return n, err
}

// bad turns what a read said into a FormatError.
func (s *source) bad(err error, what string) error {
	kind := ErrDamaged
	if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		kind = ErrTruncated
	}
	return &FormatError{File: s.name, Offset: s.at, Kind: kind, Detail: what, Err: err}
}

// exactly reads n bytes. Memory grows with what is really there, not with what a header claims.
func (s *source) exactly(n int64, what string) ([]byte, error) {
	const step = 1 << 20
	out := make([]byte, 0, min(n, step))
	for int64(len(out)) < n {
		if len(out) == cap(out) {
			grown := make([]byte, len(out), min(n, 2*int64(cap(out))))
			copy(grown, out)
			out = grown
		}
		k, err := io.ReadFull(s, out[len(out):cap(out)])
		out = out[:len(out)+k]
		if err != nil {
			return nil, s.bad(err, fmt.Sprintf("%s needs %d bytes", what, n))
		}
	}
	return out, nil
}

// end checks that nothing follows. It also makes gzip compare its checksum.
func (s *source) end() error {
	var one [1]byte
	switch n, err := io.ReadFull(s, one[:]); {
	case n > 0:
		return bad(s.name, s.at-1, ErrOversized, "more follows than the header says")
	case err != io.EOF:
		return s.bad(err, "the end of the file")
	}
	return nil
}

// open gives a file's content, unpacked when it is a gzip file, whatever its name says.
func open(path string) (*source, func() error, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, nil, fmt.Errorf("vision: %w", err)
	}
	s, err := unpack(path, f)
	if err != nil {
		f.Close()
		return nil, nil, err
	}
	return s, f.Close, nil
}

func unpack(name string, r io.Reader) (*source, error) {
	b := bufio.NewReaderSize(r, 1<<16)
	if head, _ := b.Peek(2); len(head) < 2 || head[0] != 0x1f || head[1] != 0x8b {
		return &source{name: name, r: b}, nil
	}
	z, err := gzip.NewReader(b)
	if err != nil {
		return nil, &FormatError{File: name, Kind: ErrDamaged, Detail: "gzip header", Err: err}
	}
	return &source{name: name, r: z}, nil
}

// readIDX reads an array of bytes in MNIST's format with a given number of dimensions.
func readIDX(s *source, dims int) (shape []int, pix []byte, err error) {
	head, err := s.exactly(int64(4+4*dims), "the header")
	if err != nil {
		return nil, nil, err
	}
	if want := uint32(0x800 | dims); binary.BigEndian.Uint32(head) != want {
		return nil, nil, bad(s.name, 0, ErrMagic, "it begins with %#08x, an array of bytes with %d dimensions with %#08x",
			binary.BigEndian.Uint32(head), dims, want)
	}
	size := int64(1)
	for i := range dims {
		n := int64(binary.BigEndian.Uint32(head[4+4*i:]))
		shape = append(shape, int(n))
		if i > 0 && n == 0 {
			return nil, nil, bad(s.name, int64(4+4*i), ErrDamaged, "dimension %d is empty", i)
		}
		if size *= n; size > maxSet { // n < 2^32 and size <= 2^28: no overflow before this
			return nil, nil, bad(s.name, int64(4+4*i), ErrOversized, "the header claims more than %d bytes", maxSet)
		}
	}
	if pix, err = s.exactly(size, fmt.Sprintf("an array of %v", shape)); err != nil {
		return nil, nil, err
	}
	return shape, pix, s.end()
}
