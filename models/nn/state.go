package nn

import (
	"fmt"
	"iter"

	"github.com/sugarme/gotch"
	"github.com/sugarme/gotch/ts"

	"github.com/goddp/goddp/internal/tdp"
)

// NamedState gives the module's parameters and persistent buffers under the names and in the order of Python's
// state_dict: each module's own parameters, its own buffers, then its children. Unlike NamedParameters, what is shared
// appears under each of its names. The tensors are the module's own, not copies. Package checkpoint saves and loads it.
func (b *Base) NamedState() iter.Seq2[string, *ts.Tensor] {
	return func(yield func(string, *ts.Tensor) bool) {
		b.walk("", nil, func(prefix string, b *Base) bool {
			for _, p := range b.params {
				if *p.slot != nil && !yield(join(prefix, p.name), *p.slot) {
					return false
				}
			}
			for _, p := range b.buffers {
				if p.persistent && *p.slot != nil && !yield(join(prefix, p.name), *p.slot) {
					return false
				}
			}
			return true
		})
	}
}

// ModuleVersions gives the layout version of every module by its path, in the order of NamedState: what Python keeps in
// a state dict's _metadata.
func (b *Base) ModuleVersions() iter.Seq2[string, int64] {
	return func(yield func(string, int64) bool) {
		b.walk("", nil, func(prefix string, b *Base) bool { return yield(prefix, int64(max(b.version, 1))) })
	}
}

// To brings every parameter and buffer, and the gradients, to a device and, unless dtype is gotch.Invalid, the floating
// point ones to a dtype. It happens in place: optimizers and others that hold the tensors go on working.
func (b *Base) To(device gotch.Device, dtype gotch.DType) error {
	return b.move(func(t *ts.Tensor) error { return tdp.Move(t, &device, dtype, tdp.KeepFormat) })
}

// ToDType brings every floating point parameter and buffer to a dtype: Python's half(), bfloat16(), float(), double().
func (b *Base) ToDType(dtype gotch.DType) error {
	return b.move(func(t *ts.Tensor) error { return tdp.Move(t, nil, dtype, tdp.KeepFormat) })
}

// ToChannelsLast lays parameters and buffers of four dimensions out as GPUs' tensor cores like them.
func (b *Base) ToChannelsLast() error {
	return b.move(func(t *ts.Tensor) error { return tdp.Move(t, nil, gotch.Invalid, tdp.ChannelsLast) })
}

func (b *Base) move(one func(*ts.Tensor) error) error {
	for name, t := range b.NamedParameters() {
		if err := one(t); err != nil {
			return fmt.Errorf("parameter %s: %w", join(b.Path(), name), err)
		}
	}
	for name, t := range b.NamedBuffers() {
		if err := one(t); err != nil {
			return fmt.Errorf("buffer %s: %w", join(b.Path(), name), err)
		}
	}
	return nil
}
