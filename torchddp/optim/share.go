package optim

import (
	"fmt"

	"github.com/sugarme/gotch"
	"github.com/sugarme/gotch/ts"

	"github.com/goddp/goddp/internal/tdp"
)

// Share gives all ranks the state of one rank's optimizer, such as its momentum; mine says that it is this rank's. The
// others keep their options, such as the learning rate. broadcast sends the tensors of that rank, which lie on device,
// into the others'. It is for what DDP's Join does after uneven inputs.
func (b *Base) Share(mine bool, device gotch.Device, broadcast func([]*ts.Tensor) error) (err error) {
	if b.native == nil {
		return ErrClosed
	}
	defer func() {
		if err != nil {
			err = fmt.Errorf("%s: sharing its state: %w", b.name, err)
		}
	}()
	type entry struct {
		place
		slot  tdp.StateSlot
		state *ts.Tensor // a handle on it, or on what it becomes
	}
	var entries []entry
	defer func() {
		for _, e := range entries {
			if e.state != nil {
				e.state.MustDrop()
			}
		}
	}()
	var numbers []float64 // for each entry: whether it is there, and if it is a step count, which
	for gi, g := range b.groups {
		for pi := range g.params {
			for _, s := range b.allSlots() {
				t, err := b.native.State(gi, pi, s.slot)
				if err != nil {
					return err
				}
				there, steps := 0.0, 0.0
				if t != nil {
					there = 1
					if s.slot == tdp.SlotStep {
						if steps, err = t.Float64Value([]int64{}); err != nil {
							return err
						}
					}
				}
				entries, numbers = append(entries, entry{place{gi, pi}, s.slot, t}), append(numbers, there, steps)
			}
		}
	}
	if numbers, err = exchange(numbers, device, broadcast); err != nil {
		return err
	}
	var tensors []*ts.Tensor
	for i, e := range entries {
		if numbers[2*i] == 0 || e.slot == tdp.SlotStep {
			continue
		}
		if e.state == nil {
			info, err := tdp.Describe(b.groups[e.group].params[e.param])
			if err != nil {
				return err
			}
			if e.state, err = tdp.Empty(info.Shape, info.DType, info.Device, false); err != nil {
				return err
			}
			entries[i].state = e.state
		}
		tensors = append(tensors, e.state)
	}
	if err := broadcast(tensors); err != nil || mine {
		return err
	}
	for i, e := range entries {
		value := e.state
		switch {
		case numbers[2*i] == 0:
			value = nil
		case e.slot == tdp.SlotStep:
			if value, err = tdp.FromSlice([]float32{float32(numbers[2*i+1])}, []int64{}, gotch.CPU); err != nil {
				return err
			}
			defer value.MustDrop()
		}
		onDevice := *b.groups[e.group].options.implementation() == Fused
		if err := b.native.SetState(e.group, e.param, e.slot, value, onDevice); err != nil {
			return err
		}
	}
	return nil
}

// exchange broadcasts numbers.
func exchange(numbers []float64, device gotch.Device, broadcast func([]*ts.Tensor) error) ([]float64, error) {
	t, err := tdp.FromSlice(numbers, []int64{int64(len(numbers))}, device)
	if err != nil {
		return nil, err
	}
	defer t.MustDrop()
	if err := broadcast([]*ts.Tensor{t}); err != nil {
		return nil, err
	}
	return tdp.ToSlice[float64](t)
}
