package checkpoint

import (
	"errors"
	"fmt"

	"github.com/sugarme/gotch"
	"github.com/sugarme/gotch/ts"

	"github.com/goddp/goddp/internal/tdp"
)

// Stateful is what has a state of its own beside tensors by name: optimizers, schedulers, grad scalers, data loaders
// (whose state is their sampler's place).
type Stateful interface {
	StateDict() (*Dict, error)
	LoadStateDict(*Dict) error
}

// Snapshot is all that a run needs to go on as if it had never stopped. In Python it is a plain dict:
//
//	{"epoch": 3, "step": 1200, "model": …, "optimizer": …, "scheduler": …, "scaler": …, "sampler": …,
//	 "rng": [{"cpu": …, "cuda": [...]}, …], …Extra}
//
// Parts that are nil are left out.
type Snapshot struct {
	Epoch, Step int64 // what is finished: training goes on with the next step
	Model       *StateDict
	Optimizer   *Dict
	Scheduler   *Dict
	Scaler      *Dict
	Sampler     *Dict
	// RNG are the random number generators of every rank, in rank order. Rank 0 gathers them before it saves.
	RNG []*RNGState
	// Extra holds further entries, such as the run's settings, under names that are none of the parts'.
	Extra *Dict
}

// Capture takes the state of each part that is not nil.
func Capture(epoch, step int64, model Module, optimizer, scheduler, scaler, sampler Stateful) (*Snapshot, error) {
	s := &Snapshot{Epoch: epoch, Step: step}
	if model != nil {
		s.Model = ModuleState(model)
	}
	for _, part := range []struct {
		name string
		from Stateful
		to   **Dict
	}{{"optimizer", optimizer, &s.Optimizer}, {"scheduler", scheduler, &s.Scheduler}, {"scaler", scaler, &s.Scaler}, {"sampler", sampler, &s.Sampler}} {
		if part.from == nil {
			continue
		}
		d, err := part.from.StateDict()
		if err != nil {
			return nil, fmt.Errorf("state of the %s: %w", part.name, err)
		}
		*part.to = d
	}
	return s, nil
}

// Restore hands each part to what it belongs to. A part that is wanted but not in the snapshot is an error; pass nil
// for what shall stay as it is.
func (s *Snapshot) Restore(model Module, optimizer, scheduler, scaler, sampler Stateful) error {
	if model != nil {
		if s.Model == nil {
			return errors.New(`the snapshot has no "model"`)
		}
		if _, err := LoadStateDict(model, s.Model, true); err != nil {
			return err
		}
	}
	for _, part := range []struct {
		name string
		from *Dict
		to   Stateful
	}{{"optimizer", s.Optimizer, optimizer}, {"scheduler", s.Scheduler, scheduler}, {"scaler", s.Scaler, scaler}, {"sampler", s.Sampler, sampler}} {
		if part.to == nil {
			continue
		}
		if part.from == nil {
			return fmt.Errorf("the snapshot has no %q", part.name)
		}
		if err := part.to.LoadStateDict(part.from); err != nil {
			return fmt.Errorf("state of the %s: %w", part.name, err)
		}
	}
	return nil
}

var snapshotParts = []string{"epoch", "step", "model", "optimizer", "scheduler", "scaler", "sampler", "rng"}

// Value gives the snapshot as a value to save.
func (s *Snapshot) Value() *Dict {
	d := NewDict().Set("epoch", s.Epoch).Set("step", s.Step)
	if s.Model != nil {
		d.Set("model", s.Model)
	}
	for i, part := range []*Dict{s.Optimizer, s.Scheduler, s.Scaler, s.Sampler} {
		if part != nil {
			d.Set(snapshotParts[3+i], part)
		}
	}
	if s.RNG != nil {
		l := NewList()
		for _, r := range s.RNG {
			l.Items = append(l.Items, r.Value())
		}
		d.Set("rng", l)
	}
	for k, v := range s.Extra.All() {
		d.Set(k, v)
	}
	return d
}

// SnapshotOf takes a snapshot out of a loaded value. It also reads what Python programs save: "iter_no", "iteration"
// or "global_step" for the step, "model_state_dict" and "state_dict", "optimizer_state_dict" and so on. Entries that
// are none of the parts go to Extra.
func SnapshotOf(v any) (*Snapshot, error) {
	d, ok := v.(*Dict)
	if !ok || d == nil {
		return nil, fmt.Errorf("a snapshot is a dict, not %s", describe(v))
	}
	s := &Snapshot{Extra: NewDict()}
	for k, v := range d.All() {
		var err error
		switch k {
		case "epoch":
			s.Epoch, err = Get[int64](v)
		case "step", "iter_no", "iteration", "global_step":
			s.Step, err = Get[int64](v)
		case "model", "model_state_dict", "state_dict":
			s.Model, err = StateDictOf(v)
		case "optimizer", "optimizer_state_dict":
			s.Optimizer, err = Get[*Dict](v)
		case "scheduler", "lr_scheduler", "scheduler_state_dict":
			s.Scheduler, err = Get[*Dict](v)
		case "scaler", "scaler_state_dict":
			s.Scaler, err = Get[*Dict](v)
		case "sampler":
			s.Sampler, err = Get[*Dict](v)
		case "rng":
			l, ok := v.(*List)
			if !ok {
				s.Extra.Set(k, v) // some other program's
				break
			}
			for _, item := range l.Items {
				var r *RNGState
				if r, err = rngOf(item); err != nil {
					break
				}
				s.RNG = append(s.RNG, r)
			}
		default:
			err = s.Extra.Put(k, v)
		}
		if err != nil {
			return nil, fmt.Errorf("snapshot: %v: %w", k, err)
		}
	}
	return s, nil
}

// RNGState is the state of a process's default random number generators, as torch.get_rng_state and
// torch.cuda.get_rng_state give it.
type RNGState struct {
	CPU  *ts.Tensor
	CUDA []*ts.Tensor // of the devices that the process uses
}

// CaptureRNG takes the state of the CPU's generator and of those of the given CUDA devices.
func CaptureRNG(cuda ...gotch.Device) (*RNGState, error) {
	state := func(dev gotch.Device) (*ts.Tensor, error) {
		g, err := tdp.DefaultGenerator(dev)
		if err != nil {
			return nil, err
		}
		return g.State()
	}
	cpu, err := state(gotch.CPU)
	if err != nil {
		return nil, fmt.Errorf("random number state: %w", err)
	}
	r := &RNGState{CPU: cpu}
	for _, dev := range cuda {
		t, err := state(dev)
		if err != nil {
			return nil, fmt.Errorf("random number state of %s: %w", locationOf(dev), err)
		}
		r.CUDA = append(r.CUDA, t)
	}
	return r, nil
}

// Restore puts the generators back into the state. The devices are those that Capture was given.
func (r *RNGState) Restore(cuda ...gotch.Device) error {
	if len(cuda) != len(r.CUDA) {
		return fmt.Errorf("random number state: saved for %d CUDA devices, this process uses %d", len(r.CUDA), len(cuda))
	}
	set := func(dev gotch.Device, t *ts.Tensor) error {
		g, err := tdp.DefaultGenerator(dev)
		if err == nil {
			// A map_location may have moved the state to a GPU, but it belongs in host memory.
			var host *ts.Tensor
			if host, err = onHost(t); err == nil {
				err = g.SetState(host)
				drop(host)
			}
		}
		if err != nil {
			return fmt.Errorf("random number state of %s: %w", locationOf(dev), err)
		}
		return nil
	}
	if err := set(gotch.CPU, r.CPU); err != nil {
		return err
	}
	for i, dev := range cuda {
		if err := set(dev, r.CUDA[i]); err != nil {
			return err
		}
	}
	return nil
}

func onHost(t *ts.Tensor) (*ts.Tensor, error) {
	info, err := tdp.Describe(t)
	if err != nil {
		return nil, err
	}
	host, err := tdp.Empty(info.Shape, info.DType, gotch.CPU, false)
	if err != nil {
		return nil, err
	}
	if err := tdp.Copy(host, t, false); err != nil {
		drop(host)
		return nil, err
	}
	return host, nil
}

// Value gives the state as a value to save.
func (r *RNGState) Value() *Dict {
	l := NewList()
	for _, t := range r.CUDA {
		l.Items = append(l.Items, t)
	}
	return NewDict().Set("cpu", r.CPU).Set("cuda", l)
}

func rngOf(v any) (*RNGState, error) {
	cpu, err := Get[*ts.Tensor](v, "cpu")
	if err != nil {
		return nil, err
	}
	cuda, err := Get[*List](v, "cuda")
	if err != nil {
		return nil, err
	}
	r := &RNGState{CPU: cpu}
	for i := range cuda.Items {
		t, err := Get[*ts.Tensor](cuda, i)
		if err != nil {
			return nil, err
		}
		r.CUDA = append(r.CUDA, t)
	}
	return r, nil
}
