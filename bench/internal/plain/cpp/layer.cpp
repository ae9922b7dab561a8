// The iteration that goddp and Python's DDP make, straight on libtorch: the tensor operations, c10d::Reducer,
// c10d::Logger and Gloo, nothing of goddp. Package plain loads it into a process that has libtorch already.
#include <ATen/Functions.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#include <torch/csrc/distributed/c10d/comm.hpp>
#include <torch/csrc/distributed/c10d/logger.hpp>
#include <torch/csrc/distributed/c10d/reducer.hpp>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <exception>
#include <limits>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

using c10d::ProcessGroup;
using c10d::ProcessGroupGloo;

namespace {

c10::intrusive_ptr<ProcessGroup> make_group() {
  auto store = c10::make_intrusive<c10d::HashStore>();
  auto group = c10::make_intrusive<ProcessGroup>(store, 0, 1);
  auto options = ProcessGroupGloo::Options::create(std::chrono::minutes(30));
  options->devices.push_back(ProcessGroupGloo::createDeviceForInterface("lo"));
  options->threads = 2;
  auto gloo = c10::make_intrusive<ProcessGroupGloo>(store, 0, 1, options);
  gloo->setSequenceNumberForGroup();
  group->setBackend(c10::DeviceType::CPU, ProcessGroup::BackendType::GLOO, gloo);
  group->setDefaultBackend(ProcessGroup::BackendType::GLOO);
  return group;
}

// A model of some parameters, and of buffers that are broadcast in each forward and not used. The parameters are where
// they are, as the members of modules would be: a forward that wants a list of them gathers it.
struct Layer {
  c10::intrusive_ptr<ProcessGroup> group = make_group();
  std::vector<at::Tensor *> params;
  std::vector<at::Tensor> buffers;
  std::shared_ptr<c10d::Reducer> reducer;
  std::shared_ptr<c10d::Logger> logger;

  Layer(at::Tensor **handles, int n, int norms) : params(handles, handles + n) {
    for (int i = 0; i < norms; i++) {
      buffers.push_back(at::zeros({1}));
      buffers.push_back(at::ones({1}));
      buffers.push_back(at::zeros({}, c10::kLong));
    }
    std::unordered_map<size_t, std::string> names;
    for (int i = 0; i < n; i++) names[i] = "p" + std::to_string(i);
    std::vector<bool> sparse(n, false);
    auto buckets = std::get<0>(c10d::compute_bucket_assignment_by_size(
        gather(), {static_cast<size_t>(std::numeric_limits<int64_t>::max())}, sparse));
    std::reverse(buckets.begin(), buckets.end());
    reducer = std::make_shared<c10d::Reducer>(gather(), std::move(buckets), group, sparse, int64_t(25) << 20,
                                              /*find_unused_parameters=*/false, /*gradient_as_bucket_view=*/false,
                                              std::move(names), int64_t(1) << 20, false, false, std::vector<int64_t>{});
    logger = std::make_shared<c10d::Logger>(reducer);
    reducer->set_logger(logger);
    logger->set_construction_data_and_log("Many", {}, -1, true, false, false);
  }

  std::vector<at::Tensor> gather() const {
    std::vector<at::Tensor> list;
    list.reserve(params.size());
    for (auto *p : params) list.push_back(*p);
    return list;
  }

  void step() {
    for (auto *p : params) p->mutable_grad().reset();
    logger->set_runtime_stats_and_log();
    reducer->prepare_for_forward();
    reducer->rebuild_buckets();
    if (!buffers.empty()) c10d::broadcast_coalesced(group, buffers, size_t(250) << 20, 0);
    auto out = at::cat(gather()).sum(c10::kFloat);
    reducer->prepare_for_backward({});
    out.backward();
  }
};

// Runs work, and gives what it throws as text that the caller frees.
template <typename F>
char *guarded(const F &work) {
  try {
    work();
    return nullptr;
  } catch (const std::exception &e) {
    return strdup(e.what());
  }
}

}  // namespace

extern "C" {

// A parameter of one float, which stays.
void *layer_parameter() { return new at::Tensor(at::ones({1}).requires_grad_(true)); }

// For parameters and norms batch norms of one channel, whose 3 buffers each are made here and whose 2 parameters are
// among the parameters.
char *layer_new(at::Tensor **params, int n, int norms, void **out) {
  return guarded([&] { *out = new Layer(params, n, norms); });
}

char *layer_step(void *layer) {
  return guarded([&] { static_cast<Layer *>(layer)->step(); });
}

char *layer_free(void *layer) {
  return guarded([&] { delete static_cast<Layer *>(layer); });
}
}
