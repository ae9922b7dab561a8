package ptfile

import (
	"fmt"

	"github.com/goddp/goddp/checkpoint/pickle"
)

// DType is an element type, numbered as c10::ScalarType.
type DType int8

// The element types that a file can hold.
const (
	Uint8          DType = 0
	Int8           DType = 1
	Int16          DType = 2
	Int32          DType = 3
	Int64          DType = 4
	Float16        DType = 5
	Float32        DType = 6
	Float64        DType = 7
	Complex32      DType = 8
	Complex64      DType = 9
	Complex128     DType = 10
	Bool           DType = 11
	QInt8          DType = 12
	QUint8         DType = 13
	QInt32         DType = 14
	BFloat16       DType = 15
	QUint4x2       DType = 16
	QUint2x4       DType = 17
	Bits1x8        DType = 18
	Bits2x4        DType = 19
	Bits4x2        DType = 20
	Bits8          DType = 21
	Bits16         DType = 22
	Float8E5M2     DType = 23
	Float8E4M3FN   DType = 24
	Float8E5M2FNUZ DType = 25
	Float8E4M3FNUZ DType = 26
	Uint16         DType = 27
	Uint32         DType = 28
	Uint64         DType = 29
	Float8E8M0FNU  DType = 44
	Float4E2M1FNX2 DType = 45
)

type dtypeInfo struct {
	name    string // torch.<name>
	storage string // torch.<storage>, or "" for types whose files name the dtype instead
	size    int    // of an element in bytes
	word    int    // what a change of byte order reverses
}

var dtypes = map[DType]dtypeInfo{
	Uint8: {"uint8", "ByteStorage", 1, 1}, Int8: {"int8", "CharStorage", 1, 1},
	Int16: {"int16", "ShortStorage", 2, 2}, Int32: {"int32", "IntStorage", 4, 4}, Int64: {"int64", "LongStorage", 8, 8},
	Float16: {"float16", "HalfStorage", 2, 2}, Float32: {"float32", "FloatStorage", 4, 4},
	Float64: {"float64", "DoubleStorage", 8, 8}, BFloat16: {"bfloat16", "BFloat16Storage", 2, 2},
	Complex32: {"complex32", "", 4, 2}, Complex64: {"complex64", "ComplexFloatStorage", 8, 4},
	Complex128: {"complex128", "ComplexDoubleStorage", 16, 8}, Bool: {"bool", "BoolStorage", 1, 1},
	QInt8: {"qint8", "QInt8Storage", 1, 1}, QUint8: {"quint8", "QUInt8Storage", 1, 1},
	QInt32: {"qint32", "QInt32Storage", 4, 4}, QUint4x2: {"quint4x2", "QUInt4x2Storage", 1, 1},
	QUint2x4: {"quint2x4", "QUInt2x4Storage", 1, 1},
	Bits1x8:  {"bits1x8", "", 1, 1}, Bits2x4: {"bits2x4", "", 1, 1}, Bits4x2: {"bits4x2", "", 1, 1},
	Bits8: {"bits8", "", 1, 1}, Bits16: {"bits16", "", 2, 2},
	Float8E5M2: {"float8_e5m2", "", 1, 1}, Float8E4M3FN: {"float8_e4m3fn", "", 1, 1},
	Float8E5M2FNUZ: {"float8_e5m2fnuz", "", 1, 1}, Float8E4M3FNUZ: {"float8_e4m3fnuz", "", 1, 1},
	Float8E8M0FNU: {"float8_e8m0fnu", "", 1, 1}, Float4E2M1FNX2: {"float4_e2m1fn_x2", "", 1, 1},
	Uint16: {"uint16", "", 2, 2}, Uint32: {"uint32", "", 4, 4}, Uint64: {"uint64", "", 8, 8},
}

var (
	dtypeByName    = make(map[string]DType)
	dtypeByStorage = make(map[string]DType)
)

func init() {
	for d, info := range dtypes {
		dtypeByName[info.name] = d
		if info.storage != "" {
			dtypeByStorage[info.storage] = d
		}
	}
}

// Valid tells whether files can hold elements of this type.
func (d DType) Valid() bool { _, ok := dtypes[d]; return ok }

// Size is the number of bytes of an element.
func (d DType) Size() int { return dtypes[d].size }

// String is the name without "torch.", such as "float32".
func (d DType) String() string {
	if info, ok := dtypes[d]; ok {
		return info.name
	}
	return fmt.Sprintf("dtype(%d)", int8(d))
}

// ParseDType is the reverse of String.
func ParseDType(name string) (DType, bool) {
	d, ok := dtypeByName[name]
	return d, ok
}

func (d DType) global() pickle.Global { return pickle.Global{Module: "torch", Name: d.String()} }

// storageClass is the Python class that stands for a storage of d. Types younger than the classes are saved as bytes.
func (d DType) storageClass() pickle.Global {
	if s := dtypes[d].storage; s != "" {
		return pickle.Global{Module: "torch", Name: s}
	}
	return pickle.Global{Module: "torch.storage", Name: "UntypedStorage"}
}

func (d DType) untyped() bool { return dtypes[d].storage == "" }
