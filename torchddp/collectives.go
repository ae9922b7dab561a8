package torchddp

import (
	"context"
	"fmt"
	"runtime"
	"time"

	"github.com/goddp/goddp/internal/tdp"
	"github.com/sugarme/gotch/ts"
)

// ReduceOp says how the elements of different ranks are combined.
type ReduceOp = tdp.ReduceOp

// The reductions. Gloo has all but PremulSum; NCCL has no bitwise ones. PremulSum needs [WithFactor].
const (
	Sum       = tdp.Sum
	Avg       = tdp.Avg
	Product   = tdp.Product
	Min       = tdp.Min
	Max       = tdp.Max
	BAnd      = tdp.BAnd
	BOr       = tdp.BOr
	BXor      = tdp.BXor
	PremulSum = tdp.PremulSum
)

// CallOption is an option of one operation.
type CallOption struct {
	timeout   time.Duration
	factor    float64
	hasFactor bool
	tag       int32
	waitAll   bool
	site      uintptr // where the program made the call, if this package makes it for it
}

// WithTimeout bounds one operation; 0 is the group's timeout.
func WithTimeout(d time.Duration) CallOption { return CallOption{timeout: d} }

// WithFactor is what PremulSum multiplies by.
func WithFactor(f float64) CallOption { return CallOption{factor: f, hasFactor: true} }

// WithTag marks a send or receive: it meets one with the same tag. NCCL has no tags.
func WithTag(tag int) CallOption { return CallOption{tag: int32(tag)} }

// WithAllRanks lets rank 0 of a [ProcessGroup.MonitoredBarrier] wait for all ranks and name all that are missing,
// instead of the first one.
func WithAllRanks() CallOption { return CallOption{waitAll: true} }

// callInfo is what the options of one call come to.
type callInfo struct {
	tdp.Call
	tag       int
	waitAll   bool
	hasFactor bool
}

// call reads the options, and where the program calls the method that calls it.
func call(async bool, opts []CallOption) callInfo {
	c := callInfo{Call: tdp.Call{Async: async}}
	for _, o := range opts {
		if o.timeout > 0 {
			c.Timeout = o.timeout
		}
		if o.hasFactor {
			c.Factor, c.hasFactor = o.factor, true
		}
		if o.tag != 0 {
			c.tag = int(o.tag)
		}
		if o.site != 0 {
			c.Site = o.site
		}
		c.waitAll = c.waitAll || o.waitAll
	}
	if c.Site == 0 {
		// One frame, resolved only when somebody asks for its name.
		var pc [1]uintptr
		runtime.Callers(3, pc[:])
		c.Site = pc[0]
	}
	return c
}

func (c *callInfo) check(op ReduceOp) error {
	if op == PremulSum && !c.hasFactor {
		return valueErrorf("PremulSum needs the factor: give WithFactor(f)")
	}
	return nil
}

// Work is a collective in flight. Its tensors may not be touched until Wait has returned.
type Work struct {
	p  *ProcessGroup
	op string
	w  *tdp.Work
}

// Wait blocks until the collective is done. A context that ends makes it return at once with an error that says
// which collective of which group was waited for; the collective itself goes on until it ends or times out.
//
// On CUDA tensors it orders the current stream after the collective and does not block, as in Python;
// [Work.WaitTimeout] blocks.
func (w *Work) Wait(ctx context.Context) error {
	if ctx.Done() == nil {
		return w.wait(0)
	}
	if done, err := w.w.Completed(); err == nil && done {
		return w.wait(0)
	}
	_, err := cancellable(ctx, fmt.Sprintf("waiting for %s of %v", w.op, w.p), func() (struct{}, error) {
		return struct{}{}, w.w.Wait(0)
	}, func(struct{}) {})
	return w.explain(err)
}

// WaitTimeout blocks at most d until the collective is done, on the host also for CUDA tensors.
func (w *Work) WaitTimeout(d time.Duration) error {
	if d <= 0 {
		return &RankError{Rank: w.p.rank, Op: w.op, Err: valueErrorf("timeout must be positive, got %v", d)}
	}
	return w.wait(d)
}

func (w *Work) wait(d time.Duration) error { return w.explain(w.w.Wait(d)) }

func (w *Work) explain(err error) error {
	if err == nil {
		return nil
	}
	w.p.mu.RLock()
	defer w.p.mu.RUnlock()
	return w.p.failed(w.op, err)
}

// Completed tells whether the collective is over, well or not.
func (w *Work) Completed() (bool, error) { return w.w.Completed() }

// Source is the group's number of the rank whose tensor a receive from [AnySource] got, after Wait.
func (w *Work) Source() (int, error) { return w.w.Source() }

// Close lets go of the collective. It is needed only where memory matters before the garbage collector runs.
func (w *Work) Close() error { return w.w.Close() }

// start runs op and gives its Work when async.
func (p *ProcessGroup) start(op string, fn func(*tdp.ProcessGroup) (*tdp.Work, error)) (*Work, error) {
	p.mu.RLock()
	defer p.mu.RUnlock()
	if p.pg == nil {
		return nil, &RankError{Rank: p.rank, Op: op, Err: p.usable()}
	}
	w, err := fn(p.pg)
	if err != nil {
		return nil, p.failed(op, err)
	}
	if w == nil {
		return nil, nil
	}
	return &Work{p: p, op: op, w: w}, nil
}

// Broadcast copies root's t into every rank's t.
func (p *ProcessGroup) Broadcast(t *ts.Tensor, root int, opts ...CallOption) error {
	_, err := p.broadcast(t, root, call(false, opts))
	return err
}

// BroadcastAsync starts a Broadcast.
func (p *ProcessGroup) BroadcastAsync(t *ts.Tensor, root int, opts ...CallOption) (*Work, error) {
	return p.broadcast(t, root, call(true, opts))
}

func (p *ProcessGroup) broadcast(t *ts.Tensor, root int, c callInfo) (*Work, error) {
	return p.start("broadcast", func(pg *tdp.ProcessGroup) (*tdp.Work, error) { return pg.BroadcastCall(t, root, c.Call) })
}

// AllReduce combines every rank's t, and leaves the result in all of them.
func (p *ProcessGroup) AllReduce(t *ts.Tensor, op ReduceOp, opts ...CallOption) error {
	_, err := p.allReduce(t, op, call(false, opts))
	return err
}

// AllReduceAsync starts an AllReduce.
func (p *ProcessGroup) AllReduceAsync(t *ts.Tensor, op ReduceOp, opts ...CallOption) (*Work, error) {
	return p.allReduce(t, op, call(true, opts))
}

func (p *ProcessGroup) allReduce(t *ts.Tensor, op ReduceOp, c callInfo) (*Work, error) {
	return p.start("all_reduce", func(pg *tdp.ProcessGroup) (*tdp.Work, error) {
		if err := c.check(op); err != nil {
			return nil, err
		}
		return pg.AllReduceCall(t, op, c.Call)
	})
}

// AllReduceCoalesced is AllReduce of many tensors of one dtype as one operation.
func (p *ProcessGroup) AllReduceCoalesced(tensors []*ts.Tensor, op ReduceOp, opts ...CallOption) error {
	_, err := p.allReduceCoalesced(tensors, op, call(false, opts))
	return err
}

// AllReduceCoalescedAsync starts an AllReduceCoalesced.
func (p *ProcessGroup) AllReduceCoalescedAsync(tensors []*ts.Tensor, op ReduceOp, opts ...CallOption) (*Work, error) {
	return p.allReduceCoalesced(tensors, op, call(true, opts))
}

func (p *ProcessGroup) allReduceCoalesced(tensors []*ts.Tensor, op ReduceOp, c callInfo) (*Work, error) {
	return p.start("all_reduce_coalesced", func(pg *tdp.ProcessGroup) (*tdp.Work, error) {
		if err := c.check(op); err != nil {
			return nil, err
		}
		return pg.AllReduceCoalesced(tensors, op, c.Call)
	})
}

// Reduce combines every rank's t in root's. What the others' t holds afterwards is not defined.
func (p *ProcessGroup) Reduce(t *ts.Tensor, root int, op ReduceOp, opts ...CallOption) error {
	_, err := p.reduce(t, root, op, call(false, opts))
	return err
}

// ReduceAsync starts a Reduce.
func (p *ProcessGroup) ReduceAsync(t *ts.Tensor, root int, op ReduceOp, opts ...CallOption) (*Work, error) {
	return p.reduce(t, root, op, call(true, opts))
}

func (p *ProcessGroup) reduce(t *ts.Tensor, root int, op ReduceOp, c callInfo) (*Work, error) {
	return p.start("reduce", func(pg *tdp.ProcessGroup) (*tdp.Work, error) {
		if err := c.check(op); err != nil {
			return nil, err
		}
		return pg.ReduceCall(t, root, op, c.Call)
	})
}

// AllGather copies every rank's input into outputs, which has one tensor a rank.
func (p *ProcessGroup) AllGather(outputs []*ts.Tensor, input *ts.Tensor, opts ...CallOption) error {
	_, err := p.allGather(outputs, input, call(false, opts))
	return err
}

// AllGatherAsync starts an AllGather.
func (p *ProcessGroup) AllGatherAsync(outputs []*ts.Tensor, input *ts.Tensor, opts ...CallOption) (*Work, error) {
	return p.allGather(outputs, input, call(true, opts))
}

func (p *ProcessGroup) allGather(outputs []*ts.Tensor, input *ts.Tensor, c callInfo) (*Work, error) {
	return p.start("all_gather", func(pg *tdp.ProcessGroup) (*tdp.Work, error) {
		return pg.AllGatherCall(outputs, input, c.Call)
	})
}

// AllGatherIntoTensor copies every rank's input into one output: the inputs one after the other along the first
// dimension, or stacked on a new one.
func (p *ProcessGroup) AllGatherIntoTensor(output, input *ts.Tensor, opts ...CallOption) error {
	_, err := p.allGatherInto(output, input, call(false, opts))
	return err
}

// AllGatherIntoTensorAsync starts an AllGatherIntoTensor.
func (p *ProcessGroup) AllGatherIntoTensorAsync(output, input *ts.Tensor, opts ...CallOption) (*Work, error) {
	return p.allGatherInto(output, input, call(true, opts))
}

func (p *ProcessGroup) allGatherInto(output, input *ts.Tensor, c callInfo) (*Work, error) {
	return p.start("all_gather_into_tensor", func(pg *tdp.ProcessGroup) (*tdp.Work, error) {
		return pg.AllGatherInto(output, input, c.Call)
	})
}

// AllGatherIntoTensorCoalesced is AllGatherIntoTensor of many pairs as one operation.
func (p *ProcessGroup) AllGatherIntoTensorCoalesced(outputs, inputs []*ts.Tensor, opts ...CallOption) error {
	_, err := p.allGatherIntoCoalesced(outputs, inputs, call(false, opts))
	return err
}

// AllGatherIntoTensorCoalescedAsync starts an AllGatherIntoTensorCoalesced.
func (p *ProcessGroup) AllGatherIntoTensorCoalescedAsync(outputs, inputs []*ts.Tensor, opts ...CallOption) (*Work, error) {
	return p.allGatherIntoCoalesced(outputs, inputs, call(true, opts))
}

func (p *ProcessGroup) allGatherIntoCoalesced(outputs, inputs []*ts.Tensor, c callInfo) (*Work, error) {
	return p.start("all_gather_into_tensor_coalesced", func(pg *tdp.ProcessGroup) (*tdp.Work, error) {
		return pg.AllGatherIntoCoalesced(outputs, inputs, c.Call)
	})
}

// Gather copies every rank's input into dst's outputs. The other ranks give none.
func (p *ProcessGroup) Gather(outputs []*ts.Tensor, input *ts.Tensor, dst int, opts ...CallOption) error {
	_, err := p.gather(outputs, input, dst, call(false, opts))
	return err
}

// GatherAsync starts a Gather.
func (p *ProcessGroup) GatherAsync(outputs []*ts.Tensor, input *ts.Tensor, dst int, opts ...CallOption) (*Work, error) {
	return p.gather(outputs, input, dst, call(true, opts))
}

func (p *ProcessGroup) gather(outputs []*ts.Tensor, input *ts.Tensor, dst int, c callInfo) (*Work, error) {
	return p.start("gather", func(pg *tdp.ProcessGroup) (*tdp.Work, error) {
		return pg.Gather(outputs, input, dst, c.Call)
	})
}

// Scatter gives rank i the tensor i of src's inputs. The other ranks give none.
func (p *ProcessGroup) Scatter(output *ts.Tensor, inputs []*ts.Tensor, src int, opts ...CallOption) error {
	_, err := p.scatter(output, inputs, src, call(false, opts))
	return err
}

// ScatterAsync starts a Scatter.
func (p *ProcessGroup) ScatterAsync(output *ts.Tensor, inputs []*ts.Tensor, src int, opts ...CallOption) (*Work, error) {
	return p.scatter(output, inputs, src, call(true, opts))
}

func (p *ProcessGroup) scatter(output *ts.Tensor, inputs []*ts.Tensor, src int, c callInfo) (*Work, error) {
	return p.start("scatter", func(pg *tdp.ProcessGroup) (*tdp.Work, error) {
		return pg.Scatter(output, inputs, src, c.Call)
	})
}

// ReduceScatter combines the ranks' lists element by element, and gives rank i the result i.
func (p *ProcessGroup) ReduceScatter(output *ts.Tensor, inputs []*ts.Tensor, op ReduceOp, opts ...CallOption) error {
	_, err := p.reduceScatter(output, inputs, op, call(false, opts))
	return err
}

// ReduceScatterAsync starts a ReduceScatter.
func (p *ProcessGroup) ReduceScatterAsync(output *ts.Tensor, inputs []*ts.Tensor, op ReduceOp, opts ...CallOption) (*Work, error) {
	return p.reduceScatter(output, inputs, op, call(true, opts))
}

func (p *ProcessGroup) reduceScatter(output *ts.Tensor, inputs []*ts.Tensor, op ReduceOp, c callInfo) (*Work, error) {
	return p.start("reduce_scatter", func(pg *tdp.ProcessGroup) (*tdp.Work, error) {
		if err := c.check(op); err != nil {
			return nil, err
		}
		return pg.ReduceScatter(output, inputs, op, c.Call)
	})
}

// ReduceScatterTensor combines the ranks' inputs and gives rank i the part i of the result, cut along the first
// dimension.
func (p *ProcessGroup) ReduceScatterTensor(output, input *ts.Tensor, op ReduceOp, opts ...CallOption) error {
	_, err := p.reduceScatterTensor(output, input, op, call(false, opts))
	return err
}

// ReduceScatterTensorAsync starts a ReduceScatterTensor.
func (p *ProcessGroup) ReduceScatterTensorAsync(output, input *ts.Tensor, op ReduceOp, opts ...CallOption) (*Work, error) {
	return p.reduceScatterTensor(output, input, op, call(true, opts))
}

func (p *ProcessGroup) reduceScatterTensor(output, input *ts.Tensor, op ReduceOp, c callInfo) (*Work, error) {
	return p.start("reduce_scatter_tensor", func(pg *tdp.ProcessGroup) (*tdp.Work, error) {
		if err := c.check(op); err != nil {
			return nil, err
		}
		return pg.ReduceScatterTensor(output, input, op, c.Call)
	})
}

// ReduceScatterTensorCoalesced is ReduceScatterTensor of many pairs as one operation.
func (p *ProcessGroup) ReduceScatterTensorCoalesced(outputs, inputs []*ts.Tensor, op ReduceOp, opts ...CallOption) error {
	_, err := p.reduceScatterCoalesced(outputs, inputs, op, call(false, opts))
	return err
}

// ReduceScatterTensorCoalescedAsync starts a ReduceScatterTensorCoalesced.
func (p *ProcessGroup) ReduceScatterTensorCoalescedAsync(outputs, inputs []*ts.Tensor, op ReduceOp, opts ...CallOption) (*Work, error) {
	return p.reduceScatterCoalesced(outputs, inputs, op, call(true, opts))
}

func (p *ProcessGroup) reduceScatterCoalesced(outputs, inputs []*ts.Tensor, op ReduceOp, c callInfo) (*Work, error) {
	return p.start("reduce_scatter_tensor_coalesced", func(pg *tdp.ProcessGroup) (*tdp.Work, error) {
		if err := c.check(op); err != nil {
			return nil, err
		}
		return pg.ReduceScatterCoalesced(outputs, inputs, op, c.Call)
	})
}

// AllToAll sends inputs[i] to rank i and receives outputs[i] from it. The sizes may differ from pair to pair. (Python
// has it with NCCL only; here Gloo has it as well.)
func (p *ProcessGroup) AllToAll(outputs, inputs []*ts.Tensor, opts ...CallOption) error {
	_, err := p.allToAll(outputs, inputs, call(false, opts))
	return err
}

// AllToAllAsync starts an AllToAll. With Gloo the outputs are filled by Wait.
func (p *ProcessGroup) AllToAllAsync(outputs, inputs []*ts.Tensor, opts ...CallOption) (*Work, error) {
	return p.allToAll(outputs, inputs, call(true, opts))
}

func (p *ProcessGroup) allToAll(outputs, inputs []*ts.Tensor, c callInfo) (*Work, error) {
	return p.start("all_to_all", func(pg *tdp.ProcessGroup) (*tdp.Work, error) {
		return pg.AllToAll(outputs, inputs, c.Call)
	})
}

// AllToAllSingle is AllToAll on parts of two tensors, cut along the first dimension: rank i gets inputSplits[i] rows of
// this rank's input, and this rank gets outputSplits[i] rows of rank i. nil splits are equal ones.
func (p *ProcessGroup) AllToAllSingle(output, input *ts.Tensor, outputSplits, inputSplits []int64, opts ...CallOption) error {
	_, err := p.allToAllSingle(output, input, outputSplits, inputSplits, call(false, opts))
	return err
}

// AllToAllSingleAsync starts an AllToAllSingle.
func (p *ProcessGroup) AllToAllSingleAsync(output, input *ts.Tensor, outputSplits, inputSplits []int64, opts ...CallOption) (*Work, error) {
	return p.allToAllSingle(output, input, outputSplits, inputSplits, call(true, opts))
}

func (p *ProcessGroup) allToAllSingle(output, input *ts.Tensor, outSplits, inSplits []int64, c callInfo) (*Work, error) {
	return p.start("all_to_all_single", func(pg *tdp.ProcessGroup) (*tdp.Work, error) {
		return pg.AllToAllSingle(output, input, outSplits, inSplits, c.Call)
	})
}

// Barrier waits until every rank has come to it.
func (p *ProcessGroup) Barrier(opts ...CallOption) error {
	_, err := p.barrier(call(false, opts))
	return err
}

// BarrierAsync starts a Barrier.
func (p *ProcessGroup) BarrierAsync(opts ...CallOption) (*Work, error) {
	return p.barrier(call(true, opts))
}

func (p *ProcessGroup) barrier(c callInfo) (*Work, error) {
	return p.start("barrier", func(pg *tdp.ProcessGroup) (*tdp.Work, error) { return pg.BarrierCall(p.hostDevice(), c.Call) })
}
