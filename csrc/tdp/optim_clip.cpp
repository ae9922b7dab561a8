// Gradient clipping and averages of weights.
#include "optim_internal.h"

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/native/ForeachUtils.h>

#include <cmath>
#include <sstream>
#include <string>

using tdp::Error;
using tdp::guard;
using tdp::need_defined;

namespace {

using Tensors = std::vector<at::Tensor>;

Tensors gradients(const tdp_tensor *params, int32_t n) {
  Tensors grads;
  grads.reserve(n);
  for (int32_t i = 0; i < n; i++) {
    const at::Tensor &grad = need_defined(params[i], "a parameter").grad();
    if (grad.defined()) grads.push_back(grad);
  }
  return grads;
}

// Lists that share device and dtype, in the order in which Python's grouping visits them: the order in which norms are
// added up decides about the last bit.
std::vector<Tensors> grouped(const Tensors &list) {
  std::vector<std::vector<std::optional<at::Tensor>>> nested(1);
  nested[0].assign(list.begin(), list.end());
  std::vector<Tensors> out;
  for (const auto &[key, value] : at::native::_group_tensors_by_first_tensors_device_and_dtype(nested, false)) {
    out.emplace_back();
    for (const auto &t : value.first[0]) out.back().push_back(*t);
  }
  return out;
}

bool one_by_one(int32_t implementation) {
  if (implementation == TDP_IMPL_FUSED) throw Error(TDP_ERR_UNSUPPORTED, "clipping has no fused implementation");
  return implementation == TDP_IMPL_SINGLE;
}

std::string number(double x) {
  if (std::isinf(x)) return x > 0 ? "inf" : "-inf";
  std::ostringstream s;
  s << x;
  return s.str();
}

}  // namespace

extern "C" {

tdp_error *tdp_clip_grad_norm(const tdp_tensor *params, int32_t n, double max_norm, double norm_type,
                              int32_t error_if_nonfinite, int32_t implementation, tdp_tensor *total_norm) {
  return guard([&] {
    at::NoGradGuard no_grad;
    const bool single = one_by_one(implementation);
    const Tensors grads = gradients(params, n);
    if (grads.empty()) {
      *total_norm = new at::Tensor(at::zeros({}));
      return;
    }
    const auto lists = grouped(grads);
    const c10::Device first = grads[0].device();
    Tensors norms;
    for (const Tensors &list : lists) {
      if (!single) {
        for (at::Tensor &t : at::_foreach_norm(list, norm_type)) norms.push_back(t.to(first));
      } else {
        for (const at::Tensor &g : list) norms.push_back(at::linalg_vector_norm(g, norm_type).to(first));
      }
    }
    at::Tensor total = at::linalg_vector_norm(at::stack(norms), norm_type);
    if (error_if_nonfinite && !std::isfinite(total.item<double>()))
      throw Error(TDP_ERR_VALUE,
                  "The total norm of order " + number(norm_type) +
                      " for the gradients is non-finite, so it cannot be clipped. To scale the gradients "
                      "by the non-finite norm anyway, do not ask for this error");
    at::Tensor scale = total.add(1e-6).reciprocal().mul(max_norm).clamp_max(1.0);
    for (const Tensors &list : lists) {
      at::Tensor here = scale.to(list[0].device());
      if (!single) {
        at::_foreach_mul_(list, here);
      } else {
        for (at::Tensor g : list) g.mul_(here);
      }
    }
    *total_norm = new at::Tensor(total);
  });
}

tdp_error *tdp_clip_grad_value(const tdp_tensor *params, int32_t n, double clip_value, int32_t implementation) {
  return guard([&] {
    at::NoGradGuard no_grad;
    const bool single = one_by_one(implementation);
    const Tensors grads = gradients(params, n);
    if (grads.empty()) return;
    for (const Tensors &list : grouped(grads)) {
      if (!single) {
        at::_foreach_clamp_min_(list, -clip_value);
        at::_foreach_clamp_max_(list, clip_value);
      } else {
        for (at::Tensor g : list) g.clamp_(-clip_value, clip_value);
      }
    }
  });
}

tdp_error *tdp_average(const tdp_tensor *averages, const tdp_tensor *values, int32_t n, int32_t mode, double decay,
                       int64_t count) {
  return guard([&] {
    at::NoGradGuard no_grad;
    Tensors floats, floats_now;
    for (int32_t i = 0; i < n; i++) {
      at::Tensor &a = need_defined(averages[i], "an average");
      const at::Tensor &given = need_defined(values[i], "a value");
      if (a.sizes() != given.sizes())
        throw Error(TDP_ERR_VALUE, "the average and the value of tensor " + std::to_string(i) + " differ in shape");
      if (mode == TDP_AVERAGE_COPY) {
        a.copy_(given);
        continue;
      }
      if (mode == TDP_AVERAGE_SWAP) {
        at::Tensor old = a.clone(), target = given;
        a.copy_(given);
        target.copy_(old);
        continue;
      }
      const at::Tensor v = given.detach().to(a.device());
      const bool real = a.is_floating_point() || a.is_complex();
      if (mode == TDP_AVERAGE_EMA) {
        if (real) {
          floats.push_back(a.detach());
          floats_now.push_back(v);
        } else {
          a.copy_(a * decay + v * (1 - decay));
        }
        continue;
      }
      if (mode != TDP_AVERAGE_EQUAL) throw Error(TDP_ERR_VALUE, "unknown kind of average " + std::to_string(mode));
      // As Python has it: on CUDA one lerp over the list, elsewhere tensor by tensor.
      if (real && a.is_cuda()) {
        floats.push_back(a.detach());
        floats_now.push_back(v);
      } else {
        a.copy_(a + (v - a) / at::scalar_tensor(count + 1, a.options().dtype(c10::kLong)));
      }
    }
    if (floats.empty()) return;
    double weight = mode == TDP_AVERAGE_EMA ? 1 - decay : 1.0f / static_cast<float>(count + 1);
    at::_foreach_lerp_(floats, floats_now, weight);
  });
}

}  // extern "C"
