package ckptool

import (
	"fmt"
	"io"
	"path/filepath"
	"strings"

	"github.com/goddp/goddp/checkpoint/internal/atomicfile"
	"github.com/goddp/goddp/checkpoint/pickle"
	"github.com/goddp/goddp/checkpoint/ptfile"
	"github.com/goddp/goddp/checkpoint/safetensors"
)

// ConvertOptions are the choices of Convert.
type ConvertOptions struct {
	Key         string            // convert this part only, such as "model"
	StripPrefix string            // taken from the front of every name that has it, such as "module."
	CPU         bool              // let PyTorch load to the CPU what was saved from a GPU (.pt only; safetensors know no device)
	Metadata    map[string]string // for .safetensors
	Notes       io.Writer         // where it is said what the new format cannot hold; nil for nowhere
}

// Convert reads a checkpoint of either format and writes it in that of to's extension: .safetensors, or torch.save's
// for .pt, .pth, .bin and .ckpt. The new file appears at once, when it is complete.
func Convert(from, to string, opt ConvertOptions) error {
	if opt.Notes == nil {
		opt.Notes = io.Discard
	}
	var safe bool
	switch filepath.Ext(to) {
	case ".safetensors":
		safe = true
	case ".pt", ".pth", ".bin", ".ckpt":
	default:
		return fmt.Errorf("%s: the name must end in .pt, .pth, .bin, .ckpt or .safetensors", to)
	}
	f, err := open(from)
	if err != nil {
		return err
	}
	defer f.Close()
	v, err := find(f.Value, opt.Key)
	if err == nil {
		err = hasPrefix(v, opt.StripPrefix)
	}
	if err != nil {
		return fmt.Errorf("%s: %w", from, err)
	}
	if safe {
		err = f.toSafetensors(v, to, opt)
	} else {
		err = f.toTorch(v, to, opt)
	}
	if err != nil {
		return fmt.Errorf("%s to %s: %w", from, to, err)
	}
	return nil
}

// hasPrefix makes sure that there is a name to take the prefix from: a mistyped one would do nothing.
func hasPrefix(v any, prefix string) error {
	if prefix == "" {
		return nil
	}
	if d, ok := v.(*pickle.Dict); ok {
		for name := range d.Strings() {
			if strings.HasPrefix(name, prefix) {
				return nil
			}
		}
	}
	return fmt.Errorf("no name begins with %q; choose the part that has such names with --key", prefix)
}

func (f *file) toSafetensors(v any, to string, opt ConvertOptions) error {
	list, err := tensors(v)
	if err != nil {
		return err
	}
	seen := make(map[*ptfile.Storage]string)
	for i, t := range list {
		list[i].Name = strings.TrimPrefix(t.Name, opt.StripPrefix)
		if first, ok := seen[t.Storage]; ok && t.Storage != nil && t.Storage.Bytes > 0 {
			fmt.Fprintf(opt.Notes, "%s and %s share memory; the new file holds it twice\n", plain(first), plain(t.Name))
		}
		seen[t.Storage] = t.Name
	}
	meta := opt.Metadata
	if meta == nil {
		meta = f.metadata
	}
	if meta == nil {
		meta = map[string]string{"format": "pt"} // what Hugging Face's loaders look for
	}
	return atomicfile.Write(to, atomicfile.Options{}, func(w io.Writer) error { return safetensors.Write(w, list, meta) })
}

func (f *file) toTorch(v any, to string, opt ConvertOptions) error {
	if opt.StripPrefix != "" {
		d := v.(*pickle.Dict)
		out := &pickle.Dict{Kind: d.Kind}
		for k, item := range d.All() {
			name, ok := k.(string)
			if ok {
				k = strings.TrimPrefix(name, opt.StripPrefix)
			}
			if _, taken := out.Get(k); taken {
				return fmt.Errorf("without %q two entries are named %s", opt.StripPrefix, plain(k))
			}
			if err := out.Put(k, item); err != nil {
				return err
			}
		}
		if meta, ok := d.Attrs.Get("_metadata"); ok {
			if old, ok := meta.(*pickle.Dict); ok {
				out.Attrs = pickle.NewDict().Set("_metadata", stripVersions(old, opt.StripPrefix))
			}
		}
		v = out
	}
	if opt.CPU {
		for _, s := range f.Storages {
			s.Location = "cpu"
		}
	}
	for k := range f.metadata {
		if k == "format" {
			continue
		}
		fmt.Fprintf(opt.Notes, "the metadata %s stays behind\n", plain(k))
	}
	return atomicfile.Write(to, atomicfile.Options{}, func(w io.Writer) error {
		return ptfile.Write(w, ptfile.Stem(to), v, ptfile.WriteOptions{})
	})
}

// stripVersions is what PyTorch's consume_prefix_in_state_dict_if_present does to the versions.
func stripVersions(old *pickle.Dict, prefix string) *pickle.Dict {
	out := pickle.NewOrderedDict()
	for path, v := range old.Strings() {
		switch {
		case path == "":
		case path == strings.TrimSuffix(prefix, "."):
			out.Set("", v)
		default:
			out.Set(strings.TrimPrefix(path, prefix), v)
		}
	}
	return out
}
