// SyncBatchNorm for any model: a kernel for aten::batch_norm that synchronises those calls whose running mean (or
// weight) was registered, whichever module they come from: ours, gotch's or a TorchScript one.
#include "group.h"

#include <ATen/Functions.h>
#include <ATen/OpMathType.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/batch_norm_native.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <atomic>
#include <mutex>
#include <shared_mutex>
#include <unordered_map>

using tdp::group_of;
using tdp::guard;
using tdp::need_defined;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

namespace {

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

// Which tensors mark a synchronised layer. Weak: the table must not keep a model alive, and the address of a freed
// tensor may come back as another's.
class Table {
 public:
  void put(const at::Tensor &key, Group group) {
    std::unique_lock<std::shared_mutex> lock(mutex_);
    for (auto it = map_.begin(); it != map_.end();) it = it->second.key.expired() ? map_.erase(it) : std::next(it);
    if (group)
      map_.insert_or_assign(key.unsafeGetTensorImpl(), Entry{Weak(key.getIntrusivePtr()), std::move(group)});
    else
      map_.erase(key.unsafeGetTensorImpl());
    size_.store(map_.size(), std::memory_order_release);
  }

  Group find(const at::Tensor &key) const {
    if (size_.load(std::memory_order_acquire) == 0 || !key.defined()) return {};
    std::shared_lock<std::shared_mutex> lock(mutex_);
    auto it = map_.find(key.unsafeGetTensorImpl());
    return it == map_.end() || it->second.key.expired() ? Group() : it->second.group;
  }

 private:
  using Weak = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;
  struct Entry {
    Weak key;
    Group group;
  };
  mutable std::shared_mutex mutex_;
  std::unordered_map<const c10::TensorImpl *, Entry> map_;
  std::atomic<size_t> size_{0};
};

Table &table() {
  static auto *t = new Table;  // never destroyed: kernels may run while the process ends
  return *t;
}

std::vector<int64_t> all_but_channels(const at::Tensor &x) {
  std::vector<int64_t> dims;
  for (int64_t i = 0; i < x.dim(); i++)
    if (i != 1) dims.push_back(i);
  return dims;
}

// A tensor of one value a channel, shaped to broadcast over x.
at::Tensor per_channel(const at::Tensor &v, const at::Tensor &x) {
  std::vector<int64_t> shape(x.dim(), 1);
  shape[1] = x.size(1);
  return v.view(shape);
}

bool channels_last(const at::Tensor &x) {
  return x.is_contiguous(at::MemoryFormat::ChannelsLast) || x.is_contiguous(at::MemoryFormat::ChannelsLast3d);
}

// Every rank's row of stats, stacked.
at::Tensor gather(const Group &group, const at::Tensor &row) {
  if (group->getBackendName() != "gloo") {
    at::Tensor flat = at::empty({1, row.numel() * group->getSize()}, row.options());
    at::Tensor in = row;
    group->_allgather_base(flat, in)->wait();
    return flat.reshape({group->getSize(), row.numel()});
  }
  std::vector<std::vector<at::Tensor>> out(1);
  for (int i = 0; i < group->getSize(); i++) out[0].push_back(at::empty_like(row));
  std::vector<at::Tensor> in{row};
  group->allgather(out, in)->wait();
  return at::stack(out[0]);
}

void sum_over_ranks(const Group &group, at::Tensor &t) {
  std::vector<at::Tensor> list{t};
  group->allreduce(list)->wait();
}

// The type that statistics and sums have: float for half precision.
c10::ScalarType stats_type(const at::Tensor &x) { return at::toOpMathType(x.scalar_type()); }

struct Stats {
  at::Tensor mean, invstd, counts;
};

// The whole batch's statistics by ordinary operations, in double: CPU has none of the kernels that CUDA has.
Stats batch_stats_cpu(const Group &group, const at::Tensor &x, const at::Tensor &running_mean,
                      const at::Tensor &running_var, double momentum, double eps) {
  int64_t channels = x.size(1);
  auto options = x.options().dtype(c10::kDouble);
  at::Tensor row = at::zeros({2 * channels + 1}, options);
  if (x.numel() > 0) {
    auto [var, mean] = at::var_mean(x.to(stats_type(x)), all_but_channels(x), /*correction=*/c10::Scalar(0));
    row.slice(0, 0, channels).copy_(mean);
    row.slice(0, channels, 2 * channels).copy_(var);
    row.slice(0, 2 * channels).fill_(static_cast<double>(x.numel() / channels));
  }
  at::Tensor all = gather(group, row);
  at::Tensor means = all.slice(1, 0, channels), vars = all.slice(1, channels, 2 * channels);
  at::Tensor counts = all.slice(1, 2 * channels);  // ranks × 1
  double n = counts.sum().item<double>();
  if (n < 1) throw tdp::Error(TDP_ERR_VALUE, "SyncBatchNorm: every rank's batch is empty");
  at::Tensor mean = (counts * means).sum(0) / n;
  at::Tensor var = (counts * (vars + (means - mean).square())).sum(0) / n;
  if (running_mean.defined()) running_mean.mul_(1 - momentum).add_(mean.to(running_mean.scalar_type()), momentum);
  if (running_var.defined()) {
    at::Tensor unbiased = var * (n / std::max(n - 1, 1.0));
    running_var.mul_(1 - momentum).add_(unbiased.to(running_var.scalar_type()), momentum);
  }
  return {mean, (var + eps).rsqrt(), counts.flatten()};
}

// The same by the kernels that Python's SyncBatchNorm uses.
Stats batch_stats_cuda(const Group &group, const at::Tensor &x, const at::Tensor &running_mean,
                       const at::Tensor &running_var, double momentum, double eps) {
  int64_t channels = x.size(1);
  at::Tensor row;
  if (x.numel() > 0) {
    auto [mean, invstd] = at::batch_norm_stats(x, eps);
    at::Tensor count = at::full({1}, static_cast<double>(x.numel() / channels), mean.options());
    row = at::cat({mean, invstd, count});
  } else {
    // In the type of the other ranks' statistics. (Python sends the input's, which half precision cannot mix.)
    row = at::zeros({2 * channels + 1}, x.options().dtype(stats_type(x)));
  }
  at::Tensor all = gather(group, row);
  at::Tensor counts = all.select(1, 2 * channels);
  at::Tensor filled = at::nonzero(counts >= 1).flatten();
  all = all.index_select(0, filled);
  counts = counts.index_select(0, filled);
  if (counts.numel() == 0) throw tdp::Error(TDP_ERR_VALUE, "SyncBatchNorm: every rank's batch is empty");
  auto weights = running_mean.defined() ? counts.to(running_mean.scalar_type()) : counts;
  auto [mean, invstd] = at::batch_norm_gather_stats_with_counts(x, all.slice(1, 0, channels).contiguous(),
                                                                all.slice(1, channels, 2 * channels).contiguous(),
                                                                running_mean, running_var, momentum, eps, weights);
  return {mean, invstd, counts.to(c10::kInt)};
}

at::Tensor normalize_cpu(const at::Tensor &x, const at::Tensor &weight, const at::Tensor &bias, const Stats &s) {
  at::Tensor scale = weight.defined() ? s.invstd * weight : s.invstd;
  at::Tensor shift = bias.defined() ? bias - s.mean * scale : -s.mean * scale;
  auto op = stats_type(x);
  return at::addcmul(per_channel(shift.to(op), x), x.to(op), per_channel(scale.to(op), x)).to(x.scalar_type());
}

class SyncBatchNorm : public torch::autograd::Function<SyncBatchNorm> {
 public:
  using Maybe = std::optional<at::Tensor>;  // autograd takes no undefined tensors

  static at::Tensor forward(AutogradContext *ctx, const at::Tensor &input, const Maybe &weight_or, const Maybe &bias_or,
                            const Maybe &running_mean_or, const Maybe &running_var_or, double momentum, double eps,
                            const Group &group) {
    auto value = [](const Maybe &t) { return t.value_or(at::Tensor()); };
    at::Tensor weight = value(weight_or), bias = value(bias_or);
    at::Tensor running_mean = value(running_mean_or), running_var = value(running_var_or);
    at::Tensor x = channels_last(input) ? input : input.contiguous();
    at::Tensor w = weight.defined() ? weight.contiguous() : weight;
    bool cuda = x.is_cuda();
    Stats s = cuda ? batch_stats_cuda(group, x, running_mean, running_var, momentum, eps)
                   : batch_stats_cpu(group, x, running_mean, running_var, momentum, eps);
    ctx->save_for_backward({x, w, s.mean, s.invstd, s.counts});
    ctx->saved_data["group"] = c10::IValue::make_capsule(group);
    if (x.numel() == 0) return at::empty_like(x);
    return cuda ? at::batch_norm_elemt(x, w, bias, s.mean, s.invstd, eps) : normalize_cpu(x, w, bias, s);
  }

  static variable_list backward(AutogradContext *ctx, variable_list grads) {
    auto saved = ctx->get_saved_variables();
    const at::Tensor &x = saved[0], &weight = saved[1], &mean = saved[2], &invstd = saved[3], &counts = saved[4];
    auto group = c10::static_intrusive_pointer_cast<c10d::ProcessGroup>(ctx->saved_data["group"].toCapsule());
    // Numbers count the inputs that are there; weight and bias are there together.
    bool need_x = ctx->needs_input_grad(0), need_w = weight.defined() && ctx->needs_input_grad(1),
         need_b = weight.defined() && ctx->needs_input_grad(2);
    at::Tensor dy = channels_last(grads[0]) ? grads[0] : grads[0].contiguous();
    at::Tensor dx, dw, db;
    int64_t channels = x.size(1);
    if (x.is_cuda()) {
      at::Tensor sum_dy, sum_dy_xmu;
      if (x.numel() > 0) {
        std::tie(sum_dy, sum_dy_xmu, dw, db) =
            at::batch_norm_backward_reduce(dy, x, mean, invstd, weight, need_x, need_w, need_b);
      }
      if (need_x) {
        at::Tensor sums =
            x.numel() > 0 ? at::cat({sum_dy, sum_dy_xmu}) : at::zeros({2 * channels}, x.options().dtype(stats_type(x)));
        sum_over_ranks(group, sums);
        if (x.numel() > 0)
          dx = at::batch_norm_backward_elemt(dy, x, mean, invstd,
                                             weight.defined() ? weight.to(mean.scalar_type()) : weight,
                                             sums.slice(0, 0, channels), sums.slice(0, channels), counts);
      }
    } else {
      auto op = stats_type(x);
      at::Tensor g = dy.to(op), centred = x.to(op) - per_channel(mean.to(op), x);
      auto dims = all_but_channels(x);
      at::Tensor sums = at::cat(
          {g.sum(dims, /*keepdim=*/false, c10::kDouble), (g * centred).sum(dims, /*keepdim=*/false, c10::kDouble)});
      if (need_w) dw = sums.slice(0, channels) * invstd;
      if (need_b) db = sums.slice(0, 0, channels).clone();
      if (need_x) {
        sum_over_ranks(group, sums);
        at::Tensor n = counts.sum();
        at::Tensor scale = weight.defined() ? invstd * weight : invstd;
        at::Tensor mean_dy = sums.slice(0, 0, channels) / n;
        at::Tensor slope = sums.slice(0, channels) / n * invstd.square();
        dx = ((g - per_channel(mean_dy.to(op), x) - centred * per_channel(slope.to(op), x)) *
              per_channel(scale.to(op), x))
                 .to(x.scalar_type());
      }
    }
    auto like = [](const at::Tensor &grad, const at::Tensor &param) {
      return grad.defined() && param.defined() ? grad.to(param.scalar_type()) : grad;
    };
    // Python leaves the gradients of weight and bias local as well: DDP averages them.
    return {dx, like(dw, weight), like(db, weight), {}, {}, {}, {}, {}};
  }
};

at::Tensor sync_batch_norm(const Group &group, const at::Tensor &input, const at::Tensor &weight,
                           const at::Tensor &bias, const at::Tensor &running_mean, const at::Tensor &running_var,
                           double momentum, double eps) {
  if (input.dim() < 2)
    throw tdp::Error(TDP_ERR_VALUE, "expected at least 2D input (got " + std::to_string(input.dim()) + "D input)");
  if (input.size(1) == 0) throw tdp::Error(TDP_ERR_VALUE, "SyncBatchNorm number of input channels should be non-zero");
  if (running_mean.defined() && running_mean.numel() != input.size(1))
    throw tdp::Error(TDP_ERR_VALUE, "running_mean should contain " + std::to_string(input.size(1)) + " elements not " +
                                        std::to_string(running_mean.numel()));
  auto maybe = [](const at::Tensor &t) { return t.defined() ? std::optional(t) : std::nullopt; };
  return SyncBatchNorm::apply(input, maybe(weight), maybe(bias), maybe(running_mean), maybe(running_var), momentum, eps,
                              group);
}

at::Tensor batch_norm(const at::Tensor &input, const std::optional<at::Tensor> &weight,
                      const std::optional<at::Tensor> &bias, const std::optional<at::Tensor> &running_mean,
                      const std::optional<at::Tensor> &running_var, bool training, double momentum, double eps,
                      bool cudnn_enabled) {
  if (training) {
    auto value = [](const std::optional<at::Tensor> &t) { return t.value_or(at::Tensor()); };
    at::Tensor key = value(running_mean).defined() ? value(running_mean) : value(weight);
    // One rank alone is ordinary batch norm, with its own errors.
    if (Group group = table().find(key); group && group->getSize() > 1)
      return sync_batch_norm(group, input, value(weight), value(bias), value(running_mean), value(running_var),
                             momentum, eps);
  }
  return at::native::batch_norm(input, weight, bias, running_mean, running_var, training, momentum, eps, cudnn_enabled);
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, AutogradCPU, m) { m.impl("batch_norm", batch_norm); }
TORCH_LIBRARY_IMPL(aten, AutogradCUDA, m) { m.impl("batch_norm", batch_norm); }

extern "C" {

tdp_error *tdp_sync_batch_norm(tdp_pg *pg, tdp_tensor input, tdp_tensor weight, tdp_tensor bias,
                               tdp_tensor running_mean, tdp_tensor running_var, double momentum, double eps,
                               tdp_tensor *out) {
  return guard([&] {
    auto value = [](tdp_tensor t) { return t == nullptr ? at::Tensor() : *t; };
    *out = new at::Tensor(sync_batch_norm(group_of(pg), need_defined(input, "the input"), value(weight), value(bias),
                                          value(running_mean), value(running_var), momentum, eps));
  });
}

tdp_error *tdp_sync_batch_norm_register(tdp_tensor key, tdp_pg *pg) {
  return guard(
      [&] { table().put(need_defined(key, "the layer's running mean or weight"), pg ? group_of(pg) : Group()); });
}

tdp_error *tdp_sync_batch_norm_registered(tdp_tensor key, int32_t *out) {
  return guard([&] { *out = table().find(need_defined(key, "the layer's running mean or weight")) ? 1 : 0; });
}

}  // extern "C"
