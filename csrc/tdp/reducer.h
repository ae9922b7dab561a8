#pragma once

#include "group.h"

#include <torch/csrc/distributed/c10d/logger.hpp>
#include <torch/csrc/distributed/c10d/reducer.hpp>

struct tdp_reducer {
  std::shared_ptr<c10d::Reducer> reducer;
  std::shared_ptr<c10d::Logger> logger;
  bool find_unused = false;
  bool static_graph = false;
  // Whether the static graph's first backward has been told to reduce at its end. Shared with the graph's sink, which
  // may outlive this handle.
  std::shared_ptr<bool> delay_queued = std::make_shared<bool>(false);

  // The logger reads the reducer one last time when it dies.
  ~tdp_reducer() {
    logger.reset();
    reducer.reset();
  }
};
