#pragma once

#include "guard.h"
#include "history.h"

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <chrono>
#include <string>
#include <vector>

struct tdp_pg {
  c10::intrusive_ptr<c10d::ProcessGroup> pg;  // a tdp::RecordedGroup
  std::string name;
  // What was made for the group: with a debug wrapper also what it wraps and its helper, for it forwards neither
  // timeouts nor aborts.
  std::vector<c10::intrusive_ptr<c10d::Backend>> backends;
  bool wrapped = false;

  tdp::RecordedGroup &recorded() { return static_cast<tdp::RecordedGroup &>(*pg); }
};

struct tdp_work {
  c10::intrusive_ptr<c10d::Work> work;
  c10::intrusive_ptr<c10d::ProcessGroup> pg;  // whose history gets the outcome; NULL for none
  uint64_t ticket = 0;
  int64_t timeout_ms = -1;  // for operations that take none when they start
};

namespace tdp {

inline c10::intrusive_ptr<c10d::ProcessGroup> &group_of(tdp_pg *pg) { return need(pg, "the process group")->pg; }

inline std::chrono::milliseconds timeout(int64_t ms) {
  return ms < 0 ? c10d::kUnsetTimeout : std::chrono::milliseconds(ms);
}

// Registers a backend for a device type, behind a wrapper that compares collectives where there is a helper.
void add_backend(tdp_pg *pg, c10::DeviceType device, c10d::ProcessGroup::BackendType type,
                 const c10::intrusive_ptr<c10d::Backend> &backend, const c10::intrusive_ptr<c10d::Backend> &helper);

// The helper of the wrapper: a Gloo group of its own.
c10::intrusive_ptr<c10d::Backend> make_helper(tdp_pg *pg, const c10::intrusive_ptr<c10d::Store> &store,
                                              std::chrono::milliseconds timeout);

}  // namespace tdp
