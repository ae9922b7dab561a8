package ptfile

import (
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/goddp/goddp/checkpoint/internal/zipfile"
	"github.com/goddp/goddp/checkpoint/pickle"
)

// WriteOptions are the choices of Write.
type WriteOptions struct {
	// Adapt turns a value of a type that this package does not know into one that it does, mostly a *Tensor.
	Adapt func(v any) (any, error)
}

// Stem is the folder that torch.save puts the records of a file of this name into: the name without its last
// extension, or "archive" where PyTorch's C++ cannot spell it.
func Stem(path string) string {
	name := filepath.Base(path)
	if i := strings.LastIndexByte(name, '.'); i >= 0 {
		name = name[:i]
	}
	for i := range len(path) {
		if path[i] >= 0x80 {
			name = ""
		}
	}
	if name == "" || strings.ContainsAny(name, "/\\") {
		return "archive"
	}
	return name
}

// Write writes v as torch.save of PyTorch 2.11 does, into an archive whose records lie under stem. Only
// the serialization_id, a fingerprint that readers log, differs.
func Write(w io.Writer, stem string, v any, opt WriteOptions) error {
	e, err := Encode(v, opt)
	if err != nil {
		return err
	}
	return e.Write(w, stem)
}

// Encoded is a value ready to be written: its pickle, and the storages that it refers to.
type Encoded struct {
	Pickle   []byte
	Storages []*Storage
}

// Encode does the part of Write that looks at v. Writing looks at the storages only.
func Encode(v any, opt WriteOptions) (*Encoded, error) {
	p := &pickler{opt: opt, keys: make(map[*Storage]string), as: make(map[*Storage]DType)}
	data, err := pickle.Marshal(v, pickle.EncodeOptions{Persistent: p.persistent, Reduce: p.reduce})
	if err != nil {
		return nil, err
	}
	return &Encoded{Pickle: data, Storages: p.storages}, nil
}

// Bytes is about how large the file will be.
func (e *Encoded) Bytes() int64 {
	n := int64(len(e.Pickle)) + 2048
	for _, s := range e.Storages {
		n += s.Bytes + 256
	}
	return n
}

// Write writes the archive.
func (e *Encoded) Write(w io.Writer, stem string) error {
	if stem == "" || strings.ContainsAny(stem, "/\x00") {
		return fmt.Errorf("%q cannot be the name of an archive", stem)
	}
	z := zipfile.NewWriter(w, stem)
	for _, r := range []struct {
		name string
		data []byte
	}{
		{"data.pkl", e.Pickle},
		{".format_version", []byte("1")},
		{".storage_alignment", []byte(strconv.Itoa(zipfile.Alignment))},
		{"byteorder", []byte("little")},
	} {
		if err := z.Bytes(r.name, r.data); err != nil {
			return err
		}
	}
	for i, s := range e.Storages {
		err := z.Record("data/"+strconv.Itoa(i), uint64(s.Bytes), func(to io.Writer) error {
			_, err := s.WriteTo(to)
			return err
		})
		if err != nil {
			return err
		}
	}
	if err := z.Bytes("version", []byte("3\n")); err != nil {
		return err
	}
	if err := z.Bytes(".data/serialization_id", []byte(z.SerializationID())); err != nil {
		return err
	}
	return z.Close()
}

// storageRef is a storage seen as elements of a type: what Python's pickler replaces by a persistent id.
type storageRef struct {
	s     *Storage
	dtype DType
	first int64 // elements to skip, for views inside old files
}

type pickler struct {
	opt      WriteOptions
	storages []*Storage
	keys     map[*Storage]string
	as       map[*Storage]DType
}

// ErrAlias: PyTorch's format cannot hold one storage seen as two types.
//
//lint:ignore ST1005 PyTorch's wording
var ErrAlias = errors.New("Cannot save multiple tensors or storages that view the same data as different types")

func (p *pickler) persistent(v any) (any, bool, error) {
	ref, ok := v.(*storageRef)
	if !ok {
		return nil, false, nil
	}
	as := ref.dtype
	if as.untyped() {
		as = Uint8
	}
	if was, ok := p.as[ref.s]; ok && was != as && ref.s.Bytes > 0 {
		return nil, false, fmt.Errorf("%w (%s and %s)", ErrAlias, was, as)
	}
	p.as[ref.s] = as
	key, ok := p.keys[ref.s]
	if !ok {
		key = strconv.Itoa(len(p.storages))
		p.keys[ref.s] = key
		p.storages = append(p.storages, ref.s)
	}
	location := ref.s.Location
	if location == "" {
		location = "cpu"
	}
	if location != "cpu" {
		location = strings.Clone(location) // Python makes a new string each time
	}
	return pickle.NewTuple("storage", ref.dtype.storageClass(), key, location, ref.s.Bytes/int64(as.Size())), true, nil
}

var (
	rebuildV2        = pickle.Global{Module: "torch._utils", Name: "_rebuild_tensor_v2"}
	rebuildV3        = pickle.Global{Module: "torch._utils", Name: "_rebuild_tensor_v3"}
	rebuildParam     = pickle.Global{Module: "torch._utils", Name: "_rebuild_parameter"}
	rebuildParamWith = pickle.Global{Module: "torch._utils", Name: "_rebuild_parameter_with_state"}
	rebuildMeta      = pickle.Global{Module: "torch._utils", Name: "_rebuild_meta_tensor_no_storage"}
)

func (p *pickler) reduce(v any) (any, error) {
	switch x := v.(type) {
	case *Tensor:
		return p.tensor(x)
	case *Parameter:
		if x.State != nil {
			return &pickle.Object{Func: rebuildParamWith, Args: pickle.NewTuple(x.Data, x.RequiresGrad, pickle.NewOrderedDict(), x.State)}, nil
		}
		return &pickle.Object{Func: rebuildParam, Args: pickle.NewTuple(x.Data, x.RequiresGrad, pickle.NewOrderedDict())}, nil
	case DType:
		if !x.Valid() {
			return nil, fmt.Errorf("unknown %v", x)
		}
		return x.global(), nil
	case storageClass: // the class itself as a value
		return x.name, nil
	}
	if p.opt.Adapt != nil {
		return p.opt.Adapt(v)
	}
	return nil, fmt.Errorf("a Go value of type %T has no counterpart in PyTorch", v)
}

func ints(s []int64) *pickle.Tuple {
	t := &pickle.Tuple{Items: make([]any, len(s))}
	for i, n := range s {
		t.Items[i] = n
	}
	return t
}

func (p *pickler) tensor(t *Tensor) (any, error) {
	if t == nil {
		return nil, errors.New("a nil *Tensor cannot be saved")
	}
	if err := t.validate(); err != nil {
		return nil, err
	}
	if t.Storage == nil {
		return &pickle.Object{Func: rebuildMeta, Args: pickle.NewTuple(t.DType, ints(t.Shape), ints(t.Stride), t.RequiresGrad)}, nil
	}
	args := pickle.NewTuple(&storageRef{s: t.Storage, dtype: t.DType}, t.Offset, ints(t.Shape), ints(t.Stride),
		t.RequiresGrad, pickle.NewOrderedDict())
	fn := rebuildV2
	if t.DType.untyped() {
		fn = rebuildV3
		args.Items = append(args.Items, t.DType)
	}
	if t.Conj || t.Neg {
		meta := pickle.NewDict()
		if t.Conj {
			meta.Set("conj", true)
		}
		if t.Neg {
			meta.Set("neg", true)
		}
		args.Items = append(args.Items, meta)
	}
	args.Items = slices.Clip(args.Items)
	return &pickle.Object{Func: fn, Args: args}, nil
}
