#include "guard.h"
#include "tdp_ddp.h"
#include "tdp_nn.h"

#include <ATen/Functions.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>

#include <cmath>
#include <optional>
#include <string>
#include <vector>

using tdp::Error;
using tdp::guard;
using tdp::need_defined;

namespace {

std::optional<at::Tensor> maybe(tdp_tensor t) {
  if (t == nullptr || !t->defined()) return std::nullopt;
  return *t;
}

at::Tensor &input(tdp_tensor t) { return need_defined(t, "the input"); }

c10::IntArrayRef list(const int64_t *values, int32_t n) { return {values, static_cast<size_t>(n)}; }

[[noreturn]] void unknown(const char *what, int64_t value) {
  throw Error(TDP_ERR_VALUE, std::string("unknown ") + what + " " + std::to_string(value));
}

std::string text(c10::IntArrayRef sizes) {
  std::string s = "[";
  for (size_t i = 0; i < sizes.size(); i++) s += (i ? ", " : "") + std::to_string(sizes[i]);
  return s + "]";
}

void give(tdp_tensor *out, at::Tensor value) { *out = new at::Tensor(std::move(value)); }

at::Tensor activate(int32_t kind, at::Tensor &x, bool inplace) {
  switch (kind) {
    case TDP_NN_RELU:
      return inplace ? at::relu_(x) : at::relu(x);
    case TDP_NN_GELU:
      return at::gelu(x, "none");
    case TDP_NN_GELU_TANH:
      return at::gelu(x, "tanh");
    case TDP_NN_SILU:
      return inplace ? at::silu_(x) : at::silu(x);
    case TDP_NN_SIGMOID:
      return at::sigmoid(x);
    case TDP_NN_TANH:
      return at::tanh(x);
  }
  unknown("activation", kind);
}

at::Tensor convolve(const at::Tensor &x, const at::Tensor &w, const std::optional<at::Tensor> &b, int32_t dims,
                    c10::IntArrayRef stride, const int64_t *padding, c10::IntArrayRef dilation, int64_t groups) {
  if (padding == nullptr) {
    constexpr std::string_view same = "same";
    switch (dims) {
      case 1:
        return at::conv1d(x, w, b, stride, same, dilation, groups);
      case 2:
        return at::conv2d(x, w, b, stride, same, dilation, groups);
      case 3:
        return at::conv3d(x, w, b, stride, same, dilation, groups);
    }
  } else {
    c10::IntArrayRef pad = list(padding, dims);
    switch (dims) {
      case 1:
        return at::conv1d(x, w, b, stride, pad, dilation, groups);
      case 2:
        return at::conv2d(x, w, b, stride, pad, dilation, groups);
      case 3:
        return at::conv3d(x, w, b, stride, pad, dilation, groups);
    }
  }
  unknown("number of spatial dimensions", dims);
}

// Whether the layer takes its statistics from several ranks: then one value a rank is enough.
bool synchronised(tdp_tensor running_mean, tdp_tensor weight) {
  tdp_tensor key = maybe(running_mean) ? running_mean : weight;
  int32_t registered = 0;
  if (maybe(key)) tdp_error_free(tdp_sync_batch_norm_registered(key, &registered));
  return registered != 0;
}

// Elementwise losses broadcast silently, which is hardly ever what was meant.
void same_shape(const at::Tensor &input, const at::Tensor &target) {
  if (input.sizes() != target.sizes())
    throw Error(TDP_ERR_VALUE, "the input has shape " + text(input.sizes()) + " but the target " +
                                   text(target.sizes()) + ": reshape one of them");
}

}  // namespace

static_assert(static_cast<int>(at::Reduction::None) == TDP_NN_NONE &&
              static_cast<int>(at::Reduction::Mean) == TDP_NN_MEAN &&
              static_cast<int>(at::Reduction::Sum) == TDP_NN_SUM);

static_assert(static_cast<int>(c10::MemoryFormat::Contiguous) == 0 &&
              static_cast<int>(c10::MemoryFormat::ChannelsLast) == 2 &&
              static_cast<int>(c10::MemoryFormat::ChannelsLast3d) == 3);

extern "C" {

tdp_error *tdp_nn_activation(int32_t kind, tdp_tensor x, int32_t inplace, tdp_tensor *out) {
  return guard([&] { give(out, activate(kind, input(x), inplace != 0)); });
}

tdp_error *tdp_nn_softmax(tdp_tensor x, int64_t dim, int32_t log, tdp_tensor *out) {
  return guard([&] { give(out, log ? at::log_softmax(input(x), dim) : at::softmax(input(x), dim)); });
}

tdp_error *tdp_nn_flatten(tdp_tensor x, int64_t start_dim, int64_t end_dim, tdp_tensor *out) {
  return guard([&] { give(out, at::flatten(input(x), start_dim, end_dim)); });
}

tdp_error *tdp_nn_reshape(tdp_tensor x, const int64_t *sizes, int32_t ndim, tdp_tensor *out) {
  return guard([&] { give(out, at::reshape(input(x), list(sizes, ndim))); });
}

tdp_error *tdp_nn_dropout(tdp_tensor x, double p, int32_t train, int32_t inplace, tdp_tensor *out) {
  return guard(
      [&] { give(out, inplace ? at::dropout_(input(x), p, train != 0) : at::dropout(input(x), p, train != 0)); });
}

tdp_error *tdp_nn_add(tdp_tensor x, tdp_tensor y, int32_t inplace, tdp_tensor *out) {
  return guard([&] {
    const at::Tensor &other = need_defined(y, "the second operand");
    give(out, inplace ? input(x).add_(other) : at::add(input(x), other));
  });
}

tdp_error *tdp_nn_pad(tdp_tensor x, const int64_t *pad, int32_t num_pad, const char *mode, double value,
                      tdp_tensor *out) {
  return guard([&] {
    std::optional<double> fill;
    if (std::string_view(mode) == "constant") fill = value;
    give(out, at::pad(input(x), list(pad, num_pad), mode, fill));
  });
}

tdp_error *tdp_nn_linear(tdp_tensor x, tdp_tensor weight, tdp_tensor bias, tdp_tensor *out) {
  return guard([&] { give(out, at::linear(input(x), need_defined(weight, "the weight"), maybe(bias))); });
}

tdp_error *tdp_nn_conv(tdp_tensor x, tdp_tensor weight, tdp_tensor bias, int32_t dims, const int64_t *stride,
                       const int64_t *padding, const int64_t *dilation, int64_t groups, tdp_tensor *out) {
  return guard([&] {
    give(out, convolve(input(x), need_defined(weight, "the weight"), maybe(bias), dims, list(stride, dims), padding,
                       list(dilation, dims), groups));
  });
}

tdp_error *tdp_nn_batch_norm(tdp_tensor x, tdp_tensor weight, tdp_tensor bias, tdp_tensor running_mean,
                             tdp_tensor running_var, tdp_tensor count, int32_t training, double momentum, double eps,
                             tdp_tensor *out) {
  return guard([&] {
    at::Tensor &in = input(x);
    if (training) {
      int64_t per_channel = in.dim() > 0 ? in.size(0) : 0;
      for (int64_t d = 2; d < in.dim(); d++) per_channel *= in.size(d);
      if (per_channel == 1 && !synchronised(running_mean, weight))
        throw Error(TDP_ERR_VALUE,
                    "training needs more than 1 value per channel, the input has shape " + text(in.sizes()));
    }
    if (auto n = maybe(count)) {
      at::NoGradGuard no_grad;
      n->add_(1);
      if (momentum < 0) momentum = 1.0 / n->item<double>();
    }
    if (momentum < 0) momentum = 0;
    give(out, at::batch_norm(in, maybe(weight), maybe(bias), maybe(running_mean), maybe(running_var), training != 0,
                             momentum, eps, at::globalContext().userEnabledCuDNN()));
  });
}

tdp_error *tdp_nn_layer_norm(tdp_tensor x, const int64_t *shape, int32_t ndim, tdp_tensor weight, tdp_tensor bias,
                             double eps, tdp_tensor *out) {
  return guard([&] {
    give(out, at::layer_norm(input(x), list(shape, ndim), maybe(weight), maybe(bias), eps,
                             at::globalContext().userEnabledCuDNN()));
  });
}

tdp_error *tdp_nn_group_norm(tdp_tensor x, int64_t groups, tdp_tensor weight, tdp_tensor bias, double eps,
                             tdp_tensor *out) {
  return guard([&] {
    give(out,
         at::group_norm(input(x), groups, maybe(weight), maybe(bias), eps, at::globalContext().userEnabledCuDNN()));
  });
}

tdp_error *tdp_nn_embedding(tdp_tensor weight, tdp_tensor indices, int64_t padding_idx, int32_t scale_grad_by_freq,
                            int32_t sparse, tdp_tensor *out) {
  return guard([&] {
    give(out, at::embedding(need_defined(weight, "the weight"), input(indices), padding_idx < 0 ? -1 : padding_idx,
                            scale_grad_by_freq != 0, sparse != 0));
  });
}

tdp_error *tdp_nn_max_pool(tdp_tensor x, int32_t dims, const int64_t *kernel, const int64_t *stride,
                           const int64_t *padding, const int64_t *dilation, int32_t ceil_mode, tdp_tensor *out) {
  return guard([&] {
    auto k = list(kernel, dims), s = list(stride, dims), p = list(padding, dims), d = list(dilation, dims);
    switch (dims) {
      case 1:
        return give(out, at::max_pool1d(input(x), k, s, p, d, ceil_mode != 0));
      case 2:
        return give(out, at::max_pool2d(input(x), k, s, p, d, ceil_mode != 0));
      case 3:
        return give(out, at::max_pool3d(input(x), k, s, p, d, ceil_mode != 0));
    }
    unknown("number of spatial dimensions", dims);
  });
}

tdp_error *tdp_nn_avg_pool(tdp_tensor x, int32_t dims, const int64_t *kernel, const int64_t *stride,
                           const int64_t *padding, int32_t ceil_mode, int32_t count_include_pad, int64_t divisor,
                           tdp_tensor *out) {
  return guard([&] {
    auto k = list(kernel, dims), s = list(stride, dims), p = list(padding, dims);
    bool ceil = ceil_mode != 0, all = count_include_pad != 0;
    std::optional<int64_t> div = divisor == 0 ? std::nullopt : std::optional<int64_t>(divisor);
    switch (dims) {
      case 1:
        return give(out, at::avg_pool1d(input(x), k, s, p, ceil, all));
      case 2:
        return give(out, at::avg_pool2d(input(x), k, s, p, ceil, all, div));
      case 3:
        return give(out, at::avg_pool3d(input(x), k, s, p, ceil, all, div));
    }
    unknown("number of spatial dimensions", dims);
  });
}

tdp_error *tdp_nn_adaptive_avg_pool(tdp_tensor x, int32_t dims, const int64_t *size, tdp_tensor *out) {
  return guard([&] {
    at::Tensor &in = input(x);
    std::vector<int64_t> target(size, size + dims);
    for (int32_t i = 0; i < dims; i++)
      if (target[i] < 0) target[i] = in.size(i - dims);
    switch (dims) {
      case 1:
        return give(out, at::adaptive_avg_pool1d(in, target));
      case 2:
        return give(out, at::adaptive_avg_pool2d(in, target));
      case 3:
        return give(out, at::adaptive_avg_pool3d(in, target));
    }
    unknown("number of spatial dimensions", dims);
  });
}

tdp_error *tdp_nn_loss(int32_t kind, tdp_tensor in, tdp_tensor target, tdp_tensor weight, tdp_tensor pos_weight,
                       int32_t reduction, int64_t ignore_index, double parameter, tdp_tensor *out) {
  return guard([&] {
    at::Tensor &x = input(in);
    at::Tensor &y = need_defined(target, "the target");
    if (kind != TDP_NN_CROSS_ENTROPY && kind != TDP_NN_NLL) same_shape(x, y);
    switch (kind) {
      case TDP_NN_CROSS_ENTROPY:
        return give(out, at::cross_entropy_loss(x, y, maybe(weight), reduction, ignore_index, parameter));
      case TDP_NN_NLL:
        return give(out, at::nll_loss_nd(x, y, maybe(weight), reduction, ignore_index));
      case TDP_NN_MSE:
        return give(out, at::mse_loss(x, y, reduction));
      case TDP_NN_L1:
        return give(out, at::l1_loss(x, y, reduction));
      case TDP_NN_SMOOTH_L1:
        // Python does the same: beta 0 is L1.
        return give(out,
                    parameter == 0 ? at::l1_loss(x, y, reduction) : at::smooth_l1_loss(x, y, reduction, parameter));
      case TDP_NN_BCE_LOGITS:
        return give(out, at::binary_cross_entropy_with_logits(x, y, maybe(weight), maybe(pos_weight), reduction));
    }
    unknown("loss", kind);
  });
}

tdp_error *tdp_nn_init(tdp_tensor t, int32_t kind, double a, double b) {
  return guard([&] {
    at::NoGradGuard no_grad;
    at::Tensor &x = need_defined(t, "the tensor");
    switch (kind) {
      case TDP_NN_FILL:
        x.fill_(a);
        return;
      case TDP_NN_UNIFORM:
        x.uniform_(a, b);
        return;
      case TDP_NN_NORMAL:
        x.normal_(a, b);
        return;
      case TDP_NN_EYE:
        at::eye_out(x, x.size(0), x.size(1));
        return;
    }
    unknown("initialisation", kind);
  });
}

tdp_error *tdp_nn_trunc_normal(tdp_tensor t, double mean, double std, double lo, double hi) {
  return guard([&] {
    at::NoGradGuard no_grad;
    at::Tensor &x = need_defined(t, "the tensor");
    auto cdf = [](double v) { return (1.0 + std::erf(v / std::sqrt(2.0))) / 2.0; };
    double l = cdf((lo - mean) / std), u = cdf((hi - mean) / std);
    x.uniform_(2 * l - 1, 2 * u - 1);
    x.erfinv_();
    x.mul_(std * std::sqrt(2.0));
    x.add_(mean);
    x.clamp_(lo, hi);
  });
}

tdp_error *tdp_nn_zero_row(tdp_tensor t, int64_t index) {
  return guard([&] {
    at::NoGradGuard no_grad;
    need_defined(t, "the tensor").select(0, index).fill_(0);
  });
}

tdp_error *tdp_nn_move(tdp_tensor t, tdp_device device, int32_t dtype, int32_t memory_format) {
  return guard([&] {
    at::NoGradGuard no_grad;
    at::Tensor &x = need_defined(t, "the tensor");
    auto moved = [&](const at::Tensor &v) {
      at::TensorOptions to = v.options().requires_grad(false);
      if (device.type >= 0) to = to.device(tdp::to_device(device));
      if (dtype >= 0 && (v.is_floating_point() || v.is_complex())) to = to.dtype(static_cast<c10::ScalarType>(dtype));
      std::optional<c10::MemoryFormat> format;
      if (memory_format >= 0) {
        auto f = static_cast<c10::MemoryFormat>(memory_format);
        bool fits = f == c10::MemoryFormat::Contiguous || (f == c10::MemoryFormat::ChannelsLast && v.dim() == 4) ||
                    (f == c10::MemoryFormat::ChannelsLast3d && v.dim() == 5);
        if (fits) format = f;
      }
      return v.to(to, /*non_blocking=*/false, /*copy=*/false, format);
    };
    at::Tensor data = moved(x.detach());
    at::Tensor grad = x.grad().defined() ? moved(x.grad().detach()) : at::Tensor();
    if (grad.defined()) x.mutable_grad().reset();
    x.set_data(data);
    if (grad.defined()) x.mutable_grad() = grad;
  });
}

}  // extern "C"
