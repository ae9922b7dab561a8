// Package zipfile writes the zip archives that torch.save writes, byte for byte, and reads those and any other zip
// that torch.load reads, with the checks that it leaves out: CRCs, overlaps, bounds and inflation.
package zipfile

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"hash/fnv"
	"io"
	"math"
)

// Alignment is where the payload of every record starts, so that a mapped file serves any vector load.
const Alignment = 64

// chunk is how much passes through the checksum and the file at once. It stays in the processor's cache in between.
const chunk = 512 << 10

type record struct {
	name   string
	size   uint64
	offset uint64 // of the local header
	crc    uint32
}

// Writer writes one archive front to back. It never seeks and holds nothing but the directory.
type Writer struct {
	w       io.Writer
	prefix  string
	off     uint64
	records []record
	seen    map[string]bool
	err     error
}

// NewWriter starts an archive whose records lie under prefix.
func NewWriter(w io.Writer, prefix string) *Writer {
	return &Writer{w: w, prefix: prefix, seen: make(map[string]bool)}
}

func (w *Writer) write(b []byte) {
	if w.err != nil {
		return
	}
	n, err := w.w.Write(b)
	w.off += uint64(n)
	if err == nil && n < len(b) {
		err = io.ErrShortWrite
	}
	w.err = err
}

// extra64 is the zip64 field: sizes when they do not fit into 32 bits, and the offset likewise. PyTorch's writer does
// not know the packed size yet when it writes a local header, and leaves 0 there.
func extra64(size, packed, offset uint64) []byte {
	var f []byte
	if size >= math.MaxUint32 {
		f = binary.LittleEndian.AppendUint64(f, size)
		f = binary.LittleEndian.AppendUint64(f, packed)
	}
	if offset >= math.MaxUint32 {
		f = binary.LittleEndian.AppendUint64(f, offset)
	}
	if f == nil {
		return nil
	}
	return append(binary.LittleEndian.AppendUint16([]byte{1, 0}, uint16(len(f))), f...)
}

// layout gives what stands between the fixed local header and the payload, and the flags, for a record at offset.
func layout(name string, size, offset uint64) (extra []byte, flags uint16) {
	extra = extra64(size, 0, offset)
	start := offset + 30 + uint64(len(name)) + uint64(len(extra)) + 4
	pad := int((Alignment - start%Alignment) % Alignment)
	extra = append(extra, 'F', 'B')
	extra = binary.LittleEndian.AppendUint16(extra, uint16(pad))
	for range pad {
		extra = append(extra, 'Z')
	}
	flags = 0x0800 // UTF-8 names
	if size > 0 {
		flags |= 0x0008 // sizes and CRC follow the payload
	}
	return extra, flags
}

// sink passes a payload on in pieces and sums it up.
type sink struct {
	w    *Writer
	left uint64
	crc  uint32
}

func (s *sink) Write(b []byte) (int, error) {
	if uint64(len(b)) > s.left {
		return 0, errors.New("more data than announced")
	}
	n := len(b)
	for len(b) > 0 && s.w.err == nil {
		k := min(len(b), chunk)
		s.crc = crc32.Update(s.crc, crc32.IEEETable, b[:k])
		s.w.write(b[:k])
		b = b[k:]
	}
	s.left -= uint64(n)
	return n, s.w.err
}

// Record writes one record of exactly size bytes, which fill hands to its argument.
func (w *Writer) Record(name string, size uint64, fill func(io.Writer) error) error {
	if w.err != nil {
		return w.err
	}
	name = w.prefix + "/" + name
	if len(name) > math.MaxUint16 {
		return fmt.Errorf("record name of %d bytes", len(name))
	}
	if w.seen[name] {
		return fmt.Errorf("record %s is written twice", name)
	}
	w.seen[name] = true
	rec := record{name: name, size: size, offset: w.off}
	extra, flags := layout(name, size, w.off)
	h := make([]byte, 30, 30+len(name)+len(extra))
	copy(h, "PK\x03\x04")
	binary.LittleEndian.PutUint16(h[6:], flags)
	binary.LittleEndian.PutUint16(h[26:], uint16(len(name)))
	binary.LittleEndian.PutUint16(h[28:], uint16(len(extra)))
	w.write(append(append(h, name...), extra...))
	if size > 0 {
		s := &sink{w: w, left: size}
		if err := fill(s); err != nil {
			if w.err == nil {
				w.err = err
			}
			return fmt.Errorf("record %s: %w", name, err)
		}
		if s.left != 0 && w.err == nil {
			w.err = fmt.Errorf("record %s: %d bytes are missing", name, s.left)
		}
		rec.crc = s.crc
		d := binary.LittleEndian.AppendUint32([]byte("PK\x07\x08"), rec.crc)
		if extra64(size, size, rec.offset) == nil {
			d = binary.LittleEndian.AppendUint32(d, uint32(size))
			d = binary.LittleEndian.AppendUint32(d, uint32(size))
		} else {
			d = binary.LittleEndian.AppendUint64(d, size)
			d = binary.LittleEndian.AppendUint64(d, size)
		}
		w.write(d)
	}
	w.records = append(w.records, rec)
	return w.err
}

// Bytes writes a small record.
func (w *Writer) Bytes(name string, data []byte) error {
	return w.Record(name, uint64(len(data)), func(to io.Writer) error {
		_, err := to.Write(data)
		return err
	})
}

// SerializationID is a fingerprint of the records so far, 40 digits as PyTorch's. Readers only log it.
func (w *Writer) SerializationID() string {
	names, crcs := fnv.New64a(), fnv.New64a()
	for _, r := range w.records {
		_, _ = io.WriteString(names, r.name)
		_, _ = crcs.Write(binary.LittleEndian.AppendUint32(nil, r.crc))
	}
	return fmt.Sprintf("%020d%020d", names.Sum64(), crcs.Sum64())
}

// Close writes the directory. It does not close what lies below.
func (w *Writer) Close() error {
	start := w.off
	var dir []byte
	for _, r := range w.records {
		extra := extra64(r.size, r.size, r.offset)
		_, flags := layout(r.name, r.size, r.offset)
		h := make([]byte, 46)
		copy(h, "PK\x01\x02")
		binary.LittleEndian.PutUint16(h[8:], flags)
		binary.LittleEndian.PutUint32(h[16:], r.crc)
		binary.LittleEndian.PutUint32(h[20:], uint32(min(r.size, math.MaxUint32)))
		binary.LittleEndian.PutUint32(h[24:], uint32(min(r.size, math.MaxUint32)))
		binary.LittleEndian.PutUint16(h[28:], uint16(len(r.name)))
		binary.LittleEndian.PutUint16(h[30:], uint16(len(extra)))
		binary.LittleEndian.PutUint32(h[42:], uint32(min(r.offset, math.MaxUint32)))
		dir = append(append(append(dir, h...), r.name...), extra...)
	}
	w.write(dir)
	n, size := uint64(len(w.records)), uint64(len(dir))

	// The zip64 end is always there, also in small files.
	end := make([]byte, 0, 56+20+22)
	le := binary.LittleEndian
	end = append(end, "PK\x06\x06"...)
	end = le.AppendUint64(end, 44)
	end = le.AppendUint16(end, 0x031e)
	end = le.AppendUint16(end, 0x2d)
	end = le.AppendUint64(end, 0)
	end = le.AppendUint64(end, n)
	end = le.AppendUint64(end, n)
	end = le.AppendUint64(end, size)
	end = le.AppendUint64(end, start)

	end = append(end, "PK\x06\x07"...)
	end = le.AppendUint32(end, 0)
	end = le.AppendUint64(end, start+size)
	end = le.AppendUint32(end, 1)

	end = append(end, "PK\x05\x06"...)
	end = le.AppendUint32(end, 0)
	end = le.AppendUint16(end, uint16(min(n, math.MaxUint16)))
	end = le.AppendUint16(end, uint16(min(n, math.MaxUint16)))
	end = le.AppendUint32(end, uint32(min(size, math.MaxUint32)))
	end = le.AppendUint32(end, uint32(min(start, math.MaxUint32)))
	end = le.AppendUint16(end, 0)
	w.write(end)
	if w.err == nil {
		w.err = errClosed
		return nil
	}
	return w.err
}

var errClosed = errors.New("the archive is complete")
