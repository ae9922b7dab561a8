// NCCL, in the CUDA flavour; an error that says so in the other. And the flight recorders of both.
#include "group.h"
#include "store.h"

#include <torch/csrc/distributed/c10d/FlightRecorder.hpp>

#ifdef TDP_CUDA
#define USE_C10D_NCCL
#define USE_CUDA
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>
#endif

namespace {

[[noreturn]] void no_nccl() {
  throw tdp::Error(TDP_ERR_UNSUPPORTED,
                   "this build has no NCCL: it was set up for CPU; run `goddp setup --flavor cuda` on a machine with "
                   "an NVIDIA GPU, or use the gloo backend");
}

}  // namespace

extern "C" {

tdp_error *tdp_pg_add_nccl(tdp_pg *pg, tdp_store *store, tdp_store *helper_store, const int64_t *global_ranks,
                           int64_t timeout_ms, int32_t high_priority, int32_t bound_device) {
  return tdp::guard([&] {
    auto &group = tdp::group_of(pg);
#ifdef TDP_CUDA
    const auto timeout = std::chrono::milliseconds(timeout_ms);
    auto options = c10d::ProcessGroupNCCL::Options::create(high_priority != 0);
    options->timeout = timeout;
    options->group_name = pg->name;
    options->global_ranks_in_group.assign(global_ranks, global_ranks + group->getSize());
    if (bound_device >= 0) group->setBoundDeviceId(at::Device(at::kCUDA, static_cast<c10::DeviceIndex>(bound_device)));
    auto nccl = c10::make_intrusive<c10d::ProcessGroupNCCL>(tdp::need(store, "the store")->store, group->getRank(),
                                                            group->getSize(), options);
    nccl->setSequenceNumberForGroup();
    pg->backends.push_back(nccl);
    c10::intrusive_ptr<c10d::Backend> helper;
    if (helper_store != nullptr) helper = tdp::make_helper(pg, helper_store->store, timeout);
    tdp::add_backend(pg, c10::DeviceType::CUDA, c10d::ProcessGroup::BackendType::NCCL, nccl, helper);
    if (bound_device >= 0) nccl->eagerConnectSingleDevice(*group->getBoundDeviceId());
#else
    (void)group;
    (void)store;
    (void)helper_store;
    (void)global_ranks;
    (void)timeout_ms;
    (void)high_priority;
    (void)bound_device;
    no_nccl();
#endif
  });
}

tdp_error *tdp_pg_split_nccl(tdp_pg *pg, tdp_pg *parent, tdp_store *store, const int32_t *ranks, int32_t n,
                             int64_t timeout_ms) {
  return tdp::guard([&] {
    tdp::group_of(parent);
#ifdef TDP_CUDA
    c10d::ProcessGroupNCCL *whole = nullptr;
    for (auto &b : parent->backends)
      if (auto *nccl = dynamic_cast<c10d::ProcessGroupNCCL *>(b.get())) whole = nccl;
    if (whole == nullptr) throw tdp::Error(TDP_ERR_VALUE, "the parent group has no NCCL backend to split");
    // A copy: the options of the parent are its own.
    auto options = c10::make_intrusive<c10d::ProcessGroupNCCL::Options>(*whole->getOptions());
    options->timeout = std::chrono::milliseconds(timeout_ms);
    if (pg != nullptr) options->group_name = pg->name;
    auto part = whole->split(tdp::need(store, "the store")->store, std::vector<int>(ranks, ranks + n), options);
    if (pg == nullptr) return;
    if (!part) throw tdp::Error(TDP_ERR_VALUE, "this rank is in none of the parts");
    pg->pg->setBoundDeviceId(parent->pg->getBoundDeviceId());
    part->setSequenceNumberForGroup();
    pg->backends.push_back(part);
    tdp::add_backend(pg, c10::DeviceType::CUDA, c10d::ProcessGroup::BackendType::NCCL, part, {});
#else
    (void)pg;
    (void)store;
    (void)ranks;
    (void)n;
    (void)timeout_ms;
    no_nccl();
#endif
  });
}

tdp_error *tdp_flight_recorder_dump(int32_t nccl, int32_t json, int32_t collectives, int32_t stacks,
                                    int32_t only_active, tdp_bytes *out) {
  return tdp::guard([&] {
    std::string dump;
    if (nccl) {
#ifdef TDP_CUDA
      dump = json ? c10d::dump_nccl_trace_json(collectives != 0, only_active != 0)
                  : c10d::dump_nccl_trace(collectives != 0, stacks != 0, only_active != 0);
#else
      no_nccl();
#endif
    } else {
      dump = json ? c10d::dump_fr_trace_json(collectives != 0, only_active != 0)
                  : c10d::dump_fr_trace(collectives != 0, stacks != 0, only_active != 0);
    }
    tdp::give(dump.data(), dump.size(), out);
  });
}

}  // extern "C"
