package pickle

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"math/big"
	"slices"
	"sort"
	"strconv"
	"unicode/utf8"
	"unsafe"
)

// MaxDepth is how deep values may be nested, for writing and by default for reading. Python's own limit is 1000
// calls, which a nested list reaches sooner.
const MaxDepth = 512

// batch is how many entries Python hands over per SETITEMS or APPENDS.
const batch = 1000

// EncodeOptions connect the encoder with values it does not know.
type EncodeOptions struct {
	// Persistent is asked for every value first, as Python's persistent_id. Where ok, id is written in its place.
	Persistent func(v any) (id any, ok bool, err error)
	// Reduce turns a value of an unknown type into one that the encoder knows, mostly an *Object. The result is
	// remembered under v, so that v may occur again.
	Reduce func(v any) (any, error)
}

// Marshal encodes v in protocol 2, byte for byte as CPython's pickler does.
//
// Beside the types of the package's table it takes every Go integer, float32, []any, []string, []int64, []float64
// (lists) and map[string]any (a dict in sorted order, for Go's maps have none).
func Marshal(v any, opt EncodeOptions) ([]byte, error) {
	e := &encoder{opt: opt, memo: make(map[any]uint32), open: make(map[any]bool)}
	e.buf = append(e.buf, opProto, 2)
	if err := e.save(v, 0); err != nil {
		return nil, fmt.Errorf("pickle: %w", err)
	}
	return append(e.buf, opStop), nil
}

type encoder struct {
	opt EncodeOptions
	buf []byte
	// memo holds what was written under its identity, a pointer mostly. That also keeps values made on the way alive,
	// so that no address is used twice.
	memo map[any]uint32
	// open holds the tuples and objects being written: unlike lists and dicts they cannot contain themselves.
	open map[any]bool
}

// memory is the identity of a string or byte slice: where it lies. Python has one empty string.
type memory struct {
	at   *byte
	n    int
	kind byte
}

func stringIdentity(s string) any {
	if s == "" {
		return s
	}
	return memory{unsafe.StringData(s), len(s), 's'}
}

func (e *encoder) op(b ...byte) { e.buf = append(e.buf, b...) }

func (e *encoder) u32(op byte, v uint32) {
	e.buf = binary.LittleEndian.AppendUint32(append(e.buf, op), v)
}

// get writes a reference where identity was written before.
func (e *encoder) get(identity any) bool {
	i, ok := e.memo[identity]
	switch {
	case !ok:
		return false
	case i < 256:
		e.op(opBinGet, byte(i))
	default:
		e.u32(opLongBinGet, i)
	}
	return true
}

func (e *encoder) put(identity any) {
	i := uint32(len(e.memo))
	e.memo[identity] = i
	if i < 256 {
		e.op(opBinPut, byte(i))
	} else {
		e.u32(opLongBinPut, i)
	}
}

func (e *encoder) save(v any, depth int) error {
	if depth > MaxDepth {
		return fmt.Errorf("values are nested deeper than %d", MaxDepth)
	}
	if e.opt.Persistent != nil {
		id, ok, err := e.opt.Persistent(v)
		if err != nil {
			return err
		}
		if ok {
			if err := e.save(id, depth+1); err != nil {
				return err
			}
			e.op(opBinPersID)
			return nil
		}
	}
	switch x := v.(type) {
	case nil:
		e.op(opNone)
	case bool:
		if x {
			e.op(opNewTrue)
		} else {
			e.op(opNewFalse)
		}
	case int:
		e.int64(int64(x))
	case int8:
		e.int64(int64(x))
	case int16:
		e.int64(int64(x))
	case int32:
		e.int64(int64(x))
	case int64:
		e.int64(x)
	case uint8:
		e.int64(int64(x))
	case uint16:
		e.int64(int64(x))
	case uint32:
		e.int64(int64(x))
	case uint:
		return e.bigInt(new(big.Int).SetUint64(uint64(x)))
	case uint64:
		return e.bigInt(new(big.Int).SetUint64(x))
	case *big.Int:
		if x == nil {
			return errors.New("a nil *big.Int cannot be saved")
		}
		return e.bigInt(x)
	case float32:
		e.float(float64(x))
	case float64:
		e.float(x)
	case complex64:
		return e.complex(complex128(x))
	case complex128:
		return e.complex(x)
	case string:
		return e.string(x)
	case []byte:
		return e.bytes(x)
	case ByteArray:
		return e.byteArray(x)
	case Global:
		return e.global(x)
	case *List:
		return e.list(x, depth)
	case *Tuple:
		return e.tuple(x, depth)
	case *Set:
		return e.set(x, depth)
	case *Dict:
		return e.dict(x, depth)
	case *Object:
		return e.object(x, x, depth)
	case []any:
		return e.list(&List{x}, depth)
	case []string:
		return e.list(listOf(x), depth)
	case []int64:
		return e.list(listOf(x), depth)
	case []int:
		return e.list(listOf(x), depth)
	case []float64:
		return e.list(listOf(x), depth)
	case map[string]any:
		d := NewDict()
		names := make([]string, 0, len(x))
		for k := range x {
			names = append(names, k)
		}
		sort.Strings(names)
		for _, k := range names {
			d.Set(k, x[k])
		}
		return e.dict(d, depth)
	default:
		return e.reduced(v, depth)
	}
	return nil
}

func listOf[T any](s []T) *List {
	l := &List{Items: make([]any, len(s))}
	for i, v := range s {
		l.Items[i] = v
	}
	return l
}

func (e *encoder) reduced(v any, depth int) error {
	if e.opt.Reduce == nil {
		return fmt.Errorf("a Go value of type %T has no counterpart in Python", v)
	}
	if e.get(v) {
		return nil
	}
	r, err := e.opt.Reduce(v)
	if err != nil {
		return err
	}
	if o, ok := r.(*Object); ok {
		return e.object(v, o, depth)
	}
	return e.save(r, depth+1)
}

func (e *encoder) int64(v int64) {
	switch {
	case v >= 0 && v < 1<<8:
		e.op(opBinInt1, byte(v))
	case v >= 0 && v < 1<<16:
		e.op(opBinInt2, byte(v), byte(v>>8))
	case v >= math.MinInt32 && v <= math.MaxInt32:
		e.u32(opBinInt, uint32(int32(v)))
	default:
		_ = e.bigInt(big.NewInt(v)) // 64 bits always fit
	}
}

// bigInt writes the shortest two's complement, least significant byte first.
func (e *encoder) bigInt(v *big.Int) error {
	if v.IsInt64() {
		if i := v.Int64(); i >= math.MinInt32 && i <= math.MaxInt32 {
			e.int64(i)
			return nil
		}
	}
	n := v.BitLen()/8 + 1
	if v.Sign() < 0 { // -128 fits into one byte although 128 has eight bits
		n = new(big.Int).Not(v).BitLen()/8 + 1
	}
	if n > 255 {
		return fmt.Errorf("an integer of %d bits is too long for torch.load", v.BitLen())
	}
	t := v
	if v.Sign() < 0 {
		t = new(big.Int).Add(v, new(big.Int).Lsh(big.NewInt(1), uint(8*n)))
	}
	b := t.FillBytes(make([]byte, n))
	slices.Reverse(b)
	e.op(opLong1, byte(n))
	e.op(b...)
	return nil
}

func (e *encoder) float(v float64) {
	e.buf = binary.BigEndian.AppendUint64(append(e.buf, opBinFloat), math.Float64bits(v))
}

func (e *encoder) string(s string) error {
	id := stringIdentity(s)
	if e.get(id) {
		return nil
	}
	if err := checkText(s); err != nil {
		return err
	}
	e.u32(opBinUnicode, uint32(len(s)))
	e.buf = append(e.buf, s...)
	e.put(id)
	return nil
}

// checkText accepts UTF-8 and, as Python's "surrogatepass" does, encoded surrogates.
func checkText(s string) error {
	if uint64(len(s)) > math.MaxUint32 {
		return errors.New("a string of 4 GiB or more cannot be saved")
	}
	if utf8.ValidString(s) {
		return nil
	}
	for i := 0; i < len(s); {
		r, n := utf8.DecodeRuneInString(s[i:])
		if r == utf8.RuneError && n == 1 {
			if i+2 < len(s) && s[i] == 0xED && s[i+1] >= 0xA0 && s[i+1] <= 0xBF && s[i+2] >= 0x80 && s[i+2] <= 0xBF {
				n = 3
			} else {
				return fmt.Errorf("the string %s is not UTF-8; save it as []byte", quoteShort(s))
			}
		}
		i += n
	}
	return nil
}

func quoteShort(s string) string {
	if len(s) > 40 {
		return strconv.Quote(s[:40]) + "…"
	}
	return strconv.Quote(s)
}

// latin1 is the text that stands for bytes in protocol 2, encoded as UTF-8.
func latin1(b []byte) string {
	out := make([]byte, 0, len(b)+len(b)/2)
	for _, c := range b {
		out = utf8.AppendRune(out, rune(c))
	}
	return string(out)
}

// call writes fn(*args) and remembers it under identity, which is nil for values without one.
func (e *encoder) call(fn Global, identity any, args ...any) error {
	if err := e.global(fn); err != nil {
		return err
	}
	if err := e.tuple(&Tuple{args}, 0); err != nil {
		return err
	}
	e.op(opReduce)
	if identity == nil {
		identity = new(int64)
	}
	e.put(identity)
	return nil
}

func (e *encoder) bytes(b []byte) error {
	id := any(memory{unsafe.SliceData(b), len(b), 'b'})
	if len(b) <= 1 { // CPython shares these
		id = bytesKey(b)
	}
	if e.get(id) {
		return nil
	}
	// Python writes b"" as a call of the class bytes, which its own weights_only loader then refuses. This form loads.
	return e.call(Global{"_codecs", "encode"}, id, latin1(b), "latin1")
}

func (e *encoder) byteArray(b ByteArray) error {
	fn := Global{"__builtin__", "bytearray"}
	if len(b) == 0 {
		return e.call(fn, nil)
	}
	id := memory{unsafe.SliceData([]byte(b)), len(b), 'a'}
	if e.get(id) {
		return nil
	}
	return e.call(fn, id, append([]byte(nil), b...))
}

func (e *encoder) complex(c complex128) error {
	return e.call(Global{"__builtin__", "complex"}, nil, real(c), imag(c))
}

func (e *encoder) global(g Global) error {
	if e.get(g) {
		return nil
	}
	for _, s := range []string{g.Module, g.Name} {
		if s == "" || !utf8.ValidString(s) || containsNewline(s) {
			return fmt.Errorf("%q is not the name of a Python object", g.String())
		}
	}
	e.op(opGlobal)
	e.buf = append(e.buf, g.Module...)
	e.op('\n')
	e.buf = append(e.buf, g.Name...)
	e.op('\n')
	e.put(g)
	return nil
}

func containsNewline(s string) bool {
	for i := 0; i < len(s); i++ {
		if s[i] == '\n' {
			return true
		}
	}
	return false
}

func (e *encoder) list(l *List, depth int) error {
	if l == nil {
		return errors.New("a nil *List cannot be saved; use nil for None")
	}
	if e.get(l) {
		return nil
	}
	e.op(opEmptyList)
	e.put(l)
	return e.appendItems(l.Items, depth)
}

func (e *encoder) appendItems(items []any, depth int) error {
	if len(items) == 1 {
		if err := e.save(items[0], depth+1); err != nil {
			return err
		}
		e.op(opAppend)
		return nil
	}
	for part := range slices.Chunk(items, batch) {
		e.op(opMark)
		for _, v := range part {
			if err := e.save(v, depth+1); err != nil {
				return err
			}
		}
		e.op(opAppends)
	}
	return nil
}

func (e *encoder) tuple(t *Tuple, depth int) error {
	if t == nil {
		return errors.New("a nil *Tuple cannot be saved; use nil for None")
	}
	n := len(t.Items)
	if n == 0 {
		e.op(opEmptyTuple)
		return nil
	}
	if e.get(t) {
		return nil
	}
	if e.open[t] {
		return errors.New("a tuple that contains itself cannot be saved")
	}
	e.open[t] = true
	defer delete(e.open, t)
	if n > 3 {
		e.op(opMark)
	}
	for _, v := range t.Items {
		if err := e.save(v, depth+1); err != nil {
			return err
		}
	}
	if n > 3 {
		e.op(opTuple)
	} else {
		e.op(byte(opTuple1 + n - 1))
	}
	e.put(t)
	return nil
}

func (e *encoder) set(s *Set, depth int) error {
	if s == nil {
		return errors.New("a nil *Set cannot be saved; use nil for None")
	}
	if e.get(s) {
		return nil
	}
	l := &List{Items: s.Items}
	return e.object(s, &Object{Func: Global{"__builtin__", "set"}, Args: NewTuple(l)}, depth)
}

func (e *encoder) object(identity any, o *Object, depth int) error {
	if o == nil {
		return errors.New("a nil *Object cannot be saved")
	}
	if e.get(identity) {
		return nil
	}
	if e.open[identity] {
		return errors.New("an object that contains itself cannot be saved")
	}
	e.open[identity] = true
	defer delete(e.open, identity)
	if err := e.global(o.Func); err != nil {
		return err
	}
	args := o.Args
	if args == nil {
		args = &Tuple{}
	}
	if err := e.tuple(args, depth+1); err != nil {
		return err
	}
	e.op(opReduce)
	e.put(identity)
	return e.build(o.State, depth)
}

func (e *encoder) build(state any, depth int) error {
	if state == nil {
		return nil
	}
	if err := e.save(state, depth+1); err != nil {
		return err
	}
	e.op(opBuild)
	return nil
}

func (e *encoder) dict(d *Dict, depth int) error {
	if d == nil {
		return errors.New("a nil *Dict cannot be saved; use nil for None")
	}
	if e.get(d) {
		return nil
	}
	switch d.Kind {
	case Counter:
		plain := &Dict{keys: d.keys, values: d.values, index: d.index}
		return e.object(d, &Object{Func: Global{"collections", "Counter"}, Args: NewTuple(plain)}, depth)
	case OrderedDict:
		if err := e.global(Global{"collections", "OrderedDict"}); err != nil {
			return err
		}
		e.op(opEmptyTuple, opReduce)
		e.put(d)
		// Through an iterator Python sees the end only when it asks for more, so a full batch is not followed by an
		// empty one, and a single left-over entry is written alone.
		for at := 0; at < d.Len(); {
			end := min(at+batch, d.Len())
			if err := e.entries(d, at, end, depth); err != nil {
				return err
			}
			at = end
		}
		if d.Attrs.Len() > 0 {
			return e.build(d.Attrs, depth)
		}
		return nil
	}
	e.op(opEmptyDict)
	e.put(d)
	if d.Len() == 1 {
		return e.entries(d, 0, 1, depth)
	}
	for at := 0; at < d.Len(); {
		end := min(at+batch, d.Len())
		e.op(opMark)
		if err := e.pairs(d, at, end, depth); err != nil {
			return err
		}
		e.op(opSetItems)
		if at = end; at == d.Len() && at%batch == 0 {
			e.op(opMark, opSetItems) // a plain dict's full batch is followed by another, even when it is empty
		}
	}
	return nil
}

func (e *encoder) entries(d *Dict, from, to, depth int) error {
	if to-from == 1 {
		if err := e.pairs(d, from, to, depth); err != nil {
			return err
		}
		e.op(opSetItem)
		return nil
	}
	e.op(opMark)
	if err := e.pairs(d, from, to, depth); err != nil {
		return err
	}
	e.op(opSetItems)
	return nil
}

func (e *encoder) pairs(d *Dict, from, to, depth int) error {
	for i := from; i < to; i++ {
		if err := e.save(d.keys[i], depth+1); err != nil {
			return err
		}
		if err := e.save(d.values[i], depth+1); err != nil {
			return fmt.Errorf("%s: %w", keyText(d.keys[i]), err)
		}
	}
	return nil
}

func keyText(k any) string {
	switch k := k.(type) {
	case string:
		return quoteShort(k)
	case *Tuple:
		return "a tuple key"
	default:
		return fmt.Sprint(k)
	}
}
