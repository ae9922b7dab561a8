// Making process groups and ending them.
#include "group.h"
#include "store.h"

#include <torch/csrc/distributed/c10d/FlightRecorder.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupWrapper.hpp>
#include <torch/csrc/distributed/c10d/debug.h>

#include <sched.h>

using c10d::Backend;
using c10d::ProcessGroup;
using c10d::ProcessGroupGloo;
using tdp::group_of;
using tdp::guard;
using tdp::need;

static_assert(static_cast<int>(ProcessGroup::BackendType::GLOO) == TDP_BACKEND_GLOO &&
              static_cast<int>(ProcessGroup::BackendType::NCCL) == TDP_BACKEND_NCCL);

namespace tdp {

namespace {

// Polite has the threads that this one starts in its lifetime be of the scheduler's batch class: they get their share
// of the processor like any other, but do not interrupt the thread at work when they wake up.
//
// It is for the thread of a Gloo device, which reads what peers have sent. It wakes up as soon as something arrives,
// often while a thread of this rank is in the middle of sending and holds the lock of the connection. Gloo does not
// wait for that lock but asks the kernel again and again, for a whole time slice, with the one who could let go of the
// lock kept from the core. With a core a rank that was most of an all-reduce's time: 1 KiB took 1.5 ms and takes 0.25.
class Polite {
 public:
  Polite() : changed_(sched_getscheduler(0) == SCHED_OTHER && set(SCHED_BATCH)) {}
  ~Polite() {
    if (changed_) set(SCHED_OTHER);
  }
  Polite(const Polite &) = delete;
  Polite &operator=(const Polite &) = delete;

 private:
  // Where it is forbidden nothing is lost but time.
  static bool set(int policy) {
    const sched_param none{};
    return sched_setscheduler(0, policy, &none) == 0;
  }
  bool changed_;
};

}  // namespace

c10::intrusive_ptr<Backend> make_helper(tdp_pg *pg, const c10::intrusive_ptr<c10d::Store> &store,
                                        std::chrono::milliseconds timeout) {
  auto options = ProcessGroupGloo::Options::create(timeout);
  // The same network as the group's own Gloo, where it has one.
  for (auto &b : pg->backends)
    if (auto *gloo = dynamic_cast<ProcessGroupGloo *>(b.get())) options->devices = gloo->getOptions()->devices;
  if (options->devices.empty()) {
    const Polite polite;
    options->devices.push_back(ProcessGroupGloo::createDefaultDevice());
  }
  options->threads = static_cast<int>(options->devices.size()) * 2;
  return c10::make_intrusive<ProcessGroupGloo>(store, pg->pg->getRank(), pg->pg->getSize(), options);
}

void add_backend(tdp_pg *pg, c10::DeviceType device, ProcessGroup::BackendType type,
                 const c10::intrusive_ptr<Backend> &backend, const c10::intrusive_ptr<Backend> &helper) {
  if (helper) {
    auto wrapper = c10::make_intrusive<c10d::ProcessGroupWrapper>(backend, helper);
    pg->pg->setBackend(device, type, c10::static_intrusive_pointer_cast<Backend>(wrapper));
    pg->backends.push_back(helper);
    pg->wrapped = true;
  } else {
    pg->pg->setBackend(device, type, backend);
  }
  // Tells every registered backend its name, the wrapper included.
  pg->pg->setGroupName(pg->name);
}

}  // namespace tdp

extern "C" {

tdp_error *tdp_pg_new(tdp_store *store, int32_t rank, int32_t size, const char *name, const char *description,
                      tdp_pg **out) {
  return guard([&] {
    auto handle = std::make_unique<tdp_pg>();
    handle->pg = c10::make_intrusive<tdp::RecordedGroup>(need(store, "the store")->store, rank, size);
    handle->name = name;
    handle->pg->setGroupDesc(description);
    *out = handle.release();
  });
}

tdp_error *tdp_pg_add_gloo(tdp_pg *pg, int32_t device_type, tdp_store *store, tdp_store *helper_store,
                           const int64_t *global_ranks, int64_t timeout_ms, const char *const *interfaces,
                           int32_t num_interfaces, const char *const *hostnames, int32_t num_hostnames,
                           int32_t threads) {
  return guard([&] {
    auto &group = group_of(pg);
    const auto timeout = std::chrono::milliseconds(timeout_ms);
    auto options = ProcessGroupGloo::Options::create(timeout);
    {
      const tdp::Polite polite;
      for (int32_t i = 0; i < num_interfaces; i++)
        options->devices.push_back(ProcessGroupGloo::createDeviceForInterface(interfaces[i]));
      for (int32_t i = 0; i < num_hostnames; i++)
        options->devices.push_back(ProcessGroupGloo::createDeviceForHostname(hostnames[i]));
      if (options->devices.empty()) options->devices.push_back(ProcessGroupGloo::createDefaultDevice());
    }
    options->threads = threads > 0 ? threads : static_cast<int>(options->devices.size()) * 2;
    options->group_name = pg->name;
    options->global_ranks_in_group.assign(global_ranks, global_ranks + group->getSize());
    auto gloo = c10::make_intrusive<ProcessGroupGloo>(need(store, "the store")->store, group->getRank(),
                                                      group->getSize(), options);
    gloo->setSequenceNumberForGroup();
    pg->backends.push_back(gloo);
    c10::intrusive_ptr<Backend> helper;
    if (helper_store != nullptr) helper = tdp::make_helper(pg, helper_store->store, timeout);
    tdp::add_backend(pg, static_cast<c10::DeviceType>(device_type), ProcessGroup::BackendType::GLOO, gloo, helper);
  });
}

tdp_error *tdp_pg_share_backend(tdp_pg *pg, int32_t device_type, int32_t other_type) {
  return guard([&] {
    auto &group = group_of(pg);
    auto backend = group->getBackend(static_cast<c10::DeviceType>(other_type));
    group->setBackend(static_cast<c10::DeviceType>(device_type),
                      ProcessGroup::strToBackendType(backend->getBackendName()), backend);
  });
}

tdp_error *tdp_pg_set_default_backend(tdp_pg *pg, int32_t backend) {
  return guard([&] { group_of(pg)->setDefaultBackend(static_cast<ProcessGroup::BackendType>(backend)); });
}

tdp_error *tdp_pg_set_timeout(tdp_pg *pg, int64_t timeout_ms) {
  return guard([&] {
    need(pg, "the process group");
    for (auto &b : pg->backends) b->setTimeout(std::chrono::milliseconds(timeout_ms));
  });
}

tdp_error *tdp_pg_serialise_starts(tdp_pg *pg, int32_t on) {
  // With a wrapper, or NCCL's first connection, a start itself waits for the peers: two of them may not exclude each
  // other.
  return guard([&] {
    need(pg, "the process group");
    bool waits = pg->wrapped;
    for (auto &b : pg->backends) waits = waits || dynamic_cast<ProcessGroupGloo *>(b.get()) == nullptr;
    pg->recorded().serialise_starts = on != 0 && !waits;
  });
}

tdp_error *tdp_pg_health(tdp_pg *pg, int32_t *out) {
  return guard([&] {
    need(pg, "the process group");
    *out = 0;
    // Only NCCL has a watchdog that knows.
    for (auto &b : pg->backends)
      if (b->getBackendName() == "nccl") *out = std::max(*out, static_cast<int32_t>(b->getError()));
  });
}

tdp_error *tdp_pg_abort(tdp_pg *pg) {
  return guard([&] {
    need(pg, "the process group");
    for (auto &b : pg->backends) b->abort();
  });
}

tdp_error *tdp_pg_shutdown(tdp_pg *pg) {
  return guard([&] {
    need(pg, "the process group");
    for (auto &b : pg->backends) b->shutdown();
  });
}

tdp_error *tdp_pg_free(tdp_pg *pg) {
  return guard([&] { delete pg; });
}

tdp_error *tdp_pg_history(tdp_pg *pg, tdp_history_entry *out, int32_t *n) {
  return guard([&] {
    need(pg, "the process group");
    *n = pg->recorded().history.read(out);
  });
}

tdp_error *tdp_set_debug_level(int32_t level) {
  return guard([&] { c10d::setDebugLevel(static_cast<c10d::DebugLevel>(level)); });
}

}  // extern "C"
