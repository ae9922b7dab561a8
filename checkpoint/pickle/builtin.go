package pickle

import (
	"errors"
	"fmt"
)

// builtin are the calls that build Python's own values.
var builtin = map[Global]func(args []any) (any, error){
	{"collections", "OrderedDict"}: func(args []any) (any, error) { return makeDict(OrderedDict, args) },
	{"collections", "Counter"}:     func(args []any) (any, error) { return makeDict(Counter, args) },
	{"__builtin__", "dict"}:        func(args []any) (any, error) { return makeDict(PlainDict, args) },
	{"__builtin__", "set"}:         makeSet,
	{"__builtin__", "bytes"}:       makeBytes,
	{"__builtin__", "bytearray"}:   makeByteArray,
	{"__builtin__", "complex"}:     makeComplex,
	{"_codecs", "encode"}:          encodeText,
}

func makeDict(kind DictKind, args []any) (any, error) {
	d := &Dict{Kind: kind}
	switch len(args) {
	case 0:
		return d, nil
	case 1:
	default:
		return nil, fmt.Errorf("%d arguments", len(args))
	}
	switch from := args[0].(type) {
	case *Dict:
		for k, v := range from.All() {
			if err := d.Put(k, v); err != nil {
				return nil, err
			}
		}
	case *List: // Python 2 wrote a list of [key, value]
		for _, item := range from.Items {
			var pair []any
			switch p := item.(type) {
			case *List:
				pair = p.Items
			case *Tuple:
				pair = p.Items
			}
			if len(pair) != 2 {
				return nil, errors.New("an entry that is not a pair")
			}
			if err := d.Put(pair[0], pair[1]); err != nil {
				return nil, err
			}
		}
	default:
		return nil, fmt.Errorf("made from a %T", from)
	}
	return d, nil
}

func makeSet(args []any) (any, error) {
	if len(args) == 0 {
		return &Set{}, nil
	}
	l, ok := args[0].(*List)
	if !ok || len(args) != 1 {
		return nil, errors.New("not made from a list")
	}
	for _, v := range l.Items {
		if _, err := hashKey(v); err != nil {
			return nil, fmt.Errorf("a set cannot hold a %T", v)
		}
	}
	return &Set{Items: append([]any(nil), l.Items...)}, nil
}

func makeBytes(args []any) (any, error) {
	if len(args) != 0 {
		return nil, errors.New("only the empty bytes are written this way")
	}
	return []byte{}, nil
}

func makeByteArray(args []any) (any, error) {
	switch len(args) {
	case 0:
		return ByteArray{}, nil
	case 1:
		if b, ok := args[0].([]byte); ok {
			return ByteArray(append([]byte{}, b...)), nil
		}
	case 2:
		v, err := encodeText(args)
		if err != nil {
			return nil, err
		}
		return ByteArray(v.([]byte)), nil
	}
	return nil, errors.New("not made from bytes")
}

func makeComplex(args []any) (any, error) {
	if len(args) == 2 {
		re, ok1 := args[0].(float64)
		im, ok2 := args[1].(float64)
		if ok1 && ok2 {
			return complex(re, im), nil
		}
	}
	return nil, errors.New("not made from two floats")
}

// encodeText undoes what stands for bytes in protocol 2: text whose code points are the bytes.
func encodeText(args []any) (any, error) {
	if len(args) != 2 {
		return nil, fmt.Errorf("%d arguments", len(args))
	}
	s, ok1 := args[0].(string)
	codec, ok2 := args[1].(string)
	if !ok1 || !ok2 || codec != "latin1" && codec != "latin-1" {
		return nil, errors.New("only text in latin1 is expected")
	}
	out := make([]byte, 0, len(s))
	for _, r := range s {
		if r > 255 {
			return nil, fmt.Errorf("character %q is not in latin1", r)
		}
		out = append(out, byte(r))
	}
	return out, nil
}
