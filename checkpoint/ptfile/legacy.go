package ptfile

import (
	"encoding/binary"
	"io"
	"math"
	"math/big"

	"github.com/goddp/goddp/checkpoint/pickle"
)

// The old format is five pickles one after the other (magic number, version, system, value, storage keys), then the
// storages: a count of elements and the elements, in little endian on every machine.
const (
	legacyMagic    = "1950a86a20f9469cfc6c"
	legacyProtocol = 1001
)

type legacyView struct {
	s     *Storage
	first int64
	dtype DType
}

// legacyView resolves (view key, offset, size): PyTorch 0.3 and before could save a part of a storage.
func (u *unpickler) legacyView(ref *storageRef, meta any) (any, error) {
	t, ok := meta.(*pickle.Tuple)
	if !ok || len(t.Items) != 3 {
		return nil, bad("a malformed storage view")
	}
	key, ok1 := text(t.Items[0])
	offset, ok2 := t.Items[1].(int64)
	n, ok3 := t.Items[2].(int64)
	if !ok1 || !ok2 || !ok3 {
		return nil, bad("a malformed storage view")
	}
	if v, ok := u.views[key]; ok {
		return &storageRef{s: v.s, dtype: v.dtype, first: v.first}, nil
	}
	held := ref.s.Bytes / int64(ref.dtype.Size())
	if offset < 0 || n < 0 || offset > held || n > held-offset {
		return nil, bad("a storage view of %d elements at %d in %d", n, offset, held)
	}
	if u.views == nil {
		u.views = make(map[string]legacyView)
	}
	u.views[key] = legacyView{ref.s, offset, ref.dtype}
	ref.first = offset
	return ref, nil
}

func readLegacy(r io.ReaderAt, size int64, opt ReadOptions) (*File, error) {
	f := &File{Legacy: true, NoCRC: true, Size: size}
	u := &unpickler{file: f, byKey: make(map[string]*Storage)}
	br := buffered(r, size)
	d := pickle.NewDecoder(br, u.options(opt.Limits))

	magic, err := d.Decode()
	if err != nil {
		return nil, err
	}
	if m, ok := magic.(*big.Int); !ok || m.Text(16) != legacyMagic {
		return nil, bad("a pickle that torch.save did not write")
	}
	version, err := d.Decode()
	if err != nil {
		return nil, err
	}
	if version != int64(legacyProtocol) {
		return nil, bad("protocol version %v, expected %d", version, legacyProtocol)
	}
	if _, err := d.Decode(); err != nil { // the system; storages are little endian whatever it says
		return nil, err
	}
	if f.Value, err = d.Decode(); err != nil {
		return nil, err
	}
	v, err := d.Decode()
	if err != nil {
		return nil, err
	}
	keys, ok := v.(*pickle.List)
	if !ok {
		return nil, bad("the storage keys are a %T", v)
	}
	sizes := make(map[*Storage]int64) // of an element: the file counts elements
	for _, t := range u.tensors {
		if _, ok := sizes[t.Storage]; !ok {
			sizes[t.Storage] = int64(t.DType.Size())
		}
	}
	at := d.Offset()
	f.Storages = f.Storages[:0]
	for _, k := range keys.Items {
		key, _ := text(k)
		s := u.byKey[key]
		if s == nil || s.src != nil {
			return nil, bad("storage key %.40q is unknown or occurs twice", key)
		}
		var head [8]byte
		if _, err := r.ReadAt(head[:], at); err != nil {
			return nil, bad("the file ends before storage %.40q", key)
		}
		at += 8
		n := int64(binary.LittleEndian.Uint64(head[:]))
		elem := max(sizes[s], 1)
		if n < 0 || n > math.MaxInt64/16 || s.Bytes != n*elem && s.Bytes != n {
			return nil, bad("storage %.40q has %d elements where %d bytes are needed", key, n, s.Bytes)
		}
		if s.Bytes > size-at {
			return nil, bad("the file ends inside storage %.40q", key)
		}
		s.src = sectionSource{r: r, offset: at, bytes: s.Bytes}
		at += s.Bytes
		f.Storages = append(f.Storages, s)
	}
	if len(f.Storages) != len(u.byKey) {
		return nil, bad("%d storages are used, %d are in the file", len(u.byKey), len(f.Storages))
	}
	return f, nil
}
