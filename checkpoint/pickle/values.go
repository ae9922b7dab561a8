package pickle

import (
	"fmt"
	"iter"
	"math"
	"math/big"
	"strconv"
	"strings"
)

// List is Python's list.
type List struct{ Items []any }

// NewList makes a list of the given values.
func NewList(items ...any) *List { return &List{Items: items} }

// Tuple is Python's tuple.
type Tuple struct{ Items []any }

// NewTuple makes a tuple of the given values.
func NewTuple(items ...any) *Tuple { return &Tuple{Items: items} }

// Set is Python's set. Items keep the order in which they were written.
type Set struct{ Items []any }

// ByteArray is Python's bytearray.
type ByteArray []byte

// Global names a Python function or class. Reading never resolves it to code.
type Global struct{ Module, Name string }

func (g Global) String() string { return g.Module + "." + g.Name }

// Object is a call that was read, or is to be written, as it stands: Func(*Args), then the state given to BUILD.
type Object struct {
	Func  Global
	Args  *Tuple
	State any // nil for none
}

// DictKind tells Python's ordered mappings apart.
type DictKind uint8

const (
	PlainDict   DictKind = iota // dict
	OrderedDict                 // collections.OrderedDict
	Counter                     // collections.Counter
)

func (k DictKind) String() string {
	switch k {
	case OrderedDict:
		return "OrderedDict"
	case Counter:
		return "Counter"
	}
	return "dict"
}

// Dict is an ordered mapping: Python's dict, OrderedDict or Counter. The zero value is an empty dict.
//
// Keys are what Python can hash: nil, bool, numbers, string, []byte, *Tuple of those. As in Python, 1, 1.0 and true
// are one key.
type Dict struct {
	Kind DictKind
	// Attrs holds the attributes of an OrderedDict, nil for none. A module's state_dict carries its versions here,
	// under "_metadata".
	Attrs *Dict

	keys, values []any
	index        map[any]int
}

// NewDict makes an empty dict.
func NewDict() *Dict { return &Dict{} }

// NewOrderedDict makes an empty collections.OrderedDict.
func NewOrderedDict() *Dict { return &Dict{Kind: OrderedDict} }

// Len is the number of entries.
func (d *Dict) Len() int {
	if d == nil {
		return 0
	}
	return len(d.keys)
}

// Set adds an entry, or replaces the value of the one that has this key. It panics on a key that Python cannot
// hash; use Put for keys that were not written in the program.
func (d *Dict) Set(key, value any) *Dict {
	if err := d.Put(key, value); err != nil {
		panic(err)
	}
	return d
}

// Put is Set with an error for keys that cannot be hashed.
func (d *Dict) Put(key, value any) error {
	k, err := hashKey(key)
	if err != nil {
		return err
	}
	if d.index == nil {
		d.index = make(map[any]int)
	}
	if i, ok := d.index[k]; ok {
		d.values[i] = value
		return nil
	}
	d.index[k] = len(d.keys)
	d.keys = append(d.keys, key)
	d.values = append(d.values, value)
	return nil
}

// Get gives the value of a key.
func (d *Dict) Get(key any) (any, bool) {
	if d == nil || d.index == nil {
		return nil, false
	}
	k, err := hashKey(key)
	if err != nil {
		return nil, false
	}
	i, ok := d.index[k]
	if !ok {
		return nil, false
	}
	return d.values[i], true
}

// Delete removes an entry and tells whether it was there. It takes time in proportion to the dict's size.
func (d *Dict) Delete(key any) bool {
	k, err := hashKey(key)
	if err != nil || d == nil {
		return false
	}
	at, ok := d.index[k]
	if !ok {
		return false
	}
	delete(d.index, k)
	d.keys = append(d.keys[:at], d.keys[at+1:]...)
	d.values = append(d.values[:at], d.values[at+1:]...)
	for k, i := range d.index {
		if i > at {
			d.index[k] = i - 1
		}
	}
	return true
}

// All gives the entries in order.
func (d *Dict) All() iter.Seq2[any, any] {
	return func(yield func(any, any) bool) {
		for i := 0; i < d.Len(); i++ {
			if !yield(d.keys[i], d.values[i]) {
				return
			}
		}
	}
}

// Strings gives the entries whose key is a string, in order.
func (d *Dict) Strings() iter.Seq2[string, any] {
	return func(yield func(string, any) bool) {
		for k, v := range d.All() {
			if s, ok := k.(string); ok && !yield(s, v) {
				return
			}
		}
	}
}

// bytesKey and tupleKey keep the keys of other types apart from strings with the same text.
type (
	bytesKey string
	tupleKey string
	bigKey   string
	objKey   struct{ g Global }
)

const maxKeyParts = 256

// hashKey maps a key to a comparable Go value, equal for keys that are equal in Python.
func hashKey(key any) (any, error) {
	switch k := key.(type) {
	case nil, string, int64, complex128:
		return k, nil
	case bool:
		if k {
			return int64(1), nil
		}
		return int64(0), nil
	case int:
		return int64(k), nil
	case int32:
		return int64(k), nil
	case uint8:
		return int64(k), nil
	case float64:
		if k == math.Trunc(k) && math.Abs(k) < 1<<62 {
			return int64(k), nil
		}
		return k, nil
	case *big.Int:
		if k == nil {
			return nil, fmt.Errorf("a nil *big.Int cannot be a dict key")
		}
		if k.IsInt64() {
			return k.Int64(), nil
		}
		return bigKey(k.String()), nil
	case []byte:
		return bytesKey(k), nil
	case Global:
		return objKey{k}, nil
	case *Tuple:
		var b strings.Builder
		parts := 0
		if err := tupleText(&b, k, &parts); err != nil {
			return nil, err
		}
		return tupleKey(b.String()), nil
	}
	return nil, fmt.Errorf("a value of type %T cannot be a dict key", key)
}

func tupleText(b *strings.Builder, t *Tuple, parts *int) error {
	if t == nil {
		return fmt.Errorf("a nil *Tuple cannot be a dict key")
	}
	b.WriteByte('(')
	for _, item := range t.Items {
		if *parts++; *parts > maxKeyParts {
			return fmt.Errorf("a tuple of more than %d parts cannot be a dict key", maxKeyParts)
		}
		if inner, ok := item.(*Tuple); ok {
			if err := tupleText(b, inner, parts); err != nil {
				return err
			}
			continue
		}
		k, err := hashKey(item)
		if err != nil {
			return err
		}
		s := fmt.Sprintf("%T %v", k, k)
		b.WriteString(strconv.Itoa(len(s)))
		b.WriteByte(':')
		b.WriteString(s)
	}
	b.WriteByte(')')
	return nil
}
