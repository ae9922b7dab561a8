#pragma once

#include "group.h"

#include <torch/csrc/distributed/c10d/logger.hpp>
#include <torch/csrc/distributed/c10d/reducer.hpp>

#include <memory>
#include <vector>

namespace tdp {

// What hooks need of a reducer, and may outlive it in.
struct Live {
  std::weak_ptr<c10d::Reducer> reducer;
  c10::intrusive_ptr<c10d::ProcessGroup> group;
};

class MixedPrecision;
class DelayedReduction;

// A hook's future, or a collective's, holds one tensor, perhaps in a list.
at::Tensor first_tensor(const c10::IValue &v);

// The three moments at which the modes have something to do.
void modes_before_forward(tdp_reducer &r, bool sync);
void modes_after_backward(tdp_reducer &r);
void modes_restore(tdp_reducer &r);

}  // namespace tdp

struct tdp_reducer {
  std::shared_ptr<c10d::Reducer> reducer;
  std::shared_ptr<c10d::Logger> logger;
  std::shared_ptr<tdp::Live> live = std::make_shared<tdp::Live>();
  std::vector<at::Tensor> params;
  std::vector<std::vector<size_t>> buckets;  // as they were cut first
  bool find_unused = false;
  bool static_graph = false;
  bool synced = false;  // the last forward was outside no_sync
  // Whether the static graph's first backward has been told to reduce at its end. Shared with the graph's sink, which
  // may outlive this handle.
  std::shared_ptr<bool> delay_queued = std::make_shared<bool>(false);

  std::shared_ptr<tdp::MixedPrecision> mixed;
  std::shared_ptr<tdp::DelayedReduction> delayed;
  std::vector<at::Tensor> stepped;  // parameters that an optimizer steps in backward

  // The logger reads the reducer one last time when it dies.
  ~tdp_reducer() {
    logger.reset();
    reducer.reset();
  }
};
