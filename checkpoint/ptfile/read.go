package ptfile

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"strings"
	"unicode/utf8"

	"github.com/goddp/goddp/checkpoint/internal/zipfile"
	"github.com/goddp/goddp/checkpoint/pickle"
)

// ErrTorchScript: the file is a TorchScript program, which jit.Load reads, not a checkpoint.
var ErrTorchScript = errors.New("a TorchScript program, not a checkpoint")

// ReadOptions are the choices of Open and Read.
type ReadOptions struct {
	Limits pickle.Limits
}

// File is an open checkpoint: its value, and the bytes of its storages on demand.
type File struct {
	// Value is what was saved: containers of package pickle, with *Tensor, *Parameter and DType inside.
	Value any
	// Storages are in the order in which the file has them.
	Storages []*Storage
	// Legacy: written by torch before 1.6, or with _use_new_zipfile_serialization=False. Such files have no checksums.
	Legacy bool
	// BigEndian: written on a machine of the other byte order.
	BigEndian bool
	// NoCRC: written without checksums.
	NoCRC bool
	// SerializationID is the fingerprint that PyTorch gave the file, or "".
	SerializationID string
	// Size of the file.
	Size int64

	zip *zipfile.Reader
	f   *os.File
}

// Open opens a file and reads everything but the storages. Close it when no storage is needed any more.
func Open(path string, opt ReadOptions) (*File, error) {
	// Opening a pipe would wait for its other end.
	if info, err := os.Stat(path); err == nil && !info.Mode().IsRegular() {
		return nil, fmt.Errorf("%s is not a regular file", path)
	}
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	info, err := f.Stat()
	if err != nil {
		f.Close()
		return nil, err
	}
	file, err := Read(f, info.Size(), opt)
	if err != nil {
		f.Close()
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	file.f = f
	return file, nil
}

// NewFile makes a File of a value whose storages lie in f, for other formats.
func NewFile(value any, storages []*Storage, f *os.File, size int64) *File {
	return &File{Value: value, Storages: storages, NoCRC: true, Size: size, f: f}
}

// OS gives the open file, or nil where the checkpoint was not opened by name.
func (f *File) OS() *os.File { return f.f }

// Close closes the file. Storages cannot be read afterwards.
func (f *File) Close() error {
	if f.f == nil {
		return nil
	}
	return f.f.Close()
}

// Read is Open for something that is open already.
func Read(r io.ReaderAt, size int64, opt ReadOptions) (*File, error) {
	var magic [4]byte
	if _, err := r.ReadAt(magic[:], 0); err != nil {
		return nil, fmt.Errorf("%w: the file has only %d bytes", ErrFormat, size)
	}
	switch {
	case string(magic[:]) == "PK\x03\x04":
		f, err := readZip(r, size, opt)
		return f, classified(err)
	case magic[0] == 0x80:
		f, err := readLegacy(r, size, opt)
		return f, classified(err)
	}
	var tar [5]byte
	if _, err := r.ReadAt(tar[:], 257); err == nil && string(tar[:]) == "ustar" {
		return nil, fmt.Errorf("%w: a tar archive of PyTorch 0.1; load it with an old PyTorch and save it again", ErrFormat)
	}
	return nil, fmt.Errorf("%w: neither a zip archive nor a pickle", ErrFormat)
}

// classified makes the layers' own errors ErrFormat too.
func classified(err error) error {
	if errors.Is(err, ErrFormat) || !errors.Is(err, zipfile.ErrFormat) && !errors.Is(err, pickle.ErrFormat) && !errors.Is(err, pickle.ErrLimit) {
		return err
	}
	return fmt.Errorf("%w: %w", ErrFormat, err)
}

func readZip(r io.ReaderAt, size int64, opt ReadOptions) (*File, error) {
	z, err := zipfile.NewReader(r, size)
	if err != nil {
		return nil, err
	}
	if z.Find("constants.pkl") != nil {
		return nil, ErrTorchScript
	}
	if z.Find("version") == nil {
		return nil, fmt.Errorf("%w: the archive has no record %q", ErrFormat, "version")
	}
	f := &File{Size: size, zip: z, NoCRC: z.NoCRC}
	if b := z.Find("byteorder"); b != nil {
		order, err := b.ReadAll(16)
		if err != nil {
			return nil, err
		}
		switch string(order) {
		case "little":
		case "big":
			f.BigEndian = true
		default:
			return nil, fmt.Errorf("%w: unknown byte order %q", ErrFormat, order)
		}
	}
	if b := z.Find(".data/serialization_id"); b != nil {
		id, err := b.ReadAll(4096)
		if err != nil {
			return nil, err
		}
		f.SerializationID = string(id)
	}
	pkl := z.Find("data.pkl")
	if pkl == nil {
		return nil, fmt.Errorf("%w: the archive has no record %q", ErrFormat, "data.pkl")
	}
	limit := opt.Limits.Bytes
	if limit <= 0 {
		limit = 512 << 20
	}
	if !pkl.Stored {
		limit = min(limit, 64<<20) // PyTorch never packs it
	}
	data, err := pkl.ReadAll(limit)
	if err != nil {
		return nil, err
	}
	u := &unpickler{file: f, byKey: make(map[string]*Storage)}
	f.Value, err = pickle.Unmarshal(data, u.options(opt.Limits))
	if err != nil {
		return nil, err
	}
	if f.BigEndian {
		u.swapAll()
	}
	return f, nil
}

// Records names what the archive holds beside the value, for display.
func (f *File) Records() []string {
	if f.zip == nil {
		return nil
	}
	out := make([]string, len(f.zip.Records))
	for i, r := range f.zip.Records {
		out[i] = r.Name
	}
	return out
}

// Verify reads every record of the file and checks its CRC.
func (f *File) Verify() error {
	if f.zip == nil {
		return nil
	}
	for _, r := range f.zip.Records {
		if err := r.Verify(); err != nil {
			return err
		}
	}
	return nil
}

// unpickler turns the names and persistent ids of a file into tensors.
type unpickler struct {
	file    *File
	byKey   map[string]*Storage
	tensors []*Tensor
	views   map[string]legacyView
}

func (u *unpickler) options(l pickle.Limits) pickle.DecodeOptions {
	return pickle.DecodeOptions{Limits: l, Persistent: u.persistent, Global: u.global, Call: u.call, Build: u.build}
}

// storageClass is a storage type by name, such as torch.FloatStorage.
type storageClass struct {
	name  pickle.Global
	dtype DType
}

var objects = map[pickle.Global]bool{
	{Module: "torch", Name: "Size"}:                      true,
	{Module: "torch", Name: "device"}:                    true,
	{Module: "torch.serialization", Name: "_get_layout"}: true,
	{Module: "torch._utils", Name: "_rebuild_tensor"}:    true,
	rebuildV2:        true,
	rebuildV3:        true,
	rebuildParam:     true,
	rebuildParamWith: true,
	rebuildMeta:      true,
	{Module: "torch._utils", Name: "_rebuild_sparse_tensor"}:                 true,
	{Module: "torch._utils", Name: "_rebuild_qtensor"}:                       true,
	{Module: "torch._utils", Name: "_rebuild_nested_tensor"}:                 true,
	{Module: "torch._utils", Name: "_rebuild_device_tensor_from_cpu_tensor"}: true,
	{Module: "torch", Name: "per_tensor_affine"}:                             true,
	{Module: "torch", Name: "per_tensor_symmetric"}:                          true,
	{Module: "torch", Name: "per_channel_affine"}:                            true,
	{Module: "torch", Name: "per_channel_symmetric"}:                         true,
	{Module: "torch", Name: "per_channel_affine_float_qparams"}:              true,
	{Module: "torch.nn.parameter", Name: "Parameter"}:                        true,
	{Module: "torch", Name: "Tensor"}:                                        true,
	{Module: "torch._tensor", Name: "_rebuild_from_type_v2"}:                 true,
	{Module: "torch.nn.parameter", Name: "Buffer"}:                           true,
}

func (u *unpickler) global(g pickle.Global) (any, bool) {
	if objects[g] {
		return g, true
	}
	switch g.Module {
	case "torch", "torch.cuda", "torch.storage":
	default:
		return nil, false
	}
	if d, ok := dtypeByStorage[g.Name]; ok && g.Module != "torch.storage" {
		return storageClass{g, d}, true
	}
	if g.Name == "UntypedStorage" {
		return storageClass{g, Uint8}, true
	}
	if d, ok := dtypeByName[g.Name]; ok && g.Module == "torch" {
		return d, true
	}
	return nil, false
}

func bad(format string, args ...any) error {
	return fmt.Errorf("%w: %s", ErrFormat, fmt.Sprintf(format, args...))
}

func text(v any) (string, bool) {
	switch s := v.(type) {
	case string:
		return s, true
	case []byte:
		return string(s), true
	}
	return "", false
}

// persistent resolves ('storage', class, key, location, numel), and the old format's sixth part.
func (u *unpickler) persistent(id any) (any, error) {
	t, ok := id.(*pickle.Tuple)
	if !ok || len(t.Items) < 5 || len(t.Items) > 6 {
		return nil, bad("a persistent id that is not a storage")
	}
	kind, _ := text(t.Items[0])
	if kind != "storage" {
		return nil, bad("a persistent id of kind %.20q; whole modules cannot be loaded, save their state_dict()", kind)
	}
	class, ok1 := t.Items[1].(storageClass)
	key, ok2 := text(t.Items[2])
	location, ok3 := text(t.Items[3])
	numel, ok4 := t.Items[4].(int64)
	if !ok1 || !ok2 || !ok3 || !ok4 {
		return nil, bad("a malformed storage reference")
	}
	if !utf8.ValidString(location) || !utf8.ValidString(key) {
		return nil, bad("a storage reference that is not text")
	}
	size := int64(class.dtype.Size())
	if numel < 0 || numel > math.MaxInt64/size {
		return nil, bad("storage %.40q has %d elements", key, numel)
	}
	s := u.byKey[key]
	if s == nil {
		s = &Storage{Bytes: numel * size, Location: location, Key: key}
		if !u.file.Legacy {
			if strings.ContainsRune(key, '/') {
				return nil, bad("storage key %.40q", key)
			}
			rec := u.file.zip.Find("data/" + key)
			if rec == nil {
				return nil, bad("the archive has no record %q", "data/"+key)
			}
			// A storage may hold a few bytes more than whole elements.
			if rec.Size < s.Bytes || rec.Size-s.Bytes >= size {
				return nil, bad("record %q has %d bytes, its storage needs %d", rec.Name, rec.Size, s.Bytes)
			}
			s.Bytes, s.src = rec.Size, zipSource{rec}
		}
		u.byKey[key] = s
		u.file.Storages = append(u.file.Storages, s)
	} else if numel*size > s.Bytes {
		return nil, bad("storage %.40q has two sizes, %d and %d bytes", key, s.Bytes, numel*size)
	}
	ref := &storageRef{s: s, dtype: class.dtype}
	if len(t.Items) == 6 && t.Items[5] != nil {
		if !u.file.Legacy {
			return nil, bad("a storage view in the new format")
		}
		return u.legacyView(ref, t.Items[5])
	}
	return ref, nil
}

// call builds what an allowed function of Python would.
func (u *unpickler) call(fn any, args *pickle.Tuple) (any, error) {
	g, ok := fn.(pickle.Global)
	if !ok {
		return nil, bad("a call of a %T", fn)
	}
	a := args.Items
	switch g.Name {
	case "_rebuild_tensor", "_rebuild_tensor_v2":
		return u.rebuild(a, false)
	case "_rebuild_tensor_v3":
		return u.rebuild(a, true)
	case "_rebuild_parameter", "_rebuild_parameter_with_state":
		return u.parameter(a)
	case "Parameter":
		if len(a) > 2 {
			return nil, bad("a Parameter of %d parts", len(a))
		}
		p := &Parameter{RequiresGrad: true}
		if len(a) > 0 {
			if p.Data, ok = a[0].(*Tensor); !ok {
				return nil, bad("a Parameter of a %T", a[0])
			}
		}
		if len(a) > 1 {
			p.RequiresGrad, _ = a[1].(bool)
		}
		return p, nil
	case "_rebuild_meta_tensor_no_storage":
		if len(a) == 4 {
			dtype, ok1 := a[0].(DType)
			shape, ok2 := intsOf(a[1])
			stride, ok3 := intsOf(a[2])
			grad, ok4 := a[3].(bool)
			if ok1 && ok2 && ok3 && ok4 {
				t := &Tensor{DType: dtype, Shape: shape, Stride: stride, RequiresGrad: grad}
				return t, t.validate()
			}
		}
		return nil, bad("a malformed meta tensor")
	case "Tensor":
		return nil, bad("a torch.Tensor in the form of PyTorch 0.1; load it in Python and save it again")
	case "_rebuild_from_type_v2":
		return u.subclass(a)
	}
	return &pickle.Object{Func: g, Args: args}, nil
}

// subclass takes (func, type, args, state): a tensor with attributes set on it in Python.
func (u *unpickler) subclass(a []any) (any, error) {
	if len(a) == 4 {
		inner, ok1 := a[2].(*pickle.Tuple)
		class, ok2 := a[1].(pickle.Global)
		if ok1 && ok2 && (class.Name == "Tensor" || class.Name == "Parameter") {
			return u.call(a[0], inner)
		}
	}
	return nil, bad("a tensor of a Python subclass")
}

func (u *unpickler) build(obj, state any) (any, error) {
	switch o := obj.(type) {
	case *Parameter: // PyTorch 0.2: (data, id, requires_grad, hooks)
		if t, ok := state.(*pickle.Tuple); ok && len(t.Items) >= 3 && o.Data == nil {
			data, ok1 := t.Items[0].(*Tensor)
			grad, ok2 := t.Items[len(t.Items)-2].(bool)
			if ok1 && ok2 {
				o.Data, o.RequiresGrad = data, grad
				return o, nil
			}
		}
	case *pickle.Object:
		if o.State == nil {
			o.State = state
			return o, nil
		}
	}
	return nil, bad("a %T is given attributes", obj)
}

func intsOf(v any) ([]int64, bool) {
	var items []any
	switch t := v.(type) {
	case *pickle.Tuple:
		items = t.Items
	case *pickle.List:
		items = t.Items
	case *pickle.Object: // torch.Size
		if t.Func.Name == "Size" && t.Args != nil && len(t.Args.Items) == 1 {
			return intsOf(t.Args.Items[0])
		}
		return nil, false
	default:
		return nil, false
	}
	out := make([]int64, len(items))
	for i, x := range items {
		n, ok := x.(int64)
		if !ok {
			return nil, false
		}
		out[i] = n
	}
	return out, true
}

// rebuild takes (storage, offset, size, stride[, requires_grad, hooks[, dtype][, metadata]]).
func (u *unpickler) rebuild(a []any, v3 bool) (any, error) {
	least := 4
	if v3 {
		least = 7
	}
	if len(a) < least || len(a) > 8 {
		return nil, bad("a tensor of %d parts", len(a))
	}
	ref, ok1 := a[0].(*storageRef)
	offset, ok2 := a[1].(int64)
	shape, ok3 := intsOf(a[2])
	stride, ok4 := intsOf(a[3])
	if !ok1 || !ok2 || !ok3 || !ok4 {
		return nil, bad("a malformed tensor")
	}
	if offset > math.MaxInt64-ref.first {
		return nil, bad("a tensor with offset %d", offset)
	}
	t := &Tensor{DType: ref.dtype, Shape: shape, Stride: stride, Offset: offset + ref.first, Storage: ref.s}
	if len(a) > 4 {
		if t.RequiresGrad, ok1 = a[4].(bool); !ok1 {
			return nil, bad("a malformed tensor")
		}
	}
	if len(a) > 5 {
		if hooks, ok := a[5].(*pickle.Dict); a[5] != nil && (!ok || hooks.Len() > 0) {
			return nil, bad("a tensor with hooks")
		}
	}
	rest := a[min(len(a), 6):]
	if v3 {
		if t.DType, ok1 = rest[0].(DType); !ok1 {
			return nil, bad("a malformed tensor")
		}
		rest = rest[1:]
	}
	if len(rest) > 1 {
		return nil, bad("a tensor of %d parts", len(a))
	}
	if len(rest) == 1 && rest[0] != nil {
		meta, ok := rest[0].(*pickle.Dict)
		if !ok {
			return nil, bad("a malformed tensor")
		}
		for k, v := range meta.All() {
			on, ok := v.(bool)
			switch {
			case ok && k == "conj":
				t.Conj = on
			case ok && k == "neg":
				t.Neg = on
			default:
				return nil, bad("a tensor with the metadata %.40q", fmt.Sprint(k))
			}
		}
	}
	u.tensors = append(u.tensors, t)
	return t, t.validate()
}

// parameter takes (tensor, requires_grad, hooks[, state]).
func (u *unpickler) parameter(a []any) (any, error) {
	if len(a) == 3 || len(a) == 4 {
		data, ok1 := a[0].(*Tensor)
		grad, ok2 := a[1].(bool)
		if ok1 && ok2 {
			p := &Parameter{Data: data, RequiresGrad: grad}
			if len(a) == 4 {
				p.State = a[3]
			}
			return p, nil
		}
	}
	return nil, bad("a malformed Parameter")
}

// swapAll notes for every storage what size its words have, so that reading turns them round. Storages without a
// type take that of their tensors.
func (u *unpickler) swapAll() {
	for _, t := range u.tensors {
		if word := dtypes[t.DType].word; word > t.Storage.word {
			t.Storage.word = word
		}
	}
}

// ReadBytes is Read for a file in memory.
func ReadBytes(data []byte, opt ReadOptions) (*File, error) {
	return Read(bytes.NewReader(data), int64(len(data)), opt)
}

func buffered(r io.ReaderAt, size int64) *bufio.Reader {
	return bufio.NewReaderSize(io.NewSectionReader(r, 0, size), 64<<10)
}
