package torchddp

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strconv"
	"time"
)

// RebuildOptions say who shall be in a rebuilt world.
type RebuildOptions struct {
	// Ranks are those of the old world that shall be in the new one; every one of them gives the same list. nil lets
	// those that call Rebuild agree among themselves.
	Ranks []int
	// Patience is how long the ranks that are there wait for the others, where Ranks is nil; 0 is 5 s. It should be
	// longer than a collective's timeout if ranks may still be waiting in one.
	Patience time.Duration
}

// Rebuild makes a new world after a failure, under fresh keys of the same store: with the same ranks when all come, and
// otherwise with the survivors, numbered anew in their old order. It is called on the world, which it aborts and
// destroys together with the groups made of it; DDP modules have to be made anew on the new group. A rank that comes
// too late gets an error that is [ErrPeer].
//
// It needs the store, so whoever serves that has to live: the launcher's agent, or a rank that did not fail.
func (p *ProcessGroup) Rebuild(ctx context.Context, o RebuildOptions) (*ProcessGroup, error) {
	fail := func(err error) (*ProcessGroup, error) {
		return nil, &RankError{Rank: p.rank, Op: "rebuild", Err: err}
	}
	if p.parent != nil {
		return fail(valueErrorf("Rebuild is called on the group of all ranks (World()), not on %v", p))
	}
	if o.Ranks != nil {
		if _, err := p.checkRanks(o.Ranks); err != nil {
			return fail(err)
		}
		if !slices.Contains(o.Ranks, p.rank) {
			return fail(valueErrorf("this rank is not among the ranks %v of the new world", o.Ranks))
		}
	}
	if p.groupStore == nil {
		return fail(ErrDestroyed)
	}
	generation := p.job.generation + 1
	prefix := "goddp:rebuild:" + strconv.Itoa(generation)
	members, err := p.agree(ctx, prefix, o)
	if err != nil {
		return fail(err)
	}

	// The stores below the world's own are the new world's from now on.
	p.mu.Lock()
	base := p.groupStore
	var kept []*Store
	for _, s := range p.owned {
		if s == base || s == p.base {
			kept = append(kept, s)
		}
	}
	p.owned = slices.DeleteFunc(p.owned, func(s *Store) bool { return slices.Contains(kept, s) })
	if p.pg != nil {
		_ = p.pg.Abort() // Gloo cannot, NCCL must
	}
	p.groupStore, p.base = nil, nil
	p.mu.Unlock()
	destroyErr := p.Destroy()

	g := &ProcessGroup{
		rank: slices.Index(members, p.rank), size: len(members), ranks: seq(len(members)), device: p.device, timeout: p.timeout,
		backend: p.backend, backends: p.backends, name: "0", desc: "default_pg", rebuild: p.rebuild, owned: kept, groupStore: base,
	}
	for _, s := range kept {
		if s != base {
			g.base = s
		}
	}
	g.job = &job{
		world: g, groups: []*ProcessGroup{g}, count: 1, local: map[string]int{}, connect: p.job.connect, debug: p.job.debug, nccl: p.job.nccl,
		gloo: p.job.gloo, generation: generation,
	}
	fresh, err := base.Prefix(prefix)
	if err == nil {
		g.owned = append(g.owned, fresh)
		err = g.join(ctx, fresh)
	}
	if err != nil {
		_ = g.release()
		return fail(explainConnect(err, g.size, g.backend))
	}
	_ = destroyErr // the old group was broken: that it did not end well is no news
	g.job.answers = answerRequests(g)
	return g, nil
}

// agree gives the old ranks of the new world, the same on all that are in it.
func (p *ProcessGroup) agree(ctx context.Context, prefix string, o RebuildOptions) ([]int, error) {
	store := p.groupStore
	if o.Ranks != nil {
		return slices.Sorted(slices.Values(o.Ranks)), nil
	}
	here := func(r int) string { return prefix + ":here:" + strconv.Itoa(r) }
	if err := store.Set(here(p.rank), []byte("1")); err != nil {
		return nil, err
	}
	deadline := time.Now().Add(orDefault(o.Patience, 5*time.Second))
	present := func() ([]int, error) {
		var list []int
		for r := range p.size {
			ok, err := store.Check(here(r))
			if err != nil {
				return nil, err
			}
			if ok {
				list = append(list, r)
			}
		}
		return list, nil
	}
	var mine []int
	decided := prefix + ":members"
	for {
		var err error
		if mine, err = present(); err != nil {
			return nil, err
		}
		done, err := store.Check(decided)
		if err != nil {
			return nil, err
		}
		if done || len(mine) == p.size || time.Now().After(deadline) {
			break
		}
		select {
		case <-ctx.Done():
			return nil, fmt.Errorf("%w: waiting for the other ranks: %w", ErrCancelled, context.Cause(ctx))
		case <-time.After(20 * time.Millisecond):
		}
	}
	// Whoever is first with its list decides for all.
	text, err := json.Marshal(mine)
	if err != nil {
		return nil, err
	}
	text, err = store.CompareSet(decided, nil, text)
	if err != nil {
		return nil, err
	}
	var members []int
	if err := json.Unmarshal(text, &members); err != nil {
		return nil, err
	}
	if !slices.Contains(members, p.rank) {
		return nil, fmt.Errorf("%w: this rank came too late: the others went on as %v", ErrPeer, members)
	}
	return members, nil
}
