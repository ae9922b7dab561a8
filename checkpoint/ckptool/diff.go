package ckptool

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"fmt"
	"io"
	"math"
	"slices"

	"github.com/goddp/goddp/checkpoint/pickle"
	"github.com/goddp/goddp/checkpoint/ptfile"
)

// DiffOptions are the choices of Diff.
type DiffOptions struct {
	KeyA, KeyB string  // compare these parts
	Tolerance  float64 // numbers that differ by no more count as equal
}

// Diff prints how two checkpoints differ and tells whether they do: keys that one side lacks, other dtypes, shapes and
// values. Formats, strides, devices and the sharing of memory do not count.
func Diff(w io.Writer, a, b string, opt DiffOptions) (differ bool, err error) {
	if !(opt.Tolerance >= 0) {
		return false, fmt.Errorf("a tolerance of %v makes no sense", opt.Tolerance)
	}
	fa, err := open(a)
	if err != nil {
		return false, err
	}
	defer fa.Close()
	fb, err := open(b)
	if err != nil {
		return false, err
	}
	defer fb.Close()
	va, err := find(fa.Value, opt.KeyA)
	if err != nil {
		return false, fmt.Errorf("%s: %w", a, err)
	}
	vb, err := find(fb.Value, opt.KeyB)
	if err != nil {
		return false, fmt.Errorf("%s: %w", b, err)
	}
	d := &comparison{w: bufio.NewWriter(w), tol: opt.Tolerance, seen: make(map[[2]any]bool)}
	d.values("", va, vb, 0)
	if d.err != nil {
		return d.count > 0, d.err
	}
	if d.count == 0 {
		fmt.Fprintf(d.w, "equal: %d tensors\n", d.tensors)
	}
	return d.count > 0, d.w.Flush()
}

type comparison struct {
	w       *bufio.Writer
	tol     float64
	count   int
	tensors int
	seen    map[[2]any]bool
	err     error
}

func (d *comparison) say(path, format string, args ...any) {
	d.count++
	if path == "" {
		path = "the whole"
	}
	fmt.Fprintf(d.w, "%s: %s\n", path, fmt.Sprintf(format, args...))
}

func join(path string, key any) string {
	if path == "" {
		return plain(key)
	}
	return path + "/" + plain(key)
}

func (d *comparison) values(path string, a, b any, depth int) {
	if d.err != nil || depth > pickle.MaxDepth {
		return
	}
	if ta, tb := tensorOf(a), tensorOf(b); ta != nil && tb != nil {
		d.tensor(path, ta, tb)
		return
	}
	switch x := a.(type) {
	case *pickle.Dict:
		y, ok := b.(*pickle.Dict)
		if !ok {
			break
		}
		if d.again(x, y) {
			return
		}
		for k, v := range x.All() {
			if w, ok := y.Get(k); ok {
				d.values(join(path, k), v, w, depth+1)
			} else {
				d.say(join(path, k), "only in the first (%s)", kind(v))
			}
		}
		for k, v := range y.All() {
			if _, ok := x.Get(k); !ok {
				d.say(join(path, k), "only in the second (%s)", kind(v))
			}
		}
		return
	case *pickle.List:
		if y, ok := b.(*pickle.List); ok {
			if !d.again(x, y) {
				d.items(path, x.Items, y.Items, depth)
			}
			return
		}
	case *pickle.Tuple:
		if y, ok := b.(*pickle.Tuple); ok {
			if !d.again(x, y) {
				d.items(path, x.Items, y.Items, depth)
			}
			return
		}
	}
	if x, ok := a.(*pickle.Object); ok {
		if y, ok := b.(*pickle.Object); ok && x.Func == y.Func {
			if !d.again(x, y) {
				if x.Args != nil && y.Args != nil {
					d.items(path, x.Args.Items, y.Args.Items, depth)
				}
				d.values(path, x.State, y.State, depth+1)
			}
			return
		}
	}
	if !d.equal(a, b) {
		d.say(path, "%s, %s", kind(a), kind(b))
	}
}

// again tells whether this pair was compared before: a value may refer to one list very often.
func (d *comparison) again(a, b any) bool {
	k := [2]any{a, b}
	if d.seen[k] {
		return true
	}
	d.seen[k] = true
	return false
}

func (d *comparison) items(path string, a, b []any, depth int) {
	if len(a) != len(b) {
		d.say(path, "%d items, %d items", len(a), len(b))
		return
	}
	for i := range a {
		d.values(join(path, int64(i)), a[i], b[i], depth+1)
	}
}

func kind(v any) string {
	s := &shower{}
	return s.leaf(v)
}

// equal compares plain values.
func (d *comparison) equal(a, b any) bool {
	m, ok1 := a.(int64)
	n, ok2 := b.(int64)
	if ok1 && ok2 && d.tol == 0 {
		return m == n // beyond 2^53 a float64 cannot tell neighbours apart
	}
	x, ok1 := number(a)
	y, ok2 := number(b)
	if ok1 && ok2 {
		return x == y || math.IsNaN(x) && math.IsNaN(y) || math.Abs(x-y) <= d.tol
	}
	return fmt.Sprintf("%T%v", a, deref(a)) == fmt.Sprintf("%T%v", b, deref(b))
}

// deref gives what identifies a value beside its address.
func deref(v any) any {
	switch x := v.(type) {
	case *pickle.Set: // its order means nothing
		var items []string
		for _, item := range x.Items {
			items = append(items, fmt.Sprintf("%T%v", item, item))
		}
		slices.Sort(items)
		return items
	}
	return v
}

func number(v any) (float64, bool) {
	switch x := v.(type) {
	case int64:
		return float64(x), true
	case float64:
		return x, true
	}
	return 0, false
}

func (d *comparison) tensor(path string, a, b *ptfile.Tensor) {
	d.tensors++
	if a.DType != b.DType || !slices.Equal(a.Shape, b.Shape) {
		d.say(path, "%v %s, %v %s", a.DType, list(a.Shape), b.DType, list(b.Shape))
		return
	}
	if a.Storage == nil || b.Storage == nil || a.Numel() == 0 {
		return
	}
	if a.Numel() > 1<<33 {
		d.err = fmt.Errorf("%s: %v is too large to compare", path, a)
		return
	}
	var x, y bytes.Buffer
	for _, side := range []struct {
		t  *ptfile.Tensor
		to *bytes.Buffer
	}{{a, &x}, {b, &y}} {
		if err := side.t.Rows(side.to); err != nil {
			d.err = fmt.Errorf("%s: %w", path, err)
			return
		}
	}
	if bytes.Equal(x.Bytes(), y.Bytes()) {
		return
	}
	item := a.DType.Size()
	differing, largest := 0, 0.0
	comparable := true
	for i := 0; i < x.Len(); i += item {
		p, q := x.Bytes()[i:i+item], y.Bytes()[i:i+item]
		if bytes.Equal(p, q) {
			continue
		}
		u, ok := element(a.DType, p)
		v, _ := element(a.DType, q)
		if !ok {
			comparable = false
			differing++
			continue
		}
		delta := math.Abs(u - v)
		if whole(a.DType) && d.tol == 0 {
			delta = max(delta, 1) // large integers may be the same float64
		} else if u == v || math.IsNaN(u) && math.IsNaN(v) || delta <= d.tol {
			continue
		}
		differing++
		if delta > largest || math.IsNaN(delta) {
			largest = delta
		}
	}
	switch {
	case differing == 0:
	case comparable:
		d.say(path, "%d of %d elements differ, by up to %.6g", differing, a.Numel(), largest)
	default:
		d.say(path, "%d of %d elements differ", differing, a.Numel())
	}
}

// whole tells whether a dtype's elements are integers or bools.
func whole(t ptfile.DType) bool {
	switch t {
	case ptfile.Float16, ptfile.BFloat16, ptfile.Float32, ptfile.Float64:
		return false
	}
	return true
}

// element gives a real element's value.
func element(t ptfile.DType, b []byte) (float64, bool) {
	le := binary.LittleEndian
	switch t {
	case ptfile.Float32:
		return float64(math.Float32frombits(le.Uint32(b))), true
	case ptfile.Float64:
		return math.Float64frombits(le.Uint64(b)), true
	case ptfile.BFloat16:
		return float64(math.Float32frombits(uint32(le.Uint16(b)) << 16)), true
	case ptfile.Float16:
		return half(le.Uint16(b)), true
	case ptfile.Uint8, ptfile.Bool:
		return float64(b[0]), true
	case ptfile.Int8:
		return float64(int8(b[0])), true
	case ptfile.Int16:
		return float64(int16(le.Uint16(b))), true
	case ptfile.Uint16:
		return float64(le.Uint16(b)), true
	case ptfile.Int32:
		return float64(int32(le.Uint32(b))), true
	case ptfile.Uint32:
		return float64(le.Uint32(b)), true
	case ptfile.Int64:
		return float64(int64(le.Uint64(b))), true
	case ptfile.Uint64:
		return float64(le.Uint64(b)), true
	}
	return 0, false
}

func half(h uint16) float64 {
	sign, exp, frac := 1.0, int(h>>10&31), float64(h&1023)
	if h>>15 == 1 {
		sign = -1
	}
	switch exp {
	case 0:
		return sign * math.Ldexp(frac, -24)
	case 31:
		if frac != 0 {
			return math.NaN()
		}
		return math.Inf(int(sign))
	}
	return sign * math.Ldexp(1024+frac, exp-25)
}
