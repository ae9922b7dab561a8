// The collectives of a process group, each in one call.
#include "group.h"

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/distributed/c10d/comm.hpp>

using c10d::ProcessGroup;
using c10d::ReduceOp;
using tdp::Call;
using tdp::group_of;
using tdp::guard;
using tdp::need;
using tdp::need_defined;

template <ReduceOp::RedOpType Theirs, int Ours>
constexpr bool same = static_cast<int>(Theirs) == Ours;
static_assert(same<ReduceOp::SUM, TDP_SUM> && same<ReduceOp::AVG, TDP_AVG> && same<ReduceOp::PRODUCT, TDP_PRODUCT> &&
              same<ReduceOp::MIN, TDP_MIN> && same<ReduceOp::MAX, TDP_MAX> && same<ReduceOp::BAND, TDP_BAND> &&
              same<ReduceOp::BOR, TDP_BOR> && same<ReduceOp::BXOR, TDP_BXOR> &&
              same<ReduceOp::PREMUL_SUM, TDP_PREMUL_SUM>);

namespace {

using Tensors = std::vector<at::Tensor>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

[[noreturn]] void refuse(const std::string &message) { throw tdp::Error(TDP_ERR_VALUE, message); }

const char *op_name(int32_t op) {
  static const char *const names[] = {"SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM"};
  return names[op];
}

ReduceOp to_op(int32_t op, double factor) {
  if (op < TDP_SUM || op > TDP_PREMUL_SUM) refuse("unknown reduce operation number " + std::to_string(op));
  if (op == TDP_PREMUL_SUM) return c10d::makeNCCLPreMulSum(factor);
  return ReduceOp(static_cast<ReduceOp::RedOpType>(op));
}

// Complex numbers travel as pairs of reals.
at::Tensor as_real(const at::Tensor &t) { return t.is_complex() ? at::view_as_real(t) : t; }

// A tensor that the group can work with: complex ones as their reals.
at::Tensor usable(tdp_pg *pg, tdp_tensor handle, const char *what) {
  const at::Tensor &t = need_defined(handle, what);
  auto &group = group_of(pg);
  const auto devices = group->getDeviceTypes();
  bool served = false;
  for (auto &d : devices) served = served || d.type() == t.device().type();
  if (!served) {
    std::string list;
    for (auto &d : devices) list += (list.empty() ? "" : ", ") + c10::DeviceTypeName(d.type(), true);
    refuse(std::string(what) + " lies on " + t.device().str() + ", but the group's backends serve " + list +
           ": move the tensor, or give the group a backend for it (such as cpu:gloo,cuda:nccl)");
  }
  return as_real(t);
}

at::Tensor reducible(tdp_pg *pg, tdp_tensor handle, const ReduceOp &op, const char *what) {
  if (need_defined(handle, what).is_complex() && !c10d::isComplexViewAsRealAllowed(op))
    refuse(std::string("the reduction ") + op_name(op.op_) + " is not defined on complex tensors");
  return usable(pg, handle, what);
}

Tensors usable_list(tdp_pg *pg, const tdp_tensor *handles, int32_t n, const char *what) {
  Tensors list;
  list.reserve(n);
  for (int32_t i = 0; i < n; i++) list.push_back(usable(pg, handles[i], what));
  return list;
}

// Gathering and scattering move bytes, so that a wrong dtype would be silent.
void same_dtype(const at::Tensor &one, const Tensors &list) {
  for (size_t i = 0; i < list.size(); i++)
    if (list[i].scalar_type() != one.scalar_type())
      refuse(std::string("Invalid usage of tensors with different dtypes: ") + c10::toString(one.scalar_type()) +
             " and, at index " + std::to_string(i) + " of the list, " + c10::toString(list[i].scalar_type()));
}

std::string shape(const at::Tensor &t) { return c10::str(t.sizes()); }

// Lists with one tensor a rank, each as large as one.
void one_a_rank(tdp_pg *pg, const at::Tensor &one, const Tensors &list, const char *what) {
  const auto size = static_cast<size_t>(group_of(pg)->getSize());
  if (list.size() != size)
    refuse(std::string(what) + " needs one tensor a rank: the group has " + std::to_string(size) + " ranks, the list " +
           std::to_string(list.size()) + " tensors");
  same_dtype(one, list);
  for (size_t i = 0; i < size; i++)
    if (list[i].numel() != one.numel())
      refuse(std::string(what) + ": the tensor at index " + std::to_string(i) + " has the shape " + shape(list[i]) +
             ", but " + shape(one) + " is needed");
}

void times_size(tdp_pg *pg, const at::Tensor &large, const at::Tensor &small, const char *what, const char *large_name,
                const char *small_name) {
  if (large.scalar_type() != small.scalar_type())
    refuse(std::string(what) + ": the output is " + c10::toString(large.scalar_type()) + " and the input " +
           c10::toString(small.scalar_type()));
  if (large.numel() != small.numel() * group_of(pg)->getSize())
    refuse(std::string(what) + ": the " + large_name + " must be as large as the " + small_name + " times the " +
           std::to_string(group_of(pg)->getSize()) + " ranks, but they have the shapes " + shape(large) + " and " +
           shape(small));
}

void member(tdp_pg *pg, int32_t rank, const char *what) {
  const int size = group_of(pg)->getSize();
  if (rank < 0 || rank >= size)
    refuse(std::string(what) + " rank " + std::to_string(rank) + " is not in the group of " + std::to_string(size) +
           " ranks");
}

// Several operations in flight as one.
class WorkList : public c10d::Work {
 public:
  explicit WorkList(std::vector<WorkPtr> list) : list_(std::move(list)) {}
  bool isCompleted() override {
    for (auto &w : list_)
      if (!w->isCompleted()) return false;
    return true;
  }
  bool wait(std::chrono::milliseconds timeout) override {
    // All are waited for, even after a failure: their tensors are in use until they end.
    std::exception_ptr first;
    for (auto &w : list_) {
      try {
        w->wait(timeout);
      } catch (...) {
        if (!first) first = std::current_exception();
      }
    }
    if (first) std::rethrow_exception(first);
    return true;
  }
  void abort() override {
    for (auto &w : list_) w->abort();
  }
  void synchronize() override {
    for (auto &w : list_) w->synchronize();
  }

 private:
  std::vector<WorkPtr> list_;
};

std::chrono::milliseconds wait_bound(int64_t ms) { return ms < 0 ? kNoTimeout : std::chrono::milliseconds(ms); }

// Runs one operation: starts it and waits here, or hands it in flight to the caller. p2p operations take their
// timeout while they are waited for.
template <typename F>
tdp_error *run(tdp_pg *pg, uint64_t site, int64_t wait_ms, tdp_work **out, F &&start) {
  return guard([&] {
    auto &group = group_of(pg);
    at::NoGradGuard no_grad;
    Call call(site);
    auto &history = pg->recorded().history;
    try {
      WorkPtr work = start();
      if (out != nullptr) {
        *out = new tdp_work{std::move(work), group, call.ticket, wait_ms};
        return;
      }
      if (work) work->wait(wait_bound(wait_ms));
    } catch (...) {
      history.settle(call.ticket, TDP_HISTORY_FAILED);
      throw;
    }
    history.settle(call.ticket, TDP_HISTORY_DONE);
  });
}

template <typename Options>
Options options(int64_t timeout_ms, tdp_work **work) {
  Options o;
  o.timeout = tdp::timeout(timeout_ms);
  o.asyncOp = work != nullptr;
  return o;
}

constexpr int64_t kGroups = -1;  // the wait ends with the operation, which has the timeout

}  // namespace

extern "C" {

tdp_error *tdp_broadcast(tdp_pg *pg, tdp_tensor t, int32_t root, int64_t timeout_ms, uint64_t site, tdp_work **work) {
  return run(pg, site, kGroups, work, [&] {
    member(pg, root, "root");
    Tensors list{usable(pg, t, "the tensor")};
    auto o = options<c10d::BroadcastOptions>(timeout_ms, work);
    o.rootRank = root;
    return group_of(pg)->broadcast(list, o);
  });
}

tdp_error *tdp_allreduce(tdp_pg *pg, tdp_tensor t, int32_t op, double factor, int64_t timeout_ms, uint64_t site,
                         tdp_work **work) {
  return run(pg, site, kGroups, work, [&] {
    auto o = options<c10d::AllreduceOptions>(timeout_ms, work);
    o.reduceOp = to_op(op, factor);
    Tensors list{reducible(pg, t, o.reduceOp, "the tensor")};
    return group_of(pg)->allreduce(list, o);
  });
}

tdp_error *tdp_reduce(tdp_pg *pg, tdp_tensor t, int32_t root, int32_t op, double factor, int64_t timeout_ms,
                      uint64_t site, tdp_work **work) {
  return run(pg, site, kGroups, work, [&] {
    member(pg, root, "root");
    auto o = options<c10d::ReduceOptions>(timeout_ms, work);
    o.reduceOp = to_op(op, factor);
    o.rootRank = root;
    Tensors list{reducible(pg, t, o.reduceOp, "the tensor")};
    return group_of(pg)->reduce(list, o);
  });
}

tdp_error *tdp_allgather(tdp_pg *pg, const tdp_tensor *outputs, int32_t n, tdp_tensor input, int64_t timeout_ms,
                         uint64_t site, tdp_work **work) {
  return run(pg, site, kGroups, work, [&] {
    Tensors in{usable(pg, input, "the input tensor")};
    std::vector<Tensors> out{usable_list(pg, outputs, n, "an output tensor")};
    // Only the dtype and the count are looked at here: NCCL gathers lists of unequal tensors.
    if (out[0].size() != static_cast<size_t>(group_of(pg)->getSize())) one_a_rank(pg, in[0], out[0], "all_gather");
    same_dtype(in[0], out[0]);
    return group_of(pg)->allgather(out, in, options<c10d::AllgatherOptions>(timeout_ms, work));
  });
}

tdp_error *tdp_allgather_into(tdp_pg *pg, tdp_tensor output, tdp_tensor input, int64_t timeout_ms, uint64_t site,
                              tdp_work **work) {
  return run(pg, site, kGroups, work, [&] {
    auto in = usable(pg, input, "the input tensor"), out = usable(pg, output, "the output tensor");
    times_size(pg, out, in, "all_gather_into_tensor", "output", "input");
    if (out.dim() != in.dim()) {  // stacked, which Gloo does not know: the same elements in one row
      in = in.reshape(-1);
      out = out.view(-1);
    }
    return group_of(pg)->_allgather_base(out, in, options<c10d::AllgatherOptions>(timeout_ms, work));
  });
}

tdp_error *tdp_gather(tdp_pg *pg, const tdp_tensor *outputs, int32_t n, tdp_tensor input, int32_t root,
                      int64_t timeout_ms, uint64_t site, tdp_work **work) {
  return run(pg, site, kGroups, work, [&] {
    member(pg, root, "destination");
    Tensors in{usable(pg, input, "the input tensor")};
    std::vector<Tensors> out;
    if (group_of(pg)->getRank() == root) {
      if (n == 0) refuse("gather: the destination rank needs the list of outputs");
      out.push_back(usable_list(pg, outputs, n, "an output tensor"));
      one_a_rank(pg, in[0], out[0], "gather");
    } else if (n != 0) {
      refuse("gather: only the destination rank, " + std::to_string(root) + ", may give a list of outputs");
    }
    auto o = options<c10d::GatherOptions>(timeout_ms, work);
    o.rootRank = root;
    return group_of(pg)->gather(out, in, o);
  });
}

tdp_error *tdp_scatter(tdp_pg *pg, tdp_tensor output, const tdp_tensor *inputs, int32_t n, int32_t root,
                       int64_t timeout_ms, uint64_t site, tdp_work **work) {
  return run(pg, site, kGroups, work, [&] {
    member(pg, root, "source");
    Tensors out{usable(pg, output, "the output tensor")};
    std::vector<Tensors> in;
    if (group_of(pg)->getRank() == root) {
      if (n == 0) refuse("scatter: the source rank needs the list of inputs");
      in.push_back(usable_list(pg, inputs, n, "an input tensor"));
      one_a_rank(pg, out[0], in[0], "scatter");
    } else if (n != 0) {
      refuse("scatter: only the source rank, " + std::to_string(root) + ", may give a list of inputs");
    }
    auto o = options<c10d::ScatterOptions>(timeout_ms, work);
    o.rootRank = root;
    return group_of(pg)->scatter(out, in, o);
  });
}

tdp_error *tdp_reduce_scatter(tdp_pg *pg, tdp_tensor output, const tdp_tensor *inputs, int32_t n, int32_t op,
                              double factor, int64_t timeout_ms, uint64_t site, tdp_work **work) {
  return run(pg, site, kGroups, work, [&] {
    auto o = options<c10d::ReduceScatterOptions>(timeout_ms, work);
    o.reduceOp = to_op(op, factor);
    Tensors out{reducible(pg, output, o.reduceOp, "the output tensor")};
    std::vector<Tensors> in{usable_list(pg, inputs, n, "an input tensor")};
    one_a_rank(pg, out[0], in[0], "reduce_scatter");
    return group_of(pg)->reduce_scatter(out, in, o);
  });
}

tdp_error *tdp_reduce_scatter_tensor(tdp_pg *pg, tdp_tensor output, tdp_tensor input, int32_t op, double factor,
                                     int64_t timeout_ms, uint64_t site, tdp_work **work) {
  return run(pg, site, kGroups, work, [&] {
    auto o = options<c10d::ReduceScatterOptions>(timeout_ms, work);
    o.reduceOp = to_op(op, factor);
    auto out = reducible(pg, output, o.reduceOp, "the output tensor"), in = usable(pg, input, "the input tensor");
    times_size(pg, in, out, "reduce_scatter_tensor", "input", "output");
    return group_of(pg)->_reduce_scatter_base(out, in, o);
  });
}

tdp_error *tdp_alltoall(tdp_pg *pg, const tdp_tensor *outputs, int32_t n, const tdp_tensor *inputs, int32_t m,
                        int64_t timeout_ms, uint64_t site, tdp_work **work) {
  return run(pg, site, kGroups, work, [&] {
    auto &group = group_of(pg);
    const int size = group->getSize(), rank = group->getRank();
    auto out = usable_list(pg, outputs, n, "an output tensor"), in = usable_list(pg, inputs, m, "an input tensor");
    if (n != size || m != size)
      refuse("all_to_all needs one tensor a rank: the group has " + std::to_string(size) + " ranks, the lists " +
             std::to_string(n) + " outputs and " + std::to_string(m) + " inputs");
    same_dtype(in[0], in);
    same_dtype(in[0], out);
    auto o = options<c10d::AllToAllOptions>(timeout_ms, work);
    if (group->getBackend(in[0].device().type())->getBackendName() != "gloo") return group->alltoall(out, in, o);

    // Gloo has only the single-tensor form, which does the same on one packed tensor.
    if (out[rank].numel() != in[rank].numel())
      refuse("all_to_all: this rank sends itself " + shape(in[rank]) + " but expects " + shape(out[rank]));
    std::vector<int64_t> out_sizes, in_sizes;
    Tensors flat;
    for (int i = 0; i < size; i++) {
      out_sizes.push_back(out[i].numel());
      in_sizes.push_back(in[i].numel());
      flat.push_back(in[i].reshape(-1));
    }
    int64_t total = 0;
    for (auto s : out_sizes) total += s;
    auto packed_in = at::cat(flat), packed_out = at::empty({total}, packed_in.options());
    auto started = group->alltoall_base(packed_out, packed_in, out_sizes, in_sizes, o);
    class Unpack : public WorkList {
     public:
      Unpack(WorkPtr w, at::Tensor packed, Tensors out)
          : WorkList({std::move(w)}), packed_(std::move(packed)), out_(std::move(out)) {}
      bool wait(std::chrono::milliseconds timeout) override {
        WorkList::wait(timeout);
        std::lock_guard<std::mutex> lock(unpacked_);
        at::NoGradGuard no_grad;
        int64_t at = 0;
        for (auto &t : out_) {
          t.copy_(packed_.narrow(0, at, t.numel()).view(t.sizes()));
          at += t.numel();
        }
        out_.clear();
        return true;
      }

     private:
      std::mutex unpacked_;
      at::Tensor packed_;
      Tensors out_;
    };
    return WorkPtr(c10::make_intrusive<Unpack>(std::move(started), std::move(packed_out), std::move(out)));
  });
}

tdp_error *tdp_alltoall_single(tdp_pg *pg, tdp_tensor output, tdp_tensor input, const int64_t *output_splits, int32_t n,
                               const int64_t *input_splits, int32_t m, int64_t timeout_ms, uint64_t site,
                               tdp_work **work) {
  return run(pg, site, kGroups, work, [&] {
    auto &group = group_of(pg);
    auto in = usable(pg, input, "the input tensor"), out = usable(pg, output, "the output tensor");
    same_dtype(in, {out});
    std::vector<int64_t> out_splits(output_splits, output_splits + n), in_splits(input_splits, input_splits + m);
    auto check = [&](const at::Tensor &t, const std::vector<int64_t> &splits, const char *what) {
      const int64_t size = group->getSize(), rows = t.dim() == 0 ? 1 : t.size(0);
      if (splits.empty()) {
        if (rows % size != 0)
          refuse(std::string("all_to_all_single: the first dimension of the ") + what + ", " + std::to_string(rows) +
                 ", does not divide by the " + std::to_string(size) + " ranks; give the split sizes");
        return;
      }
      int64_t sum = 0;
      for (auto s : splits) sum += s;
      if (static_cast<int64_t>(splits.size()) != size || sum != rows)
        refuse(std::string("all_to_all_single: the ") + what + " has " + std::to_string(rows) + " rows, but its " +
               std::to_string(splits.size()) + " split sizes (one a rank is needed) sum up to " + std::to_string(sum));
    };
    check(out, out_splits, "output");
    check(in, in_splits, "input");
    return group->alltoall_base(out, in, out_splits, in_splits, options<c10d::AllToAllOptions>(timeout_ms, work));
  });
}

tdp_error *tdp_barrier(tdp_pg *pg, tdp_device device, int64_t timeout_ms, uint64_t site, tdp_work **work) {
  return run(pg, site, kGroups, work, [&] {
    auto o = options<c10d::BarrierOptions>(timeout_ms, work);
    o.device = tdp::to_device(device);
    if (device.type != 0) o.device_ids.push_back(device.index);
    return group_of(pg)->barrier(o);
  });
}

tdp_error *tdp_monitored_barrier(tdp_pg *pg, int64_t timeout_ms, int32_t wait_all_ranks, uint64_t site) {
  return run(pg, site, kGroups, nullptr, [&] {
    bool gloo = false;
    for (auto &b : need(pg, "the process group")->backends) gloo = gloo || b->getBackendName() == "gloo";
    if (!gloo) throw tdp::Error(TDP_ERR_UNSUPPORTED, "monitored_barrier is only implemented for GLOO backend");
    c10d::BarrierOptions o;
    o.timeout = tdp::timeout(timeout_ms);
    group_of(pg)->monitoredBarrier(o, wait_all_ranks != 0);
    return WorkPtr();
  });
}

tdp_error *tdp_allreduce_coalesced(tdp_pg *pg, const tdp_tensor *handles, int32_t n, int32_t op, double factor,
                                   int64_t timeout_ms, uint64_t site, tdp_work **work) {
  return run(pg, site, kGroups, work, [&] {
    auto o = options<c10d::AllreduceCoalescedOptions>(timeout_ms, work);
    o.reduceOp = to_op(op, factor);
    if (n == 0) refuse("all_reduce_coalesced needs at least one tensor");
    Tensors list;
    for (int32_t i = 0; i < n; i++) list.push_back(reducible(pg, handles[i], o.reduceOp, "a tensor"));
    same_dtype(list[0], list);
    return group_of(pg)->allreduce_coalesced(list, o);
  });
}

tdp_error *tdp_allgather_into_coalesced(tdp_pg *pg, const tdp_tensor *outputs, const tdp_tensor *inputs, int32_t n,
                                        int64_t timeout_ms, uint64_t site, tdp_work **work) {
  return run(pg, site, kGroups, work, [&]() -> WorkPtr {
    auto out = usable_list(pg, outputs, n, "an output tensor"), in = usable_list(pg, inputs, n, "an input tensor");
    if (n == 0) refuse("all_gather_into_tensor_coalesced needs at least one tensor");
    for (int32_t i = 0; i < n; i++)
      times_size(pg, out[i], in[i], "all_gather_into_tensor_coalesced", "output", "input");
    auto o = options<c10d::AllgatherOptions>(timeout_ms, work);
    if (!pg->wrapped) return group_of(pg)->allgather_into_tensor_coalesced(out, in, o);
    // The debug wrapper does not know this operation: one after the other.
    std::vector<WorkPtr> list;
    for (int32_t i = 0; i < n; i++) list.push_back(group_of(pg)->_allgather_base(out[i], in[i], o));
    return c10::make_intrusive<WorkList>(std::move(list));
  });
}

tdp_error *tdp_reduce_scatter_coalesced(tdp_pg *pg, const tdp_tensor *outputs, const tdp_tensor *inputs, int32_t n,
                                        int32_t op, double factor, int64_t timeout_ms, uint64_t site, tdp_work **work) {
  return run(pg, site, kGroups, work, [&]() -> WorkPtr {
    auto o = options<c10d::ReduceScatterOptions>(timeout_ms, work);
    o.reduceOp = to_op(op, factor);
    if (n == 0) refuse("reduce_scatter_tensor_coalesced needs at least one tensor");
    Tensors out, in = usable_list(pg, inputs, n, "an input tensor");
    for (int32_t i = 0; i < n; i++) {
      out.push_back(reducible(pg, outputs[i], o.reduceOp, "an output tensor"));
      times_size(pg, in[i], out[i], "reduce_scatter_tensor_coalesced", "input", "output");
    }
    if (!pg->wrapped) return group_of(pg)->reduce_scatter_tensor_coalesced(out, in, o);
    std::vector<WorkPtr> list;
    for (int32_t i = 0; i < n; i++) list.push_back(group_of(pg)->_reduce_scatter_base(out[i], in[i], o));
    return c10::make_intrusive<WorkList>(std::move(list));
  });
}

tdp_error *tdp_broadcast_coalesced(tdp_pg *pg, const tdp_tensor *tensors, int32_t n, uint64_t bucket_bytes,
                                   int32_t root) {
  return guard([&] {
    at::NoGradGuard no_grad;
    member(pg, root, "root");
    Tensors list;
    list.reserve(n);
    // Detached, as Python's DDP hands them over: a leaf that requires grad may not be written to otherwise.
    for (int32_t i = 0; i < n; i++) list.push_back(need_defined(tensors[i], "a tensor of the module").detach());
    if (n > 0) c10d::broadcast_coalesced(group_of(pg), list, bucket_bytes, root);
  });
}

tdp_error *tdp_send(tdp_pg *pg, tdp_tensor t, int32_t peer, int32_t tag, int64_t timeout_ms, uint64_t site,
                    tdp_work **work) {
  return run(pg, site, timeout_ms, work, [&] {
    member(pg, peer, "destination");
    Tensors list{usable(pg, t, "the tensor")};
    return group_of(pg)->send(list, peer, tag);
  });
}

tdp_error *tdp_recv(tdp_pg *pg, tdp_tensor t, int32_t peer, int32_t tag, int64_t timeout_ms, uint64_t site,
                    int32_t *source, tdp_work **work) {
  WorkPtr started;
  auto *err = run(pg, site, timeout_ms, work, [&] {
    Tensors list{usable(pg, t, "the tensor")};
    if (peer >= 0) member(pg, peer, "source");
    started = peer < 0 ? group_of(pg)->recvAnysource(list, tag) : group_of(pg)->recv(list, peer, tag);
    return started;
  });
  if (err != nullptr || work != nullptr) return err;
  return guard([&] { *source = peer < 0 && started ? started->sourceRank() : peer; });
}

tdp_error *tdp_batch_p2p(tdp_pg *pg, const tdp_tensor *tensors, const int32_t *is_send, const int32_t *peers,
                         const int32_t *tags, int32_t n, int64_t timeout_ms, uint64_t site, tdp_work **work) {
  return run(pg, site, timeout_ms, work, [&]() -> WorkPtr {
    auto &group = group_of(pg);
    if (n == 0) refuse("a batch of sends and receives needs at least one of them");
    auto list = usable_list(pg, tensors, n, "a tensor");
    for (int32_t i = 0; i < n; i++)
      if (is_send[i] || peers[i] >= 0) member(pg, peers[i], is_send[i] ? "destination" : "source");
    auto backend = group->getBackend(list[0].device().type());
    const bool coalesce = backend->supportsCoalescing();
    if (coalesce) backend->startCoalescing();
    std::vector<WorkPtr> works;
    for (int32_t i = 0; i < n; i++) {
      Tensors one{list[i]};
      WorkPtr w = is_send[i]     ? group->send(one, peers[i], tags[i])
                  : peers[i] < 0 ? group->recvAnysource(one, tags[i])
                                 : group->recv(one, peers[i], tags[i]);
      if (w) works.push_back(std::move(w));
    }
    if (coalesce) return backend->endCoalescing();
    return c10::make_intrusive<WorkList>(std::move(works));
  });
}

tdp_error *tdp_work_wait(tdp_work *w, int64_t timeout_ms) {
  return guard([&] {
    auto &work = need(w, "the operation")->work;
    auto settle = [&](int32_t state) {
      if (w->pg) static_cast<tdp::RecordedGroup &>(*w->pg).history.settle(w->ticket, state);
    };
    try {
      if (work) work->wait(wait_bound(timeout_ms < 0 ? w->timeout_ms : timeout_ms));
    } catch (...) {
      settle(TDP_HISTORY_FAILED);
      throw;
    }
    settle(TDP_HISTORY_DONE);
  });
}

tdp_error *tdp_work_is_completed(tdp_work *w, int32_t *out) {
  return guard([&] {
    auto &work = need(w, "the operation")->work;
    *out = !work || work->isCompleted() ? 1 : 0;
  });
}

tdp_error *tdp_work_source(tdp_work *w, int32_t *out) {
  return guard([&] {
    auto &work = need(w, "the operation")->work;
    if (!work) throw tdp::Error(TDP_ERR_UNSUPPORTED, "the operation has no source");
    *out = work->sourceRank();
  });
}

tdp_error *tdp_work_free(tdp_work *w) {
  return guard([&] { delete w; });
}

}  // extern "C"
