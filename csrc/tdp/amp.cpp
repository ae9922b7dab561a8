// Mixed precision: the calling thread's autocast, and the tensor side of gradient scaling.
#include "optim_internal.h"

#include <ATen/Context.h>
#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>

#include <map>
#include <optional>
#include <utility>

using tdp::Error;
using tdp::guard;
using tdp::need;
using tdp::need_defined;

namespace {

c10::DeviceType device_type(int32_t type) {
  if (type != 0 && type != 1) throw Error(TDP_ERR_VALUE, "autocast is for the CPU and CUDA only");
  return type == 1 ? c10::DeviceType::CUDA : c10::DeviceType::CPU;
}

void get_state(c10::DeviceType type, tdp_autocast_state *out) {
  out->enabled = at::autocast::is_autocast_enabled(type);
  out->dtype = static_cast<int32_t>(at::autocast::get_autocast_dtype(type));
  out->cache_enabled = at::autocast::is_autocast_cache_enabled();
}

void set_state(c10::DeviceType type, const tdp_autocast_state &s) {
  at::autocast::set_autocast_enabled(type, s.enabled != 0);
  at::autocast::set_autocast_dtype(type, static_cast<c10::ScalarType>(s.dtype));
  at::autocast::set_autocast_cache_enabled(s.cache_enabled != 0);
}

}  // namespace

static_assert(static_cast<int>(c10::ScalarType::Half) == 5 && static_cast<int>(c10::ScalarType::BFloat16) == 15);

extern "C" {

tdp_error *tdp_autocast_get(int32_t type, tdp_autocast_state *out) {
  return guard([&] { get_state(device_type(type), out); });
}

tdp_error *tdp_autocast_enter(int32_t type, const tdp_autocast_state *state, tdp_autocast_state *previous) {
  return guard([&] {
    c10::DeviceType t = device_type(type);
    tdp_autocast_state before;
    get_state(t, &before);
    set_state(t, *state);
    at::autocast::increment_nesting();
    if (previous != nullptr) *previous = before;
  });
}

tdp_error *tdp_autocast_exit(int32_t type, const tdp_autocast_state *previous) {
  return guard([&] {
    c10::DeviceType t = device_type(type);
    if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
    set_state(t, *previous);
  });
}

tdp_error *tdp_amp_cuda_available(int32_t *out) {
  return guard([&] { *out = at::hasCUDA(); });
}

tdp_error *tdp_amp_scale(tdp_tensor value, tdp_tensor scale, tdp_tensor *out) {
  return guard([&] {
    const at::Tensor &v = need_defined(value, "the value to scale");
    const at::Tensor &s = need_defined(scale, "the scale");
    // With the caller's grad mode: this is part of the graph.
    *out = new at::Tensor(v * s.to(v.device(), s.scalar_type(), /*non_blocking=*/true));
  });
}

tdp_error *tdp_amp_unscale(tdp_optim *o, tdp_tensor scale, int32_t check_only, int32_t allow_fp16,
                           tdp_tensor *found_inf) {
  return guard([&] {
    at::NoGradGuard no_grad;
    need(o, "the optimizer");
    const at::Tensor &s = need_defined(scale, "the scale");
    // Lists that share device and dtype, and what every device found.
    struct Found {
      at::Tensor inf, inv_scale;
    };
    std::vector<std::pair<std::pair<c10::Device, c10::ScalarType>, std::vector<at::Tensor>>> lists;
    for (auto &g : o->groups) {
      for (at::Tensor &p : g.params) {
        at::Tensor &grad = p.mutable_grad();
        if (!grad.defined()) continue;
        if (!allow_fp16 && grad.scalar_type() == c10::kHalf)
          throw Error(TDP_ERR_VALUE, "Attempting to unscale FP16 gradients.");
        at::Tensor values = grad;
        if (grad.is_sparse()) {
          // Two halves for the same row may overflow only when they are added up.
          if (grad.scalar_type() == c10::kHalf) grad = grad.coalesce();
          values = grad._values();
        }
        std::pair key{values.device(), values.scalar_type()};
        auto at = lists.begin();
        while (at != lists.end() && at->first != key) ++at;
        if (at == lists.end()) at = lists.insert(lists.end(), {key, {}});
        at->second.push_back(values);
      }
    }
    if (lists.empty()) {
      *found_inf = nullptr;
      return;
    }
    const at::Tensor inv =
        check_only ? at::ones({}, s.options().dtype(c10::kFloat)) : s.to(c10::kDouble).reciprocal().to(c10::kFloat);
    std::vector<std::pair<c10::Device, Found>> found;
    for (auto &[key, list] : lists) {
      auto at = found.begin();
      while (at != found.end() && at->first != key.first) ++at;
      if (at == found.end())
        at =
            found.insert(found.end(), {key.first, Found{at::zeros({}, s.options().dtype(c10::kFloat).device(key.first)),
                                                        inv.to(key.first, c10::kFloat, true)}});
      at::_amp_foreach_non_finite_check_and_unscale_(list, at->second.inf, at->second.inv_scale);
    }
    at::Tensor total = found[0].second.inf.to(s.device(), c10::kFloat, true);
    for (size_t i = 1; i < found.size(); i++) total = total + found[i].second.inf.to(s.device(), c10::kFloat, true);
    *found_inf = new at::Tensor(total);
  });
}

tdp_error *tdp_amp_update(tdp_tensor scale, tdp_tensor growth_tracker, const tdp_tensor *found_infs, int32_t n,
                          double growth_factor, double backoff_factor, int64_t growth_interval) {
  return guard([&] {
    at::NoGradGuard no_grad;
    at::Tensor &s = need_defined(scale, "the scale");
    at::Tensor &tracker = need_defined(growth_tracker, "the growth tracker");
    if (n < 1) throw Error(TDP_ERR_VALUE, "No inf checks were recorded prior to update.");
    at::Tensor total = need_defined(found_infs[0], "the result of an inf check").to(s.device(), c10::kFloat, true);
    for (int32_t i = 1; i < n; i++)
      total = total + need_defined(found_infs[i], "the result of an inf check").to(s.device(), c10::kFloat, true);
    at::_amp_update_scale_(s, tracker, total, growth_factor, backoff_factor, growth_interval);
  });
}

}  // extern "C"
