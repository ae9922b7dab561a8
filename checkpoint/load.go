package checkpoint

import (
	"errors"
	"fmt"
	"io"
	"runtime"
	"sync"

	"github.com/sugarme/gotch"
	"github.com/sugarme/gotch/ts"

	"github.com/goddp/goddp/checkpoint/pickle"
	"github.com/goddp/goddp/checkpoint/ptfile"
	"github.com/goddp/goddp/internal/tdp"
)

// LoadOptions are the choices of Load. The zero value loads every tensor to the device it was saved from.
type LoadOptions struct {
	// MapLocation moves storages to other devices: MapTo, MapDevices or a function.
	MapLocation MapLocation
	// Mmap maps the file instead of reading it: tensors on the CPU are pages of the page cache, which the ranks of a
	// machine share. Writing to such a tensor changes this process's copy only. The file must not be changed in place
	// meanwhile; Save never does that.
	Mmap bool
	// SkipCRC leaves out the check of mapped tensors, as torch.load does. Without it Load goes over the mapped pages once,
	// and keeps none of them; with it the time does not depend on the size of the file, no page is read before it is used,
	// and File.Verify can still check later. Tensors that are not mapped are checked in any case.
	SkipCRC bool
	// Limits bound what a hostile file can make the reader use.
	Limits pickle.Limits
}

// Load reads a file that torch.save or Save wrote: the value, with a *ts.Tensor for every tensor. [Get] finds its way
// in it.
//
// Nothing in the file is executed. CRCs are checked, which torch.load does not do. Tensors that shared memory share it.
//
// Every rank of a job loads the file itself: the ranks of one machine read it from the disk once, for it stays in the
// page cache, and bytes for a GPU go there through a host buffer of 2 MiB, never through a second copy of the model.
func Load(path string, opt LoadOptions) (any, error) {
	f, err := Open(path, opt)
	if err != nil {
		return nil, err
	}
	v, err := f.Load()
	if cerr := f.Close(); err == nil && cerr != nil {
		err = fmt.Errorf("loading %s: %w", path, cerr)
	}
	return v, err
}

// LoadStateDictFile loads a file that holds a module's state_dict and nothing else.
func LoadStateDictFile(path string, opt LoadOptions) (*StateDict, error) {
	v, err := Load(path, opt)
	if err != nil {
		return nil, err
	}
	sd, err := StateDictOf(v)
	if err != nil {
		return nil, fmt.Errorf("loading %s: %w", path, err)
	}
	return sd, nil
}

// Read loads a checkpoint from something that is open already, such as a buffer.
func Read(r io.ReaderAt, size int64, opt LoadOptions) (any, error) {
	file, err := ptfile.Read(r, size, ptfile.ReadOptions{Limits: opt.Limits})
	if err != nil {
		return nil, err
	}
	opt.Mmap = false
	return (&File{File: file, opt: opt, name: "checkpoint"}).Load()
}

// File is an open checkpoint whose tensors are loaded one by one, or all at once. Its Value holds descriptions of
// tensors (*ptfile.Tensor).
type File struct {
	*ptfile.File
	opt  LoadOptions
	name string
}

// Open opens a checkpoint and reads all of it but the tensors' elements. Close it when no more tensor is loaded from
// it; tensors stay valid.
func Open(path string, opt LoadOptions) (*File, error) {
	f, err := ptfile.Open(path, ptfile.ReadOptions{Limits: opt.Limits})
	if err != nil {
		return nil, fmt.Errorf("loading %w", err)
	}
	return &File{File: f, opt: opt, name: path}, nil
}

// Load loads the whole value.
func (f *File) Load() (any, error) { return f.LoadValue(f.Value) }

// LoadValue loads a part of the file's Value: a tensor or anything that holds tensors. Tensors that share memory share
// it within one call.
func (f *File) LoadValue(v any) (any, error) {
	l := &loader{
		f: f, storages: make(map[*ptfile.Storage]*ts.Tensor), devices: make(map[*ptfile.Storage]gotch.Device),
		made: make(map[any]any),
	}
	defer l.release()
	out, err := l.run(v)
	if err != nil {
		for _, t := range l.tensors {
			drop(t)
		}
		return nil, fmt.Errorf("loading %s: %w", f.name, err)
	}
	return out, nil
}

// LoadTensor loads one tensor of the file.
func (f *File) LoadTensor(t *ptfile.Tensor) (*ts.Tensor, error) {
	v, err := f.LoadValue(t)
	if err != nil {
		return nil, err
	}
	return v.(*ts.Tensor), nil
}

// loader turns descriptions into tensors: first all storages, checked for their devices and read side by side, then
// the views on them.
type loader struct {
	f        *File
	order    []*ptfile.Storage
	storages map[*ptfile.Storage]*ts.Tensor // the whole storage as bytes, on its device
	devices  map[*ptfile.Storage]gotch.Device
	made     map[any]any
	tensors  []*ts.Tensor

	// Host buffers that upload has no use for at the moment. Page-locked ones take long to make.
	mu      sync.Mutex
	buffers []*ts.Tensor
}

// buffer gives a buffer for inPieces. giveBack takes it.
func (l *loader) buffer() (*ts.Tensor, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if n := len(l.buffers); n > 0 {
		b := l.buffers[n-1]
		l.buffers = l.buffers[:n-1]
		return b, nil
	}
	return hostBuffer(staging)
}

func (l *loader) giveBack(b *ts.Tensor) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.buffers = append(l.buffers, b)
}

func (l *loader) release() {
	for _, t := range l.storages {
		drop(t)
	}
}

func (l *loader) run(v any) (any, error) {
	// Every device is checked before anything is allocated.
	if err := l.find(v, make(map[any]bool)); err != nil {
		return nil, err
	}
	if err := l.fill(); err != nil {
		return nil, err
	}
	return l.convert(v)
}

func (l *loader) find(v any, seen map[any]bool) error {
	var groups [][]any
	switch x := v.(type) {
	case *ptfile.Tensor:
		return l.need(x)
	case *ptfile.Parameter:
		if x.Data == nil {
			return errors.New("a parameter without data")
		}
		groups = [][]any{{x.Data, x.State}}
	case *List:
		groups = [][]any{x.Items}
	case *Tuple:
		groups = [][]any{x.Items}
	case *Dict:
		if seen[x] {
			return nil
		}
		seen[x] = true
		for k, v := range x.All() {
			if err := l.find(v, seen); err != nil {
				return inside(k, err)
			}
		}
		if x.Attrs != nil {
			return l.find(x.Attrs, seen)
		}
		return nil
	case *pickle.Object:
		return checkObject(x)
	default:
		return nil
	}
	if seen[v] {
		return nil
	}
	seen[v] = true
	for _, g := range groups {
		for i, item := range g {
			if err := l.find(item, seen); err != nil {
				return inside(i, err)
			}
		}
	}
	return nil
}

// entryError says where in a value an error belongs.
type entryError struct {
	path []any
	err  error
}

func (e *entryError) Error() string { return pathText(e.path) + ": " + e.err.Error() }
func (e *entryError) Unwrap() error { return e.err }

func inside(key any, err error) error {
	if e, ok := err.(*entryError); ok {
		return &entryError{append([]any{key}, e.path...), e.err}
	}
	return &entryError{[]any{key}, err}
}

// checkObject refuses what libtorch would have to build and this package does not.
func checkObject(o *pickle.Object) error {
	what := ""
	switch o.Func.Name {
	case "_rebuild_sparse_tensor":
		what = "a sparse tensor; save tensor.to_dense()"
	case "_rebuild_qtensor":
		what = "a quantised tensor; save tensor.dequantize()"
	case "_rebuild_nested_tensor":
		what = "a nested tensor; save a list of its tensors"
	case "_rebuild_device_tensor_from_cpu_tensor":
		what = "a tensor of a device other than cpu and cuda; save tensor.cpu()"
	default:
		return nil // torch.Size, torch.device
	}
	return fmt.Errorf("%w: %s", ErrUnsupported, what)
}

// ErrUnsupported: the file holds a kind of tensor that cannot be loaded.
var ErrUnsupported = errors.New("not supported")

func (l *loader) need(t *ptfile.Tensor) error {
	switch t.DType {
	case ptfile.QInt8, ptfile.QUint8, ptfile.QInt32, ptfile.QUint4x2, ptfile.QUint2x4:
		return fmt.Errorf("%w: a tensor of dtype %v", ErrUnsupported, t.DType)
	}
	s := t.Storage
	if s == nil {
		return fmt.Errorf("%w: a tensor on the meta device, which has no elements", ErrUnsupported)
	}
	if _, ok := l.devices[s]; ok {
		return nil
	}
	dev, err := l.f.opt.MapLocation.resolve(s.Location)
	if err != nil {
		return err
	}
	l.devices[s] = dev
	l.order = append(l.order, s)
	return nil
}

// loadWorkers is how many storages are read at once.
const loadWorkers = 4

// fill makes and reads all storages. Memory is allocated as the reading goes on, by several workers, because the
// first touch of fresh memory costs as much as the reading.
func (l *loader) fill() error {
	for _, s := range l.order {
		l.storages[s] = nil
	}
	var (
		mu    sync.Mutex
		next  int
		first error
		wg    sync.WaitGroup
	)
	work := func() {
		defer wg.Done()
		for {
			mu.Lock()
			if first != nil || next == len(l.order) {
				mu.Unlock()
				return
			}
			s := l.order[next]
			next++
			mu.Unlock()
			t, err := l.storage(s)
			mu.Lock()
			if err != nil && first == nil {
				first = err
			}
			l.storages[s] = t
			mu.Unlock()
		}
	}
	workers := min(runtime.GOMAXPROCS(0), loadWorkers, max(len(l.order), 1))
	wg.Add(workers)
	for range workers - 1 {
		go work()
	}
	work()
	wg.Wait()
	for _, b := range l.buffers {
		drop(b)
	}
	l.buffers = nil
	return first
}

func (l *loader) storage(s *ptfile.Storage) (*ts.Tensor, error) {
	dev := l.devices[s]
	if l.f.opt.Mmap && !dev.IsCuda() {
		if t, err := l.mapped(s); t != nil || err != nil {
			return t, err
		}
	}
	t, err := tdp.Empty([]int64{s.Bytes}, gotch.Uint8, dev, false)
	if err != nil {
		return nil, err
	}
	if s.Bytes == 0 {
		return t, nil
	}
	if dev.IsCuda() {
		err = l.upload(s, t)
	} else {
		var b []byte
		if b, err = tdp.HostBytes(t); err == nil {
			wantHugePages(b)
			err = s.ReadInto(b)
		}
	}
	if err != nil {
		drop(t)
		return nil, err
	}
	runtime.KeepAlive(t)
	return t, nil
}

// upload streams a storage to a device through a small host buffer.
func (l *loader) upload(s *ptfile.Storage, dst *ts.Tensor) error {
	if s.Swapped() { // words may straddle pieces: turn them round in memory
		data, err := s.Data()
		if err != nil {
			return err
		}
		host, err := tdp.FromBytes(data, []int64{s.Bytes}, gotch.Uint8, gotch.CPU)
		if err != nil {
			return err
		}
		defer drop(host)
		return tdp.Copy(dst, host, false)
	}
	buffer, err := l.buffer()
	if err != nil {
		return err
	}
	defer l.giveBack(buffer)
	pr, pw := io.Pipe()
	go func() {
		_, err := s.WriteTo(pw)
		pw.CloseWithError(err)
	}()
	err = inPieces(dst, s.Bytes, buffer, func(part *ts.Tensor, host []byte, hostTensor *ts.Tensor) error {
		if _, err := io.ReadFull(pr, host); err != nil {
			return err
		}
		return tdp.Copy(part, hostTensor, false)
	})
	if err == nil {
		// The CRC is known to be right only at the end.
		if _, err = pr.Read(make([]byte, 1)); err == io.EOF {
			err = nil
		}
	}
	pr.CloseWithError(err)
	return err
}

// convert gives v with tensors in place of their descriptions. Containers are new ones, shared where v shares them.
func (l *loader) convert(v any) (any, error) {
	switch x := v.(type) {
	case *List, *Tuple, *Dict, *ptfile.Tensor, *ptfile.Parameter:
		if out, ok := l.made[x]; ok {
			return out, nil
		}
	}
	switch x := v.(type) {
	case *List:
		out := &List{}
		l.made[x] = out
		var err error
		out.Items, err = l.items(x.Items)
		return out, err
	case *Tuple:
		out := &Tuple{}
		l.made[x] = out
		var err error
		out.Items, err = l.items(x.Items)
		return out, err
	case *Dict:
		out := &Dict{Kind: x.Kind}
		l.made[x] = out
		for k, v := range x.All() {
			c, err := l.convert(v)
			if err != nil {
				return nil, inside(k, err)
			}
			if err := out.Put(k, c); err != nil {
				return nil, err
			}
		}
		if x.Attrs != nil {
			attrs, err := l.convert(x.Attrs)
			if err != nil {
				return nil, err
			}
			out.Attrs = attrs.(*Dict)
		}
		return out, nil
	case *ptfile.Parameter:
		// A tensor of its own: the one inside may occur elsewhere with another requires_grad.
		t, err := l.tensor(x.Data)
		if err != nil {
			return nil, err
		}
		if x.RequiresGrad {
			if err := tdp.SetRequiresGrad(t, true); err != nil {
				return nil, err
			}
		}
		state, err := l.convert(x.State)
		if err != nil {
			return nil, err
		}
		out := &Parameter{Tensor: t, RequiresGrad: x.RequiresGrad, State: state}
		l.made[x] = out
		return out, nil
	case *ptfile.Tensor:
		t, err := l.tensor(x)
		if err != nil {
			return nil, err
		}
		l.made[x] = t
		return t, nil
	}
	return v, nil
}

func (l *loader) items(in []any) ([]any, error) {
	out := make([]any, len(in))
	for i, v := range in {
		c, err := l.convert(v)
		if err != nil {
			return nil, inside(i, err)
		}
		out[i] = c
	}
	return out, nil
}

func (l *loader) tensor(x *ptfile.Tensor) (*ts.Tensor, error) {
	t, err := tdp.ViewStorage(l.storages[x.Storage], gotch.DType(x.DType), x.Shape, x.Stride, x.Offset)
	if err != nil {
		return nil, err
	}
	if x.Conj {
		if t, err = replaced(t, (*ts.Tensor).Conj); err != nil {
			return nil, err
		}
	}
	if x.Neg {
		if t, err = replaced(t, negView); err != nil {
			return nil, err
		}
	}
	if x.RequiresGrad {
		if err := tdp.SetRequiresGrad(t, true); err != nil {
			drop(t)
			return nil, err
		}
	}
	l.tensors = append(l.tensors, t)
	return t, nil
}

func replaced(t *ts.Tensor, op func(*ts.Tensor, bool) (*ts.Tensor, error)) (*ts.Tensor, error) {
	out, err := op(t, false)
	drop(t)
	return out, err
}

func negView(t *ts.Tensor, del bool) (*ts.Tensor, error) { return t.Neg(del) }
