package pickle

import (
	"fmt"
	"math"
	"math/big"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func roundTrip(t *testing.T, v any) any {
	t.Helper()
	data, err := Marshal(v, EncodeOptions{})
	require.NoError(t, err)
	out, err := Unmarshal(data, DecodeOptions{})
	require.NoError(t, err)
	return out
}

func TestPlainValues(t *testing.T) {
	huge := new(big.Int).Lsh(big.NewInt(-3), 100)
	for _, v := range []any{nil, true, false, int64(0), int64(255), int64(256), int64(65536), int64(-1), int64(math.MaxInt64), int64(math.MinInt64),
		huge, 0.0, -1.5, math.Inf(1), "", "a", "é\x00", complex(1, -2), []byte{}, []byte{0, 200}, ByteArray{1}, ByteArray{}} {
		require.Equal(t, v, roundTrip(t, v), "%T %v", v, v)
	}
	require.True(t, math.IsNaN(roundTrip(t, math.NaN()).(float64)))
	for _, x := range []any{7, int8(7), int16(7), int32(7), uint(7), uint8(7), uint16(7), uint32(7), uint64(7)} {
		require.Equal(t, int64(7), roundTrip(t, x), "%T", x)
	}
	require.Equal(t, new(big.Int).SetUint64(math.MaxUint64), roundTrip(t, uint64(math.MaxUint64)))
	require.Equal(t, 0.5, roundTrip(t, float32(0.5)))
}

// Integers in Python's shortest form; the borders are where a byte more is needed.
func TestIntegersAtEveryBorder(t *testing.T) {
	for bits := range 260 {
		for _, delta := range []int64{-1, 0, 1} {
			for _, sign := range []int64{1, -1} {
				v := new(big.Int).Lsh(big.NewInt(sign), uint(bits))
				v.Add(v, big.NewInt(delta))
				got := roundTrip(t, v)
				if n, ok := got.(int64); ok {
					got = big.NewInt(n)
				}
				require.Zero(t, v.Cmp(got.(*big.Int)), "%v", v)
			}
		}
	}
	_, err := Marshal(new(big.Int).Lsh(big.NewInt(1), 8*256), EncodeOptions{})
	require.Error(t, err)
}

func TestContainersKeepTheirIdentity(t *testing.T) {
	inner := NewList(int64(1))
	pair := NewTuple(inner, "x")
	d := NewOrderedDict().Set("a", inner).Set("b", pair).Set("c", pair)
	d.Attrs = NewDict().Set("_metadata", NewOrderedDict())
	out := roundTrip(t, NewTuple(d, d, inner, &Set{Items: []any{"s"}}, &Dict{Kind: Counter}, []any{1}, map[string]any{"z": 1, "a": 2})).(*Tuple)
	require.Same(t, out.Items[0], out.Items[1])
	o := out.Items[0].(*Dict)
	require.Equal(t, OrderedDict, o.Kind)
	a, _ := o.Get("a")
	b, _ := o.Get("b")
	c, _ := o.Get("c")
	require.Same(t, a, out.Items[2])
	require.Same(t, b, c)
	require.Same(t, a, b.(*Tuple).Items[0])
	_, ok := o.Attrs.Get("_metadata")
	require.True(t, ok)
	require.Equal(t, []any{"s"}, out.Items[3].(*Set).Items)
	require.Equal(t, Counter, out.Items[4].(*Dict).Kind)
	require.Equal(t, []any{"a", "z"}, out.Items[6].(*Dict).keys, "a Go map is written in sorted order")
}

func TestDict(t *testing.T) {
	d := NewDict().Set("a", 1).Set(int64(1), "one").Set(true, "yes").Set(1.0, "uno").Set(NewTuple("x", int64(1)), "t").Set(nil, "none").Set([]byte("a"), "bytes")
	require.Equal(t, 5, d.Len(), "1, 1.0 and True are one key")
	for key, want := range map[any]any{"a": 1, 1: "uno", false: nil, "zz": nil} {
		got, ok := d.Get(key)
		require.Equal(t, want != nil, ok, "%v", key)
		require.Equal(t, want, got)
	}
	got, ok := d.Get(NewTuple("x", int64(1)))
	require.True(t, ok)
	require.Equal(t, "t", got)
	_, ok = d.Get(NewTuple("x", "1"))
	require.False(t, ok)
	require.True(t, d.Delete("a"))
	require.False(t, d.Delete("a"))
	got, _ = d.Get([]byte("a"))
	require.Equal(t, "bytes", got)
	require.Error(t, d.Put(NewList(), 1))
	require.Panics(t, func() { d.Set(NewDict(), 1) })
	var none *Dict
	require.Zero(t, none.Len())
	for range none.All() {
		t.Fatal("a nil dict has no entries")
	}
}

func TestWhatCannotBeWritten(t *testing.T) {
	deep := any(nil)
	for range MaxDepth + 2 {
		deep = NewList(deep)
	}
	self := NewTuple(nil)
	self.Items[0] = self
	for name, v := range map[string]any{
		"struct": struct{}{}, "nil list": (*List)(nil), "nil tuple": (*Tuple)(nil), "nil dict": (*Dict)(nil), "nil set": (*Set)(nil),
		"nil object": (*Object)(nil), "nil int": (*big.Int)(nil), "not UTF-8": "\xff", "deep": deep, "tuple in itself": self,
		"name": Global{"os\nsystem", "x"}, "no name": Global{},
	} {
		_, err := Marshal(v, EncodeOptions{})
		require.Error(t, err, name)
	}
	// A surrogate alone is legal in Python's text, and kept.
	require.Equal(t, "\xed\xb2\x80", roundTrip(t, "\xed\xb2\x80"))
}

// Later protocols, which torch.save writes on request: the same values.
func TestProtocols3To5(t *testing.T) {
	for name, c := range map[string]struct {
		data string
		want any
	}{
		"3 bytes":     {"\x80\x03C\x02ab.", []byte("ab")},
		"3 long":      {"\x80\x03B\x02\x00\x00\x00ab.", []byte("ab")},
		"4 text":      {"\x80\x04\x95\x06\x00\x00\x00\x00\x00\x00\x00\x8c\x01a\x94.", "a"},
		"4 long text": {"\x80\x04\x8d\x01\x00\x00\x00\x00\x00\x00\x00a.", "a"},
		"4 set":       {"\x80\x04\x8f\x94(K\x01K\x02\x90.", &Set{Items: []any{int64(1), int64(2)}}},
		"4 global":    {"\x80\x04\x8c\x0bcollections\x94\x8c\x0bOrderedDict\x94\x93\x94)R\x94.", &Dict{Kind: OrderedDict}},
		"5 bytearray": {"\x80\x05\x96\x01\x00\x00\x00\x00\x00\x00\x00a.", ByteArray("a")},
		"2 list":      {"\x80\x02(K\x01K\x02l.", NewList(int64(1), int64(2))},
		"2 dict":      {"\x80\x02(K\x01K\x02d.", NewDict().Set(int64(1), int64(2))},
		"2 pops":      {"\x80\x02K\x012(K\x05K\x0610.", int64(1)},
	} {
		v, err := Unmarshal([]byte(c.data), DecodeOptions{})
		require.NoError(t, err, name)
		require.Equal(t, c.want, v, name)
	}
}

func TestLimits(t *testing.T) {
	list := &List{}
	for i := range 1000 {
		list.Items = append(list.Items, strings.Repeat("x", 10)+fmt.Sprint(i))
	}
	data, err := Marshal(list, EncodeOptions{})
	require.NoError(t, err)
	for _, l := range []Limits{{Bytes: 100}, {Values: 100}} {
		_, err = Unmarshal(data, DecodeOptions{Limits: l})
		require.ErrorIs(t, err, ErrLimit)
	}
	data, err = Marshal(NewList(NewList(NewList())), EncodeOptions{})
	require.NoError(t, err)
	_, err = Unmarshal(data, DecodeOptions{Limits: Limits{Depth: 2}})
	require.ErrorIs(t, err, ErrLimit)
	_, err = Unmarshal(data, DecodeOptions{Limits: Limits{Depth: 3}})
	require.NoError(t, err)
}

func ExampleUnmarshal() {
	data, _ := Marshal(NewDict().Set("epoch", 3).Set("betas", NewTuple(0.9, 0.999)), EncodeOptions{})
	v, err := Unmarshal(data, DecodeOptions{})
	if err != nil {
		panic(err)
	}
	for k, v := range v.(*Dict).Strings() {
		switch x := v.(type) {
		case *Tuple:
			fmt.Println(k, x.Items)
		default:
			fmt.Println(k, x)
		}
	}

	_, err = Unmarshal([]byte("\x80\x02cos\nsystem\n(X\x02\x00\x00\x00lstR."), DecodeOptions{})
	fmt.Println(strings.SplitN(err.Error(), " (", 2)[0])
	// Output:
	// epoch 3
	// betas [0.9 0.999]
	// pickle: the file refers to os.system
}
