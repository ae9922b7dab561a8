// Copies on a stream of their own.
#include "guard.h"

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <map>
#include <mutex>
#include <optional>
#include <vector>

using tdp::guard;

namespace {

// One stream a device for the whole process: the caching allocator keeps memory by stream, and a stream a loader would
// keep as many batches of it.
c10::Stream side_stream(c10::Device device) {
  static std::mutex mutex;
  static std::map<c10::DeviceIndex, c10::Stream> streams;
  std::lock_guard<std::mutex> lock(mutex);
  auto found = streams.find(device.index());
  if (found == streams.end()) {
    auto made = c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device, /*isHighPriority=*/false);
    found = streams.emplace(device.index(), made).first;
  }
  return found->second;
}

}  // namespace

extern "C" {

tdp_error *tdp_copy_aside(tdp_device device, const tdp_tensor *src, int32_t n, tdp_tensor *out) {
  return guard([&] {
    at::NoGradGuard no_grad;
    auto where = tdp::to_device(device);
    std::optional<c10::StreamGuard> stream;
    if (!where.is_cpu()) stream.emplace(side_stream(where));
    std::vector<at::Tensor> copies;
    for (auto &t : tdp::tensors(src, n, "a tensor to copy")) {
      auto copy = at::empty_like(t, t.options().device(where).pinned_memory(false));
      copies.push_back(copy.copy_(t, /*non_blocking=*/true));
    }
    if (stream) stream->current_stream().synchronize();
    for (int32_t i = 0; i < n; i++) out[i] = new at::Tensor(std::move(copies[i]));
  });
}

tdp_error *tdp_record_stream(const tdp_tensor *tensors, int32_t n) {
  return guard([&] {
    for (auto &t : tdp::tensors(tensors, n, "a tensor"))
      if (!t.is_cpu()) t.record_stream(c10::impl::VirtualGuardImpl(t.device().type()).getStream(t.device()));
  });
}

}  // extern "C"
