package train

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"

	"github.com/sugarme/gotch"
	"github.com/sugarme/gotch/ts"

	"github.com/goddp/goddp/checkpoint"
	"github.com/goddp/goddp/data"
	"github.com/goddp/goddp/internal/tdp"
	"github.com/goddp/goddp/torchddp"
)

// rankState is what every rank has of its own.
type rankState struct {
	Loader data.State
	RNG    [][]byte // the CPU's generator, and the device's
}

// part is a thing with a state, under its name in a snapshot.
type part struct {
	name string
	checkpoint.Stateful
}

// extras are parts that checkpoint.Snapshot has no place for.
func (t *Trainer[B]) extras() (list []part) {
	if t.opts.Plateau != nil {
		list = append(list, part{"plateau", t.opts.Plateau})
	}
	if t.opts.Average != nil {
		list = append(list, part{"average", t.opts.Average})
	}
	return list
}

// optional are the others. A nil of a concrete type must not become an interface that is not nil.
func (t *Trainer[B]) optional() (scheduler, scaler checkpoint.Stateful) {
	if t.opts.Scheduler != nil {
		scheduler = t.opts.Scheduler
	}
	if s := t.opts.Scaler; s != nil && s.Enabled() {
		scaler = s
	}
	return scheduler, scaler
}

func (t *Trainer[B]) cuda() []gotch.Device {
	if d := t.pg.Device(); d.Name == "CUDA" {
		return []gotch.Device{d}
	}
	return nil
}

// openSaver makes the folder, and tells every rank where that fails.
func (t *Trainer[B]) openSaver() error {
	o := t.opts.Snapshots
	var err error
	t.saver, err = checkpoint.NewManager(checkpoint.ManagerOptions{
		Dir: o.Dir, Keep: max(o.Keep, 0), Maximize: t.opts.Monitor.Max, Rank: t.pg.Rank(), Async: o.Async,
		Agree: func(_ context.Context, mine error) error { return agree(t.pg, mine) },
	})
	if err == nil {
		// Known now, and not after the first epoch.
		if _, err = t.Train.State(); err != nil {
			err = fmt.Errorf("Options.Snapshots: the training loader cannot tell where it stands: %w", err)
		}
	}
	return agree(t.pg, err)
}

// save writes a snapshot, if that was asked for. score decides whether it is the best one.
func (t *Trainer[B]) save(ctx context.Context, score *float64) error {
	if t.saver == nil {
		return nil
	}
	ctx = context.WithoutCancel(ctx) // the file is written although the job was told to stop
	state, err := t.rankState()
	if err = agree(t.pg, err); err != nil {
		return err
	}
	ranks, err := torchddp.GatherObject(t.pg, state, 0)
	if err != nil {
		return err
	}
	var value *checkpoint.Dict
	var made []any // what is to be freed
	defer func() { dropAll(checkpoint.NewList(made...), map[*ts.Tensor]bool{}) }()
	if t.pg.Rank() == 0 {
		var s *checkpoint.Snapshot
		if s, made, err = t.capture(ranks); err == nil {
			value = s.Value()
		}
	}
	if err = agree(t.pg, err); err != nil {
		return fmt.Errorf("snapshot: %w", err)
	}
	if score != nil {
		err = t.saver.SaveBest(ctx, t.progress.GlobalStep, value, *score)
	} else {
		err = t.saver.Save(ctx, t.progress.GlobalStep, value)
	}
	if err != nil {
		return fmt.Errorf("snapshot: %w", err)
	}
	t.saved = t.saver.Path(t.progress.GlobalStep)
	return nil
}

func (t *Trainer[B]) rankState() (s rankState, err error) {
	if s.Loader, err = t.Train.State(); err != nil {
		return s, fmt.Errorf("snapshot: the training loader: %w", err)
	}
	rng, err := checkpoint.CaptureRNG(t.cuda()...)
	if err != nil {
		return s, err
	}
	for _, g := range append([]*ts.Tensor{rng.CPU}, rng.CUDA...) {
		b, err := tdp.ToSlice[uint8](g)
		if err != nil {
			return s, err
		}
		s.RNG = append(s.RNG, b)
		g.MustDrop()
	}
	return s, nil
}

// capture takes the state of the run. made has those of its tensors that are its own.
func (t *Trainer[B]) capture(ranks []rankState) (s *checkpoint.Snapshot, made []any, err error) {
	scheduler, scaler := t.optional()
	s, err = checkpoint.Capture(int64(t.progress.Epoch), t.progress.GlobalStep, t.Model.Module(), t.Optimizer, scheduler, scaler, nil)
	if err != nil {
		return nil, nil, err
	}
	made = append(made, s.Optimizer)
	loaders := checkpoint.NewList()
	for _, r := range ranks {
		text, err := json.Marshal(r.Loader)
		if err != nil {
			return nil, made, err
		}
		loaders.Items = append(loaders.Items, string(text))
		state := &checkpoint.RNGState{}
		for i, b := range r.RNG {
			g, err := tdp.FromSlice(b, []int64{int64(len(b))}, gotch.CPU)
			if err != nil {
				return nil, made, err
			}
			made = append(made, g)
			if i == 0 {
				state.CPU = g
			} else {
				state.CUDA = append(state.CUDA, g)
			}
		}
		s.RNG = append(s.RNG, state)
	}
	s.Sampler = checkpoint.NewDict().Set("ranks", loaders)
	p, early := t.progress, t.early
	s.Extra = checkpoint.NewDict().Set("train", checkpoint.NewDict().
		Set("world", p.World).Set("step", p.Step).Set("trained", t.trained).
		Set("figures", listOf(t.meter.names)).Set("epoch", listOf(t.epoch.all)).
		Set("early_stop", listOf([]float64{early.best, float64(early.epochs)})))
	for _, part := range t.extras() {
		state, err := part.StateDict()
		if err != nil {
			return nil, made, fmt.Errorf("state of the %s: %w", part.name, err)
		}
		if count, ok := state.Get("n_averaged"); ok { // an average's other tensors are its own
			made = append(made, count)
		}
		s.Extra.Set(part.name, state)
	}
	return s, made, nil
}

// resume goes on from the newest snapshot, if that is wanted and there is one.
func (t *Trainer[B]) resume(ctx context.Context) error {
	if t.opts.Snapshots.Dir == "" {
		return nil
	}
	if err := t.openSaver(); err != nil {
		return err
	}
	if !t.opts.Snapshots.Resume {
		return nil
	}
	path := ""
	var err error
	if t.pg.Rank() == 0 {
		if path, err = t.saver.Latest(); errors.Is(err, checkpoint.ErrNoCheckpoint) {
			t.log.Info("train: nothing to resume from, beginning at the beginning", "dir", t.opts.Snapshots.Dir, "found", err)
			err = nil
		}
	}
	if err = agree(t.pg, err); err != nil {
		return err
	}
	// All ranks read the file that rank 0 chose.
	if path, err = torchddp.BroadcastObject(t.pg, path, 0); err != nil || path == "" {
		return err
	}
	if err = t.restore(path); err != nil {
		err = fmt.Errorf("resuming from %s: %w", path, err)
	}
	return agree(t.pg, err)
}

func (t *Trainer[B]) restore(path string) error {
	v, err := checkpoint.Load(path, checkpoint.LoadOptions{MapLocation: checkpoint.MapTo(gotch.CPU)})
	if err != nil {
		return err
	}
	defer dropAll(v, map[*ts.Tensor]bool{})
	s, err := checkpoint.SnapshotOf(v)
	if err != nil {
		return err
	}
	run, err := checkpoint.Get[*checkpoint.Dict](s.Extra, "train")
	if err != nil || s.Sampler == nil {
		return errors.New("this is no snapshot of package train; to begin with its weights use checkpoint.Load and LoadStateDict")
	}
	scheduler, scaler := t.optional()
	if err := s.Restore(t.Model.Module(), t.Optimizer, scheduler, scaler, nil); err != nil {
		return fmt.Errorf("it does not fit this run (is it one of another model? name another folder, or do not resume): %w", err)
	}
	for _, part := range t.extras() {
		state, err := checkpoint.Get[*checkpoint.Dict](s.Extra, part.name)
		if err != nil {
			return fmt.Errorf("it has no %s, which this run has", part.name)
		}
		if err := part.LoadStateDict(state); err != nil {
			return fmt.Errorf("state of the %s: %w", part.name, err)
		}
	}
	p := &t.progress
	p.Epoch, p.GlobalStep = int(s.Epoch), s.Step
	world, err := t.restoreRun(run)
	if err != nil {
		return fmt.Errorf("the entry \"train\": %w", err)
	}
	rank := t.pg.Rank()
	if world != t.pg.Size() {
		// What the sampler has left is dealt out anew; random numbers cannot be.
		t.log.Warn("train: resumed with another number of ranks: samples are dealt out anew, and random numbers differ",
			"before", world, "now", t.pg.Size())
		rank = 0
	} else if rank < len(s.RNG) {
		if err := s.RNG[rank].Restore(t.cuda()...); err != nil {
			return err
		}
	}
	state, err := checkpoint.Get[string](s.Sampler, "ranks", rank)
	if err != nil {
		return err
	}
	var loader data.State
	if err := json.Unmarshal([]byte(state), &loader); err != nil {
		return fmt.Errorf("the entry \"sampler\": %w", err)
	}
	if err := t.Train.Restore(loader); err != nil {
		return fmt.Errorf("the training loader: %w", err)
	}
	t.log.Info("train: resumed", "path", path, "epoch", p.Epoch, "step", p.Step)
	return nil
}

// restoreRun reads where the run stood, and with how many ranks.
func (t *Trainer[B]) restoreRun(d *checkpoint.Dict) (world int, err error) {
	n, err1 := checkpoint.Get[int64](d, "world")
	step, err2 := checkpoint.Get[int64](d, "step")
	trained, err3 := checkpoint.Get[bool](d, "trained")
	names, err4 := sliceOf[string](d, "figures")
	epoch, err5 := sliceOf[float64](d, "epoch")
	early, err6 := sliceOf[float64](d, "early_stop")
	if err := errors.Join(err1, err2, err3, err4, err5, err6); err != nil {
		return 0, err
	}
	if len(early) != 2 || len(epoch) != 0 && len(epoch) != figSums+len(names) {
		return 0, fmt.Errorf("it has %d figures for %d names, written by another version", len(epoch), len(names))
	}
	t.progress.Step, t.trained, t.epoch.all = int(step), trained, epoch
	t.early = patience{best: early[0], epochs: int(early[1])}
	if len(names) > 0 {
		err = t.meter.declare(names)
	}
	return int(n), err
}

func listOf[T any](values []T) *checkpoint.List {
	l := checkpoint.NewList()
	for _, v := range values {
		l.Items = append(l.Items, v)
	}
	return l
}

func sliceOf[T any](d *checkpoint.Dict, key string) (out []T, err error) {
	l, err := checkpoint.Get[*checkpoint.List](d, key)
	if err != nil {
		return nil, err
	}
	for i := range l.Items {
		v, err := checkpoint.Get[T](l, i)
		if err != nil {
			return nil, err
		}
		out = append(out, v)
	}
	return out, nil
}

// dropAll frees the tensors of a loaded value.
func dropAll(v any, done map[*ts.Tensor]bool) {
	switch v := v.(type) {
	case *ts.Tensor:
		if v != nil && !done[v] {
			done[v] = true
			v.MustDrop()
		}
	case *checkpoint.StateDict:
		for _, x := range v.All() {
			dropAll(x, done)
		}
	case *checkpoint.Dict:
		for _, x := range v.All() {
			dropAll(x, done)
		}
	case *checkpoint.List:
		for _, x := range v.Items {
			dropAll(x, done)
		}
	case *checkpoint.Tuple:
		for _, x := range v.Items {
			dropAll(x, done)
		}
	}
}
