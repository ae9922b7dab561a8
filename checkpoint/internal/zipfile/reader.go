package zipfile

import (
	"archive/zip"
	"compress/flate"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"math"
	"slices"
	"strings"
)

// ErrFormat: the file is not a zip archive as torch.load wants it, or a damaged one.
var ErrFormat = errors.New("invalid archive")

// ErrChecksum: a record's bytes are not those that were written.
var ErrChecksum = errors.New("checksum mismatch")

// maxRecords bounds the directory. PyTorch itself writes one record per storage.
const maxRecords = 4 << 20

// Reader gives access to the records of an archive.
type Reader struct {
	// Prefix is the folder that all records lie in.
	Prefix string
	// NoCRC: the file was written with its checksums left out (torch.serialization.set_crc32_options(False)).
	NoCRC   bool
	Records []*Record

	src    io.ReaderAt
	size   int64
	byName map[string]*Record
}

// Record is one file of the archive.
type Record struct {
	Name   string // without the prefix
	Size   int64  // of the payload
	CRC    uint32
	Stored bool  // not compressed
	Offset int64 // of the (compressed) payload in the file
	packed int64
	r      *Reader
}

// NewReader reads the directory of an archive of the given size and checks it against the file: every record lies
// inside it, none overlaps another, no name occurs twice.
func NewReader(src io.ReaderAt, size int64) (*Reader, error) {
	z, err := zip.NewReader(src, size)
	if err != nil && !errors.Is(err, zip.ErrInsecurePath) {
		if errors.Is(err, zip.ErrFormat) || errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
			return nil, fmt.Errorf("%w: no zip directory; the file may be cut off", ErrFormat)
		}
		return nil, err
	}
	if len(z.File) == 0 || len(z.File) > maxRecords {
		return nil, fmt.Errorf("%w: %d records", ErrFormat, len(z.File))
	}
	r := &Reader{src: src, size: size, byName: make(map[string]*Record, len(z.File)), NoCRC: true}
	for i, f := range z.File {
		prefix, name, ok := strings.Cut(f.Name, "/")
		if !ok {
			return nil, fmt.Errorf("%w: record %q is not in a folder", ErrFormat, f.Name)
		}
		if i == 0 {
			r.Prefix = prefix
		} else if prefix != r.Prefix {
			return nil, fmt.Errorf("%w: records in two folders, %q and %q", ErrFormat, r.Prefix, prefix)
		}
		if r.byName[name] != nil {
			return nil, fmt.Errorf("%w: record %q occurs twice", ErrFormat, name)
		}
		rec := &Record{Name: name, CRC: f.CRC32, Stored: f.Method == zip.Store, r: r}
		if f.UncompressedSize64 > math.MaxInt64 || f.CompressedSize64 > uint64(size) {
			return nil, fmt.Errorf("%w: record %q is larger than the file", ErrFormat, name)
		}
		rec.Size, rec.packed = int64(f.UncompressedSize64), int64(f.CompressedSize64)
		switch {
		case f.Flags&1 != 0:
			return nil, fmt.Errorf("%w: record %q is encrypted", ErrFormat, name)
		case f.Method != zip.Store && f.Method != zip.Deflate:
			return nil, fmt.Errorf("%w: record %q has compression method %d", ErrFormat, name, f.Method)
		case rec.Stored && rec.Size != rec.packed:
			return nil, fmt.Errorf("%w: record %q has two sizes, %d and %d", ErrFormat, name, rec.Size, rec.packed)
		}
		if rec.Offset, err = f.DataOffset(); err != nil {
			if errors.Is(err, zip.ErrFormat) || errors.Is(err, io.EOF) {
				return nil, fmt.Errorf("%w: record %q does not begin where the directory says", ErrFormat, name)
			}
			return nil, fmt.Errorf("record %q: %w", name, err)
		}
		if rec.Offset < 0 || rec.Offset > size || rec.packed > size-rec.Offset {
			return nil, fmt.Errorf("%w: record %q reaches beyond the end of the file", ErrFormat, name)
		}
		if rec.CRC != 0 && rec.Size > 0 {
			r.NoCRC = false
		}
		r.byName[name] = rec
		r.Records = append(r.Records, rec)
	}
	return r, r.overlaps()
}

func (r *Reader) overlaps() error {
	order := slices.Clone(r.Records)
	slices.SortFunc(order, func(a, b *Record) int {
		if a.Offset != b.Offset {
			return int(min(max(a.Offset-b.Offset, -1), 1))
		}
		return int(min(max(a.packed-b.packed, -1), 1))
	})
	for i := 1; i < len(order); i++ {
		// Between two payloads stand at least a local header and the second name.
		if a, b := order[i-1], order[i]; a.Offset+a.packed+30 > b.Offset {
			return fmt.Errorf("%w: records %q and %q overlap", ErrFormat, a.Name, b.Name)
		}
	}
	return nil
}

// Find gives a record by its name without the prefix, or nil.
func (r *Reader) Find(name string) *Record { return r.byName[name] }

// bombRatio: deflate can shrink zeros by 1032. Beyond this ratio a large record is refused.
const (
	bombRatio = 200
	bombSize  = 64 << 20
)

// raw gives the payload's bytes without checking them.
func (rec *Record) raw() (io.Reader, error) {
	section := io.NewSectionReader(rec.r.src, rec.Offset, rec.packed)
	if rec.Stored {
		return section, nil
	}
	if rec.Size > bombSize && rec.Size/bombRatio > rec.packed {
		return nil, fmt.Errorf("%w: record %q would grow from %d to %d bytes", ErrFormat, rec.Name, rec.packed, rec.Size)
	}
	return flate.NewReader(section), nil
}

// ReadInto fills dst, which has the record's size, and checks the CRC.
func (rec *Record) ReadInto(dst []byte) error {
	if int64(len(dst)) != rec.Size {
		return fmt.Errorf("record %q has %d bytes, not %d", rec.Name, rec.Size, len(dst))
	}
	if rec.Stored {
		return rec.readStored(dst)
	}
	src, err := rec.raw()
	if err != nil {
		return err
	}
	if _, err := io.ReadFull(src, dst); err != nil {
		return rec.cut(err)
	}
	var one [1]byte
	if n, _ := src.Read(one[:]); n > 0 {
		return fmt.Errorf("%w: record %q is longer than the directory says", ErrFormat, rec.Name)
	}
	return rec.CheckCRC(crc32.ChecksumIEEE(dst))
}

func (rec *Record) readStored(dst []byte) error {
	crc := uint32(0)
	for at := 0; at < len(dst); {
		part := dst[at:min(at+chunk, len(dst))]
		if _, err := rec.r.src.ReadAt(part, rec.Offset+int64(at)); err != nil {
			return rec.cut(err)
		}
		if !rec.r.NoCRC {
			crc = crc32.Update(crc, crc32.IEEETable, part)
		}
		at += len(part)
	}
	return rec.CheckCRC(crc)
}

func (rec *Record) cut(err error) error {
	var corrupt flate.CorruptInputError
	if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) || errors.As(err, &corrupt) {
		return fmt.Errorf("%w: record %q: %v", ErrFormat, rec.Name, err)
	}
	return fmt.Errorf("record %q: %w", rec.Name, err)
}

// HasCRC tells whether the archive has a checksum of the payload.
func (rec *Record) HasCRC() bool { return !rec.r.NoCRC }

// CheckCRC compares a payload's CRC-32 (IEEE) with the archive's, where that has one.
func (rec *Record) CheckCRC(crc uint32) error {
	if rec.r.NoCRC || crc == rec.CRC {
		return nil
	}
	return fmt.Errorf("%w in record %q: the file was damaged after it was written (CRC %08x, expected %08x)",
		ErrChecksum, rec.Name, crc, rec.CRC)
}

// ReadAll gives a record's payload, of at most limit bytes.
func (rec *Record) ReadAll(limit int64) ([]byte, error) {
	if rec.Size > limit {
		return nil, fmt.Errorf("%w: record %q has %d bytes, more than %d", ErrFormat, rec.Name, rec.Size, limit)
	}
	if !rec.Stored && rec.Size > 1<<20 { // a size that only claims to be large must not cost memory
		src, err := rec.raw()
		if err != nil {
			return nil, err
		}
		data, err := io.ReadAll(io.LimitReader(src, rec.Size+1))
		if err != nil {
			return nil, rec.cut(err)
		}
		if int64(len(data)) != rec.Size {
			return nil, fmt.Errorf("%w: record %q has another size than the directory says", ErrFormat, rec.Name)
		}
		return data, rec.CheckCRC(crc32.ChecksumIEEE(data))
	}
	data := make([]byte, rec.Size)
	return data, rec.ReadInto(data)
}

// WriteTo copies the payload in small pieces and checks its CRC at the end.
func (rec *Record) WriteTo(w io.Writer) (int64, error) {
	src, err := rec.raw()
	if err != nil {
		return 0, err
	}
	crc := crc32.NewIEEE()
	n, err := io.CopyBuffer(struct{ io.Writer }{io.MultiWriter(crc, w)}, struct{ io.Reader }{io.LimitReader(src, rec.Size+1)},
		make([]byte, chunk))
	if err != nil {
		return n, rec.cut(err)
	}
	if n != rec.Size {
		return n, fmt.Errorf("%w: record %q has %d bytes, the directory says %d", ErrFormat, rec.Name, n, rec.Size)
	}
	return n, rec.CheckCRC(crc.Sum32())
}

// Verify reads the record and checks its CRC.
func (rec *Record) Verify() error {
	_, err := rec.WriteTo(io.Discard)
	return err
}
