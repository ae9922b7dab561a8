// What a group did last, for the table that a timeout prints.
#pragma once

#include "tdp.h"

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <array>
#include <chrono>
#include <mutex>
#include <vector>

namespace tdp {

// A ring of the last operations. Noting one costs a lock that nobody else holds and a few stores.
class History {
 public:
  using Clock = std::chrono::steady_clock;

  // Gives the ticket that settle wants.
  uint64_t note(int32_t op, int32_t peer, const at::Tensor *first, size_t tensors, uint64_t site);
  void settle(uint64_t ticket, int32_t state);
  int32_t read(tdp_history_entry *out) const;

 private:
  struct Slot {
    tdp_history_entry entry;
    Clock::time_point started;
    uint64_t ticket = 0;
  };
  mutable std::mutex mutex_;
  std::array<Slot, TDP_HISTORY_SIZE> ring_{};
  uint64_t next_ = 1;
  uint64_t collectives_ = 0, point_to_point_ = 0;
};

// The call from Go that runs on this thread. It tells the history where the program made it, and brings the ticket of
// the operation that it started back.
class Call {
 public:
  explicit Call(uint64_t site) : site(site), outer_(current_) { current_ = this; }
  ~Call() { current_ = outer_; }
  Call(const Call &) = delete;
  Call &operator=(const Call &) = delete;

  static Call *current() { return current_; }

  const uint64_t site;
  uint64_t ticket = 0;

 private:
  Call *const outer_;
  static thread_local Call *current_;
};

// c10d's group, which also writes down what runs on it: what Go asks for as well as what the reducer starts.
class RecordedGroup : public c10d::ProcessGroup {
 public:
  using Tensors = std::vector<at::Tensor>;
  using Lists = std::vector<std::vector<at::Tensor>>;
  using Work = c10::intrusive_ptr<c10d::Work>;
  using c10d::ProcessGroup::ProcessGroup;

  History history;
  bool serialise_starts = false;

  Work broadcast(Tensors &t, const c10d::BroadcastOptions &o) override;
  Work allreduce(Tensors &t, const c10d::AllreduceOptions &o) override;
  Work allreduce_coalesced(Tensors &t, const c10d::AllreduceCoalescedOptions &o) override;
  Work reduce(Tensors &t, const c10d::ReduceOptions &o) override;
  Work allgather(Lists &out, Tensors &in, const c10d::AllgatherOptions &o) override;
  Work _allgather_base(at::Tensor &out, at::Tensor &in, const c10d::AllgatherOptions &o) override;
  Work allgather_coalesced(Lists &out, Tensors &in, const c10d::AllgatherOptions &o) override;
  Work allgather_into_tensor_coalesced(Tensors &out, Tensors &in, const c10d::AllgatherOptions &o) override;
  Work gather(Lists &out, Tensors &in, const c10d::GatherOptions &o) override;
  Work scatter(Tensors &out, Lists &in, const c10d::ScatterOptions &o) override;
  Work reduce_scatter(Tensors &out, Lists &in, const c10d::ReduceScatterOptions &o) override;
  Work _reduce_scatter_base(at::Tensor &out, at::Tensor &in, const c10d::ReduceScatterOptions &o) override;
  Work reduce_scatter_tensor_coalesced(Tensors &out, Tensors &in, const c10d::ReduceScatterOptions &o) override;
  Work alltoall_base(at::Tensor &out, at::Tensor &in, std::vector<int64_t> &out_splits, std::vector<int64_t> &in_splits,
                     const c10d::AllToAllOptions &o) override;
  Work alltoall(Tensors &out, Tensors &in, const c10d::AllToAllOptions &o) override;
  void monitoredBarrier(const c10d::BarrierOptions &o, bool wait_all_ranks) override;
  Work send(Tensors &t, int peer, int tag) override;
  Work recv(Tensors &t, int peer, int tag) override;
  Work recvAnysource(Tensors &t, int tag) override;
  Work barrier(const c10d::BarrierOptions &o) override;

 private:
  template <typename F>
  Work start(c10d::OpType op, int32_t peer, const at::Tensor *first, size_t tensors, F &&run);
};

}  // namespace tdp
