package torchddp

import (
	"fmt"

	"github.com/goddp/goddp/internal/tdp"
	"github.com/sugarme/gotch"
	"github.com/sugarme/gotch/ts"
)

// Object collectives.
//
// They travel as Python's do, step by step: values become bytes, the sizes go first, then the bytes as a uint8 tensor
// (padded to the largest in gathers and scatters, one after the other in broadcasts and sends). So with the Pickle codec
// Go and Python ranks exchange values. A rank that cannot encode its value sends the size -1, and all ranks get an error
// that names it, instead of waiting.

// DefaultMaxObjectBytes bounds what an object collective takes from the other ranks.
const DefaultMaxObjectBytes = 1 << 30

// ObjectOptions are options of object collectives; all ranks give the same.
type ObjectOptions struct {
	// Codec turns values into bytes; nil is Gob.
	Codec Codec
	// MaxBytes bounds the bytes of one rank's values; 0 is DefaultMaxObjectBytes.
	MaxBytes int64
	// Call has options of the tensors' collectives, such as WithTimeout.
	Call []CallOption
}

func objectOptions(o []ObjectOptions) ObjectOptions {
	var out ObjectOptions
	if len(o) > 0 {
		out = o[0]
	}
	if out.Codec == nil {
		out.Codec = Gob
	}
	out.MaxBytes = orDefault(out.MaxBytes, DefaultMaxObjectBytes)
	// What the history shows is the program's line, not this file's.
	out.Call = append([]CallOption{{site: objectSite()}}, out.Call...)
	return out
}

// objectError is an object collective's error of this rank.
func (p *ProcessGroup) objectError(op string, err error) error {
	return &RankError{Rank: p.rank, Op: op, Err: err}
}

const encodeFailed = -1

// encode gives the bytes, or an error and the size that tells it to the others.
func encode[T any](v T, o ObjectOptions) ([]byte, int64, error) {
	data, err := o.Codec.Marshal(v)
	if err == nil && int64(len(data)) > o.MaxBytes {
		err = valueErrorf("the encoded value has %d bytes, more than MaxBytes (%d)", len(data), o.MaxBytes)
	}
	if err != nil {
		return nil, encodeFailed, err
	}
	return data, int64(len(data)), nil
}

func decode[T any](data []byte, from int, o ObjectOptions) (v T, err error) {
	if err := o.Codec.Unmarshal(data, &v); err != nil {
		return v, fmt.Errorf("decoding the value of rank %d as %T: %w", from, v, err)
	}
	return v, nil
}

func (o ObjectOptions) checkSize(n int64, from int) error {
	switch {
	case n == encodeFailed:
		return fmt.Errorf("%w: rank %d could not encode its value", ErrPeer, from)
	case n < 0 || n > o.MaxBytes:
		return valueErrorf("rank %d announces %d bytes, more than MaxBytes (%d)", from, n, o.MaxBytes)
	}
	return nil
}

// tensors is a list that is freed at the end of an object collective.
type tensors []*ts.Tensor

func (l *tensors) drop() {
	for _, t := range *l {
		_ = t.Drop()
	}
}

func (l *tensors) keep(t *ts.Tensor, err error) (*ts.Tensor, error) {
	if err == nil {
		*l = append(*l, t)
	}
	return t, err
}

func (l *tensors) ofInts(v []int64, dev gotch.Device) (*ts.Tensor, error) {
	return l.keep(tdp.FromSlice(v, []int64{int64(len(v))}, dev))
}

func (l *tensors) ofBytes(v []byte, dev gotch.Device) (*ts.Tensor, error) {
	return l.keep(tdp.FromSlice(v, []int64{int64(len(v))}, dev))
}

func (l *tensors) empty(n int64, dtype gotch.DType, dev gotch.Device) (*ts.Tensor, error) {
	return l.keep(tdp.Empty([]int64{n}, dtype, dev, false))
}

// gatherSizes tells every rank all sizes, and the largest.
func (p *ProcessGroup) gatherSizes(size int64, o ObjectOptions, live *tensors) (sizes []int64, largest int64, err error) {
	dev := p.hostDevice()
	mine, err := live.ofInts([]int64{size}, dev)
	if err != nil {
		return nil, 0, err
	}
	all := make([]*ts.Tensor, p.size)
	for i := range all {
		if all[i], err = live.empty(1, gotch.Int64, dev); err != nil {
			return nil, 0, err
		}
	}
	if err := p.AllGather(all, mine, o.Call...); err != nil {
		return nil, 0, err
	}
	sizes = make([]int64, p.size)
	for i, t := range all {
		v, err := tdp.ToSlice[int64](t)
		if err != nil {
			return nil, 0, err
		}
		sizes[i] = v[0]
		largest = max(largest, v[0])
	}
	return sizes, largest, nil
}

func pad(data []byte, n int64) []byte {
	out := make([]byte, n)
	copy(out, data)
	return out
}

// AllGatherObject gives every rank the values of all, by rank.
func AllGatherObject[T any](p *ProcessGroup, v T, opts ...ObjectOptions) ([]T, error) {
	const op = "all_gather_object"
	values, err := gatherObjects(p, op, v, objectOptions(opts), func(outputs []*ts.Tensor, input *ts.Tensor, o ObjectOptions) error {
		return p.AllGather(outputs, input, o.Call...)
	}, true)
	return values, err
}

// GatherObject gives dst the values of all ranks, by rank, and the others nil.
func GatherObject[T any](p *ProcessGroup, v T, dst int, opts ...ObjectOptions) ([]T, error) {
	const op = "gather_object"
	if dst < 0 || dst >= p.size {
		return nil, p.objectError(op, orMember(p, valueErrorf("destination rank %d is not in the group of %d ranks", dst, p.size)))
	}
	return gatherObjects(p, op, v, objectOptions(opts), func(outputs []*ts.Tensor, input *ts.Tensor, o ObjectOptions) error {
		return p.Gather(outputs, input, dst, o.Call...)
	}, p.rank == dst)
}

func orMember(p *ProcessGroup, err error) error {
	if p.rank < 0 {
		return ErrNotMember
	}
	return err
}

func gatherObjects[T any](p *ProcessGroup, op string, v T, o ObjectOptions, move func([]*ts.Tensor, *ts.Tensor, ObjectOptions) error, receives bool) ([]T, error) {
	if p.rank < 0 {
		return nil, p.objectError(op, ErrNotMember)
	}
	var live tensors
	defer live.drop()
	data, size, encodeErr := encode(v, o)
	sizes, largest, err := p.gatherSizes(size, o, &live)
	if err != nil {
		return nil, err
	}
	if encodeErr != nil {
		return nil, p.objectError(op, encodeErr)
	}
	for r, n := range sizes {
		if err := o.checkSize(n, r); err != nil {
			return nil, p.objectError(op, err)
		}
	}
	outputs := make([]*ts.Tensor, 0, p.size)
	if largest > 0 {
		dev := p.hostDevice()
		input, err := live.ofBytes(pad(data, largest), dev)
		if err != nil {
			return nil, p.objectError(op, err)
		}
		if receives {
			for range p.size {
				t, err := live.empty(largest, gotch.Uint8, dev)
				if err != nil {
					return nil, p.objectError(op, err)
				}
				outputs = append(outputs, t)
			}
		}
		if err := move(outputs, input, o); err != nil {
			return nil, err
		}
	}
	if !receives {
		return nil, nil
	}
	values := make([]T, p.size)
	for r := range values {
		if r == p.rank {
			values[r] = v
			continue
		}
		var data []byte
		if largest > 0 {
			if data, err = tdp.ToSlice[uint8](outputs[r]); err != nil {
				return nil, p.objectError(op, err)
			}
		}
		if values[r], err = decode[T](data[:sizes[r]], r, o); err != nil {
			return nil, p.objectError(op, err)
		}
	}
	return values, nil
}

// BroadcastObject gives every rank src's value. v of the other ranks does not matter.
func BroadcastObject[T any](p *ProcessGroup, v T, src int, opts ...ObjectOptions) (T, error) {
	list := []T{v}
	err := broadcastObjects(p, list, src, objectOptions(opts))
	return list[0], err
}

// BroadcastObjectList overwrites the other ranks' values with src's. The lists are equally long.
func BroadcastObjectList[T any](p *ProcessGroup, list []T, src int, opts ...ObjectOptions) error {
	return broadcastObjects(p, list, src, objectOptions(opts))
}

func broadcastObjects[T any](p *ProcessGroup, list []T, src int, o ObjectOptions) error {
	const op = "broadcast_object_list"
	if p.rank < 0 {
		return p.objectError(op, ErrNotMember)
	}
	if src < 0 || src >= p.size {
		return p.objectError(op, valueErrorf("source rank %d is not in the group of %d ranks", src, p.size))
	}
	return moveObjects(p, op, list, src, p.rank == src, o, func(t *ts.Tensor) error { return p.Broadcast(t, src, o.Call...) })
}

// SendObjectList gives a list of values to rank dst, which takes it with RecvObjectList.
func SendObjectList[T any](p *ProcessGroup, list []T, dst int, opts ...ObjectOptions) error {
	const op = "send_object_list"
	o := objectOptions(opts)
	if p.rank < 0 {
		return p.objectError(op, ErrNotMember)
	}
	return moveObjects(p, op, list, p.rank, true, o, func(t *ts.Tensor) error { return p.Send(t, dst, o.Call...) })
}

// RecvObjectList fills list with as many values as src, or with [AnySource] whoever, sends. It gives the sender.
func RecvObjectList[T any](p *ProcessGroup, list []T, src int, opts ...ObjectOptions) (sender int, err error) {
	const op = "recv_object_list"
	o := objectOptions(opts)
	if p.rank < 0 {
		return -1, p.objectError(op, ErrNotMember)
	}
	err = moveObjects(p, op, list, src, false, o, func(t *ts.Tensor) (err error) {
		// The bytes come from whom the sizes came from.
		src, err = p.Recv(t, src, o.Call...)
		return err
	})
	if err != nil {
		return -1, err
	}
	return src, nil
}

// moveObjects moves the sizes and then the bytes of a list from one rank to one or all others.
func moveObjects[T any](p *ProcessGroup, op string, list []T, src int, sends bool, o ObjectOptions, move func(*ts.Tensor) error) error {
	if len(list) == 0 {
		return p.objectError(op, valueErrorf("the list of values is empty"))
	}
	var live tensors
	defer live.drop()
	dev := p.hostDevice()
	sizes := make([]int64, len(list))
	var all []byte
	var encodeErr error
	if sends {
		for i, v := range list {
			data, n, err := encode(v, o)
			sizes[i] = n
			if err != nil && encodeErr == nil {
				encodeErr = fmt.Errorf("encoding value %d (%T): %w", i, v, err)
			}
			all = append(all, data...)
		}
	}
	t, err := live.ofInts(sizes, dev)
	if err != nil {
		return p.objectError(op, err)
	}
	if err := move(t); err != nil {
		return err
	}
	if encodeErr != nil {
		return p.objectError(op, encodeErr)
	}
	if sizes, err = tdp.ToSlice[int64](t); err != nil {
		return p.objectError(op, err)
	}
	var total int64
	for _, n := range sizes {
		if err := o.checkSize(n, src); err != nil {
			return p.objectError(op, err)
		}
		total += n
	}
	if total > o.MaxBytes {
		return p.objectError(op, o.checkSize(total, src))
	}
	if sends {
		t, err = live.ofBytes(all, dev)
	} else {
		t, err = live.empty(total, gotch.Uint8, dev)
	}
	if err != nil {
		return p.objectError(op, err)
	}
	if err := move(t); err != nil {
		return err
	}
	if sends {
		return nil
	}
	if all, err = tdp.ToSlice[uint8](t); err != nil {
		return p.objectError(op, err)
	}
	for i, n := range sizes {
		if list[i], err = decode[T](all[:n], src, o); err != nil {
			return p.objectError(op, err)
		}
		all = all[n:]
	}
	return nil
}

// ScatterObject gives rank i the value i of src's list, which has one a rank. The other ranks give nil.
func ScatterObject[T any](p *ProcessGroup, list []T, src int, opts ...ObjectOptions) (v T, err error) {
	const op = "scatter_object_list"
	o := objectOptions(opts)
	fail := func(err error) (T, error) { return v, p.objectError(op, err) }
	if p.rank < 0 {
		return fail(ErrNotMember)
	}
	if src < 0 || src >= p.size {
		return fail(valueErrorf("source rank %d is not in the group of %d ranks", src, p.size))
	}
	var live tensors
	defer live.drop()
	dev := p.hostDevice()
	var encoded [][]byte
	var largest int64
	var encodeErr error
	if p.rank == src {
		if len(list) != p.size {
			encodeErr = valueErrorf("the source rank needs one value a rank: %d ranks, %d values", p.size, len(list))
		}
		for i, v := range list {
			data, n, err := encode(v, o)
			if err != nil && encodeErr == nil {
				encodeErr = fmt.Errorf("encoding value %d (%T): %w", i, v, err)
			}
			encoded = append(encoded, data)
			largest = max(largest, n)
		}
		if encodeErr != nil {
			largest = encodeFailed
		}
	}
	size, err := live.ofInts([]int64{largest}, dev)
	if err != nil {
		return fail(err)
	}
	if err := p.Broadcast(size, src, o.Call...); err != nil {
		return v, err
	}
	if encodeErr != nil {
		return fail(encodeErr)
	}
	sizes, err := tdp.ToSlice[int64](size)
	if err != nil {
		return fail(err)
	}
	largest = sizes[0]
	if err := o.checkSize(largest, src); err != nil {
		return fail(err)
	}
	output, err := live.empty(largest, gotch.Uint8, dev)
	if err != nil {
		return fail(err)
	}
	length, err := live.empty(1, gotch.Int64, dev)
	if err != nil {
		return fail(err)
	}
	var inputs, lengths []*ts.Tensor
	for _, data := range encoded {
		a, errA := live.ofBytes(pad(data, largest), dev)
		b, errB := live.ofInts([]int64{int64(len(data))}, dev)
		if errA != nil || errB != nil {
			return fail(fmt.Errorf("%w %w", errA, errB))
		}
		inputs, lengths = append(inputs, a), append(lengths, b)
	}
	if err := p.Scatter(output, inputs, src, o.Call...); err != nil {
		return v, err
	}
	if err := p.Scatter(length, lengths, src, o.Call...); err != nil {
		return v, err
	}
	if p.rank == src {
		return list[p.rank], nil
	}
	data, err := tdp.ToSlice[uint8](output)
	if err != nil {
		return fail(err)
	}
	n, err := tdp.ToSlice[int64](length)
	if err != nil {
		return fail(err)
	}
	if n[0] < 0 || n[0] > largest {
		return fail(valueErrorf("rank %d announces %d bytes of %d", src, n[0], largest))
	}
	if v, err = decode[T](data[:n[0]], src, o); err != nil {
		return fail(err)
	}
	return v, nil
}
