package pickle

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"
	"math/big"
	"slices"
	"unicode/utf8"
	"unsafe"
)

// Limits bound what a hostile pickle can make the reader use. Zero values stand for the defaults.
type Limits struct {
	Bytes  int64 // of the pickle; default 512 MiB
	Values int   // made while reading; default 8 Mi
	Depth  int   // of nesting; default MaxDepth
}

func (l Limits) withDefaults() Limits {
	if l.Bytes <= 0 {
		l.Bytes = 512 << 20
	}
	if l.Values <= 0 {
		l.Values = 8 << 20
	}
	if l.Depth <= 0 {
		l.Depth = MaxDepth
	}
	return l
}

// DecodeOptions say which names a pickle may use beside Python's own containers.
type DecodeOptions struct {
	Limits Limits
	// Persistent resolves a persistent id. Without it such ids are an error.
	Persistent func(id any) (any, error)
	// Global gives the value that stands for a name, mostly the Global itself, or ok = false where it is not allowed.
	Global func(g Global) (v any, ok bool)
	// Call gives the result of fn(*args) for an allowed fn.
	Call func(fn any, args *Tuple) (any, error)
	// Build gives obj with the state that BUILD brings, for objects that Call made.
	Build func(obj, state any) (any, error)
}

// Unmarshal decodes one pickle and wants nothing to follow it.
func Unmarshal(data []byte, opt DecodeOptions) (any, error) {
	d := NewDecoder(bufio.NewReader(bytes.NewReader(data)), opt)
	v, err := d.Decode()
	if err != nil {
		return nil, err
	}
	if _, err := d.r.ReadByte(); err == nil {
		return nil, formatError(d.off, "data after the end of the pickle")
	}
	return v, nil
}

// Decoder reads pickles one after the other, as old torch.save files have them.
type Decoder struct {
	r      *bufio.Reader
	off    int64
	opt    DecodeOptions
	stack  []any
	marks  []int
	memo   []any
	sparse map[uint32]any
	values int
}

// NewDecoder reads from r, and not beyond the pickles that Decode was asked for.
func NewDecoder(r *bufio.Reader, opt DecodeOptions) *Decoder {
	opt.Limits = opt.Limits.withDefaults()
	return &Decoder{r: r, opt: opt}
}

// Offset is how many bytes were read so far.
func (d *Decoder) Offset() int64 { return d.off }

// Decode reads the next pickle.
func (d *Decoder) Decode() (any, error) {
	d.stack, d.marks, d.memo, d.sparse = d.stack[:0], d.marks[:0], nil, nil
	v, err := d.run()
	if err != nil {
		var refused *UnsafeGlobalError
		if errors.As(err, &refused) {
			d.collect(refused)
		}
		return nil, fmt.Errorf("pickle: %w", err)
	}
	if err := (&checker{limit: d.opt.Limits.Depth, height: make(map[any]int)}).check(v); err != nil {
		return nil, fmt.Errorf("pickle: %w", err)
	}
	return v, nil
}

func (d *Decoder) fail(format string, args ...any) error { return formatError(d.off, format, args...) }

func (d *Decoder) byte() (byte, error) {
	if d.off >= d.opt.Limits.Bytes {
		return 0, fmt.Errorf("%w: longer than %d bytes", ErrLimit, d.opt.Limits.Bytes)
	}
	b, err := d.r.ReadByte()
	if err != nil {
		return 0, d.ioError(err)
	}
	d.off++
	return b, nil
}

func (d *Decoder) ioError(err error) error {
	if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		return d.fail("it ends too early")
	}
	return err
}

// bytes reads n bytes. Memory grows with what is really there, not with what n claims.
func (d *Decoder) bytes(n uint64) ([]byte, error) {
	if n > uint64(d.opt.Limits.Bytes-min(d.off, d.opt.Limits.Bytes)) {
		return nil, fmt.Errorf("%w: a value of %d bytes", ErrLimit, n)
	}
	const step = 64 << 10
	out := make([]byte, min(n, step))
	for at := uint64(0); ; {
		k, err := io.ReadFull(d.r, out[at:])
		d.off += int64(k)
		if err != nil {
			return nil, d.ioError(err)
		}
		if at = uint64(len(out)); at == n {
			return out, nil
		}
		grow := min(n-at, at)
		out = append(out, make([]byte, grow)...)
	}
}

func (d *Decoder) uint(n int) (uint64, error) {
	var buf [8]byte
	for i := range n {
		b, err := d.byte()
		if err != nil {
			return 0, err
		}
		buf[i] = b
	}
	return binary.LittleEndian.Uint64(buf[:]), nil
}

func (d *Decoder) line() (string, error) {
	var out []byte
	for {
		b, err := d.byte()
		if err != nil {
			return "", err
		}
		if b == '\n' {
			return string(out), nil
		}
		if out = append(out, b); len(out) > 4096 {
			return "", d.fail("a name of more than 4096 bytes")
		}
	}
}

func (d *Decoder) push(v any) error {
	if d.values++; d.values > d.opt.Limits.Values {
		return fmt.Errorf("%w: more than %d values", ErrLimit, d.opt.Limits.Values)
	}
	d.stack = append(d.stack, v)
	return nil
}

// floor is the lowest stack index that belongs to the innermost mark.
func (d *Decoder) floor() int {
	if len(d.marks) == 0 {
		return 0
	}
	return d.marks[len(d.marks)-1]
}

func (d *Decoder) pop() (any, error) {
	if len(d.stack) <= d.floor() {
		return nil, d.fail("the stack is empty")
	}
	v := d.stack[len(d.stack)-1]
	d.stack = d.stack[:len(d.stack)-1]
	return v, nil
}

func (d *Decoder) top() (any, error) {
	if len(d.stack) <= d.floor() {
		return nil, d.fail("the stack is empty")
	}
	return d.stack[len(d.stack)-1], nil
}

// popMark gives a copy of what lies above the innermost mark.
func (d *Decoder) popMark() ([]any, error) {
	if len(d.marks) == 0 {
		return nil, d.fail("no mark on the stack")
	}
	at := d.floor()
	d.marks = d.marks[:len(d.marks)-1]
	items := slices.Clone(d.stack[at:])
	d.stack = d.stack[:at]
	return items, nil
}

func (d *Decoder) put(i uint32) error {
	v, err := d.top()
	if err != nil {
		return err
	}
	switch {
	case int(i) < len(d.memo):
		d.memo[i] = v
	case int(i) == len(d.memo):
		d.memo = append(d.memo, v)
	default:
		if d.sparse == nil {
			d.sparse = make(map[uint32]any)
		}
		d.sparse[i] = v
	}
	return nil
}

func (d *Decoder) get(i uint32) error {
	if int(i) < len(d.memo) {
		return d.push(d.memo[i])
	}
	v, ok := d.sparse[i]
	if !ok {
		return d.fail("memo entry %d does not exist", i)
	}
	return d.push(v)
}

func (d *Decoder) run() (any, error) {
	for first := true; ; first = false {
		op, err := d.byte()
		if err != nil {
			return nil, err
		}
		if first && op != opProto {
			return nil, d.fail("it does not begin with a protocol number (protocols 0 and 1 are not supported)")
		}
		if op == opStop {
			v, err := d.pop()
			if err != nil {
				return nil, err
			}
			if len(d.stack) != 0 || len(d.marks) != 0 {
				return nil, d.fail("values are left on the stack")
			}
			return v, nil
		}
		if err := d.step(op); err != nil {
			return nil, err
		}
	}
}

func (d *Decoder) step(op byte) error {
	switch op {
	case opProto:
		n, err := d.byte()
		if err == nil && (n < 2 || n > 5) {
			err = d.fail("protocol %d; torch.save writes protocol 2", n)
		}
		return err
	case opFrame:
		_, err := d.uint(8)
		return err
	case opMark:
		if d.values++; d.values > d.opt.Limits.Values {
			return fmt.Errorf("%w: more than %d values", ErrLimit, d.opt.Limits.Values)
		}
		d.marks = append(d.marks, len(d.stack))
		return nil
	case opPop:
		if len(d.stack) == d.floor() && len(d.marks) > 0 {
			d.marks = d.marks[:len(d.marks)-1]
			return nil
		}
		_, err := d.pop()
		return err
	case opPopMark:
		_, err := d.popMark()
		return err
	case opDup:
		v, err := d.top()
		if err != nil {
			return err
		}
		return d.push(v)
	case opNone:
		return d.push(nil)
	case opNewTrue:
		return d.push(true)
	case opNewFalse:
		return d.push(false)
	case opBinInt, opBinInt1, opBinInt2, opBinFloat, opLong1, opLong4:
		return d.number(op)
	case opBinUnicode, opShortBinUnicode, opBinUnicode8, opBinString, opShortBinString, opBinBytes, opShortBinBytes,
		opBinBytes8, opByteArray8:
		return d.text(op)
	case opEmptyTuple:
		return d.push(&Tuple{})
	case opEmptyList:
		return d.push(&List{})
	case opEmptyDict:
		return d.push(&Dict{})
	case opEmptySet:
		return d.push(&Set{})
	case opTuple:
		items, err := d.popMark()
		if err != nil {
			return err
		}
		return d.push(&Tuple{items})
	case opTuple1, opTuple2, opTuple3:
		n := int(op-opTuple1) + 1
		if len(d.stack)-d.floor() < n {
			return d.fail("the stack is empty")
		}
		items := slices.Clone(d.stack[len(d.stack)-n:])
		d.stack = d.stack[:len(d.stack)-n]
		return d.push(&Tuple{items})
	case opList:
		items, err := d.popMark()
		if err != nil {
			return err
		}
		return d.push(&List{items})
	case opDict:
		items, err := d.popMark()
		if err != nil {
			return err
		}
		dict := &Dict{}
		if err := d.setItems(dict, items); err != nil {
			return err
		}
		return d.push(dict)
	case opAppend:
		v, err := d.pop()
		if err != nil {
			return err
		}
		return d.appendTo(v)
	case opAppends:
		items, err := d.popMark()
		if err != nil {
			return err
		}
		return d.appendTo(items...)
	case opAddItems:
		items, err := d.popMark()
		if err != nil {
			return err
		}
		for _, v := range items {
			if _, err := hashKey(v); err != nil {
				return d.fail("a set cannot hold a %T", v)
			}
		}
		top, err := d.top()
		if err != nil {
			return err
		}
		set, ok := top.(*Set)
		if !ok {
			return d.fail("items are added to a %T", top)
		}
		set.Items = append(set.Items, items...)
		return nil
	case opSetItem:
		v, err := d.pop()
		if err != nil {
			return err
		}
		k, err := d.pop()
		if err != nil {
			return err
		}
		return d.setTop([]any{k, v})
	case opSetItems:
		items, err := d.popMark()
		if err != nil {
			return err
		}
		return d.setTop(items)
	case opBinGet, opLongBinGet, opBinPut, opLongBinPut:
		n := 1
		if op == opLongBinGet || op == opLongBinPut {
			n = 4
		}
		i, err := d.uint(n)
		if err != nil {
			return err
		}
		if op == opBinGet || op == opLongBinGet {
			return d.get(uint32(i))
		}
		return d.put(uint32(i))
	case opMemoize:
		return d.put(uint32(len(d.memo) + len(d.sparse)))
	case opGlobal, opStackGlobal:
		return d.global(op)
	case opReduce, opNewObj:
		return d.reduce()
	case opBuild:
		return d.build()
	case opBinPersID:
		id, err := d.pop()
		if err != nil {
			return err
		}
		if d.opt.Persistent == nil {
			return d.fail("a persistent id where none is expected")
		}
		v, err := d.opt.Persistent(id)
		if err != nil {
			return fmt.Errorf("byte %d: %w", d.off, err)
		}
		return d.push(v)
	}
	return d.fail("instruction 0x%02x is not allowed", op)
}

func (d *Decoder) number(op byte) error {
	n := map[byte]int{opBinInt: 4, opBinInt1: 1, opBinInt2: 2, opBinFloat: 8, opLong1: 1, opLong4: 4}[op]
	u, err := d.uint(n)
	if err != nil {
		return err
	}
	switch op {
	case opBinInt:
		return d.push(int64(int32(uint32(u))))
	case opBinInt1, opBinInt2:
		return d.push(int64(u))
	case opBinFloat:
		var b [8]byte
		binary.LittleEndian.PutUint64(b[:], u)
		return d.push(math.Float64frombits(binary.BigEndian.Uint64(b[:])))
	}
	if u > 4096 {
		return d.fail("an integer of %d bytes", u)
	}
	b, err := d.bytes(u)
	if err != nil {
		return err
	}
	slices.Reverse(b)
	v := new(big.Int).SetBytes(b)
	if len(b) > 0 && b[0]&0x80 != 0 {
		v.Sub(v, new(big.Int).Lsh(big.NewInt(1), uint(8*len(b))))
	}
	if v.IsInt64() {
		return d.push(v.Int64())
	}
	return d.push(v)
}

func (d *Decoder) text(op byte) error {
	width := 4
	switch op {
	case opShortBinUnicode, opShortBinString, opShortBinBytes:
		width = 1
	case opBinUnicode8, opBinBytes8, opByteArray8:
		width = 8
	}
	n, err := d.uint(width)
	if err != nil {
		return err
	}
	b, err := d.bytes(n)
	if err != nil {
		return err
	}
	switch op {
	case opBinBytes, opShortBinBytes, opBinBytes8:
		return d.push(b)
	case opByteArray8:
		return d.push(ByteArray(b))
	case opBinString, opShortBinString:
		// Python 2 strings: text where it is text.
		if !utf8.Valid(b) {
			return d.push(b)
		}
		return d.push(string(b))
	}
	// Not string(b): Go shares strings of one byte, and then two that Python kept apart could not be told apart.
	s := unsafe.String(unsafe.SliceData(b), len(b))
	if err := checkText(s); err != nil {
		return d.fail("a string is not UTF-8")
	}
	return d.push(s)
}

func (d *Decoder) appendTo(items ...any) error {
	top, err := d.top()
	if err != nil {
		return err
	}
	l, ok := top.(*List)
	if !ok {
		return d.fail("items are appended to a %T", top)
	}
	l.Items = append(l.Items, items...)
	return nil
}

func (d *Decoder) setTop(items []any) error {
	top, err := d.top()
	if err != nil {
		return err
	}
	dict, ok := top.(*Dict)
	if !ok {
		return d.fail("entries are set in a %T", top)
	}
	return d.setItems(dict, items)
}

func (d *Decoder) setItems(dict *Dict, items []any) error {
	if len(items)%2 != 0 {
		return d.fail("a key without a value")
	}
	for i := 0; i < len(items); i += 2 {
		if err := dict.Put(items[i], items[i+1]); err != nil {
			return d.fail("%v", err)
		}
	}
	return nil
}

func (d *Decoder) global(op byte) error {
	var g Global
	if op == opGlobal {
		var err error
		if g.Module, err = d.line(); err != nil {
			return err
		}
		if g.Name, err = d.line(); err != nil {
			return err
		}
	} else {
		name, err := d.pop()
		if err != nil {
			return err
		}
		module, err := d.pop()
		if err != nil {
			return err
		}
		m, ok1 := module.(string)
		n, ok2 := name.(string)
		if !ok1 || !ok2 {
			return d.fail("a name that is not text")
		}
		g = Global{m, n}
	}
	v, ok := d.allowed(g)
	if !ok {
		return &UnsafeGlobalError{Globals: []Global{g}, Offset: d.off}
	}
	return d.push(v)
}

// allowed looks g up among the builtins of this package and then in the caller's list.
func (d *Decoder) allowed(g Global) (any, bool) {
	if g.Module == "builtins" {
		g.Module = "__builtin__"
	}
	if _, ok := builtin[g]; ok {
		return g, true
	}
	if d.opt.Global != nil {
		return d.opt.Global(g)
	}
	return nil, false
}

func (d *Decoder) reduce() error {
	a, err := d.pop()
	if err != nil {
		return err
	}
	fn, err := d.pop()
	if err != nil {
		return err
	}
	args, ok := a.(*Tuple)
	if !ok {
		return d.fail("the arguments of a call are a %T", a)
	}
	if g, ok := fn.(Global); ok {
		if f, ok := builtin[g]; ok {
			v, err := f(args.Items)
			if err != nil {
				return d.fail("%s: %v", g, err)
			}
			return d.push(v)
		}
	}
	if d.opt.Call == nil {
		return d.fail("a call of %v", fn)
	}
	v, err := d.opt.Call(fn, args)
	if err != nil {
		return fmt.Errorf("byte %d: %w", d.off, err)
	}
	return d.push(v)
}

func (d *Decoder) build() error {
	state, err := d.pop()
	if err != nil {
		return err
	}
	obj, err := d.pop()
	if err != nil {
		return err
	}
	if dict, ok := obj.(*Dict); ok && dict.Kind == OrderedDict {
		attrs, ok := state.(*Dict)
		if !ok {
			return d.fail("the attributes of an OrderedDict are a %T", state)
		}
		if dict.Attrs == nil {
			dict.Attrs = attrs
		} else {
			for k, v := range attrs.All() {
				if err := dict.Attrs.Put(k, v); err != nil {
					return d.fail("%v", err)
				}
			}
		}
		return d.push(dict)
	}
	if d.opt.Build == nil {
		return d.fail("a %T has no attributes", obj)
	}
	v, err := d.opt.Build(obj, state)
	if err != nil {
		return fmt.Errorf("byte %d: %w", d.off, err)
	}
	return d.push(v)
}

// collect scans what follows a name that is not allowed for others like it, so that the error can list them all.
func (d *Decoder) collect(e *UnsafeGlobalError) {
	const most = 16
	for len(e.Globals) < most {
		op, err := d.byte()
		if err != nil || op == opStop {
			return
		}
		switch op {
		case opGlobal:
			m, err1 := d.line()
			n, err2 := d.line()
			if err1 != nil || err2 != nil {
				return
			}
			g := Global{m, n}
			if _, ok := d.allowed(g); !ok && !slices.Contains(e.Globals, g) {
				e.Globals = append(e.Globals, g)
			}
		case opBinGet, opBinPut, opBinInt1, opProto:
			_, err = d.uint(1)
		case opBinInt2:
			_, err = d.uint(2)
		case opBinInt, opLongBinGet, opLongBinPut:
			_, err = d.uint(4)
		case opBinFloat, opFrame:
			_, err = d.uint(8)
		case opShortBinUnicode, opShortBinString, opShortBinBytes, opLong1:
			err = d.skip(1)
		case opBinUnicode, opBinString, opBinBytes, opLong4:
			err = d.skip(4)
		case opBinUnicode8, opBinBytes8, opByteArray8:
			err = d.skip(8)
		}
		if err != nil {
			return
		}
	}
}

func (d *Decoder) skip(width int) error {
	n, err := d.uint(width)
	if err == nil {
		_, err = d.bytes(n)
	}
	return err
}

// checker refuses cycles, which nothing in this module can walk, and nesting beyond the limit.
type checker struct {
	limit, depth int
	height       map[any]int // of finished containers; -1 for those being walked
}

func children(v any) [][]any {
	switch x := v.(type) {
	case *List:
		return [][]any{x.Items}
	case *Tuple:
		return [][]any{x.Items}
	case *Set:
		return [][]any{x.Items}
	case *Dict:
		if x.Attrs != nil {
			return [][]any{x.keys, x.values, {x.Attrs}}
		}
		return [][]any{x.keys, x.values}
	case *Object:
		return [][]any{{x.Args, x.State}}
	}
	return nil
}

func (c *checker) check(v any) error {
	_, err := c.walk(v)
	return err
}

func (c *checker) walk(v any) (int, error) {
	groups := children(v)
	if groups == nil {
		return 0, nil
	}
	if h, ok := c.height[v]; ok {
		if h < 0 {
			return 0, fmt.Errorf("%w: a container that contains itself", ErrFormat)
		}
		if c.depth+h > c.limit {
			return 0, fmt.Errorf("%w: nested deeper than %d", ErrLimit, c.limit)
		}
		return h, nil
	}
	if c.depth++; c.depth > c.limit {
		return 0, fmt.Errorf("%w: nested deeper than %d", ErrLimit, c.limit)
	}
	c.height[v] = -1
	highest := 0
	for _, g := range groups {
		for _, item := range g {
			h, err := c.walk(item)
			if err != nil {
				return 0, err
			}
			highest = max(highest, h)
		}
	}
	c.depth--
	c.height[v] = highest + 1
	return highest + 1, nil
}
