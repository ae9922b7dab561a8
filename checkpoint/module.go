package checkpoint

import (
	"fmt"
	"iter"
	"reflect"
	"slices"
	"strconv"
	"strings"

	"github.com/sugarme/gotch/ts"

	"github.com/goddp/goddp/internal/tdp"
)

// Module is what has a state: parameters and buffers by name, in a fixed order. The models of this module and
// torchddp.DDP are such.
type Module interface {
	NamedParameters() iter.Seq2[string, *ts.Tensor]
	NamedBuffers() iter.Seq2[string, *ts.Tensor]
}

// StateLister is a Module that knows its state_dict exactly as Python's: shared tensors under each of their names,
// without buffers that are not persistent, module after module. Without it the state is put together from the names.
type StateLister interface {
	NamedState() iter.Seq2[string, *ts.Tensor]
}

// VersionLister is a Module that knows the path and version of every module in it, in order; "" is the whole.
type VersionLister interface {
	ModuleVersions() iter.Seq2[string, int64]
}

// ModuleState gives the state_dict of a module. It borrows the module's tensors.
func ModuleState(m Module) *StateDict {
	sd := NewStateDict()
	if v, ok := m.(VersionLister); ok {
		for path, version := range v.ModuleVersions() {
			sd.SetVersion(path, version)
		}
	}
	if l, ok := m.(StateLister); ok {
		for name, t := range l.NamedState() {
			sd.Set(name, t)
		}
		return sd
	}
	// Python lists a module's parameters, then its buffers, then its children. Parameters come in the children's order,
	// so each buffer belongs after the last parameter of its own module, and new modules come in the order in which
	// their names first appear.
	type own struct {
		names   []string
		tensors []*ts.Tensor
	}
	var order []string
	modules := make(map[string]*own)
	at := func(path string) *own {
		if modules[path] == nil {
			modules[path] = &own{}
			order = append(order, path)
		}
		return modules[path]
	}
	for path := range sd.Versions() {
		at(path)
	}
	for _, seq := range []iter.Seq2[string, *ts.Tensor]{m.NamedParameters(), m.NamedBuffers()} {
		for name, t := range seq {
			path, _ := splitName(name)
			o := at(path)
			o.names = append(o.names, name)
			o.tensors = append(o.tensors, t)
		}
	}
	for _, path := range order {
		for i, name := range modules[path].names {
			sd.Set(name, modules[path].tensors[i])
		}
	}
	return sd
}

func splitName(name string) (module, leaf string) {
	if i := strings.LastIndexByte(name, '.'); i >= 0 {
		return name[:i], name[i+1:]
	}
	return "", name
}

// IncompatibleKeys are the names in which a state dict and a model differ.
type IncompatibleKeys struct {
	Missing    []string // in the model, not in the file
	Unexpected []string // in the file, not in the model
}

// Mismatch is a tensor whose shape in the file is another than in the model.
type Mismatch struct {
	Name        string
	File, Model []int64
}

// StateDictError says all that keeps a state dict from being loaded into a model, in Python's words.
type StateDictError struct {
	Class string // the model's type
	IncompatibleKeys
	Mismatched []Mismatch
	strict     bool
}

func (e *StateDictError) Error() string {
	var lines []string
	if e.strict && len(e.Missing) > 0 {
		lines = append(lines, "Missing key(s) in state_dict: "+quoted(e.Missing)+". ")
	}
	if e.strict && len(e.Unexpected) > 0 {
		lines = append(lines, "Unexpected key(s) in state_dict: "+quoted(e.Unexpected)+". ")
	}
	for _, m := range e.Mismatched {
		lines = append(lines, fmt.Sprintf("size mismatch for %s: copying a param with shape %s from checkpoint, the shape in current model is %s.",
			m.Name, sizeText(m.File), sizeText(m.Model)))
	}
	text := fmt.Sprintf("Error(s) in loading state_dict for %s:\n\t%s", e.Class, strings.Join(lines, "\n\t"))
	if hint := e.hint(); hint != "" {
		text += "\n\t" + hint
	}
	return text
}

// hint spots the commonest cause: a file saved as ddp.state_dict() for a bare model, or the reverse.
func (e *StateDictError) hint() string {
	prefixed := func(names []string) bool {
		return len(names) > 0 && !slices.ContainsFunc(names, func(n string) bool { return !strings.HasPrefix(n, DDPPrefix) })
	}
	switch {
	case prefixed(e.Unexpected) && len(e.Missing) > 0 && !prefixed(e.Missing):
		return `The file was saved from inside DistributedDataParallel: load sd.StripPrefix("module.").`
	case prefixed(e.Missing) && len(e.Unexpected) > 0 && !prefixed(e.Unexpected):
		return `The model is inside DistributedDataParallel, the file is of the bare model: load sd.AddPrefix("module.").`
	}
	return ""
}

func quoted(names []string) string {
	q := make([]string, len(names))
	for i, n := range names {
		q[i] = `"` + n + `"`
	}
	return strings.Join(q, ", ")
}

func sizeText(shape []int64) string {
	s := make([]string, len(shape))
	for i, n := range shape {
		s[i] = strconv.FormatInt(n, 10)
	}
	return "torch.Size([" + strings.Join(s, ", ") + "])"
}

// LoadStateDict copies sd's tensors into m's parameters and buffers, across dtypes and devices. With strict, names
// that only one side has are an error; without, they are only reported. Different shapes are an error either way.
//
// All is checked before anything is copied, so m is unchanged after a [StateDictError]; Python's copies what fits.
func LoadStateDict(m Module, sd *StateDict, strict bool) (IncompatibleKeys, error) {
	if sd == nil {
		return IncompatibleKeys{}, fmt.Errorf("loading a state dict: it is nil")
	}
	model := ModuleState(m)
	e := &StateDictError{Class: className(m), strict: strict}
	type pair struct {
		name     string
		dst, src *ts.Tensor
		info     tdp.TensorInfo
		first    bool // take the only element of a one-dimensional src
	}
	var pairs []pair
	for name, dst := range model.All() {
		src, ok := sd.Get(name)
		if !ok {
			if !addedLater(name, sd) {
				e.Missing = append(e.Missing, name)
			}
			continue
		}
		to, err := tdp.Describe(dst)
		if err != nil {
			return IncompatibleKeys{}, fmt.Errorf("%q of the model: %w", name, err)
		}
		from, err := tdp.Describe(src)
		if err != nil {
			return IncompatibleKeys{}, fmt.Errorf("%q of the state dict: %w", name, err)
		}
		// Scalars were saved with one dimension before PyTorch 0.4.
		scalar := len(to.Shape) == 0 && len(from.Shape) == 1 && from.Numel > 0
		if !scalar && !slices.Equal(to.Shape, from.Shape) {
			e.Mismatched = append(e.Mismatched, Mismatch{name, from.Shape, to.Shape})
			continue
		}
		pairs = append(pairs, pair{name, dst, src, from, scalar})
	}
	e.Unexpected = unexpected(model, sd)
	if len(e.Mismatched) > 0 || strict && len(e.Missing)+len(e.Unexpected) > 0 {
		return e.IncompatibleKeys, e
	}
	for _, p := range pairs {
		src := p.src
		if p.first {
			one, err := tdp.ViewStorage(src, p.info.DType, []int64{}, []int64{}, p.info.Offset)
			if err != nil {
				return e.IncompatibleKeys, fmt.Errorf("%q: %w", p.name, err)
			}
			defer drop(one)
			src = one
		}
		if err := tdp.Copy(p.dst, src, false); err != nil {
			return e.IncompatibleKeys, fmt.Errorf("%q: %w", p.name, err)
		}
	}
	return e.IncompatibleKeys, nil
}

// addedLater: batch norm has num_batches_tracked since its version 2, and keeps its own count for older files.
func addedLater(name string, sd *StateDict) bool {
	module, leaf := splitName(name)
	if leaf != "num_batches_tracked" {
		return false
	}
	v, ok := sd.Version(module)
	return !ok || v < 2
}

// unexpected lists the names that the model lacks, in the order in which Python's walk over the modules meets them.
func unexpected(model, sd *StateDict) []string {
	var order []string
	own := make(map[string]map[string]bool)      // module -> its entries
	children := make(map[string]map[string]bool) // module -> its children
	var add func(path string)
	add = func(path string) {
		if own[path] != nil {
			return
		}
		own[path], children[path] = make(map[string]bool), make(map[string]bool)
		if path != "" {
			parent, leaf := splitName(path)
			add(parent)
			children[parent][leaf] = true
		}
		order = append(order, path)
	}
	add("")
	for path := range model.Versions() {
		add(path)
	}
	for name := range model.All() {
		path, leaf := splitName(name)
		add(path)
		own[path][leaf] = true
	}
	var strange []string // most state dicts have none; then there is no walk
	for name := range sd.All() {
		if _, ok := model.Get(name); !ok {
			strange = append(strange, name)
		}
	}
	if len(strange) == 0 {
		return nil
	}
	var out []string
	for _, path := range order {
		prefix := path + "."
		if path == "" {
			prefix = ""
		}
		for _, name := range strange {
			rest, ok := strings.CutPrefix(name, prefix)
			if !ok {
				continue
			}
			head, _, deeper := strings.Cut(rest, ".")
			if deeper && !children[path][head] || !deeper && !own[path][head] {
				out = append(out, name)
			}
		}
	}
	return out
}

// className is the name of m's type, as Python's __class__.__name__.
func className(m any) string {
	if n, ok := m.(interface{ ClassName() string }); ok {
		return n.ClassName()
	}
	t := reflect.TypeOf(m)
	for t != nil && t.Kind() == reflect.Pointer {
		t = t.Elem()
	}
	if t == nil {
		return "nil"
	}
	return t.Name()
}
