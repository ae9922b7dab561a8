package torchddp

import (
	"bytes"
	"encoding/gob"
	"encoding/json"
	"fmt"
	"math"
	"math/big"
	"reflect"
	"runtime"
	"slices"
	"strings"

	"github.com/goddp/goddp/checkpoint/pickle"
)

// Codec turns the values of object collectives into bytes and back. Marshal gets the value, Unmarshal a pointer to one.
type Codec interface {
	Marshal(v any) ([]byte, error)
	Unmarshal(data []byte, into any) error
}

// The codecs of object collectives.
var (
	// Gob is encoding/gob: any Go type with exported fields, between programs that know the type. It is the default.
	Gob Codec = gobCodec{}
	// JSON is encoding/json.
	JSON Codec = jsonCodec{}
	// Pickle is what Python ranks read and write. Values are what has a counterpart in Python: numbers, strings,
	// []byte, slices (lists), maps (dicts), structs (dicts by field name, or by the name in a `json:"..."` tag) and
	// nil. What comes from Python goes into such types as well; into an any it becomes bool, int64, float64, string,
	// []byte, []any, map[string]any (or map[any]any), nil. Nothing that a pickle names is ever run: a value of any other
	// class is an error.
	Pickle Codec = pickleCodec{}
)

type gobCodec struct{}

func (gobCodec) Marshal(v any) ([]byte, error) {
	var b bytes.Buffer
	// By pointer, so that an interface value keeps its type.
	if err := gob.NewEncoder(&b).Encode(&v); err == nil {
		return append([]byte{1}, b.Bytes()...), nil
	}
	b.Reset()
	if err := gob.NewEncoder(&b).Encode(v); err != nil {
		return nil, err
	}
	return append([]byte{0}, b.Bytes()...), nil
}

func (gobCodec) Unmarshal(data []byte, into any) error {
	if len(data) == 0 {
		return fmt.Errorf("no data")
	}
	d := gob.NewDecoder(bytes.NewReader(data[1:]))
	if data[0] == 0 {
		return d.Decode(into)
	}
	var v any
	if err := d.Decode(&v); err != nil {
		return err
	}
	return assign(reflect.ValueOf(into).Elem(), v)
}

type jsonCodec struct{}

func (jsonCodec) Marshal(v any) ([]byte, error)         { return json.Marshal(v) }
func (jsonCodec) Unmarshal(data []byte, into any) error { return json.Unmarshal(data, into) }

type pickleCodec struct{}

func (pickleCodec) Marshal(v any) ([]byte, error) {
	p, err := toPickle(reflect.ValueOf(v), 0)
	if err != nil {
		return nil, err
	}
	return pickle.Marshal(p, pickle.EncodeOptions{})
}

func (pickleCodec) Unmarshal(data []byte, into any) error {
	v, err := pickle.Unmarshal(data, pickle.DecodeOptions{})
	if err != nil {
		return err
	}
	return assign(reflect.ValueOf(into).Elem(), v)
}

// objectSite is where the program calls an object collective.
func objectSite() uintptr {
	var pc [1]uintptr
	runtime.Callers(4, pc[:])
	return pc[0]
}

// fieldName is a struct field's name in a dict, or "" for fields that are left out.
func fieldName(f reflect.StructField) string {
	if !f.IsExported() {
		return ""
	}
	tag, _, _ := strings.Cut(f.Tag.Get("json"), ",")
	switch tag {
	case "-":
		return ""
	case "":
		return f.Name
	}
	return tag
}

// toPickle turns Go values into those that package pickle writes.
func toPickle(v reflect.Value, depth int) (any, error) {
	if depth > pickle.MaxDepth {
		return nil, valueErrorf("values are nested deeper than %d", pickle.MaxDepth)
	}
	if !v.IsValid() {
		return nil, nil
	}
	switch x := v.Interface().(type) {
	case *pickle.List, *pickle.Tuple, *pickle.Set, *pickle.Dict, pickle.ByteArray, *big.Int, []byte:
		return x, nil
	}
	switch v.Kind() {
	case reflect.Bool:
		return v.Bool(), nil
	case reflect.Int, reflect.Int8, reflect.Int16, reflect.Int32, reflect.Int64:
		return v.Int(), nil
	case reflect.Uint, reflect.Uint8, reflect.Uint16, reflect.Uint32, reflect.Uint64:
		return v.Uint(), nil
	case reflect.Float32, reflect.Float64:
		return v.Float(), nil
	case reflect.Complex64, reflect.Complex128:
		return v.Complex(), nil
	case reflect.String:
		return v.String(), nil
	case reflect.Pointer, reflect.Interface:
		if v.IsNil() {
			return nil, nil
		}
		return toPickle(v.Elem(), depth+1)
	case reflect.Slice, reflect.Array:
		if v.Kind() == reflect.Slice && v.Type().Elem().Kind() == reflect.Uint8 {
			return v.Bytes(), nil
		}
		list := pickle.NewList()
		for i := range v.Len() {
			x, err := toPickle(v.Index(i), depth+1)
			if err != nil {
				return nil, err
			}
			list.Items = append(list.Items, x)
		}
		return list, nil
	case reflect.Map:
		dict := pickle.NewDict()
		keys := v.MapKeys()
		sortKeys(keys)
		for _, k := range keys {
			key, err := toPickle(k, depth+1)
			if err != nil {
				return nil, err
			}
			x, err := toPickle(v.MapIndex(k), depth+1)
			if err != nil {
				return nil, err
			}
			if err := dict.Put(key, x); err != nil {
				return nil, err
			}
		}
		return dict, nil
	case reflect.Struct:
		dict := pickle.NewDict()
		for i := range v.NumField() {
			name := fieldName(v.Type().Field(i))
			if name == "" {
				continue
			}
			x, err := toPickle(v.Field(i), depth+1)
			if err != nil {
				return nil, err
			}
			dict.Set(name, x)
		}
		return dict, nil
	}
	return nil, valueErrorf("a Go value of type %v has no counterpart in Python", v.Type())
}

// plain turns what package pickle reads into plain Go values.
func plain(v any) any {
	switch x := v.(type) {
	case *pickle.List:
		return plainList(x.Items)
	case *pickle.Tuple:
		return plainList(x.Items)
	case *pickle.Set:
		return plainList(x.Items)
	case pickle.ByteArray:
		return []byte(x)
	case *pickle.Dict:
		names := map[string]any{}
		others := map[any]any{}
		for k, e := range x.All() {
			if s, ok := k.(string); ok {
				names[s] = plain(e)
				others[s] = names[s]
				continue
			}
			switch key := k.(type) {
			case *pickle.Tuple, []byte:
				others[fmt.Sprint(plain(key))] = plain(e) // Go cannot hash them
			default:
				others[k] = plain(e)
			}
		}
		if len(names) == x.Len() {
			return names
		}
		return others
	}
	return v
}

func plainList(items []any) []any {
	out := make([]any, len(items))
	for i, x := range items {
		out[i] = plain(x)
	}
	return out
}

func items(v any) ([]any, bool) {
	switch x := v.(type) {
	case *pickle.List:
		return x.Items, true
	case *pickle.Tuple:
		return x.Items, true
	case *pickle.Set:
		return x.Items, true
	}
	return nil, false
}

// assign puts a decoded value into a Go variable of a fitting type.
func assign(dst reflect.Value, v any) error {
	mismatch := func() error { return valueErrorf("a value of type %T does not go into a %v", v, dst.Type()) }
	if v == nil {
		dst.SetZero()
		return nil
	}
	if src := reflect.ValueOf(v); dst.Kind() != reflect.Interface && src.Type().AssignableTo(dst.Type()) {
		dst.Set(src)
		return nil
	}
	switch dst.Kind() {
	case reflect.Interface:
		p := reflect.ValueOf(plain(v))
		if !p.Type().AssignableTo(dst.Type()) {
			return mismatch()
		}
		dst.Set(p)
		return nil
	case reflect.Pointer:
		dst.Set(reflect.New(dst.Type().Elem()))
		return assign(dst.Elem(), v)
	case reflect.Bool:
		if b, ok := v.(bool); ok {
			dst.SetBool(b)
			return nil
		}
	case reflect.Int, reflect.Int8, reflect.Int16, reflect.Int32, reflect.Int64:
		if n, ok := v.(int64); ok && !dst.OverflowInt(n) {
			dst.SetInt(n)
			return nil
		}
	case reflect.Uint, reflect.Uint8, reflect.Uint16, reflect.Uint32, reflect.Uint64:
		if n, ok := v.(int64); ok && n >= 0 && !dst.OverflowUint(uint64(n)) {
			dst.SetUint(uint64(n))
			return nil
		}
		if n, ok := v.(*big.Int); ok && n.IsUint64() && !dst.OverflowUint(n.Uint64()) {
			dst.SetUint(n.Uint64())
			return nil
		}
	case reflect.Float32, reflect.Float64:
		switch n := v.(type) {
		case float64:
			dst.SetFloat(n)
			return nil
		case int64: // Python's ints go where floats are wanted
			if n == int64(float64(n)) && math.Abs(float64(n)) <= 1<<53 {
				dst.SetFloat(float64(n))
				return nil
			}
		}
	case reflect.Complex64, reflect.Complex128:
		if c, ok := v.(complex128); ok {
			dst.SetComplex(c)
			return nil
		}
	case reflect.String:
		if s, ok := v.(string); ok {
			dst.SetString(s)
			return nil
		}
	case reflect.Slice:
		if b, ok := v.(pickle.ByteArray); ok && dst.Type().Elem().Kind() == reflect.Uint8 {
			dst.SetBytes([]byte(b))
			return nil
		}
		list, ok := items(v)
		if !ok {
			return mismatch()
		}
		dst.Set(reflect.MakeSlice(dst.Type(), len(list), len(list)))
		for i, x := range list {
			if err := assign(dst.Index(i), x); err != nil {
				return fmt.Errorf("element %d: %w", i, err)
			}
		}
		return nil
	case reflect.Array:
		list, ok := items(v)
		if !ok || len(list) != dst.Len() {
			return mismatch()
		}
		for i, x := range list {
			if err := assign(dst.Index(i), x); err != nil {
				return fmt.Errorf("element %d: %w", i, err)
			}
		}
		return nil
	case reflect.Map:
		dict, ok := v.(*pickle.Dict)
		if !ok {
			return mismatch()
		}
		dst.Set(reflect.MakeMapWithSize(dst.Type(), dict.Len()))
		for k, x := range dict.All() {
			key, value := reflect.New(dst.Type().Key()).Elem(), reflect.New(dst.Type().Elem()).Elem()
			if err := assign(key, k); err != nil {
				return fmt.Errorf("key %v: %w", k, err)
			}
			if !key.Comparable() {
				return fmt.Errorf("key %v: %w", k, mismatch())
			}
			if err := assign(value, x); err != nil {
				return fmt.Errorf("value of %v: %w", k, err)
			}
			dst.SetMapIndex(key, value)
		}
		return nil
	case reflect.Struct:
		dict, ok := v.(*pickle.Dict)
		if !ok {
			return mismatch()
		}
		for i := range dst.NumField() {
			name := fieldName(dst.Type().Field(i))
			if name == "" {
				continue
			}
			if x, ok := dict.Get(name); ok {
				if err := assign(dst.Field(i), x); err != nil {
					return fmt.Errorf("field %s: %w", name, err)
				}
			}
		}
		return nil
	}
	return mismatch()
}

// sortKeys gives a map's keys an order that does not change from run to run.
func sortKeys(keys []reflect.Value) {
	slices.SortFunc(keys, func(a, b reflect.Value) int {
		return strings.Compare(fmt.Sprintf("%T %v", a.Interface(), a.Interface()), fmt.Sprintf("%T %v", b.Interface(), b.Interface()))
	})
}
