package torchddp

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/goddp/goddp/internal/tdp"
	"github.com/sugarme/gotch"
	"go.uber.org/multierr"
)

// ProcessGroup is a set of ranks that communicate. All of them make the same calls in the same order.
//
// [InitProcessGroup] gives the group of all ranks of the job, the world; [ProcessGroup.NewGroup] and its relatives make
// groups of some of them. Ranks in a group's methods, such as the root of a broadcast, are numbers in that group;
// [ProcessGroup.GlobalRank] and [ProcessGroup.GroupRank] translate. (Python's functions take ranks of the world, or the
// group's own as group_src and group_dst.)
//
// A rank that is not in a group has a ProcessGroup for it all the same, whose Rank is -1 and whose operations give
// [ErrNotMember].
type ProcessGroup struct {
	mu    sync.RWMutex // held for reading by operations, for writing by Destroy
	pg    *tdp.ProcessGroup
	store *Store // the group's own keys

	groupStore *Store // where the group's keys start: "default_pg", or the world's own keys
	base       *Store // the store itself, where this group opened it
	owned      []*Store

	rank, size int // -1 on ranks outside the group
	ranks      []int
	device     gotch.Device
	timeout    time.Duration
	backend    string
	backends   []deviceBackend
	name       string
	desc       string
	job        *job
	parent     *ProcessGroup // nil for the world
	ddps       int           // how many DDP modules were made on the group: names their keys in the store
	splits     int
	rebuild    InitOptions
}

// job is what the world and the groups made of it share.
type job struct {
	mu         sync.Mutex
	world      *ProcessGroup
	groups     []*ProcessGroup // those that this rank is in, in the order they were made
	count      int             // numbers groups as Python does
	local      map[string]int  // how many groups were made of a set of ranks by its members alone
	gloo       tdp.GlooOptions
	nccl       NCCLOptions
	debug      DebugLevel
	connect    time.Duration
	generation int // how often the world was rebuilt
	answers    *responder
}

// Rank is this process's number in the group, or -1 where it is not in it.
func (p *ProcessGroup) Rank() int { return p.rank }

// Size is the number of ranks, PyTorch's world size, or -1 where this rank is not in the group.
func (p *ProcessGroup) Size() int { return p.size }

// IsMember tells whether this rank is in the group.
func (p *ProcessGroup) IsMember() bool { return p.rank >= 0 }

// Name is the group's name, which is the same on all ranks: "0" for the world, then "1", "2", as in Python.
func (p *ProcessGroup) Name() string { return p.name }

// Ranks are the numbers that the group's ranks have in the world, in the group's order.
func (p *ProcessGroup) Ranks() []int { return slices.Clone(p.ranks) }

// GlobalRank is the world's number of a rank of this group, as torch.distributed.get_global_rank.
func (p *ProcessGroup) GlobalRank(groupRank int) (int, error) {
	if groupRank < 0 || groupRank >= len(p.ranks) {
		return -1, valueErrorf("rank %d is not in %v", groupRank, p)
	}
	return p.ranks[groupRank], nil
}

// GroupRank is this group's number of a rank of the world, as torch.distributed.get_group_rank.
func (p *ProcessGroup) GroupRank(globalRank int) (int, error) {
	i := slices.Index(p.ranks, globalRank)
	if i < 0 {
		return -1, valueErrorf("global rank %d is not in %v", globalRank, p)
	}
	return i, nil
}

// World is the group of all ranks.
func (p *ProcessGroup) World() *ProcessGroup { return p.job.world }

// Backend is the backend's name as it was asked for.
func (p *ProcessGroup) Backend() string { return p.backend }

// Device is where this rank's tensors lie.
func (p *ProcessGroup) Device() gotch.Device { return p.device }

// hostDevice is where objects and barriers live: the CPU where a backend serves it, as in Python.
func (p *ProcessGroup) hostDevice() gotch.Device {
	for _, b := range p.backends {
		if b.dev == tdp.CPU {
			return gotch.CPU
		}
	}
	return p.device
}

func (p *ProcessGroup) uses(b tdp.Backend) bool {
	return slices.ContainsFunc(p.backends, func(d deviceBackend) bool { return d.backend == b })
}

// Timeout bounds every collective.
func (p *ProcessGroup) Timeout() time.Duration {
	p.mu.RLock()
	defer p.mu.RUnlock()
	return p.timeout
}

// SetTimeout changes the bound of later collectives. Call it on all ranks alike.
func (p *ProcessGroup) SetTimeout(d time.Duration) error {
	if d <= 0 {
		return &RankError{Rank: p.rank, Op: "set timeout", Err: valueErrorf("timeout must be positive, got %v", d)}
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if err := p.usable(); err != nil {
		return &RankError{Rank: p.rank, Op: "set timeout", Err: err}
	}
	p.timeout = d
	return p.pg.SetTimeout(d)
}

// Store is the store under the group's prefix. Keep away from keys that start with "goddp:".
func (p *ProcessGroup) Store() *Store { return p.store }

// String names the group for messages.
func (p *ProcessGroup) String() string {
	if p.rank < 0 {
		return fmt.Sprintf("process group %s (%s, global ranks %v, this rank is not in it)", p.name, p.backend, p.ranks)
	}
	return fmt.Sprintf("process group %s (%s, rank %d of %d)", p.name, p.backend, p.rank, p.size)
}

// connect makes the backends. It blocks until all ranks are there.
func (p *ProcessGroup) connect(connect time.Duration) error {
	pg, err := p.newHandle()
	if err != nil {
		return err
	}
	p.pg = pg
	made := map[tdp.Backend]tdp.DeviceType{}
	for _, b := range p.backends {
		if first, done := made[b.backend]; done {
			if err := pg.ShareBackend(b.dev, first); err != nil {
				return err
			}
			continue
		}
		made[b.backend] = b.dev
		store, err := p.backendStore(b.dev, connect)
		if err != nil {
			return err
		}
		if err := p.addBackend(b, store); err != nil {
			return err
		}
	}
	return pg.SetDefaultBackend(p.defaultBackend())
}

func (p *ProcessGroup) newHandle() (pg *tdp.ProcessGroup, err error) {
	err = p.store.use(func(h *tdp.Store) (err error) {
		pg, err = tdp.NewProcessGroup(h, p.rank, p.size, p.name, p.desc)
		return err
	})
	return pg, err
}

// defaultBackend decides for operations without a device: NCCL where both are there, as in Python.
func (p *ProcessGroup) defaultBackend() tdp.Backend {
	if p.uses(tdp.NCCL) {
		return tdp.NCCL
	}
	return tdp.Gloo
}

func (p *ProcessGroup) backendStore(dev tdp.DeviceType, connect time.Duration) (*Store, error) {
	prefix := "cpu/"
	if dev == tdp.CUDA {
		prefix = "cuda/"
	}
	store, err := p.store.Prefix(prefix)
	if err != nil {
		return nil, err
	}
	p.owned = append(p.owned, store)
	return store, store.SetTimeout(connect)
}

func (p *ProcessGroup) globalRanks() []int64 {
	list := make([]int64, len(p.ranks))
	for i, r := range p.ranks {
		list[i] = int64(r)
	}
	return list
}

func (p *ProcessGroup) addBackend(b deviceBackend, store *Store) error {
	return store.use(func(h *tdp.Store) error {
		var helper *tdp.Store
		if p.job.debug == DebugDetail {
			// Python's key: _create_process_group_wrapper.
			wrapper, err := store.Prefix("pg_wrapper:" + p.name)
			if err != nil {
				return err
			}
			p.owned = append(p.owned, wrapper)
			helper = wrapper.s
		}
		if b.backend == tdp.NCCL {
			o := p.job.nccl
			bound := -1
			if o.Eager {
				bound = p.device.Value
			}
			return p.pg.AddNCCL(h, tdp.NCCLOptions{
				Timeout: p.timeout, HighPriority: o.HighPriority, GlobalRanks: p.globalRanks(), Helper: helper, BoundDevice: bound,
			})
		}
		gloo := p.job.gloo
		gloo.Timeout, gloo.GlobalRanks, gloo.Helper = p.timeout, p.globalRanks(), helper
		return p.pg.AddGloo(b.dev, h, gloo)
	})
}

// storeBarrier is Python's _store_based_barrier, by its keys, of size ranks.
func (p *ProcessGroup) storeBarrier(ctx context.Context, store *Store, size int, timeout time.Duration) error {
	key := "store_based_barrier_key:" + p.name
	n, err := store.Add(key, 1)
	if err != nil {
		return err
	}
	last := key + ":last_worker"
	if n == int64(size) {
		if err := store.Set(last, []byte("1")); err != nil {
			return err
		}
	}
	return store.Wait(ctx, timeout, last)
}

// usable tells why the group cannot be used. p.mu is held.
func (p *ProcessGroup) usable() error {
	switch {
	case p.pg != nil:
		return nil
	case p.rank < 0:
		return ErrNotMember
	}
	return ErrDestroyed
}

// run calls fn with the live group, and names the rank in its error.
func (p *ProcessGroup) run(op string, fn func(*tdp.ProcessGroup) error) error {
	p.mu.RLock()
	defer p.mu.RUnlock()
	if p.pg == nil {
		return &RankError{Rank: p.rank, Op: op, Err: p.usable()}
	}
	if err := fn(p.pg); err != nil {
		return p.failed(op, err)
	}
	return nil
}

// Destroy waits for the group's operations in flight, closes its connections and joins the backend's threads.
// Destroying the world destroys its other groups first, the youngest before the older ones. Destroying twice is
// allowed.
func (p *ProcessGroup) Destroy() error {
	var err error
	if p.parent == nil {
		p.job.answers.stop()
		p.job.mu.Lock()
		groups := slices.Clone(p.job.groups)
		p.job.mu.Unlock()
		for _, g := range slices.Backward(groups) {
			if g != p {
				err = multierr.Append(err, g.Destroy())
			}
		}
	}
	p.job.remove(p)
	p.mu.Lock()
	defer p.mu.Unlock()
	p.groupStore, p.base = nil, nil
	return multierr.Append(err, p.release())
}

// Shutdown ends the group's communication as Destroy does, but leaves the group and its store in place: operations
// give errors afterwards, the history can still be read.
func (p *ProcessGroup) Shutdown() error {
	return p.run("shutdown", func(pg *tdp.ProcessGroup) error { return pg.Shutdown() })
}

func (p *ProcessGroup) release() error {
	var err error
	if p.pg != nil {
		err = multierr.Append(err, p.pg.Close())
		p.pg = nil
	}
	for i := len(p.owned) - 1; i >= 0; i-- {
		err = multierr.Append(err, p.owned[i].Close())
	}
	p.owned = nil
	return err
}

func (j *job) add(p *ProcessGroup) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.groups = append(j.groups, p)
}

func (j *job) remove(p *ProcessGroup) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.groups = slices.DeleteFunc(j.groups, func(g *ProcessGroup) bool { return g == p })
}

func (j *job) find(name string) *ProcessGroup {
	j.mu.Lock()
	defer j.mu.Unlock()
	for _, g := range j.groups {
		if g.name == name {
			return g
		}
	}
	return nil
}

// Abort makes operations in flight fail, in this process and so in its peers. NCCL can; Gloo cannot be interrupted:
// its operations end with their timeout, or when a peer goes.
func (p *ProcessGroup) Abort() error {
	return p.run("abort", func(pg *tdp.ProcessGroup) error { return pg.Abort() })
}

// Health tells whether NCCL's watchdog saw an operation fail or time out: NCCL's operations run behind the program,
// which learns of it here, at the next barrier, or at the next operation. It is nil for Gloo, whose operations tell
// themselves.
func (p *ProcessGroup) Health() error {
	return p.run("health", func(pg *tdp.ProcessGroup) error { return pg.Health() })
}
