package pickle

import (
	"errors"
	"fmt"
	"strings"
)

var (
	// ErrFormat: the bytes are not a pickle, or a damaged one.
	ErrFormat = errors.New("invalid pickle")
	// ErrLimit: the pickle is larger or deeper than the reader's limits allow.
	ErrLimit = errors.New("pickle beyond the reader's limits")
	// ErrUnsafeGlobal: the pickle wants to call something that is not on the allow-list.
	ErrUnsafeGlobal = errors.New("pickle refers to code that is not allowed")
)

// UnsafeGlobalError names the functions and classes that a pickle wants to use and that are not allowed. Nothing of
// the file was executed.
type UnsafeGlobalError struct {
	Globals []Global // the first is the one at which reading stopped
	Offset  int64    // where in the pickle
}

func (e *UnsafeGlobalError) Error() string {
	names := make([]string, len(e.Globals))
	for i, g := range e.Globals {
		names[i] = g.String()
	}
	return fmt.Sprintf("the file refers to %s (at byte %d of its pickle), which only Python can build and which may run code there. "+
		"If you trust the file, load it in Python and save plain data again: torch.save({k: v for k, v in obj.state_dict().items()}, path); "+
		"numpy numbers need .item(), arrays torch.from_numpy",
		strings.Join(names, ", "), e.Offset)
}

// Unwrap gives ErrUnsafeGlobal.
func (e *UnsafeGlobalError) Unwrap() error { return ErrUnsafeGlobal }

func formatError(off int64, format string, args ...any) error {
	return fmt.Errorf("%w: byte %d: %s", ErrFormat, off, fmt.Sprintf(format, args...))
}
