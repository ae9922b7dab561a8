package data

import (
	"errors"
	"fmt"

	"github.com/goddp/goddp/checkpoint/pickle"
)

// State is where a pass over a DataLoader stood. It is plain data: keep it in a checkpoint as JSON or gob, one copy for
// all ranks is enough.
type State struct {
	Running  bool         `json:"running"`   // in the middle of a pass, or just behind its last batch
	BaseSeed int64        `json:"base_seed"` // of that pass
	Sampler  SamplerState `json:"sampler"`
}

// State names the batch that comes next. Inside the loop the batch in hand counts as consumed: take the state after the
// optimizer's step. Call it, Restore and SetEpoch on the loop's own goroutine.
func (l *DataLoader[B]) State() (State, error) {
	s, ok := l.opts.Sampler.(Resumable)
	if !ok {
		return State{}, fmt.Errorf("data: %w: %T cannot tell where it stands", ErrNotResumable, l.opts.Sampler)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.pending != nil && l.pending.Sampler.Epoch == l.epoch() {
		return *l.pending, nil
	}
	if l.last == nil || l.last.finished || l.last.epoch != l.epoch() {
		return State{Sampler: s.State(0)}, nil
	}
	return State{Running: true, BaseSeed: l.last.baseSeed, Sampler: s.State(l.last.consumed)}, nil
}

// Restore makes the next pass give what the pass that st saw had left. Samplers with epochs continue in the epoch of
// st: calling SetEpoch with that epoch keeps the place, with another one it is given up.
func (l *DataLoader[B]) Restore(st State) error {
	s, ok := l.opts.Sampler.(Resumable)
	if !ok {
		return fmt.Errorf("data: %w: %T cannot be set to a place", ErrNotResumable, l.opts.Sampler)
	}
	_, epochs := s.(EpochSetter)
	if !st.Running && !epochs {
		return nil // the pass was over: the next one is a fresh one
	}
	if !st.Running {
		st.Sampler.Cursor = 0
	}
	if err := s.Restore(st.Sampler); err != nil {
		return err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.last = nil
	l.pending = nil
	if st.Running {
		l.pending = &st
	}
	return nil
}

// StateDict is State as a dict, the way checkpoint.Snapshot takes it.
func (l *DataLoader[B]) StateDict() (*pickle.Dict, error) {
	st, err := l.State()
	if err != nil {
		return nil, err
	}
	s := st.Sampler
	d := pickle.NewDict().Set("kind", s.Kind).Set("length", int64(s.Length)).Set("epoch", int64(s.Epoch)).
		Set("seed", s.Seed).Set("cursor", int64(s.Cursor))
	if s.Generator != nil {
		d.Set("generator", s.Generator)
	}
	return pickle.NewDict().Set("running", st.Running).Set("base_seed", st.BaseSeed).Set("sampler", d), nil
}

// LoadStateDict is Restore of what StateDict gave.
func (l *DataLoader[B]) LoadStateDict(d *pickle.Dict) error {
	var st State
	var sampler *pickle.Dict
	s := &st.Sampler
	err := errors.Join(take(d, "running", &st.Running), take(d, "base_seed", &st.BaseSeed),
		take(d, "sampler", &sampler))
	if err == nil {
		err = errors.Join(take(sampler, "kind", &s.Kind), take(sampler, "length", &s.Length),
			take(sampler, "epoch", &s.Epoch), take(sampler, "seed", &s.Seed), take(sampler, "cursor", &s.Cursor))
	}
	if err == nil {
		if _, ok := sampler.Get("generator"); ok {
			err = take(sampler, "generator", &s.Generator)
		}
	}
	if err != nil {
		return err
	}
	return l.Restore(st)
}

// take reads one entry of a state.
func take[T any](d *pickle.Dict, key string, to *T) error {
	v, _ := d.Get(key)
	if n, ok := v.(int64); ok {
		if to, ok := any(to).(*int); ok {
			*to = int(n)
			return nil
		}
	}
	x, ok := v.(T)
	if !ok {
		return fmt.Errorf("data: %w: its entry %q is a %T, not a %T", ErrState, key, v, *to)
	}
	*to = x
	return nil
}
