// The C++ side of the benchmark of the layer's own cost: the iteration that goddp and Python's DDP make, straight on
// libtorch. layer N NORMS: a model of N parameters of one float, and of batch norms of one channel, which are 2 parameters
// and 3 buffers each and are not run. It answers requests as package pair sends them.
#include <ATen/Functions.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#include <torch/csrc/distributed/c10d/comm.hpp>
#include <torch/csrc/distributed/c10d/logger.hpp>
#include <torch/csrc/distributed/c10d/reducer.hpp>
#include <ATen/Parallel.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <limits>
#include <string>

#include <sys/resource.h>

using c10d::ProcessGroup;
using c10d::ProcessGroupGloo;

static c10::intrusive_ptr<ProcessGroup> make_group() {
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

// The number after "n": in a request.
static int times(const std::string &line) {
  auto at = line.find("\"n\":");
  return at == std::string::npos ? 0 : std::atoi(line.c_str() + at + 4);
}

// The processor time of all threads, in seconds.
static double processor_seconds() {
  rusage u{};
  getrusage(RUSAGE_SELF, &u);
  return static_cast<double>(u.ru_utime.tv_sec + u.ru_stime.tv_sec) +
         static_cast<double>(u.ru_utime.tv_usec + u.ru_stime.tv_usec) / 1e6;
}

int main(int argc, char **argv) {
  const int norms = argc > 2 ? std::atoi(argv[2]) : 0;
  const int n = (argc > 1 ? std::atoi(argv[1]) : 1) + 2 * norms;
  at::set_num_threads(1);
  auto group = make_group();
  std::vector<at::Tensor> params;
  for (int i = 0; i < n; i++) params.push_back(at::ones({1}).requires_grad_(true));
  std::vector<at::Tensor> buffers;
  for (int i = 0; i < norms; i++) {
    buffers.push_back(at::zeros({1}));
    buffers.push_back(at::ones({1}));
    buffers.push_back(at::zeros({}, c10::kLong));
  }
  std::unordered_map<size_t, std::string> names;
  for (int i = 0; i < n; i++) names[i] = "p" + std::to_string(i);
  std::vector<bool> sparse(n, false);
  auto buckets = std::get<0>(c10d::compute_bucket_assignment_by_size(
      params, {static_cast<size_t>(std::numeric_limits<int64_t>::max())}, sparse));
  std::reverse(buckets.begin(), buckets.end());
  auto reducer = std::make_shared<c10d::Reducer>(params, std::move(buckets), group, sparse, int64_t(25) << 20,
                                                 /*find_unused_parameters=*/false, /*gradient_as_bucket_view=*/false,
                                                 std::move(names), int64_t(1) << 20, false, false, std::vector<int64_t>{});
  auto logger = std::make_shared<c10d::Logger>(reducer);
  reducer->set_logger(logger);
  logger->set_construction_data_and_log("Many", {}, -1, true, false, false);

  auto step = [&] {
    for (auto &p : params) p.mutable_grad().reset();
    logger->set_runtime_stats_and_log();
    reducer->prepare_for_forward();
    reducer->rebuild_buckets();
    if (!buffers.empty()) c10d::broadcast_coalesced(group, buffers, size_t(250) << 20, 0);
    auto out = at::cat(params).sum(c10::kFloat);
    reducer->prepare_for_backward({});
    out.backward();
  };

  std::printf("{\"values\":{}}\n");
  std::fflush(stdout);
  for (std::string line; std::getline(std::cin, line);) {
    const int rounds = times(line);
    const double cpu = processor_seconds();
    const auto begin = std::chrono::steady_clock::now();
    for (int i = 0; i < rounds; i++) step();
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
    std::printf("{\"values\":{\"seconds\":[%.12g],\"cpu\":[%.12g]}}\n", took.count() / rounds,
                (processor_seconds() - cpu) / rounds);
    std::fflush(stdout);
  }
  return 0;
}
