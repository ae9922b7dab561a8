// What the optimizer's files, and the reducer, share.
#pragma once

#include "guard.h"
#include "tdp_optim.h"

#include <ATen/core/Tensor.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

namespace tdp {

// The parameters of a group and their state, slot by slot. An undefined tensor is a state not made yet.
struct OptimGroup {
  std::vector<at::Tensor> params;
  std::array<std::vector<at::Tensor>, TDP_NUM_SLOTS> slots;
};

// What one step works on: the parameters of a group that have a gradient.
struct OptimWork {
  OptimGroup *group = nullptr;
  std::vector<size_t> index;  // into the group
  std::vector<at::Tensor> params, grads;
  bool sparse = false, complex = false;

  size_t size() const { return index.size(); }
  at::Tensor &slot(int s, size_t i) const { return group->slots[s][index[i]]; }
};

// One step of one algorithm. grad_scale and found_inf may be undefined.
void optim_run(int32_t algorithm, OptimWork &work, const tdp_optim_options &options, const at::Tensor &grad_scale,
               const at::Tensor &found_inf);

// Steps one parameter with the gradient given, with the options that tdp_optim_in_backward set: for hooks of the
// reducer that know a gradient is complete. Safe from several threads.
void optim_step_param(tdp_optim *o, const at::Tensor &param, const at::Tensor &grad);
bool optim_has(const tdp_optim *o, const at::Tensor &param);

}  // namespace tdp

struct tdp_optim {
  int32_t algorithm = 0;
  std::vector<tdp::OptimGroup> groups;

  // For steps inside backward.
  std::mutex mutex;
  std::vector<tdp_optim_options> backward_options;
  std::unordered_map<const c10::TensorImpl *, std::pair<size_t, size_t>> position;  // parameter -> group, index
};
