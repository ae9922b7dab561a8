package checkpoint

import (
	"fmt"
	"iter"
	"math/big"
	"slices"
	"strings"

	"github.com/sugarme/gotch"
	"github.com/sugarme/gotch/ts"

	"github.com/goddp/goddp/checkpoint/pickle"
	"github.com/goddp/goddp/checkpoint/ptfile"
)

// The containers of checkpoint values; package pickle describes them.
type (
	Dict  = pickle.Dict
	List  = pickle.List
	Tuple = pickle.Tuple
)

// NewDict makes an empty Python dict.
func NewDict() *Dict { return pickle.NewDict() }

// NewOrderedDict makes an empty collections.OrderedDict.
func NewOrderedDict() *Dict { return pickle.NewOrderedDict() }

// NewList makes a Python list.
func NewList(items ...any) *List { return pickle.NewList(items...) }

// NewTuple makes a Python tuple.
func NewTuple(items ...any) *Tuple { return pickle.NewTuple(items...) }

// Parameter is a tensor that is a torch.nn.Parameter in Python. A module's state_dict holds plain tensors; parameters
// occur where Python code saved one itself.
type Parameter struct {
	Tensor       *ts.Tensor
	RequiresGrad bool
	State        any // attributes that Python code set on it, or nil
}

// StateDict is a module's state_dict: its parameters and buffers by name, in the module's order, and the versions of
// the modules that they belong to. The zero value is empty and ready.
//
// It borrows the tensors: whoever made them drops them.
type StateDict struct {
	names    []string
	tensors  []*ts.Tensor
	index    map[string]int
	modules  []string
	versions []int64
}

// NewStateDict makes an empty StateDict.
func NewStateDict() *StateDict { return &StateDict{} }

// Len is the number of tensors.
func (s *StateDict) Len() int { return len(s.names) }

// Set adds a tensor, or replaces the one of this name.
func (s *StateDict) Set(name string, t *ts.Tensor) *StateDict {
	if i, ok := s.index[name]; ok {
		s.tensors[i] = t
		return s
	}
	if s.index == nil {
		s.index = make(map[string]int)
	}
	s.index[name] = len(s.names)
	s.names = append(s.names, name)
	s.tensors = append(s.tensors, t)
	return s
}

// Get gives the tensor of a name.
func (s *StateDict) Get(name string) (*ts.Tensor, bool) {
	i, ok := s.index[name]
	if !ok {
		return nil, false
	}
	return s.tensors[i], true
}

// Names are the names in order.
func (s *StateDict) Names() []string { return slices.Clone(s.names) }

// All gives names and tensors in order.
func (s *StateDict) All() iter.Seq2[string, *ts.Tensor] {
	return func(yield func(string, *ts.Tensor) bool) {
		for i, n := range s.names {
			if !yield(n, s.tensors[i]) {
				return
			}
		}
	}
}

// SetVersion records the version of the module at path ("" is the whole). Python reads it to adapt old files: batch
// norm has version 2, almost everything else 1.
func (s *StateDict) SetVersion(path string, version int64) *StateDict {
	if i := slices.Index(s.modules, path); i >= 0 {
		s.versions[i] = version
		return s
	}
	s.modules = append(s.modules, path)
	s.versions = append(s.versions, version)
	return s
}

// Version gives the version of the module at path.
func (s *StateDict) Version(path string) (int64, bool) {
	if i := slices.Index(s.modules, path); i >= 0 {
		return s.versions[i], true
	}
	return 0, false
}

// Versions gives the paths and versions of the modules in order.
func (s *StateDict) Versions() iter.Seq2[string, int64] {
	return func(yield func(string, int64) bool) {
		for i, m := range s.modules {
			if !yield(m, s.versions[i]) {
				return
			}
		}
	}
}

// DDPPrefix is what names begin with when the model was saved inside DistributedDataParallel.
const DDPPrefix = "module."

// StripPrefix gives the same state without prefix before every name that has it, as
// torch.nn.modules.utils.consume_prefix_in_state_dict_if_present does. Use it with [DDPPrefix] for files that were
// saved as ddp.state_dict().
func (s *StateDict) StripPrefix(prefix string) *StateDict {
	out := NewStateDict()
	for n, t := range s.All() {
		out.Set(strings.TrimPrefix(n, prefix), t)
	}
	for m, v := range s.Versions() {
		switch {
		case m == "" && prefix != "": // the wrapper's own
		case m == strings.TrimSuffix(prefix, "."):
			out.SetVersion("", v)
		default:
			out.SetVersion(strings.TrimPrefix(m, prefix), v)
		}
	}
	return out
}

// AddPrefix gives the same state with prefix before every name, as a model wrapped in DistributedDataParallel has it.
func (s *StateDict) AddPrefix(prefix string) *StateDict {
	out := NewStateDict()
	for n, t := range s.All() {
		out.Set(prefix+n, t)
	}
	if len(s.modules) > 0 {
		out.SetVersion("", 1)
	}
	for m, v := range s.Versions() {
		out.SetVersion(strings.TrimSuffix(prefix+m, "."), v)
	}
	return out
}

// StateDictOf takes the state_dict in a loaded value: a dict whose keys are strings and whose values are tensors.
func StateDictOf(v any) (*StateDict, error) {
	if s, ok := v.(*StateDict); ok && s != nil {
		return s, nil
	}
	d, ok := v.(*Dict)
	if !ok || d == nil {
		return nil, fmt.Errorf("a state dict was expected, not %s", describe(v))
	}
	out := NewStateDict()
	for k, v := range d.All() {
		name, ok := k.(string)
		if !ok {
			return nil, fmt.Errorf("a state dict with the key %v, which is not a string", k)
		}
		switch t := v.(type) {
		case *ts.Tensor:
			out.Set(name, t)
		case *Parameter:
			out.Set(name, t.Tensor)
		default:
			return nil, fmt.Errorf("a state dict whose entry %q is not a tensor but %s", name, describe(v))
		}
	}
	if m, ok := d.Attrs.Get("_metadata"); ok {
		if meta, ok := m.(*Dict); ok {
			for path, v := range meta.Strings() {
				if local, ok := v.(*Dict); ok {
					if n, ok := local.Get("version"); ok {
						if n, ok := n.(int64); ok {
							out.SetVersion(path, n)
						}
					}
				}
			}
		}
	}
	return out, nil
}

func describe(v any) string {
	switch x := v.(type) {
	case nil:
		return "None"
	case *Dict:
		return fmt.Sprintf("a %s of %d entries", x.Kind, x.Len())
	case *List:
		return fmt.Sprintf("a list of %d", len(x.Items))
	case *Tuple:
		return fmt.Sprintf("a tuple of %d", len(x.Items))
	case *ts.Tensor, *ptfile.Tensor:
		return "a tensor"
	case *Parameter, *ptfile.Parameter:
		return "a parameter"
	case string:
		return fmt.Sprintf("the string %.40q", x)
	case int64, float64, bool, *big.Int:
		return fmt.Sprintf("%v", x)
	}
	return fmt.Sprintf("a %T", v)
}

// Get follows path (dict keys, list indices) into a loaded value and gives what lies there as a T:
//
//	epoch, err := checkpoint.Get[int64](ckpt, "epoch")
//	sd, err := checkpoint.Get[*checkpoint.StateDict](ckpt, "model")
//	beta1, err := checkpoint.Get[float64](ckpt, "optimizer", "param_groups", 0, "betas", 0)
//
// A whole number counts as a float64, a parameter as its *ts.Tensor, a list or tuple of numbers as []int64 or
// []float64, a dict of tensors as a *StateDict.
func Get[T any](v any, path ...any) (T, error) {
	var zero T
	at := v
	for i, step := range path {
		var ok bool
		switch c := at.(type) {
		case *Dict:
			at, ok = c.Get(step)
		case *StateDict:
			var name string
			if name, ok = step.(string); ok {
				at, ok = c.Get(name)
			}
		case *List:
			at, ok = item(c.Items, step)
		case *Tuple:
			at, ok = item(c.Items, step)
		}
		if !ok {
			return zero, fmt.Errorf("%s: no such entry in %s", pathText(path[:i+1]), describe(at))
		}
	}
	out, err := as[T](at)
	if err != nil && len(path) > 0 {
		err = fmt.Errorf("%s: %w", pathText(path), err)
	}
	return out, err
}

func item(items []any, step any) (any, bool) {
	i, ok := step.(int)
	if !ok || i < 0 || i >= len(items) {
		return nil, false
	}
	return items[i], true
}

func pathText(path []any) string {
	var b strings.Builder
	for _, p := range path {
		fmt.Fprintf(&b, "[%#v]", p)
	}
	return b.String()
}

func as[T any](v any) (T, error) {
	if x, ok := v.(T); ok {
		return x, nil
	}
	var out T
	var err error
	switch p := any(&out).(type) {
	case *float64:
		if n, ok := v.(int64); ok {
			*p = float64(n)
			return out, nil
		}
	case *int:
		if n, ok := v.(int64); ok && int64(int(n)) == n {
			*p = int(n)
			return out, nil
		}
	case **ts.Tensor:
		if x, ok := v.(*Parameter); ok {
			*p = x.Tensor
			return out, nil
		}
	case **StateDict:
		*p, err = StateDictOf(v)
		return out, err
	case *[]int64:
		if *p, err = slice[int64](v); err == nil {
			return out, nil
		}
	case *[]float64:
		if *p, err = slice[float64](v); err == nil {
			return out, nil
		}
	case *[]string:
		if *p, err = slice[string](v); err == nil {
			return out, nil
		}
	case *gotch.DType:
		if d, ok := v.(ptfile.DType); ok {
			*p = gotch.DType(d)
			return out, nil
		}
	}
	return out, fmt.Errorf("a %T was expected, not %s", out, describe(v))
}

func slice[T any](v any) ([]T, error) {
	var items []any
	switch c := v.(type) {
	case *List:
		items = c.Items
	case *Tuple:
		items = c.Items
	case *pickle.Object: // torch.Size
		if c.Func.Name == "Size" && c.Args != nil && len(c.Args.Items) == 1 {
			return slice[T](c.Args.Items[0])
		}
		return nil, fmt.Errorf("not a list")
	default:
		return nil, fmt.Errorf("not a list")
	}
	out := make([]T, len(items))
	for i, x := range items {
		var err error
		if out[i], err = as[T](x); err != nil {
			return nil, err
		}
	}
	return out, nil
}
