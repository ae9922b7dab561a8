// The optimizer object: its groups, its state and the calls on it. The algorithms are in optim_step.cpp.
#include "optim_internal.h"

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <string>
#include <unordered_set>
#include <utility>

using tdp::Error;
using tdp::guard;
using tdp::need;
using tdp::need_defined;

namespace tdp {
namespace {

OptimGroup &group_at(tdp_optim *o, int32_t group) {
  need(o, "the optimizer");
  if (group < 0 || static_cast<size_t>(group) >= o->groups.size())
    throw Error(TDP_ERR_VALUE, "the optimizer has no parameter group " + std::to_string(group));
  return o->groups[group];
}

at::Tensor &state_at(tdp_optim *o, int32_t group, int32_t param, int32_t slot) {
  OptimGroup &g = group_at(o, group);
  if (param < 0 || static_cast<size_t>(param) >= g.params.size())
    throw Error(TDP_ERR_VALUE,
                "parameter group " + std::to_string(group) + " has no parameter " + std::to_string(param));
  if (slot < 0 || slot >= TDP_NUM_SLOTS) throw Error(TDP_ERR_VALUE, "no state slot " + std::to_string(slot));
  return g.slots[slot][param];
}

void gather(OptimWork &work, size_t index, const at::Tensor &grad) {
  const at::Tensor &p = work.group->params[index];
  work.index.push_back(index);
  work.params.push_back(p);
  work.grads.push_back(grad);
  work.sparse = work.sparse || grad.layout() != c10::kStrided;
  work.complex = work.complex || p.is_complex();
}

// Runs after autograd added up a parameter's gradient.
struct StepInBackward : torch::autograd::PostAccumulateGradHook {
  explicit StepInBackward(tdp_optim *o) : optim(o) {}
  void operator()(const at::Tensor &param) override {
    const at::Tensor grad = param.grad();
    if (!grad.defined()) return;
    optim_step_param(optim, param, grad);
    param.mutable_grad().reset();
  }
  tdp_optim *optim;
};

void drop_hooks(tdp_optim *o) {
  for (OptimGroup &g : o->groups)
    for (at::Tensor &p : g.params)
      if (dynamic_cast<StepInBackward *>(torch::autograd::impl::post_acc_grad_hooks(p).get()) != nullptr)
        torch::autograd::impl::set_post_acc_grad_hooks(p, nullptr);
}

}  // namespace

void optim_step_param(tdp_optim *o, const at::Tensor &param, const at::Tensor &grad) {
  at::NoGradGuard no_grad;
  std::lock_guard<std::mutex> lock(o->mutex);
  auto found = o->position.find(param.unsafeGetTensorImpl());
  if (found == o->position.end()) throw Error(TDP_ERR_VALUE, "the optimizer does not have this parameter");
  auto [group, index] = found->second;
  if (group >= o->backward_options.size())
    throw Error(TDP_ERR_VALUE, "steps in backward were not enabled for this parameter's group");
  OptimWork work;
  work.group = &o->groups[group];
  gather(work, index, grad);
  optim_run(o->algorithm, work, o->backward_options[group], at::Tensor(), at::Tensor());
}

bool optim_has(const tdp_optim *o, const at::Tensor &param) {
  return o->position.count(param.unsafeGetTensorImpl()) != 0;
}

}  // namespace tdp

extern "C" {

tdp_error *tdp_optim_new(int32_t algorithm, tdp_optim **out) {
  return guard([&] {
    if (algorithm < TDP_OPTIM_SGD || algorithm > TDP_OPTIM_LAMB)
      throw Error(TDP_ERR_VALUE, "unknown optimizer " + std::to_string(algorithm));
    auto o = std::make_unique<tdp_optim>();
    o->algorithm = algorithm;
    *out = o.release();
  });
}

tdp_error *tdp_optim_add_group(tdp_optim *o, const tdp_tensor *params, int32_t n, const tdp_optim_options *options) {
  return guard([&] {
    at::NoGradGuard no_grad;
    need(o, "the optimizer");
    tdp::OptimGroup g;
    std::unordered_set<const c10::TensorImpl *> seen;
    g.params.reserve(n);
    for (int32_t i = 0; i < n; i++) {
      const at::Tensor &p = need_defined(params[i], "a parameter");
      if (!p.is_leaf() && !p.retains_grad()) throw Error(TDP_ERR_VALUE, "can't optimize a non-leaf Tensor");
      if (o->position.count(p.unsafeGetTensorImpl()) != 0)
        throw Error(TDP_ERR_VALUE, "some parameters appear in more than one parameter group");
      if (!seen.insert(p.unsafeGetTensorImpl()).second)
        throw Error(TDP_ERR_VALUE, "parameter " + std::to_string(i) + " of the group is in it twice");
      g.params.push_back(p);
    }
    for (auto &slot : g.slots) slot.resize(n);
    if (o->algorithm == TDP_OPTIM_ADAGRAD) {
      // Adagrad's state exists from the start.
      bool fused = options->implementation == TDP_IMPL_FUSED;
      for (int32_t i = 0; i < n; i++) {
        const at::Tensor &p = g.params[i];
        g.slots[TDP_SLOT_STEP][i] =
            at::zeros({}, at::TensorOptions().dtype(c10::kFloat).device(fused ? p.device() : c10::Device(c10::kCPU)));
        c10::Scalar init = options->initial;
        if (p.is_complex()) init = c10::complex<double>(options->initial, options->initial);
        g.slots[TDP_SLOT_1][i] = at::full_like(p.detach(), init);
      }
    }
    o->groups.push_back(std::move(g));
    size_t group = o->groups.size() - 1;
    const auto &added = o->groups.back().params;
    for (size_t i = 0; i < added.size(); i++) o->position.emplace(added[i].unsafeGetTensorImpl(), std::pair{group, i});
  });
}

tdp_error *tdp_optim_step(tdp_optim *o, const tdp_optim_options *options, tdp_tensor grad_scale, tdp_tensor found_inf) {
  return guard([&] {
    at::NoGradGuard no_grad;
    need(o, "the optimizer");
    std::lock_guard<std::mutex> lock(o->mutex);
    for (size_t i = 0; i < o->groups.size(); i++) {
      tdp::OptimWork work;
      work.group = &o->groups[i];
      const auto &params = work.group->params;
      work.index.reserve(params.size());
      work.params.reserve(params.size());
      work.grads.reserve(params.size());
      for (size_t k = 0; k < params.size(); k++) {
        const at::Tensor &grad = params[k].grad();
        if (grad.defined()) tdp::gather(work, k, grad);
      }
      if (work.size() == 0) continue;
      tdp::optim_run(o->algorithm, work, options[i], grad_scale == nullptr ? at::Tensor() : *grad_scale,
                     found_inf == nullptr ? at::Tensor() : *found_inf);
    }
  });
}

tdp_error *tdp_optim_zero_grad(tdp_optim *o, int32_t set_to_none) {
  return guard([&] {
    at::NoGradGuard no_grad;
    need(o, "the optimizer");
    std::vector<at::Tensor> on_device;
    for (auto &g : o->groups) {
      for (auto &p : g.params) {
        at::Tensor &grad = p.mutable_grad();
        if (!grad.defined()) continue;
        if (set_to_none) {
          grad.reset();
          continue;
        }
        // A gradient that was built with create_graph lets go of its graph. A new alias does that without detach_(),
        // which views (of the reducer's buckets) refuse.
        if (grad.grad_fn()) grad = grad.detach();
        if (grad.requires_grad()) grad.requires_grad_(false);
        if (grad.is_cuda() && grad.layout() == c10::kStrided)
          on_device.push_back(grad);
        else
          grad.zero_();
      }
    }
    if (!on_device.empty()) at::_foreach_zero_(on_device);
  });
}

tdp_error *tdp_optim_state(tdp_optim *o, int32_t group, int32_t param, int32_t slot, tdp_tensor *out) {
  return guard([&] {
    at::Tensor &state = tdp::state_at(o, group, param, slot);
    *out = state.defined() ? new at::Tensor(state) : nullptr;
  });
}

tdp_error *tdp_optim_set_state(tdp_optim *o, int32_t group, int32_t param, int32_t slot, tdp_tensor value,
                               int32_t step_on_device) {
  return guard([&] {
    at::NoGradGuard no_grad;
    at::Tensor &state = tdp::state_at(o, group, param, slot);
    if (value == nullptr) {
      state.reset();
      return;
    }
    const at::Tensor &p = o->groups[group].params[param];
    const at::Tensor v = need_defined(value, "the state").detach();
    if (slot == TDP_SLOT_STEP) {
      if (v.numel() != 1) throw Error(TDP_ERR_VALUE, "a step count must have one element");
      auto where = at::TensorOptions().device(step_on_device ? p.device() : c10::Device(c10::kCPU));
      state = v.to(where.dtype(step_on_device || !v.is_floating_point() ? c10::kFloat : v.scalar_type()),
                   /*non_blocking=*/false, /*copy=*/true)
                  .reshape({});
      return;
    }
    if (v.sizes() != p.sizes())
      throw Error(TDP_ERR_VALUE, "the state has the wrong shape for parameter " + std::to_string(param) + " of group " +
                                     std::to_string(group));
    if (v.layout() != c10::kStrided) {
      state = v.to(p.options().layout(v.layout()), false, true);
    } else {
      at::Tensor copy = at::empty_like(
          p.detach(),
          p.options().dtype(p.is_floating_point() ? p.scalar_type() : v.scalar_type()).requires_grad(false));
      copy.copy_(v);
      state = copy;
    }
  });
}

tdp_error *tdp_optim_in_backward(tdp_optim *o, const tdp_optim_options *options, int32_t mode) {
  return guard([&] {
    need(o, "the optimizer");
    std::lock_guard<std::mutex> lock(o->mutex);
    if (mode == TDP_IN_BACKWARD_OFF) {
      tdp::drop_hooks(o);
      o->backward_options.clear();
      return;
    }
    o->backward_options.assign(options, options + o->groups.size());
    if (mode == TDP_IN_BACKWARD_OPTIONS) {
      tdp::drop_hooks(o);
      return;
    }
    for (auto &g : o->groups)
      for (auto &p : g.params) {
        auto &hook = torch::autograd::impl::post_acc_grad_hooks(p);
        if (dynamic_cast<tdp::StepInBackward *>(hook.get()) != nullptr) continue;
        if (hook != nullptr) throw Error(TDP_ERR_VALUE, "a parameter already has another hook on its gradient");
        if (!p.is_leaf() || !p.requires_grad()) continue;
        torch::autograd::impl::set_post_acc_grad_hooks(p, std::make_unique<tdp::StepInBackward>(o));
      }
  });
}

tdp_error *tdp_optim_free(tdp_optim *o) {
  return guard([&] {
    if (o != nullptr) tdp::drop_hooks(o);
    delete o;
  });
}

}  // extern "C"
