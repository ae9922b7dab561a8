// Package ckptool is what `goddp ckpt` does: it shows, converts and compares checkpoint files without libtorch.
package ckptool

import (
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strconv"
	"strings"

	"github.com/goddp/goddp/checkpoint/pickle"
	"github.com/goddp/goddp/checkpoint/ptfile"
	"github.com/goddp/goddp/checkpoint/safetensors"
)

// file is an open checkpoint of either format.
type file struct {
	*ptfile.File
	path     string
	format   string
	metadata map[string]string // of safetensors
}

func open(path string) (*file, error) {
	if info, err := os.Stat(path); err == nil && !info.Mode().IsRegular() {
		return nil, fmt.Errorf("%s is not a file that holds a checkpoint, but %s", path, modeName(info.Mode()))
	}
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	var head [4]byte
	_, err = io.ReadFull(f, head[:])
	f.Close()
	if err != nil {
		return nil, fmt.Errorf("%s: too short to be a checkpoint", path)
	}
	if string(head[:]) != "PK\x03\x04" && head[0] != 0x80 || strings.HasSuffix(path, ".safetensors") {
		s, err := safetensors.Open(path)
		if err == nil {
			return &file{s.AsFile(), path, "safetensors", s.Metadata}, nil
		}
		if strings.HasSuffix(path, ".safetensors") {
			return nil, err
		}
	}
	p, err := ptfile.Open(path, ptfile.ReadOptions{})
	if err != nil {
		return nil, err
	}
	format := "torch.save"
	if p.Legacy {
		format = "torch.save, the format before 1.6"
	}
	return &file{p, path, format, nil}, nil
}

func modeName(m os.FileMode) string {
	if m.IsDir() {
		return "a folder"
	}
	return "a device, pipe or socket"
}

// tensorOf gives the tensor in a leaf, or nil.
func tensorOf(v any) *ptfile.Tensor {
	switch x := v.(type) {
	case *ptfile.Tensor:
		return x
	case *ptfile.Parameter:
		return x.Data
	}
	return nil
}

// find follows a key such as "model", "optimizer/state/0" or "optimizer/param_groups/0/lr". A key with dots is one
// step.
func find(v any, key string) (any, error) {
	if key == "" {
		return v, nil
	}
	for _, step := range strings.Split(key, "/") {
		number, err := strconv.ParseInt(step, 10, 64)
		isNumber := err == nil
		var items []any
		switch x := v.(type) {
		case *pickle.Dict:
			next, ok := x.Get(step)
			if !ok && isNumber {
				next, ok = x.Get(number)
			}
			if !ok {
				return nil, fmt.Errorf("there is no %q; the keys are %s", key, strings.Join(keys(x), ", "))
			}
			v = next
			continue
		case *pickle.List:
			items = x.Items
		case *pickle.Tuple:
			items = x.Items
		default:
			return nil, fmt.Errorf("there is no %q: what should hold %q has no keys", key, step)
		}
		if !isNumber || number < 0 || number >= int64(len(items)) {
			return nil, fmt.Errorf("there is no %q: %q is none of %d items", key, step, len(items))
		}
		v = items[number]
	}
	return v, nil
}

func keys(d *pickle.Dict) []string {
	var out []string
	for k := range d.All() {
		if out = append(out, plain(k)); len(out) == 20 {
			return append(out, "…")
		}
	}
	return out
}

// tensors gives the flat dict of tensors in v. Where v is a training checkpoint it says which keys lead to one.
func tensors(v any) ([]safetensors.Tensor, error) {
	d, ok := v.(*pickle.Dict)
	if !ok {
		return nil, errors.New("it is not a dict of tensors")
	}
	var out []safetensors.Tensor
	var other, candidates []string
	for k, v := range d.All() {
		name, isText := k.(string)
		t := tensorOf(v)
		switch {
		case isText && t != nil:
			out = append(out, safetensors.Tensor{Name: name, Tensor: t})
		default:
			other = append(other, plain(k))
			if holdsTensors(v) {
				candidates = append(candidates, "--key "+plain(k))
			}
		}
	}
	if len(other) == 0 {
		return out, nil
	}
	hint := ""
	if len(candidates) > 0 {
		hint = "; choose a part with " + strings.Join(candidates, " or ")
	}
	return nil, fmt.Errorf("it holds more than named tensors (%s)%s", strings.Join(other[:min(len(other), 8)], ", "), hint)
}

// holdsTensors tells whether v is a dict of named tensors and nothing else.
func holdsTensors(v any) bool {
	d, ok := v.(*pickle.Dict)
	if !ok || d.Len() == 0 {
		return false
	}
	for k, v := range d.All() {
		if _, isText := k.(string); !isText || tensorOf(v) == nil {
			return false
		}
	}
	return true
}

// plain shows a key; what could disturb a terminal is quoted.
func plain(k any) string {
	s, ok := k.(string)
	if !ok {
		if t, ok := k.(*pickle.Tuple); ok {
			parts := make([]string, len(t.Items))
			for i, x := range t.Items {
				parts[i] = plain(x)
			}
			return "(" + strings.Join(parts, ", ") + ")"
		}
		return fmt.Sprint(k)
	}
	quoted := fmt.Sprintf("%q", s)
	if s == "" || quoted != `"`+s+`"` || strings.ContainsAny(s, " ") {
		return quoted
	}
	return s
}

// shared lists for every storage with more than one tensor their number.
func sharedStorages(v any) map[*ptfile.Storage]int {
	count := make(map[*ptfile.Storage]int)
	seen := make(map[any]bool)
	walk(v, seen, func(t *ptfile.Tensor) {
		if t.Storage != nil {
			count[t.Storage]++
		}
	})
	return count
}

// walk visits every tensor once.
func walk(v any, seen map[any]bool, do func(*ptfile.Tensor)) {
	var groups [][]any
	switch x := v.(type) {
	case *ptfile.Tensor:
		if x != nil && !seen[x] {
			seen[x] = true
			do(x)
		}
		return
	case *ptfile.Parameter:
		groups = [][]any{{x.Data, x.State}}
	case *pickle.List:
		groups = [][]any{x.Items}
	case *pickle.Tuple:
		groups = [][]any{x.Items}
	case *pickle.Object:
		groups = [][]any{{x.State}}
		if x.Args != nil {
			groups = append(groups, x.Args.Items)
		}
	case *pickle.Dict:
		if seen[x] {
			return
		}
		seen[x] = true
		for _, item := range x.All() {
			walk(item, seen, do)
		}
		return
	default:
		return
	}
	if seen[v] {
		return
	}
	seen[v] = true
	for item := range slices.Values(slices.Concat(groups...)) {
		walk(item, seen, do)
	}
}
