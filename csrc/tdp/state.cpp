// A module's state over ranks: buffers made equal, and hashes to see whether it is.
#include "group.h"

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/distributed/c10d/comm.hpp>

#include <cstring>

using tdp::group_of;
using tdp::guard;
using tdp::need_defined;

namespace {

// Lets a buffer stand on other memory, unseen by autograd: what was saved of the old one keeps it, and its version.
void replace(at::Tensor &buffer, const at::Tensor &with) { buffer.set_data(with); }

void average(const c10::intrusive_ptr<c10d::ProcessGroup> &group, std::vector<at::Tensor> &list) {
  // One flat tensor a dtype: few messages.
  std::vector<bool> done(list.size(), false);
  for (size_t i = 0; i < list.size(); i++) {
    if (done[i]) continue;
    std::vector<at::Tensor> flat;
    std::vector<size_t> members;
    for (size_t k = i; k < list.size(); k++) {
      if (done[k] || list[k].scalar_type() != list[i].scalar_type() || list[k].device() != list[i].device()) continue;
      done[k] = true;
      members.push_back(k);
      flat.push_back(list[k].flatten());
    }
    std::vector<at::Tensor> wire{at::cat(flat)};
    group->allreduce(wire)->wait();
    wire[0].div_(group->getSize());
    int64_t at = 0;
    for (size_t k : members) {
      list[k] = wire[0].slice(0, at, at + list[k].numel()).view(list[k].sizes()).clone();
      at += list[k].numel();
    }
  }
}

// FNV-1a over 64-bit words, four at a time so that the multiplications overlap.
uint64_t hash_bytes(const char *data, size_t size) {
  constexpr uint64_t kPrime = 0x100000001b3ULL;
  uint64_t lane[4] = {0xcbf29ce484222325ULL, 0x9e3779b97f4a7c15ULL, 0xc2b2ae3d27d4eb4fULL, 0x165667b19e3779f9ULL};
  auto mix = [&](uint64_t &h, uint64_t word) {
    h = (h ^ word) * kPrime;
    h ^= h >> 29;
  };
  size_t i = 0;
  for (; i + 32 <= size; i += 32) {
    uint64_t words[4];
    std::memcpy(words, data + i, 32);
    for (int k = 0; k < 4; k++) mix(lane[k], words[k]);
  }
  for (; i < size; i += 8) {
    uint64_t word = 0;
    std::memcpy(&word, data + i, std::min<size_t>(8, size - i));
    mix(lane[0], word);
  }
  uint64_t h = size;
  for (uint64_t l : lane) mix(h, l);
  return h;
}

// Whether the caller's handle is all there is of a tensor. Otherwise autograd may have saved it for a backward to come.
bool alone(const at::Tensor &t) {
  return t.has_storage() && t.use_count() == 1 && t.storage().use_count() == 1 && t.is_non_overlapping_and_dense();
}

}  // namespace

extern "C" {

tdp_error *tdp_sync_buffers(tdp_pg *pg, const tdp_tensor *buffers, int32_t n, int32_t mode, uint64_t bucket_bytes,
                            int32_t root) {
  return guard([&] {
    at::NoGradGuard no_grad;
    auto group = group_of(pg);
    if (group->getSize() == 1) return;
    std::vector<at::Tensor> wire, averaged;
    std::vector<int32_t> wire_of, averaged_of;
    for (int32_t i = 0; i < n; i++) {
      at::Tensor &b = need_defined(buffers[i], "a buffer");
      bool mean = mode == TDP_BUFFERS_AVERAGE && (b.is_floating_point() || b.is_complex());
      (mean ? averaged_of : wire_of).push_back(i);
      (mean ? averaged : wire).push_back(mean ? b.detach() : alone(b) ? b : b.detach().clone());
    }
    if (!wire.empty()) c10d::broadcast_coalesced(group, wire, bucket_bytes, root);
    average(group, averaged);
    for (size_t k = 0; k < wire.size(); k++)
      if (!wire[k].is_same(*buffers[wire_of[k]])) replace(*buffers[wire_of[k]], wire[k]);
    for (size_t k = 0; k < averaged.size(); k++) replace(*buffers[averaged_of[k]], averaged[k]);
  });
}

tdp_error *tdp_hash_tensors(const tdp_tensor *tensors, int32_t n, uint64_t *out) {
  return guard([&] {
    at::NoGradGuard no_grad;
    for (int32_t i = 0; i < n; i++) {
      at::Tensor host = need_defined(tensors[i], "a tensor").detach().to(c10::kCPU).contiguous();
      out[i] = hash_bytes(static_cast<const char *>(host.const_data_ptr()), host.nbytes());
    }
  });
}

}  // extern "C"
