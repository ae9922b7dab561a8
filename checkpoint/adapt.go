package checkpoint

import (
	"errors"
	"fmt"
	"io"
	"runtime"
	"strconv"

	"github.com/sugarme/gotch"
	"github.com/sugarme/gotch/ts"

	"github.com/goddp/goddp/checkpoint/pickle"
	"github.com/goddp/goddp/checkpoint/ptfile"
	"github.com/goddp/goddp/internal/tdp"
)

// staging is how much of a device's memory passes through the host at once.
const staging = 2 << 20

// adapter turns tensors into their descriptions. Tensors that are one in libtorch become one, and so do storages.
type adapter struct {
	tensors  map[uint64]*ptfile.Tensor
	storages map[storageID]*ptfile.Storage
	dicts    map[*StateDict]*pickle.Dict
	params   map[*Parameter]*ptfile.Parameter
}

type storageID struct {
	address uint64
	bytes   int64
}

func newAdapter() *adapter {
	return &adapter{
		tensors: make(map[uint64]*ptfile.Tensor), storages: make(map[storageID]*ptfile.Storage),
		dicts: make(map[*StateDict]*pickle.Dict), params: make(map[*Parameter]*ptfile.Parameter),
	}
}

func (a *adapter) adapt(v any) (any, error) {
	switch x := v.(type) {
	case *ts.Tensor:
		return a.tensor(x)
	case ts.Tensor:
		return a.tensor(&x)
	case *Parameter:
		if x == nil {
			return nil, errors.New("a nil *Parameter cannot be saved")
		}
		if p := a.params[x]; p != nil {
			return p, nil
		}
		data, err := a.detached(x.Tensor)
		if err != nil {
			return nil, err
		}
		p := &ptfile.Parameter{Data: data, RequiresGrad: x.RequiresGrad, State: x.State}
		a.params[x] = p
		return p, nil
	case *StateDict:
		return a.stateDict(x)
	case gotch.DType:
		return ptfile.DType(x), nil
	case gotch.Device:
		name, index := "cpu", -1
		if x.IsCuda() {
			name, index = "cuda", x.Value
		}
		args := pickle.NewTuple(name)
		if index >= 0 {
			args.Items = append(args.Items, index)
		}
		return &pickle.Object{Func: pickle.Global{Module: "torch", Name: "device"}, Args: args}, nil
	}
	return nil, fmt.Errorf("a Go value of type %T has no counterpart in PyTorch; save numbers, strings, bools, nil, lists, dicts and tensors", v)
}

// stateDict lays a state_dict out as Python's: detached tensors, and the versions as the attribute _metadata.
func (a *adapter) stateDict(s *StateDict) (any, error) {
	if s == nil {
		return nil, errors.New("a nil *StateDict cannot be saved")
	}
	if d := a.dicts[s]; d != nil {
		return d, nil
	}
	d := pickle.NewOrderedDict()
	a.dicts[s] = d
	for name, t := range s.All() {
		x, err := a.detached(t)
		if err != nil {
			return nil, fmt.Errorf("%q: %w", name, err)
		}
		if err := d.Put(name, x); err != nil {
			return nil, err
		}
	}
	if len(s.modules) > 0 {
		meta := pickle.NewOrderedDict()
		for path, version := range s.Versions() {
			meta.Set(path, pickle.NewDict().Set("version", version))
		}
		d.Attrs = pickle.NewDict().Set("_metadata", meta)
	}
	return d, nil
}

func (a *adapter) tensor(t *ts.Tensor) (*ptfile.Tensor, error) {
	info, err := a.describe(t)
	if err != nil {
		return nil, err
	}
	if x := a.tensors[info.Impl]; x != nil {
		return x, nil
	}
	x, err := a.build(t, info)
	if err == nil {
		x.RequiresGrad = info.RequiresGrad
		a.tensors[info.Impl] = x
	}
	return x, err
}

// detached gives what t.detach() would be: a tensor of its own on the same storage.
func (a *adapter) detached(t *ts.Tensor) (*ptfile.Tensor, error) {
	info, err := a.describe(t)
	if err != nil {
		return nil, err
	}
	return a.build(t, info)
}

func (a *adapter) describe(t *ts.Tensor) (tdp.TensorInfo, error) {
	if t == nil {
		return tdp.TensorInfo{}, errors.New("a nil tensor cannot be saved; use nil for None")
	}
	info, err := tdp.Describe(t)
	if err != nil {
		return info, err
	}
	switch d := ptfile.DType(info.DType); {
	case !info.Defined:
		return info, errors.New("an undefined tensor cannot be saved; use nil for None")
	case info.Sparse:
		return info, errors.New("a sparse tensor cannot be saved; make it dense first (tensor.ToDense)")
	case !d.Valid():
		return info, fmt.Errorf("a tensor of dtype %d cannot be saved", info.DType)
	case d == ptfile.QInt8 || d == ptfile.QUint8 || d == ptfile.QInt32 || d == ptfile.QUint4x2 || d == ptfile.QUint2x4:
		return info, fmt.Errorf("a quantised tensor (%v) cannot be saved; dequantise it first", d)
	}
	return info, nil
}

func (a *adapter) build(t *ts.Tensor, info tdp.TensorInfo) (*ptfile.Tensor, error) {
	id := storageID{info.Storage, info.StorageBytes}
	// The common case needs no other tensor: t is all of its storage, in host memory.
	whole := !info.Device.IsCuda() && info.Contiguous && info.Offset == 0 && info.Numel*int64(info.ElementSize) == info.StorageBytes
	s := a.storages[id]
	if s == nil {
		location := "cpu"
		if info.Device.IsCuda() {
			location = "cuda:" + strconv.Itoa(info.Device.Value)
		}
		s = ptfile.NewStorageFunc(info.StorageBytes, location, func(w io.Writer) error {
			if whole {
				return writeHost(t, w)
			}
			return writeStorage(t, w)
		})
		if info.Storage != 0 { // empty storages have no address to tell them apart by
			a.storages[id] = s
		}
	}
	return &ptfile.Tensor{
		DType: ptfile.DType(info.DType), Shape: info.Shape, Stride: info.Stride, Offset: info.Offset, Storage: s,
		Conj: info.Conj, Neg: info.Neg,
	}, nil
}

// writeStorage streams the bytes of t's storage: straight from host memory, or from a device in small pieces.
func writeStorage(t *ts.Tensor, w io.Writer) error {
	base, err := tdp.StorageOf(t)
	if err != nil {
		return err
	}
	defer drop(base)
	info, err := tdp.Describe(base)
	if err != nil {
		return err
	}
	if !info.Device.IsCuda() {
		return writeHost(base, w)
	}
	buffer, err := hostBuffer(min(info.Numel, staging))
	if err != nil {
		return err
	}
	defer drop(buffer)
	return inPieces(base, info.Numel, buffer, func(part *ts.Tensor, host []byte, hostTensor *ts.Tensor) error {
		if err := tdp.Copy(hostTensor, part, false); err != nil {
			return err
		}
		_, err := w.Write(host)
		return err
	})
}

func writeHost(t *ts.Tensor, w io.Writer) error {
	b, err := tdp.HostBytes(t)
	if err != nil {
		return err
	}
	_, err = w.Write(b)
	runtime.KeepAlive(t)
	return err
}

// inPieces cuts a one-dimensional uint8 tensor on a device into pieces and lends as much of the buffer on the host, which has
// room for the largest.
func inPieces(base *ts.Tensor, n int64, buffer *ts.Tensor, do func(part *ts.Tensor, host []byte, hostTensor *ts.Tensor) error) error {
	bytes, err := tdp.HostBytes(buffer)
	if err != nil {
		return err
	}
	for at := int64(0); at < n; at += staging {
		k := min(n-at, staging)
		part, err := tdp.ViewStorage(base, gotch.Uint8, []int64{k}, []int64{1}, at)
		if err != nil {
			return err
		}
		host, err := tdp.ViewStorage(buffer, gotch.Uint8, []int64{k}, []int64{1}, 0)
		if err != nil {
			drop(part)
			return err
		}
		err = do(part, bytes[:k], host)
		drop(part)
		drop(host)
		if err != nil {
			return err
		}
	}
	runtime.KeepAlive(buffer)
	return nil
}

// hostBuffer is page-locked where the machine has a GPU, which makes copies twice as fast.
func hostBuffer(n int64) (*ts.Tensor, error) {
	if deviceCount() > 0 {
		if t, err := tdp.Empty([]int64{n}, gotch.Uint8, gotch.CPU, true); err == nil {
			return t, nil
		}
	}
	return tdp.Empty([]int64{n}, gotch.Uint8, gotch.CPU, false)
}

// drop frees a tensor that nothing uses any more. A failure only leaves it to the finalizer.
func drop(t *ts.Tensor) {
	if t != nil {
		_ = t.Drop()
	}
}
