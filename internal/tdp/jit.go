package tdp

/*
#include <stdlib.h>
#include "../../csrc/tdp/tdp_jit.h"
*/
import "C"

import (
	"fmt"
	"maps"
	"runtime"
	"slices"
	"unsafe"

	"github.com/sugarme/gotch"
	"github.com/sugarme/gotch/ts"
)

// Script is a TorchScript module.
type Script struct{ h *C.tdp_script }

func newScript(h *C.tdp_script, err error) (*Script, error) {
	if err != nil {
		return nil, err
	}
	s := &Script{h: h}
	runtime.AddCleanup(s, func(h *C.tdp_script) { C.tdp_error_free(C.tdp_script_free(h)) }, h)
	return s, nil
}

// anywhere is the device of a load that leaves tensors where they were saved.
func anywhere(dev *gotch.Device) C.tdp_device {
	if dev == nil {
		return C.tdp_device{_type: -1, index: -1}
	}
	return device(*dev)
}

// LoadScript reads a file of torch.jit.save. A nil device leaves every tensor where it was saved.
func LoadScript(path string, dev *gotch.Device) (*Script, error) {
	p := C.CString(path)
	defer C.free(unsafe.Pointer(p))
	var h *C.tdp_script
	rec := C.tdp_script_load(p, anywhere(dev), &h)
	return newScript(h, done("torch.jit.load", rec))
}

// LoadScriptData is LoadScript from memory.
func LoadScriptData(data []byte, dev *gotch.Device) (*Script, error) {
	var h *C.tdp_script
	rec := C.tdp_script_load_data(ptr(data), C.uint64_t(len(data)), anywhere(dev), &h)
	return newScript(h, done("torch.jit.load", rec))
}

// Save writes a file that torch.jit.load reads.
func (s *Script) Save(path string) error {
	p := C.CString(path)
	defer C.free(unsafe.Pointer(p))
	return done("torch.jit.save", C.tdp_script_save(s.h, p), s)
}

// SaveData is Save to memory.
func (s *Script) SaveData() ([]byte, error) {
	var out C.tdp_bytes
	if err := done("torch.jit.save", C.tdp_script_save_data(s.h, &out), s); err != nil {
		return nil, err
	}
	defer C.tdp_bytes_free(&out)
	return slices.Clone(unsafe.Slice((*byte)(out.data), int(out.size))), nil
}

// ScriptKind tells what a ScriptEntry is.
type ScriptKind int32

// The kinds.
const (
	ScriptModule    ScriptKind = C.TDP_SCRIPT_MODULE
	ScriptParameter ScriptKind = C.TDP_SCRIPT_PARAMETER
	ScriptBuffer    ScriptKind = C.TDP_SCRIPT_BUFFER
)

// ScriptEntry is a module, a parameter or a buffer.
type ScriptEntry struct {
	Kind   ScriptKind
	Parent int // the entry of the module it belongs to; -1 for the root
	Name   string
	Type   string // of a module: its Python class
	Tensor *ts.Tensor
}

// Tree lists the modules with their parameters and buffers, in Python's order.
func (s *Script) Tree() ([]ScriptEntry, error) {
	var list C.tdp_script_entries
	if err := done("TorchScript tree", C.tdp_script_tree(s.h, &list), s); err != nil {
		return nil, err
	}
	defer C.tdp_script_entries_free(&list)
	entries := unsafe.Slice(list.entries, int(list.n))
	out := make([]ScriptEntry, len(entries))
	for i := range entries {
		e := &entries[i]
		out[i] = ScriptEntry{Kind: ScriptKind(e.kind), Parent: int(e.parent), Name: C.GoString(e.name), Type: C.GoString(e._type), Tensor: tensor(e.tensor)}
		e.tensor = nil
	}
	return out, nil
}

// Train sets the modules, in the order of the tree, to training or evaluation.
func (s *Script) Train(flags []bool) error {
	b := make([]byte, len(flags))
	for i, on := range flags {
		if on {
			b[i] = 1
		}
	}
	return done("TorchScript train", C.tdp_script_train(s.h, (*C.uint8_t)(unsafe.SliceData(b)), C.int32_t(len(b))), s)
}

// Tuple is a Python tuple.
type Tuple []any

// Field is a member of a NamedTuple.
type Field struct {
	Name  string
	Value any
}

// NamedTuple is a typing.NamedTuple that a method returned.
type NamedTuple []Field

// Entry is a member of a Dict.
type Entry struct{ Key, Value any }

// Dict is a Python dict in its order.
type Dict []Entry

// ScriptOptimize sets whether TorchScript may rewrite graphs at run time, in the whole process, and tells whether it
// might.
func ScriptOptimize(on bool) (previous bool, err error) {
	var prev C.int32_t
	err = done("TorchScript optimize", C.tdp_script_optimize(flag(on), &prev))
	return prev != 0, err
}

// Call calls a method. Arguments and results are nil, *ts.Tensor, int64, float64, bool, string, []any for lists, Tuple and
// Dict; as arguments also int, slices of these and maps from strings to tensors. Tensors of the result are the caller's.
func (s *Script) Call(method string, args ...any) (any, error) {
	m := C.CString(method)
	defer C.free(unsafe.Pointer(m))
	in := C.tdp_value{kind: C.TDP_VALUE_TUPLE}
	defer release(&in)
	if err := pack(&in, args); err != nil {
		return nil, &Error{Op: "TorchScript " + method, Message: err.Error(), kind: ErrValue}
	}
	var out C.tdp_value
	rec := C.tdp_script_call(s.h, m, in.items, C.int32_t(in.n), &out)
	if err := done("TorchScript "+method, rec, s, args); err != nil {
		return nil, err
	}
	defer C.tdp_value_clear(&out)
	return unpack(&out), nil
}

// pack makes v a sequence. The tensors stay borrowed: release does not free them.
func pack[T any](v *C.tdp_value, items []T) error {
	if len(items) == 0 {
		return nil
	}
	v.items = (*C.tdp_value)(C.calloc(C.size_t(len(items)), C.size_t(unsafe.Sizeof(*v))))
	v.n = C.int64_t(len(items))
	out := unsafe.Slice(v.items, len(items))
	for i := range items {
		if err := encode(&out[i], items[i]); err != nil {
			return err
		}
	}
	return nil
}

func release(v *C.tdp_value) {
	if v.items != nil {
		items := unsafe.Slice(v.items, int(v.n))
		for i := range items {
			release(&items[i])
		}
		C.free(unsafe.Pointer(v.items))
	}
	C.free(unsafe.Pointer(v.s))
}

func encode(v *C.tdp_value, x any) error {
	switch x := x.(type) {
	case nil:
		v.kind = C.TDP_VALUE_NONE
	case *ts.Tensor:
		v.kind, v.t = C.TDP_VALUE_TENSOR, handle(x)
	case int:
		v.kind, v.i = C.TDP_VALUE_INT, C.int64_t(x)
	case int64:
		v.kind, v.i = C.TDP_VALUE_INT, C.int64_t(x)
	case float64:
		v.kind, v.d = C.TDP_VALUE_DOUBLE, C.double(x)
	case bool:
		v.kind, v.i = C.TDP_VALUE_BOOL, C.int64_t(flag(x))
	case string:
		v.kind, v.s, v.n = C.TDP_VALUE_STRING, C.CString(x), C.int64_t(len(x))
	case Tuple:
		v.kind = C.TDP_VALUE_TUPLE
		return pack(v, x)
	case []any:
		v.kind = C.TDP_VALUE_LIST
		return pack(v, x)
	case []*ts.Tensor:
		v.kind = C.TDP_VALUE_LIST
		return pack(v, x)
	case []int64:
		v.kind = C.TDP_VALUE_LIST
		return pack(v, x)
	case []float64:
		v.kind = C.TDP_VALUE_LIST
		return pack(v, x)
	case []bool:
		v.kind = C.TDP_VALUE_LIST
		return pack(v, x)
	case []string:
		v.kind = C.TDP_VALUE_LIST
		return pack(v, x)
	case Dict:
		v.kind = C.TDP_VALUE_DICT
		var flat []any
		for _, e := range x {
			flat = append(flat, e.Key, e.Value)
		}
		return pack(v, flat)
	case map[string]*ts.Tensor:
		v.kind = C.TDP_VALUE_DICT
		var flat []any
		for _, k := range slices.Sorted(maps.Keys(x)) {
			flat = append(flat, k, x[k])
		}
		return pack(v, flat)
	default:
		return fmt.Errorf("a Go %T has no counterpart in TorchScript", x)
	}
	return nil
}

// unpack gives a result to Go, which owns its tensors from then on.
func unpack(v *C.tdp_value) any {
	var items []C.tdp_value
	if v.items != nil {
		items = unsafe.Slice(v.items, int(v.n))
	}
	switch v.kind {
	case C.TDP_VALUE_TENSOR:
		t := tensor(v.t)
		v.t = nil
		return t
	case C.TDP_VALUE_INT:
		return int64(v.i)
	case C.TDP_VALUE_DOUBLE:
		return float64(v.d)
	case C.TDP_VALUE_BOOL:
		return v.i != 0
	case C.TDP_VALUE_STRING:
		return C.GoStringN(v.s, C.int(v.n))
	case C.TDP_VALUE_LIST:
		out := make([]any, len(items))
		for i := range items {
			out[i] = unpack(&items[i])
		}
		return out
	case C.TDP_VALUE_TUPLE:
		if len(items) > 0 && items[0].name != nil {
			out := make(NamedTuple, len(items))
			for i := range items {
				out[i] = Field{C.GoString(items[i].name), unpack(&items[i])}
			}
			return out
		}
		out := make(Tuple, len(items))
		for i := range items {
			out[i] = unpack(&items[i])
		}
		return out
	case C.TDP_VALUE_DICT:
		out := make(Dict, len(items)/2)
		for i := range out {
			out[i] = Entry{unpack(&items[2*i]), unpack(&items[2*i+1])}
		}
		return out
	}
	return nil
}
