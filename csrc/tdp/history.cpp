#include "history.h"

#include <ATen/Functions.h>

#include <algorithm>

namespace tdp {

using c10d::OpType;
using c10d::ProcessGroup;

thread_local Call *Call::current_ = nullptr;

uint64_t History::note(int32_t op, int32_t peer, const at::Tensor *first, size_t tensors, uint64_t site) {
  const bool p2p = op >= static_cast<int32_t>(OpType::SEND) && op <= static_cast<int32_t>(OpType::RECVANYSOURCE);
  std::lock_guard<std::mutex> lock(mutex_);
  const uint64_t ticket = next_++;
  Slot &slot = ring_[ticket % ring_.size()];
  slot.ticket = ticket;
  slot.started = Clock::now();
  auto &e = slot.entry;
  e.seq = p2p ? ++point_to_point_ : ++collectives_;
  e.site = site;
  e.op = op;
  e.peer = peer;
  e.state = TDP_HISTORY_ISSUED;
  e.tensors = static_cast<int32_t>(tensors);
  e.dtype = -1;
  e.ndim = 0;
  if (first != nullptr && first->defined()) {
    e.dtype = static_cast<int32_t>(first->scalar_type());
    e.ndim = static_cast<int32_t>(first->dim());
    for (int32_t i = 0; i < std::min<int32_t>(e.ndim, TDP_HISTORY_DIMS); i++) e.sizes[i] = first->size(i);
  }
  return ticket;
}

void History::settle(uint64_t ticket, int32_t state) {
  if (ticket == 0) return;
  std::lock_guard<std::mutex> lock(mutex_);
  Slot &slot = ring_[ticket % ring_.size()];
  if (slot.ticket == ticket) slot.entry.state = state;
}

int32_t History::read(tdp_history_entry *out) const {
  const auto now = Clock::now();
  std::lock_guard<std::mutex> lock(mutex_);
  int32_t n = 0;
  const uint64_t first = next_ > ring_.size() ? next_ - ring_.size() : 1;
  for (uint64_t ticket = first; ticket < next_; ticket++) {
    const Slot &slot = ring_[ticket % ring_.size()];
    out[n] = slot.entry;
    out[n].age_us = std::chrono::duration_cast<std::chrono::microseconds>(now - slot.started).count();
    n++;
  }
  return n;
}

namespace {

// Keeps libtorch's flight recorder from being written by two groups at the same time: its table of groups has no lock.
std::mutex starts;

const at::Tensor *front(const std::vector<at::Tensor> &t) { return t.empty() ? nullptr : &t[0]; }

}  // namespace

template <typename F>
RecordedGroup::Work RecordedGroup::start(OpType op, int32_t peer, const at::Tensor *first, size_t tensors, F &&run) {
  Call *call = Call::current();
  const uint64_t ticket = history.note(static_cast<int32_t>(op), peer, first, tensors, call ? call->site : 0);
  if (call) call->ticket = ticket;
  std::unique_lock<std::mutex> lock(starts, std::defer_lock);
  if (serialise_starts) lock.lock();
  return run();
}

RecordedGroup::Work RecordedGroup::broadcast(Tensors &t, const c10d::BroadcastOptions &o) {
  return start(OpType::BROADCAST, o.rootRank, front(t), t.size(), [&] { return ProcessGroup::broadcast(t, o); });
}

RecordedGroup::Work RecordedGroup::allreduce(Tensors &t, const c10d::AllreduceOptions &o) {
  return start(OpType::ALLREDUCE, -1, front(t), t.size(), [&] { return ProcessGroup::allreduce(t, o); });
}

RecordedGroup::Work RecordedGroup::allreduce_coalesced(Tensors &t, const c10d::AllreduceCoalescedOptions &o) {
  return start(OpType::ALLREDUCE_COALESCED, -1, front(t), t.size(),
               [&] { return ProcessGroup::allreduce_coalesced(t, o); });
}

RecordedGroup::Work RecordedGroup::reduce(Tensors &t, const c10d::ReduceOptions &o) {
  return start(OpType::REDUCE, o.rootRank, front(t), t.size(), [&] { return ProcessGroup::reduce(t, o); });
}

RecordedGroup::Work RecordedGroup::allgather(Lists &out, Tensors &in, const c10d::AllgatherOptions &o) {
  return start(OpType::ALLGATHER, -1, front(in), in.size(), [&] { return ProcessGroup::allgather(out, in, o); });
}

RecordedGroup::Work RecordedGroup::_allgather_base(at::Tensor &out, at::Tensor &in, const c10d::AllgatherOptions &o) {
  return start(OpType::_ALLGATHER_BASE, -1, &in, 1, [&] { return ProcessGroup::_allgather_base(out, in, o); });
}

RecordedGroup::Work RecordedGroup::allgather_coalesced(Lists &out, Tensors &in, const c10d::AllgatherOptions &o) {
  return start(OpType::ALLGATHER_COALESCED, -1, front(in), in.size(),
               [&] { return ProcessGroup::allgather_coalesced(out, in, o); });
}

RecordedGroup::Work RecordedGroup::allgather_into_tensor_coalesced(Tensors &out, Tensors &in,
                                                                   const c10d::AllgatherOptions &o) {
  return start(OpType::ALLGATHER_COALESCED, -1, front(in), in.size(),
               [&] { return ProcessGroup::allgather_into_tensor_coalesced(out, in, o); });
}

RecordedGroup::Work RecordedGroup::gather(Lists &out, Tensors &in, const c10d::GatherOptions &o) {
  return start(OpType::GATHER, o.rootRank, front(in), in.size(), [&] { return ProcessGroup::gather(out, in, o); });
}

RecordedGroup::Work RecordedGroup::scatter(Tensors &out, Lists &in, const c10d::ScatterOptions &o) {
  return start(OpType::SCATTER, o.rootRank, front(out), out.size(), [&] { return ProcessGroup::scatter(out, in, o); });
}

RecordedGroup::Work RecordedGroup::reduce_scatter(Tensors &out, Lists &in, const c10d::ReduceScatterOptions &o) {
  return start(OpType::REDUCE_SCATTER, -1, front(out), out.size(),
               [&] { return ProcessGroup::reduce_scatter(out, in, o); });
}

RecordedGroup::Work RecordedGroup::_reduce_scatter_base(at::Tensor &out, at::Tensor &in,
                                                        const c10d::ReduceScatterOptions &o) {
  return start(OpType::_REDUCE_SCATTER_BASE, -1, &in, 1,
               [&] { return ProcessGroup::_reduce_scatter_base(out, in, o); });
}

RecordedGroup::Work RecordedGroup::reduce_scatter_tensor_coalesced(Tensors &out, Tensors &in,
                                                                   const c10d::ReduceScatterOptions &o) {
  return start(OpType::COALESCED, -1, front(in), in.size(),
               [&] { return ProcessGroup::reduce_scatter_tensor_coalesced(out, in, o); });
}

RecordedGroup::Work RecordedGroup::alltoall_base(at::Tensor &out, at::Tensor &in, std::vector<int64_t> &out_splits,
                                                 std::vector<int64_t> &in_splits, const c10d::AllToAllOptions &o) {
  return start(OpType::ALLTOALL_BASE, -1, &in, 1,
               [&] { return ProcessGroup::alltoall_base(out, in, out_splits, in_splits, o); });
}

RecordedGroup::Work RecordedGroup::alltoall(Tensors &out, Tensors &in, const c10d::AllToAllOptions &o) {
  return start(OpType::ALLTOALL, -1, front(in), in.size(), [&] { return ProcessGroup::alltoall(out, in, o); });
}

void RecordedGroup::monitoredBarrier(const c10d::BarrierOptions &o, bool wait_all_ranks) {
  Call *call = Call::current();
  const uint64_t ticket = history.note(TDP_OP_MONITORED_BARRIER, -1, nullptr, 0, call ? call->site : 0);
  if (call) call->ticket = ticket;
  ProcessGroup::monitoredBarrier(o, wait_all_ranks);
}

RecordedGroup::Work RecordedGroup::send(Tensors &t, int peer, int tag) {
  return start(OpType::SEND, peer, front(t), t.size(), [&] { return ProcessGroup::send(t, peer, tag); });
}

RecordedGroup::Work RecordedGroup::recv(Tensors &t, int peer, int tag) {
  return start(OpType::RECV, peer, front(t), t.size(), [&] { return ProcessGroup::recv(t, peer, tag); });
}

RecordedGroup::Work RecordedGroup::recvAnysource(Tensors &t, int tag) {
  return start(OpType::RECVANYSOURCE, -1, front(t), t.size(), [&] { return ProcessGroup::recvAnysource(t, tag); });
}

// ProcessGroup::barrier keeps the tensor that chooses the backend in a static variable, which two groups on two
// threads overwrite under each other. This does the same with a tensor of its own.
RecordedGroup::Work RecordedGroup::barrier(const c10d::BarrierOptions &o) {
  static auto op = c10::Dispatcher::singleton()
                       .findSchemaOrThrow("c10d::barrier", "")
                       .typed<Work(at::Tensor, const c10::intrusive_ptr<ProcessGroup> &, const std::vector<int64_t> &,
                                   bool, int64_t)>();
  at::Device device = o.device.value_or(backendType_ == BackendType::NCCL ? at::kCUDA : at::kCPU);
  auto tensor = at::empty({1}, at::TensorOptions().device(device).dtype(at::kByte));
  return start(OpType::BARRIER, -1, nullptr, 0, [&] {
    return op.call(tensor, c10::intrusive_ptr<ProcessGroup>::unsafe_reclaim_from_nonowning(this), o.device_ids,
                   o.asyncOp, o.timeout.count());
  });
}

}  // namespace tdp
