package torchddp

import (
	"context"
	"crypto/sha1"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/goddp/goddp/internal/tdp"
)

// GroupOptions say how a group of some ranks is made. The zero value is PyTorch's default.
type GroupOptions struct {
	// Backend is as in InitOptions; "" is the world's.
	Backend string
	// Timeout bounds every collective; 0 is PyTorch's default for the backend, not the world's timeout.
	Timeout time.Duration
	// LocalSync lets only the members make the call (use_local_synchronization).
	LocalSync bool
	// Description goes into libtorch's logs and the flight recorder.
	Description string
}

// NewGroup makes a group of some ranks of the world; nil is all of them. All ranks of the world call it, with the same
// ranks and in the same order, also those that will not be in it: for those it gives a group whose IsMember is false.
// It is called on the world.
//
// The ranks of the new group are numbered in ascending order, as in Python.
func (p *ProcessGroup) NewGroup(ctx context.Context, ranks []int, o GroupOptions) (*ProcessGroup, error) {
	fail := func(err error) (*ProcessGroup, error) {
		return nil, &RankError{Rank: p.rank, Op: "new_group", Err: err}
	}
	if p.parent != nil {
		return fail(valueErrorf("NewGroup is called on the group of all ranks (World()), not on %v; Split divides other groups", p))
	}
	if ranks == nil {
		ranks = seq(p.size)
	}
	ranks, err := p.checkRanks(ranks)
	if err != nil {
		return fail(err)
	}
	if o.LocalSync && !slices.Contains(ranks, p.rank) {
		return p.outsider(ranks, o, ""), nil
	}
	j := p.job
	allGo := true
	if o.LocalSync {
		keys := make([]string, len(ranks))
		for i, r := range ranks {
			keys[i] = memberKey(r)
		}
		if allGo, err = p.store.Check(keys...); err != nil {
			return fail(err)
		}
	}
	j.mu.Lock()
	var name string
	switch {
	case o.LocalSync && allGo:
		// The same on all members, whatever other groups each of them is in.
		set := fmt.Sprint(ranks)
		j.local[set]++
		name = hashName(ranks, "local"+strconv.Itoa(j.local[set]))
	case o.LocalSync:
		// Python's name: a hash over the ranks and the number of groups that this rank is in. Members that are in
		// unequally many do not meet: Python's weakness, which Python ranks bring along.
		name = hashName(ranks, strconv.Itoa(len(j.groups)))
	default:
		name = strconv.Itoa(j.count)
		j.count++
	}
	taken := slices.ContainsFunc(j.groups, func(g *ProcessGroup) bool { return g.name == name })
	j.mu.Unlock()
	if taken {
		return fail(valueErrorf("The specified group name %s has already been created", name))
	}
	g, err := p.makeGroup(ctx, ranks, name, orDefault(o.Description, "undefined"), o, nil)
	if err != nil {
		return fail(err)
	}
	if os.Getenv("TORCH_DIST_INIT_BARRIER") == "1" {
		store, size := p.store, p.size
		if o.LocalSync {
			store, size = g.store, len(ranks)
		}
		if err := g.storeBarrier(ctx, store, size, j.connect); err != nil {
			return fail(errors.Join(err, g.Destroy()))
		}
	}
	return g, nil
}

// checkRanks gives the ranks in ascending order, or says what is wrong with them.
func (p *ProcessGroup) checkRanks(ranks []int) ([]int, error) {
	if len(ranks) == 0 {
		return nil, valueErrorf("a group needs at least one rank")
	}
	if len(ranks) > p.size {
		return nil, valueErrorf("the new group's world size (%d) should be less or equal to the world size (%d)", len(ranks), p.size)
	}
	ranks = slices.Sorted(slices.Values(ranks))
	for i, r := range ranks {
		if r < 0 || r >= p.size {
			return nil, valueErrorf("The new group's rank should be within the world size: rank %d of %d ranks", r, p.size)
		}
		if i > 0 && r == ranks[i-1] {
			return nil, valueErrorf("rank %d is given twice", r)
		}
	}
	return ranks, nil
}

func hashName(ranks []int, suffix string) string {
	text := make([]string, len(ranks), len(ranks)+1)
	for i, r := range ranks {
		text[i] = strconv.Itoa(r)
	}
	sum := sha1.Sum([]byte(strings.Join(append(text, suffix), "_")))
	return hex.EncodeToString(sum[:])
}

// outsider is the group as a rank that is not in it sees it.
func (p *ProcessGroup) outsider(global []int, o GroupOptions, name string) *ProcessGroup {
	return &ProcessGroup{
		rank: -1, size: -1, ranks: global, device: p.device, backend: orDefault(o.Backend, p.backend), name: name,
		job: p.job, parent: p, store: p.store, timeout: o.Timeout,
	}
}

// makeGroup connects a group of some of p's ranks. connect, where given, makes the backends instead of the usual way.
func (p *ProcessGroup) makeGroup(ctx context.Context, ranks []int, name, desc string, o GroupOptions, connect func(*ProcessGroup) error) (*ProcessGroup, error) {
	global := make([]int, len(ranks))
	for i, r := range ranks {
		global[i] = p.ranks[r]
	}
	rank := slices.Index(ranks, p.rank)
	if rank < 0 {
		return p.outsider(global, o, name), nil
	}
	backend := orDefault(o.Backend, p.backend)
	backends, err := parseBackend(backend)
	if err != nil {
		return nil, err
	}
	if o.Timeout < 0 {
		return nil, valueErrorf("timeout must not be negative, got %v", o.Timeout)
	}
	if slices.ContainsFunc(backends, func(b deviceBackend) bool { return b.backend == tdp.NCCL }) {
		p.job.nccl.prepare()
	}
	g := &ProcessGroup{
		rank: rank, size: len(ranks), ranks: global, device: p.device, timeout: orDefault(o.Timeout, defaultTimeout(backend)),
		backend: backend, backends: backends, name: name, desc: desc, job: p.job, parent: p, groupStore: p.store, rebuild: p.rebuild,
	}
	if connect != nil {
		err = connect(g)
	} else {
		err = g.join(ctx, p.store)
	}
	if err != nil {
		if !errors.Is(err, ErrCancelled) { // otherwise the call still runs
			_ = g.release()
		}
		return nil, explainConnect(err, g.size, backend)
	}
	p.job.add(g)
	return g, nil
}

// NewSubgroups cuts the world into groups of size consecutive ranks each. mine is the one this rank is in, all has
// every group, for Destroy. All ranks of the world call it.
func (p *ProcessGroup) NewSubgroups(ctx context.Context, size int, o GroupOptions) (mine *ProcessGroup, all []*ProcessGroup, err error) {
	fail := func(format string, args ...any) (*ProcessGroup, []*ProcessGroup, error) {
		return nil, nil, &RankError{Rank: p.rank, Op: "new_subgroups", Err: valueErrorf(format, args...)}
	}
	switch {
	case size <= 0:
		return fail("the group size (%d) must be positive", size)
	case size > p.size:
		return fail("the group size (%d) must not exceed the world size (%d)", size, p.size)
	case p.size%size != 0:
		return fail("the world size (%d) must be divisible by the group size (%d)", p.size, size)
	}
	return p.NewSubgroupsByEnumeration(ctx, slices.Collect(slices.Chunk(seq(p.size), size)), o)
}

// NewSubgroupsByEnumeration makes one group of every list of ranks. No rank may be in two of them; some may be in none,
// and get a group that they are not in as mine. All ranks of the world call it with the same lists.
func (p *ProcessGroup) NewSubgroupsByEnumeration(ctx context.Context, lists [][]int, o GroupOptions) (mine *ProcessGroup, all []*ProcessGroup, err error) {
	fail := func(err error) (*ProcessGroup, []*ProcessGroup, error) {
		for _, g := range all {
			err = errors.Join(err, g.Destroy())
		}
		return nil, nil, &RankError{Rank: p.rank, Op: "new_subgroups", Err: err}
	}
	if len(lists) == 0 {
		return fail(valueErrorf("the lists of ranks cannot be empty"))
	}
	// Before the first group is made: Python finds an overlap only after it has made some.
	in := map[int][]int{}
	for _, list := range lists {
		for _, r := range list {
			if other, ok := in[r]; ok {
				return fail(valueErrorf("Rank %d has appeared in both subgroup %v and %v", r, other, list))
			}
			in[r] = list
		}
	}
	for _, list := range lists {
		g, err := p.NewGroup(ctx, list, o)
		if err != nil {
			return fail(err)
		}
		all = append(all, g)
		if g.IsMember() {
			mine = g
		}
	}
	if mine == nil {
		mine = p.outsider(nil, o, "")
	}
	return mine, all, nil
}

// NewSubgroupsByNode makes one group of the ranks of each machine. node names this rank's machine; "" is the host's
// name, or under torchrun GROUP_RANK, the number of its agent. All ranks of the world call it, and all are Go ranks.
func (p *ProcessGroup) NewSubgroupsByNode(ctx context.Context, node string, o GroupOptions) (mine *ProcessGroup, all []*ProcessGroup, err error) {
	if node == "" {
		if agent := os.Getenv("GROUP_RANK"); agent != "" && os.Getenv("TORCHELASTIC_RUN_ID") != "" {
			node = "agent " + agent
		} else if node, err = os.Hostname(); err != nil {
			return nil, nil, &RankError{Rank: p.rank, Op: "new_subgroups", Err: err}
		}
	}
	nodes, err := AllGatherObject(p, node, ObjectOptions{Codec: JSON})
	if err != nil {
		return nil, nil, err
	}
	var order []string
	members := map[string][]int{}
	for rank, n := range nodes {
		if _, seen := members[n]; !seen {
			order = append(order, n)
		}
		members[n] = append(members[n], rank)
	}
	lists := make([][]int, len(order))
	for i, n := range order {
		lists[i] = members[n]
	}
	return p.NewSubgroupsByEnumeration(ctx, lists, o)
}

// Split cuts the group into parts, each a list of ranks of this group, in whose order the part's ranks are numbered.
// All ranks of the group call it; those in no part get a group that they are not in. NCCL splits its communicator,
// which is quicker than a new one and needs NCCLOptions.Eager; Gloo connects anew.
func (p *ProcessGroup) Split(ctx context.Context, parts [][]int, o GroupOptions) (*ProcessGroup, error) {
	fail := func(err error) (*ProcessGroup, error) {
		return nil, &RankError{Rank: p.rank, Op: "split_group", Err: err}
	}
	if p.rank < 0 {
		return fail(ErrNotMember)
	}
	if len(parts) == 0 {
		return fail(valueErrorf("the parts cannot be empty"))
	}
	if o.Backend != "" && o.Backend != p.backend {
		return fail(valueErrorf("a part has the backend of the whole, %s; use NewGroup for another", p.backend))
	}
	seen := map[int]bool{}
	var mine []int
	for _, part := range parts {
		if _, err := p.checkRanks(part); err != nil {
			return fail(err)
		}
		for _, r := range part {
			if seen[r] {
				return fail(valueErrorf("rank %d is in two parts", r))
			}
			seen[r] = true
			if r == p.rank {
				mine = part
			}
		}
	}
	p.job.mu.Lock()
	p.splits++
	suffix := fmt.Sprintf("%s:split:%d", p.name, p.splits)
	p.job.mu.Unlock()
	desc := orDefault(o.Description, p.desc+":split:"+strconv.Itoa(p.splits))
	if p.uses(tdp.NCCL) {
		if !p.job.nccl.Eager {
			return fail(valueErrorf("NCCL can split only a group that is bound to its device: set NCCLOptions.Eager"))
		}
		return p.splitNCCL(ctx, mine, suffix, desc, o)
	}
	if mine == nil {
		return p.outsider(nil, o, ""), nil
	}
	g, err := p.makeGroup(ctx, mine, hashName(mine, suffix), desc, o, nil)
	if err != nil {
		return fail(err)
	}
	return g, nil
}

func (p *ProcessGroup) splitNCCL(ctx context.Context, mine []int, suffix, desc string, o GroupOptions) (*ProcessGroup, error) {
	timeout := orDefault(o.Timeout, defaultTimeout(p.backend))
	if mine == nil {
		// ncclCommSplit is a collective of the whole: the others wait for this rank.
		err := p.run("split_group", func(pg *tdp.ProcessGroup) error {
			return p.store.use(func(h *tdp.Store) error {
				var none *tdp.ProcessGroup
				return none.SplitNCCL(pg, h, []int32{}, timeout)
			})
		})
		return p.outsider(nil, o, ""), err
	}
	ranks := make([]int32, len(mine))
	for i, r := range mine {
		ranks[i] = int32(r)
	}
	return p.makeGroup(ctx, mine, hashName(mine, suffix), desc, o, func(g *ProcessGroup) (err error) {
		if g.store, err = p.store.Prefix(g.name + "/"); err != nil {
			return err
		}
		g.owned = append(g.owned, g.store)
		if g.pg, err = g.newHandle(); err != nil {
			return err
		}
		for _, b := range g.backends {
			store, err := g.backendStore(b.dev, p.job.connect)
			if err != nil {
				return err
			}
			if b.backend == tdp.Gloo {
				if err := g.addBackend(b, store); err != nil {
					return err
				}
				continue
			}
			err = p.run("split_group", func(pg *tdp.ProcessGroup) error {
				return store.use(func(h *tdp.Store) error { return g.pg.SplitNCCL(pg, h, ranks, timeout) })
			})
			if err != nil {
				return err
			}
		}
		return g.pg.SetDefaultBackend(g.defaultBackend())
	})
}
