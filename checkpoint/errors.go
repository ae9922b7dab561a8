package checkpoint

import (
	"github.com/goddp/goddp/checkpoint/internal/zipfile"
	"github.com/goddp/goddp/checkpoint/pickle"
	"github.com/goddp/goddp/checkpoint/ptfile"
)

// The kinds of failure that callers tell apart with errors.Is. Beside them there are ErrDevice, ErrUnsupported and
// ErrNoCheckpoint, and *StateDictError for errors.As.
var (
	// ErrFormat: the file is not a checkpoint, or is cut off or damaged in its structure.
	ErrFormat = ptfile.ErrFormat
	// ErrChecksum: bytes of the file are not those that were written.
	ErrChecksum = zipfile.ErrChecksum
	// ErrUnsafeGlobal: the file wants to run code. The error names what, and how to save plain data instead.
	ErrUnsafeGlobal = pickle.ErrUnsafeGlobal
	// ErrTorchScript: the file is a TorchScript program.
	ErrTorchScript = ptfile.ErrTorchScript
)
