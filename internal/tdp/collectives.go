package tdp

/*
#include <stdlib.h>
#include "../../csrc/tdp/tdp.h"

#cgo noescape tdp_broadcast
#cgo noescape tdp_allreduce
#cgo noescape tdp_reduce
#cgo noescape tdp_allgather
#cgo noescape tdp_allgather_into
#cgo noescape tdp_reduce_scatter_tensor
#cgo noescape tdp_send
#cgo noescape tdp_recv
#cgo noescape tdp_barrier
#cgo noescape tdp_work_is_completed
*/
import "C"

import (
	"runtime"
	"time"
	"unsafe"

	"github.com/sugarme/gotch"
	"github.com/sugarme/gotch/ts"
)

// ReduceOp says how elements of different ranks are combined.
type ReduceOp int32

// The reductions, with c10d's numbers.
const (
	Sum       ReduceOp = C.TDP_SUM
	Avg       ReduceOp = C.TDP_AVG
	Product   ReduceOp = C.TDP_PRODUCT
	Min       ReduceOp = C.TDP_MIN
	Max       ReduceOp = C.TDP_MAX
	BAnd      ReduceOp = C.TDP_BAND
	BOr       ReduceOp = C.TDP_BOR
	BXor      ReduceOp = C.TDP_BXOR
	PremulSum ReduceOp = C.TDP_PREMUL_SUM
)

// Call is what every collective takes beside its tensors.
type Call struct {
	Timeout time.Duration // <= 0: the group's
	Site    uintptr       // where the program makes the call, for the group's history
	Async   bool
	Factor  float64 // of PremulSum
}

func (c *Call) timeout() C.int64_t { return millis(c.Timeout) }
func (c *Call) site() C.uint64_t   { return C.uint64_t(c.Site) }

// Work is an operation in flight.
type Work struct {
	h       *C.tdp_work
	cleanup runtime.Cleanup
}

// launch turns an operation's outcome into a Work, or into nothing when it was waited for.
func launch(op string, rec *C.tdp_error, w *C.tdp_work, keep ...any) (*Work, error) {
	if err := done(op, rec, keep...); err != nil {
		return nil, err
	}
	if w == nil {
		return nil, nil
	}
	work := &Work{h: w}
	// Freeing a Work joins nothing, so that the collector may do it.
	work.cleanup = runtime.AddCleanup(work, func(h *C.tdp_work) { C.tdp_error_free(C.tdp_work_free(h)) }, w)
	return work, nil
}

func (c *Call) slot(w **C.tdp_work) **C.tdp_work {
	if c.Async {
		return w
	}
	return nil
}

// BroadcastCall sends root's t to all.
func (p *ProcessGroup) BroadcastCall(t *ts.Tensor, root int, c Call) (*Work, error) {
	var w *C.tdp_work
	rec := C.tdp_broadcast(p.h, handle(t), C.int32_t(root), c.timeout(), c.site(), c.slot(&w))
	return launch("broadcast", rec, w, p, t)
}

// AllReduceCall combines t of all ranks in place.
func (p *ProcessGroup) AllReduceCall(t *ts.Tensor, op ReduceOp, c Call) (*Work, error) {
	var w *C.tdp_work
	rec := C.tdp_allreduce(p.h, handle(t), C.int32_t(op), C.double(c.Factor), c.timeout(), c.site(), c.slot(&w))
	return launch("all_reduce", rec, w, p, t)
}

// ReduceCall combines t of all ranks into root's.
func (p *ProcessGroup) ReduceCall(t *ts.Tensor, root int, op ReduceOp, c Call) (*Work, error) {
	var w *C.tdp_work
	rec := C.tdp_reduce(p.h, handle(t), C.int32_t(root), C.int32_t(op), C.double(c.Factor), c.timeout(), c.site(), c.slot(&w))
	return launch("reduce", rec, w, p, t)
}

// AllGatherCall collects input of every rank in outputs, one tensor a rank.
func (p *ProcessGroup) AllGatherCall(outputs []*ts.Tensor, input *ts.Tensor, c Call) (*Work, error) {
	var w *C.tdp_work
	out := NewHandles(outputs)
	rec := C.tdp_allgather(p.h, out.ptr(), out.n(), handle(input), c.timeout(), c.site(), c.slot(&w))
	return launch("all_gather", rec, w, p, out, input)
}

// AllGatherInto collects input of every rank in one tensor.
func (p *ProcessGroup) AllGatherInto(output, input *ts.Tensor, c Call) (*Work, error) {
	var w *C.tdp_work
	rec := C.tdp_allgather_into(p.h, handle(output), handle(input), c.timeout(), c.site(), c.slot(&w))
	return launch("all_gather_into_tensor", rec, w, p, output, input)
}

// Gather collects input of every rank in root's outputs.
func (p *ProcessGroup) Gather(outputs []*ts.Tensor, input *ts.Tensor, root int, c Call) (*Work, error) {
	var w *C.tdp_work
	out := NewHandles(outputs)
	rec := C.tdp_gather(p.h, out.ptr(), out.n(), handle(input), C.int32_t(root), c.timeout(), c.site(), c.slot(&w))
	return launch("gather", rec, w, p, out, input)
}

// Scatter gives every rank one of root's inputs.
func (p *ProcessGroup) Scatter(output *ts.Tensor, inputs []*ts.Tensor, root int, c Call) (*Work, error) {
	var w *C.tdp_work
	in := NewHandles(inputs)
	rec := C.tdp_scatter(p.h, handle(output), in.ptr(), in.n(), C.int32_t(root), c.timeout(), c.site(), c.slot(&w))
	return launch("scatter", rec, w, p, output, in)
}

// ReduceScatter combines the ranks' lists, and gives every rank the element of its number.
func (p *ProcessGroup) ReduceScatter(output *ts.Tensor, inputs []*ts.Tensor, op ReduceOp, c Call) (*Work, error) {
	var w *C.tdp_work
	in := NewHandles(inputs)
	rec := C.tdp_reduce_scatter(p.h, handle(output), in.ptr(), in.n(), C.int32_t(op), C.double(c.Factor), c.timeout(), c.site(), c.slot(&w))
	return launch("reduce_scatter", rec, w, p, output, in)
}

// ReduceScatterTensor combines the ranks' inputs and gives every rank its part.
func (p *ProcessGroup) ReduceScatterTensor(output, input *ts.Tensor, op ReduceOp, c Call) (*Work, error) {
	var w *C.tdp_work
	rec := C.tdp_reduce_scatter_tensor(p.h, handle(output), handle(input), C.int32_t(op), C.double(c.Factor), c.timeout(), c.site(), c.slot(&w))
	return launch("reduce_scatter_tensor", rec, w, p, output, input)
}

// AllToAll gives rank i this rank's input i, and this rank's output i is from rank i.
func (p *ProcessGroup) AllToAll(outputs, inputs []*ts.Tensor, c Call) (*Work, error) {
	var w *C.tdp_work
	out, in := NewHandles(outputs), NewHandles(inputs)
	rec := C.tdp_alltoall(p.h, out.ptr(), out.n(), in.ptr(), in.n(), c.timeout(), c.site(), c.slot(&w))
	return launch("all_to_all", rec, w, p, out, in)
}

// AllToAllSingle is AllToAll on parts of two tensors, cut along the first dimension.
func (p *ProcessGroup) AllToAllSingle(output, input *ts.Tensor, outSplits, inSplits []int64, c Call) (*Work, error) {
	var w *C.tdp_work
	rec := C.tdp_alltoall_single(p.h, handle(output), handle(input), ints(outSplits), C.int32_t(len(outSplits)),
		ints(inSplits), C.int32_t(len(inSplits)), c.timeout(), c.site(), c.slot(&w))
	return launch("all_to_all_single", rec, w, p, output, input)
}

// BarrierCall waits for all ranks.
func (p *ProcessGroup) BarrierCall(dev gotch.Device, c Call) (*Work, error) {
	var w *C.tdp_work
	rec := C.tdp_barrier(p.h, device(dev), c.timeout(), c.site(), c.slot(&w))
	return launch("barrier", rec, w, p)
}

// MonitoredBarrier is a barrier in which rank 0 finds out who did not come.
func (p *ProcessGroup) MonitoredBarrier(waitAllRanks bool, c Call) error {
	return done("monitored_barrier", C.tdp_monitored_barrier(p.h, c.timeout(), flag(waitAllRanks), c.site()), p)
}

// AllReduceCoalesced is AllReduce of many tensors at once.
func (p *ProcessGroup) AllReduceCoalesced(tensors []*ts.Tensor, op ReduceOp, c Call) (*Work, error) {
	var w *C.tdp_work
	list := NewHandles(tensors)
	rec := C.tdp_allreduce_coalesced(p.h, list.ptr(), list.n(), C.int32_t(op), C.double(c.Factor), c.timeout(), c.site(), c.slot(&w))
	return launch("all_reduce_coalesced", rec, w, p, list)
}

func pairs(op string, outputs, inputs []*ts.Tensor) error {
	if len(outputs) != len(inputs) {
		return &Error{Op: op, Message: "as many outputs as inputs are needed", kind: ErrValue}
	}
	return nil
}

// AllGatherIntoCoalesced is AllGatherInto of many pairs at once.
func (p *ProcessGroup) AllGatherIntoCoalesced(outputs, inputs []*ts.Tensor, c Call) (*Work, error) {
	const op = "all_gather_into_tensor_coalesced"
	if err := pairs(op, outputs, inputs); err != nil {
		return nil, err
	}
	var w *C.tdp_work
	out, in := NewHandles(outputs), NewHandles(inputs)
	rec := C.tdp_allgather_into_coalesced(p.h, out.ptr(), in.ptr(), in.n(), c.timeout(), c.site(), c.slot(&w))
	return launch(op, rec, w, p, out, in)
}

// ReduceScatterCoalesced is ReduceScatterTensor of many pairs at once.
func (p *ProcessGroup) ReduceScatterCoalesced(outputs, inputs []*ts.Tensor, op ReduceOp, c Call) (*Work, error) {
	const name = "reduce_scatter_tensor_coalesced"
	if err := pairs(name, outputs, inputs); err != nil {
		return nil, err
	}
	var w *C.tdp_work
	out, in := NewHandles(outputs), NewHandles(inputs)
	rec := C.tdp_reduce_scatter_coalesced(p.h, out.ptr(), in.ptr(), in.n(), C.int32_t(op), C.double(c.Factor), c.timeout(), c.site(), c.slot(&w))
	return launch(name, rec, w, p, out, in)
}

// BroadcastCoalesced sends root's tensors to all, in place, packed into buckets.
func (p *ProcessGroup) BroadcastCoalesced(tensors *Handles, bucketBytes, root int) error {
	rec := C.tdp_broadcast_coalesced(p.h, tensors.ptr(), tensors.n(), C.uint64_t(bucketBytes), C.int32_t(root))
	return done("broadcast_coalesced", rec, p, tensors)
}

// Send gives t to another rank.
func (p *ProcessGroup) Send(t *ts.Tensor, peer, tag int, c Call) (*Work, error) {
	var w *C.tdp_work
	rec := C.tdp_send(p.h, handle(t), C.int32_t(peer), C.int32_t(tag), c.timeout(), c.site(), c.slot(&w))
	return launch("send", rec, w, p, t)
}

// Recv fills t with what peer sent; peer < 0: whoever sends. It gives the sender, where it waits.
func (p *ProcessGroup) Recv(t *ts.Tensor, peer, tag int, c Call) (source int, work *Work, err error) {
	var w *C.tdp_work
	var from C.int32_t
	rec := C.tdp_recv(p.h, handle(t), C.int32_t(peer), C.int32_t(tag), c.timeout(), c.site(), &from, c.slot(&w))
	work, err = launch("recv", rec, w, p, t)
	return int(from), work, err
}

// BatchP2P starts sends and receives together.
func (p *ProcessGroup) BatchP2P(tensors []*ts.Tensor, isSend []bool, peers, tags []int32, c Call) (*Work, error) {
	var w *C.tdp_work
	list := NewHandles(tensors)
	kinds := make([]C.int32_t, len(isSend))
	for i, s := range isSend {
		kinds[i] = flag(s)
	}
	rec := C.tdp_batch_p2p(p.h, list.ptr(), unsafe.SliceData(kinds), (*C.int32_t)(unsafe.SliceData(peers)),
		(*C.int32_t)(unsafe.SliceData(tags)), list.n(), c.timeout(), c.site(), c.slot(&w))
	return launch("batch_isend_irecv", rec, w, p, list)
}

// Wait blocks until the operation is done, fails, or d has passed. d <= 0: the operation's own timeout.
func (w *Work) Wait(d time.Duration) error { return done("wait", C.tdp_work_wait(w.h, millis(d)), w) }

// Completed tells whether the operation is over, well or not.
func (w *Work) Completed() (bool, error) {
	var out C.int32_t
	rec := C.tdp_work_is_completed(w.h, &out)
	return out != 0, done("work", rec, w)
}

// Source tells who sent what a receive from anybody got.
func (w *Work) Source() (int, error) {
	var out C.int32_t
	rec := C.tdp_work_source(w.h, &out)
	return int(out), done("work", rec, w)
}

// Close lets go of the operation. One in flight goes on and keeps its tensors.
func (w *Work) Close() error {
	w.cleanup.Stop()
	h := w.h
	w.h = nil
	return done("close work", C.tdp_work_free(h), w)
}

// The collectives that the library itself runs, without a place in the program.

// Broadcast is BroadcastCall with a timeout.
func (p *ProcessGroup) Broadcast(t *ts.Tensor, root int, timeout time.Duration, async bool) (*Work, error) {
	return p.BroadcastCall(t, root, Call{Timeout: timeout, Async: async})
}

// AllReduce is AllReduceCall with a timeout.
func (p *ProcessGroup) AllReduce(t *ts.Tensor, op ReduceOp, timeout time.Duration, async bool) (*Work, error) {
	return p.AllReduceCall(t, op, Call{Timeout: timeout, Async: async})
}

// Reduce is ReduceCall with a timeout.
func (p *ProcessGroup) Reduce(t *ts.Tensor, root int, op ReduceOp, timeout time.Duration, async bool) (*Work, error) {
	return p.ReduceCall(t, root, op, Call{Timeout: timeout, Async: async})
}

// AllGather is AllGatherCall with a timeout.
func (p *ProcessGroup) AllGather(outputs []*ts.Tensor, input *ts.Tensor, timeout time.Duration, async bool) (*Work, error) {
	return p.AllGatherCall(outputs, input, Call{Timeout: timeout, Async: async})
}

// Barrier is BarrierCall with a timeout.
func (p *ProcessGroup) Barrier(dev gotch.Device, timeout time.Duration, async bool) (*Work, error) {
	return p.BarrierCall(dev, Call{Timeout: timeout, Async: async})
}
