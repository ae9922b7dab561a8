package torchddp

import (
	"errors"
	"fmt"
	"log/slog"

	"github.com/goddp/goddp/internal/tdp"
	"github.com/sugarme/gotch"
	"github.com/sugarme/gotch/ts"
)

// JoinOptions are those of DistributedDataParallel.join.
type JoinOptions struct {
	// DivideByActive divides gradients by the number of ranks that still have data instead of by the group's size.
	DivideByActive bool
	// EndTogether makes all ranks stop with [ErrEarlyEnd] as soon as one has no more data, instead of letting the
	// others go on. It is needed where the model itself communicates, as SyncBatchNorm does.
	EndTogether bool
	// Optimizers get the state of the rank that trained longest, as the model does. PyTorch leaves it to each rank: one
	// that ended earlier then goes on with another momentum, and so with other weights, than the rest.
	Optimizers []JoinOptimizer
}

// JoinOptimizer is an optimizer whose state can be another rank's: those of package optim.
type JoinOptimizer interface {
	Share(mine bool, device gotch.Device, broadcast func([]*ts.Tensor) error) error
}

// ErrEarlyEnd is what ranks get with JoinOptions.EndTogether when one has run out of data.
var ErrEarlyEnd = errors.New("a rank has exhausted its inputs")

// joinState is set while a Join runs. Its methods do nothing on nil.
type joinState struct{ options JoinOptions }

// Join runs fn, a training loop, on ranks that may have unequally many batches. A rank whose loop has ended answers
// the collectives of the others with zeros until all have ended; then all get the model of the last one. With an
// error of fn there is nothing to wait for: it is returned at once.
func (d *DDP) Join(options JoinOptions, fn func() error) error {
	if d.join != nil {
		return d.errorf("join", valueErrorf("this module is already inside a Join"))
	}
	if len(d.delayed) > 0 {
		return d.errorf("join", valueErrorf("it cannot be combined with DelayAllReduce"))
	}
	d.join = &joinState{options}
	defer func() { d.join = nil }()
	if err := fn(); err != nil {
		return err
	}
	const warnAfter = 1000
	last := true // whether this rank was among the last to end
	for i := 0; ; i++ {
		if i == warnAfter {
			slog.Warn("this rank has ended 1000 iterations before the others: the data is shared out badly", "rank", d.pg.rank)
		}
		active, err := d.joinReduce(0, Sum)
		if err != nil {
			return err
		}
		if active == 0 {
			break
		}
		if options.EndTogether {
			if _, err := d.joinReduce(1, Sum); err != nil {
				return err
			}
			return d.errorf("join", fmt.Errorf("%w: rank %d exhausted all inputs", ErrEarlyEnd, d.pg.rank))
		}
		last = false
		if err := d.shadow(); err != nil {
			return err
		}
	}
	root, err := d.commonRank(last)
	if err != nil {
		return err
	}
	if err := d.broadcastState(root); err != nil {
		return err
	}
	for _, o := range options.Optimizers {
		err := o.Share(root == d.pg.rank, d.device, func(list []*ts.Tensor) error {
			return d.pg.run("join", func(pg *tdp.ProcessGroup) error {
				return pg.BroadcastCoalesced(tdp.NewHandles(list), broadcastBucketBytes, root)
			})
		})
		if err != nil {
			return d.errorf("join", err)
		}
	}
	return nil
}

// joinReduce adds up one float32 over all ranks, as Python's joinables do.
func (d *DDP) joinReduce(v float32, op ReduceOp) (float32, error) {
	return reduceOne(d.pg, "join", v, op)
}

// commonRank agrees on the largest rank that is a candidate.
func (d *DDP) commonRank(candidate bool) (int, error) {
	mine := int64(-1)
	if candidate {
		mine = int64(d.pg.rank)
	}
	rank, err := reduceOne(d.pg, "join", mine, Max)
	if err != nil {
		return 0, err
	}
	if rank < 0 {
		return 0, d.errorf("join", valueErrorf("no rank can lend its model"))
	}
	return int(rank), nil
}

// shadow makes the collectives of one iteration of the ranks that still train.
func (d *DDP) shadow() error {
	if err := d.reducer.Rebuild(); err != nil {
		return d.explain("join", err)
	}
	if d.syncBuffers {
		// Part of the others' exchange, without being the one whose buffers count.
		if err := d.equalizeBuffersFrom(func() (int, error) { return d.commonRank(false) }); err != nil {
			return err
		}
	}
	syncing, err := d.joinReduce(0, Sum)
	if err != nil {
		return err
	}
	d.syncBuffers = syncing != 0
	if syncing == 0 {
		return nil
	}
	return d.pg.run("join", func(pg *tdp.ProcessGroup) error {
		return d.reducer.Shadow(pg, d.options.FindUnusedParameters)
	})
}

// checkEarlyEnd, with EndTogether, asks whether a rank has ended.
func (j *joinState) checkEarlyEnd(d *DDP) error {
	if j == nil || !j.options.EndTogether {
		return nil
	}
	ended, err := d.joinReduce(0, Sum)
	if err != nil {
		return err
	}
	if ended != 0 {
		return d.errorf("forward", fmt.Errorf("%w: it is another rank", ErrEarlyEnd))
	}
	return nil
}

// bufferRoot is the rank whose buffers count: 0, or with Join the largest one that still trains.
func (j *joinState) bufferRoot(d *DDP) (int, error) {
	if j == nil {
		return 0, nil
	}
	return d.commonRank(true)
}

// tellSync tells ended ranks whether a backward will be averaged.
func (j *joinState) tellSync(d *DDP, sync bool) error {
	if j == nil {
		return nil
	}
	v := float32(0)
	if sync {
		v = 1
	}
	_, err := d.joinReduce(v, Sum)
	return err
}
