package checkpoint

import (
	"fmt"
	"io"

	"github.com/goddp/goddp/checkpoint/internal/atomicfile"
	"github.com/goddp/goddp/checkpoint/safetensors"
)

// SaveSafetensors writes a state dict, and free text, as a .safetensors file: names and tensors, without versions,
// strides and shared memory. As Save it replaces the file at once.
func SaveSafetensors(path string, sd *StateDict, metadata map[string]string, opt ...SaveOptions) error {
	var o SaveOptions
	if len(opt) > 0 {
		o = opt[0]
	}
	a := newAdapter()
	tensors := make([]safetensors.Tensor, 0, sd.Len())
	for name, t := range sd.All() {
		x, err := a.detached(t)
		if err != nil {
			return fmt.Errorf("saving %s: %q: %w", path, name, err)
		}
		tensors = append(tensors, safetensors.Tensor{Name: name, Tensor: x})
	}
	err := atomicfile.Write(path, atomicfile.Options{Perm: o.Perm, NoSync: o.NoSync}, func(w io.Writer) error {
		return safetensors.Write(w, tensors, metadata)
	})
	if err != nil {
		return fmt.Errorf("saving %s: %w", path, err)
	}
	return nil
}

// LoadSafetensors reads a .safetensors file: its tensors, in the order of their bytes, and its free text.
func LoadSafetensors(path string, opt LoadOptions) (*StateDict, map[string]string, error) {
	f, err := safetensors.Open(path)
	if err != nil {
		return nil, nil, fmt.Errorf("loading %w", err)
	}
	defer f.Close()
	v, err := (&File{File: f.AsFile(), opt: opt, name: path}).Load()
	if err != nil {
		return nil, nil, err
	}
	sd, err := StateDictOf(v)
	return sd, f.Metadata, err
}
