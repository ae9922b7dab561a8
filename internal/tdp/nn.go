package tdp

/*
#include <stdlib.h>
#include "../../csrc/tdp/tdp_nn.h"

#cgo noescape tdp_nn_activation
#cgo nocallback tdp_nn_activation
#cgo noescape tdp_nn_softmax
#cgo nocallback tdp_nn_softmax
#cgo noescape tdp_nn_flatten
#cgo nocallback tdp_nn_flatten
#cgo noescape tdp_nn_reshape
#cgo nocallback tdp_nn_reshape
#cgo noescape tdp_nn_dropout
#cgo nocallback tdp_nn_dropout
#cgo noescape tdp_nn_add
#cgo nocallback tdp_nn_add
#cgo noescape tdp_nn_linear
#cgo nocallback tdp_nn_linear
#cgo noescape tdp_nn_conv
#cgo nocallback tdp_nn_conv
#cgo noescape tdp_nn_batch_norm
#cgo nocallback tdp_nn_batch_norm
#cgo noescape tdp_nn_layer_norm
#cgo nocallback tdp_nn_layer_norm
#cgo noescape tdp_nn_group_norm
#cgo nocallback tdp_nn_group_norm
#cgo noescape tdp_nn_embedding
#cgo nocallback tdp_nn_embedding
#cgo noescape tdp_nn_max_pool
#cgo nocallback tdp_nn_max_pool
#cgo noescape tdp_nn_avg_pool
#cgo nocallback tdp_nn_avg_pool
#cgo noescape tdp_nn_adaptive_avg_pool
#cgo nocallback tdp_nn_adaptive_avg_pool
#cgo noescape tdp_nn_loss
#cgo nocallback tdp_nn_loss
*/
import "C"

import (
	"unsafe"

	"github.com/sugarme/gotch"
	"github.com/sugarme/gotch/ts"
)

// Activation is an elementwise function without parameters.
type Activation int32

// The activations.
const (
	ReLU     Activation = C.TDP_NN_RELU
	GELU     Activation = C.TDP_NN_GELU
	GELUTanh Activation = C.TDP_NN_GELU_TANH
	SiLU     Activation = C.TDP_NN_SILU
	Sigmoid  Activation = C.TDP_NN_SIGMOID
	Tanh     Activation = C.TDP_NN_TANH
)

// Activate applies an activation. In place, the result is a second handle on x.
func Activate(kind Activation, x *ts.Tensor, inplace bool) (*ts.Tensor, error) {
	var out C.tdp_tensor
	rec := C.tdp_nn_activation(C.int32_t(kind), handle(x), flag(inplace), &out)
	return tensor(out), done("activation", rec, x)
}

// Softmax is torch.softmax, or torch.log_softmax.
func Softmax(x *ts.Tensor, dim int64, log bool) (*ts.Tensor, error) {
	var out C.tdp_tensor
	rec := C.tdp_nn_softmax(handle(x), C.int64_t(dim), flag(log), &out)
	return tensor(out), done("softmax", rec, x)
}

// Flatten is torch.flatten.
func Flatten(x *ts.Tensor, startDim, endDim int64) (*ts.Tensor, error) {
	var out C.tdp_tensor
	rec := C.tdp_nn_flatten(handle(x), C.int64_t(startDim), C.int64_t(endDim), &out)
	return tensor(out), done("flatten", rec, x)
}

// Reshape is torch.reshape. One size may be -1.
func Reshape(x *ts.Tensor, shape []int64) (*ts.Tensor, error) {
	var out C.tdp_tensor
	rec := C.tdp_nn_reshape(handle(x), ints(shape), C.int32_t(len(shape)), &out)
	return tensor(out), done("reshape", rec, x)
}

// Dropout is F.dropout. In place, the result is a second handle on x.
func Dropout(x *ts.Tensor, p float64, train, inplace bool) (*ts.Tensor, error) {
	var out C.tdp_tensor
	rec := C.tdp_nn_dropout(handle(x), C.double(p), flag(train), flag(inplace), &out)
	return tensor(out), done("dropout", rec, x)
}

// Add is x + y. In place it is x += y, and the result a second handle on x.
func Add(x, y *ts.Tensor, inplace bool) (*ts.Tensor, error) {
	var out C.tdp_tensor
	rec := C.tdp_nn_add(handle(x), handle(y), flag(inplace), &out)
	return tensor(out), done("add", rec, x, y)
}

// Pad is F.pad: pairs for the last dimension first.
func Pad(x *ts.Tensor, pad []int64, mode string, value float64) (*ts.Tensor, error) {
	var out C.tdp_tensor
	m := C.CString(mode)
	defer C.free(unsafe.Pointer(m))
	rec := C.tdp_nn_pad(handle(x), ints(pad), C.int32_t(len(pad)), m, C.double(value), &out)
	return tensor(out), done("pad", rec, x)
}

// Linear is F.linear. bias may be nil.
func Linear(x, weight, bias *ts.Tensor) (*ts.Tensor, error) {
	var out C.tdp_tensor
	rec := C.tdp_nn_linear(handle(x), handle(weight), handle(bias), &out)
	return tensor(out), done("linear", rec, x, weight, bias)
}

// ConvSpec is the geometry of a convolution. A nil Padding means "same".
type ConvSpec struct {
	Stride, Padding, Dilation []int64
	Groups                    int64
}

// Conv is F.conv1d, conv2d or conv3d, by the length of the spec's lists. bias may be nil.
func Conv(x, weight, bias *ts.Tensor, s *ConvSpec) (*ts.Tensor, error) {
	var out C.tdp_tensor
	rec := C.tdp_nn_conv(handle(x), handle(weight), handle(bias), C.int32_t(len(s.Stride)), ints(s.Stride),
		ints(s.Padding), ints(s.Dilation), C.int64_t(s.Groups), &out)
	return tensor(out), done("conv", rec, x, weight, bias)
}

// BatchNormSpec is what batch normalisation needs beside its input. Tensors may be nil. Momentum < 0 means the
// cumulative average.
type BatchNormSpec struct {
	Weight, Bias, RunningMean, RunningVar, Count *ts.Tensor
	Training                                     bool
	Momentum, Eps                                float64
}

// BatchNorm is what BatchNorm's forward does, the batch counter included.
func BatchNorm(x *ts.Tensor, s *BatchNormSpec) (*ts.Tensor, error) {
	var out C.tdp_tensor
	rec := C.tdp_nn_batch_norm(handle(x), handle(s.Weight), handle(s.Bias), handle(s.RunningMean), handle(s.RunningVar),
		handle(s.Count), flag(s.Training), C.double(s.Momentum), C.double(s.Eps), &out)
	return tensor(out), done("batch_norm", rec, x, s)
}

// LayerNorm is F.layer_norm. weight and bias may be nil.
func LayerNorm(x *ts.Tensor, shape []int64, weight, bias *ts.Tensor, eps float64) (*ts.Tensor, error) {
	var out C.tdp_tensor
	rec := C.tdp_nn_layer_norm(handle(x), ints(shape), C.int32_t(len(shape)), handle(weight), handle(bias), C.double(eps), &out)
	return tensor(out), done("layer_norm", rec, x, weight, bias)
}

// GroupNorm is F.group_norm. weight and bias may be nil.
func GroupNorm(x *ts.Tensor, groups int64, weight, bias *ts.Tensor, eps float64) (*ts.Tensor, error) {
	var out C.tdp_tensor
	rec := C.tdp_nn_group_norm(handle(x), C.int64_t(groups), handle(weight), handle(bias), C.double(eps), &out)
	return tensor(out), done("group_norm", rec, x, weight, bias)
}

// Embedding is F.embedding. paddingIdx < 0: none.
func Embedding(weight, indices *ts.Tensor, paddingIdx int64, scaleGradByFreq, sparse bool) (*ts.Tensor, error) {
	var out C.tdp_tensor
	rec := C.tdp_nn_embedding(handle(weight), handle(indices), C.int64_t(paddingIdx), flag(scaleGradByFreq), flag(sparse), &out)
	return tensor(out), done("embedding", rec, weight, indices)
}

// PoolSpec is the geometry of a pooling window. Dilation is MaxPool's only; CountIncludePad and Divisor are AvgPool's.
type PoolSpec struct {
	Kernel, Stride, Padding, Dilation []int64
	CeilMode, CountIncludePad         bool
	Divisor                           int64
}

// MaxPool is F.max_pool1d, 2d or 3d.
func MaxPool(x *ts.Tensor, s *PoolSpec) (*ts.Tensor, error) {
	var out C.tdp_tensor
	rec := C.tdp_nn_max_pool(handle(x), C.int32_t(len(s.Kernel)), ints(s.Kernel), ints(s.Stride), ints(s.Padding),
		ints(s.Dilation), flag(s.CeilMode), &out)
	return tensor(out), done("max_pool", rec, x)
}

// AvgPool is F.avg_pool1d, 2d or 3d.
func AvgPool(x *ts.Tensor, s *PoolSpec) (*ts.Tensor, error) {
	var out C.tdp_tensor
	rec := C.tdp_nn_avg_pool(handle(x), C.int32_t(len(s.Kernel)), ints(s.Kernel), ints(s.Stride), ints(s.Padding),
		flag(s.CeilMode), flag(s.CountIncludePad), C.int64_t(s.Divisor), &out)
	return tensor(out), done("avg_pool", rec, x)
}

// AdaptiveAvgPool is F.adaptive_avg_pool1d, 2d or 3d. A negative size keeps the input's.
func AdaptiveAvgPool(x *ts.Tensor, size []int64) (*ts.Tensor, error) {
	var out C.tdp_tensor
	rec := C.tdp_nn_adaptive_avg_pool(handle(x), C.int32_t(len(size)), ints(size), &out)
	return tensor(out), done("adaptive_avg_pool", rec, x)
}

// LossKind names a loss function.
type LossKind int32

// The losses.
const (
	CrossEntropyLoss LossKind = C.TDP_NN_CROSS_ENTROPY
	NLLLoss          LossKind = C.TDP_NN_NLL
	MSELoss          LossKind = C.TDP_NN_MSE
	L1Loss           LossKind = C.TDP_NN_L1
	SmoothL1Loss     LossKind = C.TDP_NN_SMOOTH_L1
	BCELogitsLoss    LossKind = C.TDP_NN_BCE_LOGITS
)

// Reduction tells how a loss sums up its elements.
type Reduction int32

// The reductions.
const (
	ReduceNone Reduction = C.TDP_NN_NONE
	ReduceMean Reduction = C.TDP_NN_MEAN
	ReduceSum  Reduction = C.TDP_NN_SUM
)

// LossSpec is what a loss needs beside input and target. Parameter is cross entropy's label smoothing or smooth L1's
// beta. Tensors may be nil.
type LossSpec struct {
	Weight, PosWeight *ts.Tensor
	Reduction         Reduction
	IgnoreIndex       int64
	Parameter         float64
}

// Loss computes a loss.
func Loss(kind LossKind, input, target *ts.Tensor, s *LossSpec) (*ts.Tensor, error) {
	var out C.tdp_tensor
	rec := C.tdp_nn_loss(C.int32_t(kind), handle(input), handle(target), handle(s.Weight), handle(s.PosWeight),
		C.int32_t(s.Reduction), C.int64_t(s.IgnoreIndex), C.double(s.Parameter), &out)
	return tensor(out), done("loss", rec, input, target, s)
}

// Fill sets every element.
func Fill(t *ts.Tensor, value float64) error {
	return done("fill", C.tdp_nn_init(handle(t), C.TDP_NN_FILL, C.double(value), 0), t)
}

// Uniform draws every element from [lo, hi).
func Uniform(t *ts.Tensor, lo, hi float64) error {
	return done("uniform", C.tdp_nn_init(handle(t), C.TDP_NN_UNIFORM, C.double(lo), C.double(hi)), t)
}

// Normal draws every element from a normal distribution.
func Normal(t *ts.Tensor, mean, std float64) error {
	return done("normal", C.tdp_nn_init(handle(t), C.TDP_NN_NORMAL, C.double(mean), C.double(std)), t)
}

// Eye makes a matrix the identity.
func Eye(t *ts.Tensor) error { return done("eye", C.tdp_nn_init(handle(t), C.TDP_NN_EYE, 0, 0), t) }

// TruncNormal draws from a normal distribution cut to [lo, hi].
func TruncNormal(t *ts.Tensor, mean, std, lo, hi float64) error {
	return done("trunc_normal", C.tdp_nn_trunc_normal(handle(t), C.double(mean), C.double(std), C.double(lo), C.double(hi)), t)
}

// ZeroRow zeroes t[index].
func ZeroRow(t *ts.Tensor, index int64) error {
	return done("zero row", C.tdp_nn_zero_row(handle(t), C.int64_t(index)), t)
}

// Memory formats of c10. KeepFormat leaves the strides as they are.
const (
	KeepFormat     int32 = -1
	Contiguous     int32 = 0
	ChannelsLast   int32 = 2
	ChannelsLast3D int32 = 3
)

// Move brings t and its gradient to a device (nil: keep), a floating point dtype (gotch.Invalid: keep) and a memory
// format, in place: whoever holds t sees it moved.
func Move(t *ts.Tensor, dev *gotch.Device, dtype gotch.DType, format int32) error {
	d := C.tdp_device{_type: -1, index: -1}
	if dev != nil {
		d = device(*dev)
	}
	return done("move", C.tdp_nn_move(handle(t), d, C.int32_t(dtype), C.int32_t(format)), t)
}
