package ckptool

import (
	"bufio"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"

	"github.com/goddp/goddp/checkpoint/pickle"
	"github.com/goddp/goddp/checkpoint/ptfile"
)

// ShowOptions are the choices of Show.
type ShowOptions struct {
	Key    string // show this part only, such as "model" or "optimizer/state/0"
	Verify bool   // read everything and check the CRCs
}

// maxLines bounds what Show prints: a value may refer to one list very often.
const maxLines = 1_000_000

// Show prints what a checkpoint holds: keys, dtypes, shapes, sizes, plain values and metadata.
func Show(w io.Writer, path string, opt ShowOptions) error {
	f, err := open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	b := bufio.NewWriter(w)
	s := &shower{w: b, shared: sharedStorages(f.Value)}
	s.head(f)
	if opt.Verify {
		if err := verify(f); err != nil {
			b.Flush()
			return fmt.Errorf("%s: %w", path, err)
		}
		if f.NoCRC {
			fmt.Fprintln(b, "all of it can be read; the file has no checksums")
		} else {
			fmt.Fprintln(b, "all of it can be read, and the checksums are right")
		}
	}
	v, err := find(f.Value, opt.Key)
	if err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	s.entries(v, 0)
	if s.err != nil {
		return s.err
	}
	return b.Flush()
}

func verify(f *file) error {
	if err := f.Verify(); err != nil {
		return err
	}
	for _, s := range f.Storages {
		if _, err := s.WriteTo(io.Discard); err != nil {
			return err
		}
	}
	return nil
}

type shower struct {
	w      *bufio.Writer
	shared map[*ptfile.Storage]int
	lines  int
	err    error
}

func (s *shower) line(depth int, format string, args ...any) bool {
	if s.lines++; s.lines > maxLines {
		s.err = fmt.Errorf("more than %d lines; choose a part with --key", maxLines)
		return false
	}
	fmt.Fprintf(s.w, "%s%s\n", strings.Repeat("  ", depth), fmt.Sprintf(format, args...))
	return true
}

func (s *shower) head(f *file) {
	count, elements, bytes := 0, int64(0), int64(0)
	dtypes := make(map[ptfile.DType]int)
	seen := make(map[*ptfile.Storage]bool)
	walk(f.Value, make(map[any]bool), func(t *ptfile.Tensor) {
		count++
		elements += t.Numel()
		dtypes[t.DType]++
		if t.Storage != nil && !seen[t.Storage] {
			seen[t.Storage] = true
			bytes += t.Storage.Bytes
		}
	})
	fmt.Fprintf(s.w, "%s: %s, %s\n", f.path, f.format, size(f.Size))
	fmt.Fprintf(s.w, "%d tensors, %d elements, %s of memory", count, elements, size(bytes))
	for i, d := range slices.Sorted(maps.Keys(dtypes)) {
		sep := ", "
		if i == 0 {
			sep = ": "
		}
		fmt.Fprintf(s.w, "%s%d %v", sep, dtypes[d], d)
	}
	fmt.Fprintln(s.w)
	if f.BigEndian {
		fmt.Fprintln(s.w, "big endian")
	}
	if f.SerializationID != "" {
		fmt.Fprintf(s.w, "serialization id %s\n", plain(f.SerializationID))
	}
	for _, k := range slices.Sorted(maps.Keys(f.metadata)) {
		fmt.Fprintf(s.w, "metadata %s: %s\n", plain(k), plain(f.metadata[k]))
	}
}

// entries prints v: a container's items on lines of their own, anything else on one.
func (s *shower) entries(v any, depth int) {
	switch x := v.(type) {
	case *pickle.Dict:
		width := 0
		for k := range x.All() {
			width = min(max(width, len(plain(k))), 48)
		}
		for k, item := range x.All() {
			if !s.entry(fmt.Sprintf("%-*s", width, plain(k)), item, depth) {
				return
			}
		}
		if m, ok := x.Attrs.Get("_metadata"); ok {
			s.line(depth, "module versions: %s", versions(m))
		}
	case *pickle.List:
		s.items(x.Items, depth)
	case *pickle.Tuple:
		s.items(x.Items, depth)
	default:
		s.line(depth, "%s", s.leaf(v))
	}
}

func (s *shower) items(items []any, depth int) {
	for i, item := range items {
		if !s.entry(fmt.Sprintf("[%d]", i), item, depth) {
			return
		}
	}
}

func (s *shower) entry(name string, v any, depth int) bool {
	if depth > 100 {
		return s.line(depth, "%s  …", name)
	}
	switch x := v.(type) {
	case *pickle.Dict:
		if !s.line(depth, "%s  %v of %d", name, x.Kind, x.Len()) {
			return false
		}
		s.entries(x, depth+1)
	case *pickle.List:
		if flat(x.Items) {
			return s.line(depth, "%s  [%s]", name, s.short(x.Items))
		}
		if !s.line(depth, "%s  list of %d", name, len(x.Items)) {
			return false
		}
		s.items(x.Items, depth+1)
	case *pickle.Tuple:
		if flat(x.Items) {
			return s.line(depth, "%s  (%s)", name, s.short(x.Items))
		}
		if !s.line(depth, "%s  tuple of %d", name, len(x.Items)) {
			return false
		}
		s.items(x.Items, depth+1)
	default:
		return s.line(depth, "%s  %s", name, s.leaf(v))
	}
	return s.err == nil
}

// flat tells whether items are all plain values.
func flat(items []any) bool {
	for _, v := range items {
		switch v.(type) {
		case *pickle.Dict, *pickle.List, *pickle.Tuple, *ptfile.Tensor, *ptfile.Parameter:
			return false
		}
	}
	return true
}

func (s *shower) short(items []any) string {
	const most = 8
	var parts []string
	for i, v := range items {
		if i == most-1 && len(items) > most {
			parts = append(parts, "…", s.leaf(items[len(items)-1])+fmt.Sprintf(": %d items", len(items)))
			break
		}
		parts = append(parts, s.leaf(v))
	}
	return strings.Join(parts, ", ")
}

func (s *shower) leaf(v any) string {
	switch x := v.(type) {
	case nil:
		return "None"
	case bool:
		if x {
			return "True"
		}
		return "False"
	case string:
		if len(x) > 200 {
			return fmt.Sprintf("%q… (%d bytes)", x[:200], len(x))
		}
		return fmt.Sprintf("%q", x)
	case []byte:
		return fmt.Sprintf("%d bytes", len(x))
	case pickle.ByteArray:
		return fmt.Sprintf("bytearray of %d", len(x))
	case *pickle.Set:
		return "{" + s.short(x.Items) + "}"
	case ptfile.DType:
		return "torch." + x.String()
	case *ptfile.Parameter:
		return s.tensor(x.Data) + ", parameter"
	case *ptfile.Tensor:
		return s.tensor(x)
	case *pickle.Object:
		if x.Args == nil || len(x.Args.Items) == 0 {
			return x.Func.String() + "()"
		}
		if t, ok := x.Args.Items[0].(*pickle.Tuple); ok && len(x.Args.Items) == 1 && flat(t.Items) {
			return x.Func.String() + "((" + s.short(t.Items) + "))" // torch.Size
		}
		return x.Func.String() + "(" + s.short(x.Args.Items) + ")"
	case *pickle.Dict:
		return fmt.Sprintf("%v of %d", x.Kind, x.Len())
	case *pickle.List:
		return fmt.Sprintf("list of %d", len(x.Items))
	case *pickle.Tuple:
		return fmt.Sprintf("tuple of %d", len(x.Items))
	}
	return fmt.Sprint(v)
}

func (s *shower) tensor(t *ptfile.Tensor) string {
	if t == nil {
		return "parameter without data"
	}
	out := fmt.Sprintf("%v %s  %s", t.DType, list(t.Shape), size(t.Numel()*int64(t.DType.Size())))
	if t.Storage == nil {
		return out + ", on meta"
	}
	if t.Storage.Location != "cpu" {
		out += ", from " + plain(t.Storage.Location)
	}
	if !t.Contiguous() {
		out += ", strides " + list(t.Stride)
	}
	if n := s.shared[t.Storage]; n > 1 {
		out += fmt.Sprintf(", shares storage %s with %d more", plain(t.Storage.Key), n-1)
	} else if t.Numel()*int64(t.DType.Size()) < t.Storage.Bytes {
		out += ", in a storage of " + size(t.Storage.Bytes)
	}
	if t.RequiresGrad {
		out += ", requires_grad"
	}
	return out
}

func list(n []int64) string { return strings.ReplaceAll(fmt.Sprint(n), " ", ", ") }

// versions shows the commonest version, and the modules with another.
func versions(m any) string {
	d, ok := m.(*pickle.Dict)
	if !ok {
		return "?"
	}
	count := make(map[int64]int)
	type module struct {
		path    string
		version int64
	}
	var all []module
	for path, v := range d.Strings() {
		if local, ok := v.(*pickle.Dict); ok {
			if n, ok := local.Get("version"); ok {
				if n, ok := n.(int64); ok {
					count[n]++
					all = append(all, module{path, n})
				}
			}
		}
	}
	common := int64(1)
	for _, n := range slices.Sorted(maps.Keys(count)) {
		if count[n] > count[common] {
			common = n
		}
	}
	other := make(map[int64][]string)
	for _, m := range all {
		if m.version != common {
			other[m.version] = append(other[m.version], plain(m.path))
		}
	}
	out := fmt.Sprintf("%d for %d modules", common, count[common])
	for _, n := range slices.Sorted(maps.Keys(other)) {
		names := other[n]
		if len(names) > 4 {
			names = append(slices.Clone(names[:3]), fmt.Sprintf("… %d in all", len(other[n])))
		}
		out += fmt.Sprintf(", %d for %s", n, strings.Join(names, ", "))
	}
	return out
}

func size(n int64) string {
	switch {
	case n < 1<<10:
		return fmt.Sprintf("%d B", n)
	case n < 1<<20:
		return fmt.Sprintf("%.1f KiB", float64(n)/(1<<10))
	case n < 1<<30:
		return fmt.Sprintf("%.1f MiB", float64(n)/(1<<20))
	}
	return fmt.Sprintf("%.2f GiB", float64(n)/(1<<30))
}
