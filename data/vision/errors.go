package vision

import (
	"errors"
	"fmt"
	"strings"
)

// What is wrong with a file, for errors.Is.
var (
	ErrMagic     = errors.New("not such a file")
	ErrTruncated = errors.New("truncated")
	ErrOversized = errors.New("oversized")
	ErrCount     = errors.New("counts do not match")
	ErrLabel     = errors.New("label out of range")
	ErrDamaged   = errors.New("damaged")
)

// FormatError is a file that does not hold what it should.
type FormatError struct {
	File   string
	Offset int64 // in the unpacked content, where it was noticed
	Kind   error // one of the errors above
	Detail string
	Err    error // what the unpacker or the reader said, or nil
}

func (e *FormatError) Error() string {
	s := fmt.Sprintf("vision: %s: %v at offset %d: %s", e.File, e.Kind, e.Offset, e.Detail)
	if e.Err != nil {
		s += ": " + e.Err.Error()
	}
	return s
}

// Unwrap gives the kind and the cause.
func (e *FormatError) Unwrap() []error {
	if e.Err == nil {
		return []error{e.Kind}
	}
	return []error{e.Kind, e.Err}
}

func bad(file string, offset int64, kind error, format string, args ...any) *FormatError {
	return &FormatError{File: file, Offset: offset, Kind: kind, Detail: fmt.Sprintf(format, args...)}
}

// MissingError is a data set that is not there.
type MissingError struct {
	Set   string
	Root  string
	Files []string // any line of these will do; a line may name several files, all of which are needed
}

func (e *MissingError) Error() string {
	return fmt.Sprintf("vision: %s is not in %s. Put there one of\n  %s\nor let it be fetched (--download), or use made-up images of the same shape (--synthetic)",
		e.Set, e.Root, strings.Join(e.Files, "\n  "))
}
