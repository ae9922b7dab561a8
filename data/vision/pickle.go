package vision

import (
	"encoding/binary"

	"math"
	"strconv"
)

// The part of Python's pickle that CIFAR's files are made of: dictionaries, lists, numbers, strings and one array of
// bytes, in protocols 2 to 5. Nothing is ever called: the few names that may stand in a file are known here.

type (
	pyText   string // text or bytes: Python 2 did not tell them apart
	pyTuple  []any
	pyList   struct{ items []any }
	pyDict   struct{ items map[pyText]any }
	pyGlobal string // "module name"
	pyDtype  struct{ name pyText }
	pyArray  struct {
		shape []int64
		dtype *pyDtype
		raw   []byte
		ready bool
	}
)

type unpickler struct {
	file  string
	b     []byte
	at    int
	stack []any
	marks []int
	memo  map[uint32]any
}

// unpickle reads a pickled dictionary. What it gives refers to b.
func unpickle(file string, b []byte) (*pyDict, error) {
	u := &unpickler{file: file, b: b, memo: map[uint32]any{}}
	if len(b) == 0 || b[0] != 0x80 {
		return nil, bad(file, 0, ErrMagic, "not a pickle of protocol 2 or later")
	}
	for {
		op, err := u.byte()
		if err != nil {
			return nil, err
		}
		if op == '.' {
			v, err := u.pop()
			if err != nil {
				return nil, err
			}
			d, ok := v.(*pyDict)
			if !ok {
				return nil, u.bad("it holds no dictionary")
			}
			return d, nil
		}
		if err := u.step(op); err != nil {
			return nil, err
		}
	}
}

func (u *unpickler) bad(format string, args ...any) error {
	return bad(u.file, int64(u.at), ErrDamaged, "pickle: "+format, args...)
}

func (u *unpickler) take(n uint64) ([]byte, error) {
	if n > uint64(len(u.b)-u.at) {
		return nil, bad(u.file, int64(u.at), ErrTruncated, "pickle: %d bytes are needed, %d are left", n, len(u.b)-u.at)
	}
	out := u.b[u.at : u.at+int(n) : u.at+int(n)]
	u.at += int(n)
	return out, nil
}

func (u *unpickler) byte() (byte, error) {
	b, err := u.take(1)
	if err != nil {
		return 0, err
	}
	return b[0], nil
}

// number reads n bytes, low ones first.
func (u *unpickler) number(n uint64) (uint64, error) {
	b, err := u.take(n)
	if err != nil {
		return 0, err
	}
	var full [8]byte
	copy(full[:], b)
	return binary.LittleEndian.Uint64(full[:]), nil
}

func (u *unpickler) line() (string, error) {
	for i := u.at; i < len(u.b); i++ {
		if u.b[i] == '\n' {
			s := string(u.b[u.at:i])
			u.at = i + 1
			return s, nil
		}
	}
	return "", bad(u.file, int64(u.at), ErrTruncated, "pickle: a line does not end")
}

func (u *unpickler) push(v any) { u.stack = append(u.stack, v) }

func (u *unpickler) pop() (any, error) {
	low := 0
	if len(u.marks) > 0 {
		low = u.marks[len(u.marks)-1]
	}
	if len(u.stack) <= low {
		return nil, u.bad("the stack is empty")
	}
	v := u.stack[len(u.stack)-1]
	u.stack = u.stack[:len(u.stack)-1]
	return v, nil
}

// popMark gives what was pushed since the last mark.
func (u *unpickler) popMark() ([]any, error) {
	if len(u.marks) == 0 {
		return nil, u.bad("there is no mark")
	}
	low := u.marks[len(u.marks)-1]
	u.marks = u.marks[:len(u.marks)-1]
	out := append([]any(nil), u.stack[low:]...)
	u.stack = u.stack[:low]
	return out, nil
}

// sized pushes a string whose length stands in front in n bytes.
func (u *unpickler) sized(n uint64) error {
	size, err := u.number(n)
	if err != nil {
		return err
	}
	b, err := u.take(size)
	if err != nil {
		return err
	}
	u.push(b)
	return nil
}

func (u *unpickler) step(op byte) error {
	switch op {
	case 0x80: // PROTO
		v, err := u.byte()
		if err == nil && (v < 2 || v > 5) {
			err = bad(u.file, int64(u.at), ErrMagic, "pickle protocol %d", v)
		}
		return err
	case 0x95: // FRAME
		_, err := u.take(8)
		return err
	case '(':
		u.marks = append(u.marks, len(u.stack))
	case '}':
		u.push(&pyDict{map[pyText]any{}})
	case ']':
		u.push(&pyList{})
	case ')':
		u.push(pyTuple{})
	case 't':
		items, err := u.popMark()
		if err != nil {
			return err
		}
		u.push(pyTuple(items))
	case 0x85, 0x86, 0x87: // TUPLE1 to TUPLE3
		items := make(pyTuple, op-0x84)
		for i := len(items) - 1; i >= 0; i-- {
			v, err := u.pop()
			if err != nil {
				return err
			}
			items[i] = v
		}
		u.push(items)
	case 'a':
		v, err := u.pop()
		if err != nil {
			return err
		}
		return u.extend([]any{v})
	case 'e':
		items, err := u.popMark()
		if err != nil {
			return err
		}
		return u.extend(items)
	case 's':
		v, err := u.pop()
		if err != nil {
			return err
		}
		k, err := u.pop()
		if err != nil {
			return err
		}
		return u.set([]any{k, v})
	case 'u':
		items, err := u.popMark()
		if err != nil {
			return err
		}
		return u.set(items)
	case 'N':
		u.push(nil)
	case 0x88:
		u.push(true)
	case 0x89:
		u.push(false)
	case 'J':
		v, err := u.number(4)
		u.push(int64(int32(v)))
		return err
	case 'K':
		v, err := u.number(1)
		u.push(int64(v))
		return err
	case 'M':
		v, err := u.number(2)
		u.push(int64(v))
		return err
	case 0x8a: // LONG1
		n, err := u.byte()
		if err != nil {
			return err
		}
		if n > 8 {
			return u.bad("an integer of %d bytes", n)
		}
		v, err := u.number(uint64(n))
		if shift := 64 - 8*uint(n); n > 0 && n < 8 {
			v = uint64(int64(v<<shift) >> shift)
		}
		u.push(int64(v))
		return err
	case 'G':
		b, err := u.take(8)
		if err != nil {
			return err
		}
		u.push(math.Float64frombits(binary.BigEndian.Uint64(b)))
	case 'U', 'C', 0x8c: // strings and bytes with a length of 1, 4 or 8 bytes
		return u.sized(1)
	case 'T', 'X', 'B':
		return u.sized(4)
	case 0x8d, 0x8e, 0x96:
		return u.sized(8)
	case 'c':
		module, err := u.line()
		if err != nil {
			return err
		}
		name, err := u.line()
		if err != nil {
			return err
		}
		return u.global(module, name)
	case 0x93: // STACK_GLOBAL
		name, err := u.pop()
		if err != nil {
			return err
		}
		module, err := u.pop()
		if err != nil {
			return err
		}
		m, ok1 := module.([]byte)
		n, ok2 := name.([]byte)
		if !ok1 || !ok2 {
			return u.bad("a name that is not text")
		}
		return u.global(string(m), string(n))
	case 'R':
		args, err := u.pop()
		if err != nil {
			return err
		}
		fn, err := u.pop()
		if err != nil {
			return err
		}
		return u.reduce(fn, args)
	case 'b':
		state, err := u.pop()
		if err != nil {
			return err
		}
		obj, err := u.pop()
		if err != nil {
			return err
		}
		u.push(obj)
		return u.build(obj, state)
	case 'q':
		k, err := u.number(1)
		if err != nil {
			return err
		}
		return u.put(uint32(k))
	case 'r':
		k, err := u.number(4)
		if err != nil {
			return err
		}
		return u.put(uint32(k))
	case 0x94: // MEMOIZE
		return u.put(uint32(len(u.memo)))
	case 'h':
		k, err := u.number(1)
		if err != nil {
			return err
		}
		return u.get(uint32(k))
	case 'j':
		k, err := u.number(4)
		if err != nil {
			return err
		}
		return u.get(uint32(k))
	default:
		return u.bad("unknown operation %#02x", op)
	}
	return nil
}

func (u *unpickler) put(k uint32) error {
	v, err := u.pop()
	if err != nil {
		return err
	}
	u.push(v)
	u.memo[k] = v
	return nil
}

func (u *unpickler) get(k uint32) error {
	v, ok := u.memo[k]
	if !ok {
		return u.bad("nothing is remembered as %d", k)
	}
	u.push(v)
	return nil
}

func (u *unpickler) extend(items []any) error {
	v, err := u.pop()
	if err != nil {
		return err
	}
	u.push(v)
	l, ok := v.(*pyList)
	if !ok {
		return u.bad("items for something that is no list")
	}
	l.items = append(l.items, items...)
	return nil
}

func (u *unpickler) set(items []any) error {
	v, err := u.pop()
	if err != nil {
		return err
	}
	u.push(v)
	d, ok := v.(*pyDict)
	if !ok || len(items)%2 != 0 {
		return u.bad("pairs for something that is no dictionary")
	}
	for i := 0; i < len(items); i += 2 {
		k, ok := items[i].([]byte)
		if !ok || len(k) > 64 {
			return u.bad("a key that is no short text")
		}
		d.items[pyText(k)] = items[i+1]
	}
	return nil
}

// global pushes one of the few names that may occur.
func (u *unpickler) global(module, name string) error {
	switch module {
	case "numpy.core.multiarray", "numpy._core.multiarray", "numpy.core.numeric", "numpy._core.numeric":
		module = "numpy"
	}
	switch g := module + " " + name; g {
	case "numpy _reconstruct", "numpy ndarray", "numpy dtype", "numpy _frombuffer", "_codecs encode":
		u.push(pyGlobal(g))
		return nil
	}
	return u.bad("it names %s.%s, which no CIFAR file needs", module, name)
}

func (u *unpickler) reduce(fn, args any) error {
	g, ok1 := fn.(pyGlobal)
	a, ok2 := args.(pyTuple)
	if !ok1 || !ok2 {
		return u.bad("a call of something that cannot be called")
	}
	switch {
	case g == "numpy _reconstruct":
		u.push(&pyArray{})
		return nil
	case g == "numpy dtype" && len(a) > 0:
		if name, ok := a[0].([]byte); ok {
			u.push(&pyDtype{pyText(name)})
			return nil
		}
	case g == "_codecs encode" && len(a) == 2: // how Python 3 wrote bytes in protocol 2
		if text, ok := a[0].([]byte); ok {
			out := make([]byte, 0, len(text))
			for _, r := range string(text) {
				if r > 255 {
					return u.bad("a character %s in bytes", strconv.QuoteRune(r))
				}
				out = append(out, byte(r))
			}
			u.push(out)
			return nil
		}
	case g == "numpy _frombuffer" && len(a) == 4: // how numpy writes arrays in protocol 5
		arr := &pyArray{}
		u.push(arr)
		order, _ := a[3].([]byte)
		return u.fill(arr, a[2], a[1], string(order) != "C", a[0])
	}
	return u.bad("a call of %s with %d arguments", g, len(a))
}

func (u *unpickler) build(obj, state any) error {
	switch obj := obj.(type) {
	case *pyDtype:
		return nil // byte order and alignment, which a byte does not have
	case *pyArray:
		s, ok := state.(pyTuple)
		if !ok || len(s) != 5 {
			return u.bad("an array's state of an unknown kind")
		}
		fortran, _ := s[3].(bool)
		return u.fill(obj, s[1], s[2], fortran, s[4])
	}
	return u.bad("a state for something that has none")
}

func (u *unpickler) fill(a *pyArray, shape, dtype any, fortran bool, raw any) error {
	dims, ok := shape.(pyTuple)
	if !ok {
		return u.bad("an array without a shape")
	}
	a.shape = nil
	for _, d := range dims {
		n, ok := d.(int64)
		if !ok || n < 0 {
			return u.bad("an array with the dimension %v", d)
		}
		a.shape = append(a.shape, n)
	}
	if a.dtype, ok = dtype.(*pyDtype); !ok {
		return u.bad("an array without a dtype")
	}
	if a.raw, ok = raw.([]byte); !ok {
		return u.bad("an array without bytes")
	}
	if fortran {
		return u.bad("an array in column order")
	}
	a.ready = true
	return nil
}

// array gives the bytes of an array of n-byte rows, and the number of rows.
func (d *pyDict) array(file, key string, row int) ([]byte, int, error) {
	a, ok := d.items[pyText(key)].(*pyArray)
	if !ok || !a.ready {
		return nil, 0, bad(file, 0, ErrDamaged, "it has no array %q", key)
	}
	switch a.dtype.name {
	case "u1", "|u1", "uint8", "B":
	default:
		return nil, 0, bad(file, 0, ErrDamaged, "array %q has the dtype %q, expected u1", key, a.dtype.name)
	}
	if len(a.shape) != 2 || a.shape[1] != int64(row) {
		return nil, 0, bad(file, 0, ErrDamaged, "array %q has the shape %v, expected rows of %d", key, a.shape, row)
	}
	if a.shape[0] > maxSet || int64(len(a.raw)) != a.shape[0]*int64(row) {
		return nil, 0, bad(file, 0, ErrTruncated, "array %q has the shape %v, but %d bytes", key, a.shape, len(a.raw))
	}
	return a.raw, int(a.shape[0]), nil
}

// bytes gives a list of small numbers.
func (d *pyDict) bytes(file, key string) ([]byte, error) {
	l, ok := d.items[pyText(key)].(*pyList)
	if !ok {
		return nil, bad(file, 0, ErrDamaged, "it has no list %q", key)
	}
	out := make([]byte, len(l.items))
	for i, v := range l.items {
		n, ok := v.(int64)
		if !ok || n < 0 || n > 255 {
			return nil, bad(file, 0, ErrLabel, "item %d of %q is %v", i, key, v)
		}
		out[i] = byte(n)
	}
	return out, nil
}

// names gives a list of texts, or nil where there is none.
func (d *pyDict) names(key string) []string {
	l, ok := d.items[pyText(key)].(*pyList)
	if !ok {
		return nil
	}
	var out []string
	for _, v := range l.items {
		b, ok := v.([]byte)
		if !ok {
			return nil
		}
		out = append(out, string(b))
	}
	return out
}
