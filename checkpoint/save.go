package checkpoint

import (
	"fmt"
	"io"
	"os"

	"github.com/goddp/goddp/checkpoint/internal/atomicfile"
	"github.com/goddp/goddp/checkpoint/ptfile"
)

// SaveOptions are the choices of Save. The zero value is right for most.
type SaveOptions struct {
	// NoSync leaves it to the system when the bytes reach the disk, as torch.save does. The file is still never half
	// written for readers of a running machine, but a power cut shortly after may lose it.
	NoSync bool
	// Perm are the file's permissions; 0 stands for those of the file that is replaced, or what umask leaves of 0666.
	Perm os.FileMode
}

// Save writes v to path as torch.save does; torch.load(path) reads it.
//
// v is made of tensors, a *StateDict, *Dict, *List, *Tuple, numbers, strings, bools, []byte and nil. The tensors must
// not change meanwhile; [AsyncSaver] copies them first.
//
// The bytes go to a temporary file beside path, which takes path's name when all of it is on the disk. Whatever
// happens, path holds the old file or the new one, and on an error the old one.
func Save(path string, v any, opt ...SaveOptions) error {
	var o SaveOptions
	if len(opt) > 0 {
		o = opt[0]
	}
	a := newAdapter()
	err := atomicfile.Write(path, atomicfile.Options{Perm: o.Perm, NoSync: o.NoSync}, func(w io.Writer) error {
		return ptfile.Write(w, ptfile.Stem(path), v, ptfile.WriteOptions{Adapt: a.adapt})
	})
	if err != nil {
		return fmt.Errorf("saving %s: %w", path, err)
	}
	return nil
}

// Write writes v to w in torch.save's format, its records under "archive" as torch.save does for buffers.
func Write(w io.Writer, v any) error {
	return ptfile.Write(w, "archive", v, ptfile.WriteOptions{Adapt: newAdapter().adapt})
}

// CheckWritable tells whether Save could write to path: its folder exists, can be written to, and path itself is not
// a folder. Call it before training begins rather than find out after the first epoch.
func CheckWritable(path string) error {
	if err := atomicfile.Check(path); err != nil {
		return fmt.Errorf("checkpoints cannot be saved to %s: %w", path, err)
	}
	return nil
}

// copyAtomically copies an open file to path.
func copyAtomically(path string, r io.ReaderAt, size int64, o SaveOptions) error {
	return atomicfile.Write(path, atomicfile.Options{Perm: o.Perm, NoSync: o.NoSync}, func(w io.Writer) error {
		_, err := io.Copy(w, io.NewSectionReader(r, 0, size))
		return err
	})
}
