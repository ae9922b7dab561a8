package checkpoint

import (
	"fmt"
	"hash/crc32"
	"os"
	"runtime/debug"

	"github.com/sugarme/gotch/ts"
	"golang.org/x/sys/unix"

	"github.com/goddp/goddp/checkpoint/ptfile"
	"github.com/goddp/goddp/internal/tdp"
)

// mapLeast is the size from which mapping beats reading: a mapping costs two system calls and a page fault.
const mapLeast = 64 << 10

// mapped maps a storage's pages, or gives nil for those that are better read.
func (l *loader) mapped(s *ptfile.Storage) (*ts.Tensor, error) {
	off, ok := s.Section()
	if !ok || s.Bytes < mapLeast || off%8 != 0 || l.f.OS() == nil {
		return nil, nil
	}
	skip := off & int64(os.Getpagesize()-1)
	fd, size := int(l.f.OS().Fd()), int(skip+s.Bytes)
	pages, err := unix.Mmap(fd, off-skip, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE)
	if err != nil {
		return nil, nil // too many mappings, or a file system without them: read it
	}
	if !l.f.opt.SkipCRC {
		err = verifyPages(s, pages, int(skip))
	}
	var t *ts.Tensor
	if err == nil {
		t, err = tdp.FromMmap(pages, uint64(skip), uint64(s.Bytes))
	}
	if err != nil {
		_ = unix.Munmap(pages)
		return nil, err
	}
	return t, nil
}

// verifyPages goes over a fresh mapping and compares its CRC with the file's. Each piece is given back before the next,
// so that a large file does not become resident memory of every process that maps it.
func verifyPages(s *ptfile.Storage, pages []byte, skip int) (err error) {
	if !s.HasCRC() {
		return nil
	}
	// A disk that fails, or another program that cuts the file off, shows as a memory fault here.
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	defer func() {
		switch v := recover().(type) {
		case nil:
		case interface{ Addr() uintptr }:
			err = fmt.Errorf("storage %s cannot be read from its mapping: was the file cut off meanwhile? (%v)", s.Key, v)
		default:
			panic(v)
		}
	}()
	sum := uint32(0)
	for at := 0; at < len(pages); at += staging {
		piece := pages[at:min(at+staging, len(pages))]
		_ = unix.Madvise(piece, unix.MADV_POPULATE_READ) // one call instead of a fault for every few pages
		sum = crc32.Update(sum, crc32.IEEETable, piece[min(skip, len(piece)):])
		skip = 0
		_ = unix.Madvise(piece, unix.MADV_DONTNEED)
	}
	return s.CheckCRC(sum)
}
