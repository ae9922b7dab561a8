package tdp

/*
#include <stdlib.h>
#include "../../csrc/tdp/tdp.h"

#cgo noescape tdp_tensor_describe
#cgo nocallback tdp_tensor_describe
*/
import "C"

import (
	"fmt"
	"unsafe"

	"github.com/sugarme/gotch"
	"github.com/sugarme/gotch/ts"
)

// The dtypes of c10 that gotch has no name for.
const (
	Float8E5M2     gotch.DType = 23
	Float8E4M3FN   gotch.DType = 24
	Float8E5M2FNUZ gotch.DType = 25
	Float8E4M3FNUZ gotch.DType = 26
	Uint16         gotch.DType = 27
	Uint32         gotch.DType = 28
	Uint64         gotch.DType = 29
	Float8E8M0FNU  gotch.DType = 44
)

// TensorInfo is what a tensor is, without its elements.
type TensorInfo struct {
	Defined      bool
	DType        gotch.DType
	Device       gotch.Device
	Shape        []int64
	Stride       []int64 // nil for sparse tensors
	ElementSize  int
	Numel        int64
	Offset       int64 // of the first element in the storage, in elements
	StorageBytes int64
	Storage      uint64         // equal for tensors that share memory; 0 when there is none
	Impl         uint64         // identity of the tensor itself: equal for two handles on one tensor
	Data         unsafe.Pointer // the first element, on whichever device it lies

	RequiresGrad, Leaf, Contiguous, Conj, Neg, Sparse, Pinned bool
}

// Device turns gotch's device into the ABI's. gotch counts the CPU as -1.
func device(d gotch.Device) C.tdp_device {
	if d.Name == "CUDA" {
		return C.tdp_device{_type: 1, index: C.int32_t(d.Value)}
	}
	return C.tdp_device{_type: 0, index: -1}
}

func goDevice(d C.tdp_device) gotch.Device {
	if d._type == 1 {
		return gotch.CudaBuilder(uint(d.index))
	}
	return gotch.CPU
}

func handle(t *ts.Tensor) C.tdp_tensor {
	if t == nil {
		return nil
	}
	return C.tdp_tensor(t.Ctensor())
}

// tensor gives a new owned handle to Go.
func tensor(h C.tdp_tensor) *ts.Tensor {
	if h == nil {
		return nil
	}
	return ts.FromCtensor(unsafe.Pointer(h))
}

func ints(s []int64) *C.int64_t { return (*C.int64_t)(unsafe.SliceData(s)) }

func ptr(b []byte) unsafe.Pointer { return unsafe.Pointer(unsafe.SliceData(b)) }

// Impl is the identity of the tensor itself, equal for two handles on one tensor, or 0 for no handle. All undefined
// tensors have the same. It calls no C: a C++ tensor is one pointer, to what counts.
func Impl(t *ts.Tensor) uint64 {
	h := handle(t)
	if h == nil {
		return 0
	}
	return *(*uint64)(unsafe.Pointer(h))
}

// Describe tells what t is.
func Describe(t *ts.Tensor) (TensorInfo, error) {
	var c C.tdp_tensor_info
	if err := done("describe", C.tdp_tensor_describe(handle(t), &c), t); err != nil {
		return TensorInfo{}, err
	}
	flag := func(bit C.int32_t) bool { return c.flags&bit != 0 }
	info := TensorInfo{
		Defined: flag(C.TDP_TENSOR_DEFINED), DType: gotch.DType(c.dtype), Device: goDevice(c.device),
		ElementSize: int(c.element_size), Numel: int64(c.numel), Offset: int64(c.storage_offset),
		StorageBytes: int64(c.storage_bytes), Storage: uint64(c.storage), Impl: uint64(c.impl), Data: c.data,
		RequiresGrad: flag(C.TDP_TENSOR_REQUIRES_GRAD), Leaf: flag(C.TDP_TENSOR_LEAF),
		Contiguous: flag(C.TDP_TENSOR_CONTIGUOUS), Conj: flag(C.TDP_TENSOR_CONJ), Neg: flag(C.TDP_TENSOR_NEG),
		Sparse: flag(C.TDP_TENSOR_SPARSE), Pinned: flag(C.TDP_TENSOR_PINNED),
	}
	n := int(c.ndim)
	dims := make([]int64, 2*n)
	info.Shape = dims[:n:n]
	for i := range n {
		info.Shape[i] = int64(c.sizes[i])
	}
	if !info.Sparse {
		info.Stride = dims[n:]
		for i := range n {
			info.Stride[i] = int64(c.strides[i])
		}
	}
	return info, nil
}

// Empty makes an uninitialised tensor. pinned asks for page-locked host memory, which needs a GPU.
func Empty(shape []int64, dtype gotch.DType, dev gotch.Device, pinned bool) (*ts.Tensor, error) {
	var out C.tdp_tensor
	pin := C.int32_t(0)
	if pinned {
		pin = 1
	}
	rec := C.tdp_tensor_empty(ints(shape), C.int32_t(len(shape)), C.int32_t(dtype), device(dev), pin, &out)
	return tensor(out), done("empty", rec)
}

// FromBytes copies host memory, the elements in native byte order, into a new tensor.
func FromBytes(data []byte, shape []int64, dtype gotch.DType, dev gotch.Device) (*ts.Tensor, error) {
	var out C.tdp_tensor
	rec := C.tdp_tensor_from_data(ptr(data), C.uint64_t(len(data)), ints(shape), C.int32_t(len(shape)),
		C.int32_t(dtype), device(dev), &out)
	return tensor(out), done("tensor from memory", rec)
}

// Element is a Go type whose memory is a tensor element's.
type Element interface {
	~int8 | ~uint8 | ~int16 | ~int32 | ~int64 | ~float32 | ~float64 | ~complex64 | ~complex128 | ~bool
}

// DTypeOf gives the dtype whose elements are T.
func DTypeOf[T Element]() gotch.DType {
	var zero T
	switch any(zero).(type) {
	case uint8:
		return gotch.Uint8
	case int8:
		return gotch.Int8
	case int16:
		return gotch.Int16
	case int32:
		return gotch.Int
	case int64:
		return gotch.Int64
	case float32:
		return gotch.Float
	case float64:
		return gotch.Double
	case complex64:
		return gotch.ComplexFloat
	case complex128:
		return gotch.ComplexDouble
	case bool:
		return gotch.Bool
	}
	return gotch.Invalid
}

func bytesOf[T Element](data []T) []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(data))), len(data)*int(unsafe.Sizeof(*new(T))))
}

// FromSlice copies a Go slice into a new tensor of the given shape.
func FromSlice[T Element](data []T, shape []int64, dev gotch.Device) (*ts.Tensor, error) {
	return FromBytes(bytesOf(data), shape, DTypeOf[T](), dev)
}

// ToSlice copies the elements of t, in row-major order, into a new Go slice.
func ToSlice[T Element](t *ts.Tensor) ([]T, error) {
	info, err := Describe(t)
	if err != nil {
		return nil, err
	}
	if want := DTypeOf[T](); info.DType != want {
		return nil, &Error{Op: "tensor to slice", Message: fmt.Sprintf("the tensor has dtype %d, the slice %d", info.DType, want), kind: ErrValue}
	}
	out := make([]T, info.Numel)
	return out, ToBytes(t, bytesOf(out))
}

// ToBytes copies the elements of t, in row-major order, into dst, which must have their exact size.
func ToBytes(t *ts.Tensor, dst []byte) error {
	return done("tensor to memory", C.tdp_tensor_to_data(handle(t), ptr(dst), C.uint64_t(len(dst))), t)
}

// FromMmap makes a uint8 tensor of pages[offset:offset+n]. pages came from mmap and are the tensor's from now on:
// they are unmapped when the last view of it is freed. On error they stay the caller's.
func FromMmap(pages []byte, offset, n uint64) (*ts.Tensor, error) {
	var out C.tdp_tensor
	rec := C.tdp_tensor_from_mmap(ptr(pages), C.uint64_t(offset), C.uint64_t(n), C.uint64_t(len(pages)), &out)
	return tensor(out), done("tensor from mmap", rec)
}

// ViewStorage makes a tensor of another dtype and geometry on base's storage. offset counts elements of dtype.
func ViewStorage(base *ts.Tensor, dtype gotch.DType, shape, stride []int64, offset int64) (*ts.Tensor, error) {
	if len(shape) != len(stride) {
		return nil, &Error{Op: "view of storage", Message: fmt.Sprintf("%d sizes but %d strides", len(shape), len(stride)), kind: ErrValue}
	}
	var out C.tdp_tensor
	rec := C.tdp_tensor_view_storage(handle(base), C.int32_t(dtype), ints(shape), ints(stride), C.int32_t(len(shape)),
		C.int64_t(offset), &out)
	return tensor(out), done("view of storage", rec, base)
}

// StorageOf gives t's whole storage as a uint8 tensor that shares it.
func StorageOf(t *ts.Tensor) (*ts.Tensor, error) {
	var out C.tdp_tensor
	rec := C.tdp_tensor_storage(handle(t), &out)
	return tensor(out), done("storage", rec, t)
}

// Share gives a second handle on the same tensor.
func Share(t *ts.Tensor) (*ts.Tensor, error) {
	var out C.tdp_tensor
	rec := C.tdp_tensor_share(handle(t), &out)
	return tensor(out), done("share", rec, t)
}

// Copy writes src into dst, across dtypes and devices, unseen by autograd.
func Copy(dst, src *ts.Tensor, nonBlocking bool) error {
	nb := C.int32_t(0)
	if nonBlocking {
		nb = 1
	}
	return done("copy", C.tdp_tensor_copy(handle(dst), handle(src), nb), dst, src)
}

// Grad gives t's gradient, or nil where there is none.
func Grad(t *ts.Tensor) (*ts.Tensor, error) {
	var out C.tdp_tensor
	rec := C.tdp_tensor_grad(handle(t), &out)
	return tensor(out), done("grad", rec, t)
}

// SetGrad replaces t's gradient; nil drops it.
func SetGrad(t, grad *ts.Tensor) error {
	return done("set grad", C.tdp_tensor_set_grad(handle(t), handle(grad)), t, grad)
}

// SetRequiresGrad marks a leaf as trainable or not.
func SetRequiresGrad(t *ts.Tensor, on bool) error {
	flag := C.int32_t(0)
	if on {
		flag = 1
	}
	return done("set requires_grad", C.tdp_tensor_set_requires_grad(handle(t), flag), t)
}

// HostBytes is the memory of a contiguous CPU tensor. It is valid while t is not dropped: keep t alive.
func HostBytes(t *ts.Tensor) ([]byte, error) {
	info, err := Describe(t)
	if err != nil {
		return nil, err
	}
	if info.Device.Name == "CUDA" || info.Sparse || !info.Contiguous {
		return nil, &Error{Op: "memory of tensor", Message: "only a contiguous CPU tensor has host memory to look at", kind: ErrValue}
	}
	return unsafe.Slice((*byte)(info.Data), info.Numel*int64(info.ElementSize)), nil
}

var dtypeNames = map[gotch.DType]string{
	gotch.Uint8: "uint8", gotch.Int8: "int8", gotch.Int16: "int16", gotch.Int: "int32", gotch.Int64: "int64",
	gotch.Half: "float16", gotch.Float: "float32", gotch.Double: "float64", gotch.ComplexHalf: "complex32",
	gotch.ComplexFloat: "complex64", gotch.ComplexDouble: "complex128", gotch.Bool: "bool", gotch.BFloat16: "bfloat16",
	Float8E5M2: "float8_e5m2", Float8E4M3FN: "float8_e4m3fn", Float8E5M2FNUZ: "float8_e5m2fnuz",
	Float8E4M3FNUZ: "float8_e4m3fnuz", Uint16: "uint16", Uint32: "uint32", Uint64: "uint64", Float8E8M0FNU: "float8_e8m0fnu",
}

// DTypeName is PyTorch's name of a dtype, without "torch.".
func DTypeName(d gotch.DType) string {
	if name, ok := dtypeNames[d]; ok {
		return name
	}
	return fmt.Sprintf("dtype %d", d)
}
