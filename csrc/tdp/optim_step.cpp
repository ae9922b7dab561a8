// The arithmetic of one optimizer step, operation by operation as Python's implementations order it, so that the same
// gradients give the same bits.
//
// Three implementations, as in Python:
//   single   one parameter after another, operation by operation; on the CPU block by block (optim_block.h), where
//            every element sees the same operations at a fraction of the memory traffic.
//   foreach  ATen's _foreach_ operations over lists.
//   fused    ATen's fused kernels.
#include "optim_block.h"
#include "optim_internal.h"

#include <ATen/Functions.h>
#include <ATen/ScalarOps.h>
#include <ATen/TensorIterator.h>
#include <ATen/TensorOperators.h>

#include <cmath>
#include <limits>
#include <string>
#include <type_traits>
#include <utility>

namespace tdp {
namespace {

using Options = tdp_optim_options;
using Tensors = std::vector<at::Tensor>;

bool flag(const Options &o, int32_t bit) { return (o.flags & bit) != 0; }

// What an update works on: a parameter with its gradient and states, as tensors or as blocks of them.
template <typename V>
struct Operands {
  V p, g;
  std::array<V, 3> s;
};
using Slice = Operands<at::Tensor>;

// Whether t lies in memory in the same order as p, without gaps, so that both are runs of numbers. Half precision is
// not for blocks: libtorch rounds the rest of a vector differently from whole vectors there.
bool in_blocks(const at::Tensor &p) {
  return p.is_cpu() && p.layout() == c10::kStrided &&
         (p.scalar_type() == c10::kFloat || p.scalar_type() == c10::kDouble) && p.is_non_overlapping_and_dense() &&
         !p.is_neg() && p.numel() > 0 && blocks_match();
}

bool alike(const at::Tensor &t, const at::Tensor &p) {
  return !t.defined() || (t.is_cpu() && t.layout() == c10::kStrided && t.scalar_type() == p.scalar_type() &&
                          t.sizes() == p.sizes() && t.strides() == p.strides() && !t.is_neg());
}

bool in_blocks(const Slice &x) {
  return in_blocks(x.p) && alike(x.g, x.p) && alike(x.s[0], x.p) && alike(x.s[1], x.p) && alike(x.s[2], x.p);
}

// Autograd must notice that a tensor it may have saved was written to.
void wrote(const at::Tensor &t) {
  if (t.defined() && !t.is_inference()) t.unsafeGetTensorImpl()->bump_version();
}

// A run of elements of one slice, the unit that threads take.
struct Run {
  size_t slice;
  int64_t offset, n;
};
constexpr int64_t kRun = 64 * kBlock;

template <typename T, typename F>
void run_blocks(const Slice &whole, const Run &run, const F &update) {
  const SerialMath serial;
  Scratch<T> scratch;
  auto start = [&](const at::Tensor &t) { return t.defined() ? t.mutable_data_ptr<T>() + run.offset : nullptr; };
  const Operands<T *> at = {start(whole.p), start(whole.g), {start(whole.s[0]), start(whole.s[1]), start(whole.s[2])}};
  for (int64_t done = 0; done < run.n; done += kBlock) {
    const int n = static_cast<int>(std::min<int64_t>(kBlock, run.n - done));
    auto block = [&](T *d) { return d == nullptr ? Block<T>{} : Block<T>{d + done, n, &scratch}; };
    Operands<Block<T>> x = {block(at.p), block(at.g), {block(at.s[0]), block(at.s[1]), block(at.s[2])}};
    scratch.used = 0;
    update(run.slice, x);
  }
}

// Calls task(0) ... task(n-1) on libtorch's threads. at::parallel_for is a template on OpenMP, which this library is
// compiled without: a second OpenMP runtime beside libtorch's would have threads of its own. An iteration over a tensor
// of numbers runs inside libtorch.
void in_parallel(int64_t n, c10::function_ref<void(int64_t)> task) {
  at::Tensor numbers = at::empty({n}, at::TensorOptions().dtype(c10::kLong));
  int64_t *d = numbers.mutable_data_ptr<int64_t>();
  for (int64_t i = 0; i < n; i++) d[i] = i;
  auto iter = at::TensorIterator::borrowing_nullary_op(numbers);
  iter.for_each(
      [&](char **data, const int64_t *strides, int64_t size) {
        for (int64_t i = 0; i < size; i++) task(*reinterpret_cast<int64_t *>(data[0] + i * strides[0]));
      },
      /*grain_size=*/1);
}

// Runs update(i, operands) on every slice: block by block and spread over threads where that is possible, otherwise on
// whole tensors. update does elementwise operations only.
template <typename F>
void elementwise(std::vector<Slice> &slices, const F &update) {
  std::vector<Run> runs;
  for (size_t i = 0; i < slices.size(); i++) {
    if (!in_blocks(slices[i])) {
      update(i, slices[i]);
      continue;
    }
    const int64_t numel = slices[i].p.numel();
    for (int64_t at = 0; at < numel; at += kRun) runs.push_back({i, at, std::min(kRun, numel - at)});
    wrote(slices[i].p);
    for (const at::Tensor &s : slices[i].s) wrote(s);
  }
  in_parallel(static_cast<int64_t>(runs.size()), [&](int64_t k) {
    const Slice &whole = slices[runs[k].slice];
    if (whole.p.scalar_type() == c10::kFloat)
      run_blocks<float>(whole, runs[k], update);
    else
      run_blocks<double>(whole, runs[k], update);
  });
}

// Complex numbers as pairs of real ones. Blocks are real already.
void as_real(Slice &x) {
  if (!x.p.is_complex()) return;
  x.p = at::view_as_real(x.p);
  x.g = at::view_as_real(x.g);
  for (at::Tensor &s : x.s)
    if (s.defined()) s = at::view_as_real(s);
}
template <typename T>
void as_real(Operands<Block<T>> &) {}

// step += 1, and its value.
double advance(const at::Tensor &step) {
  if (step.is_cpu() && step.dim() == 0) {
    if (step.scalar_type() == c10::kFloat) {
      wrote(step);
      return *step.mutable_data_ptr<float>() += 1.0f;
    }
    if (step.scalar_type() == c10::kDouble) {
      wrote(step);
      return *step.mutable_data_ptr<double>() += 1.0;
    }
  }
  at::Tensor(step).add_(1);
  return step.item<double>();
}

at::Tensor zeros_like_param(const at::Tensor &p) { return at::zeros_like(p.detach()); }

at::Tensor new_step(const at::Tensor &p, bool fused) {
  return at::zeros({}, at::TensorOptions().dtype(c10::kFloat).device(fused ? p.device() : c10::Device(c10::kCPU)));
}

void refuse_sparse(const OptimWork &w, const char *message) {
  if (w.sparse) throw Error(TDP_ERR_VALUE, message);
}

// The step count lies beside the parameter for fused kernels, otherwise on the CPU. It moves when the implementation
// was changed between steps.
void place_step(at::Tensor &step, const at::Tensor &p, bool fused) {
  if (!step.defined()) {
    step = new_step(p, fused);
    return;
  }
  const c10::Device device = fused ? p.device() : c10::Device(c10::kCPU);
  if (step.device() != device || (fused && step.scalar_type() != c10::kFloat))
    step = step.to(device, fused ? c10::kFloat : step.scalar_type());
}

// Makes the states that the listed slots lack.
void init_state(const OptimWork &w, std::initializer_list<int> slots, bool fused) {
  for (size_t i = 0; i < w.size(); i++) {
    place_step(w.slot(TDP_SLOT_STEP, i), w.params[i], fused);
    for (int s : slots)
      if (!w.slot(s, i).defined()) w.slot(s, i) = zeros_like_param(w.params[i]);
  }
}

// The parameters of a step that share device and dtype, as lists.
struct Batch {
  std::vector<size_t> index;  // into the work
  Tensors params, grads, steps;
  std::array<Tensors, 3> s;  // empty for slots that are not asked for
};

std::vector<Batch> batches(const OptimWork &w, std::initializer_list<int> slots) {
  std::vector<Batch> out;
  std::vector<std::pair<c10::Device, c10::ScalarType>> keys;
  for (size_t i = 0; i < w.size(); i++) {
    std::pair key{w.params[i].device(), w.params[i].scalar_type()};
    size_t at = 0;
    while (at < keys.size() && keys[at] != key) at++;
    if (at == keys.size()) {
      keys.push_back(key);
      out.emplace_back();
      for (Tensors *list : {&out.back().params, &out.back().grads}) list->reserve(w.size());
    }
    Batch &b = out[at];
    b.index.push_back(i);
    b.params.push_back(w.params[i]);
    b.grads.push_back(w.grads[i]);
    if (w.slot(TDP_SLOT_STEP, i).defined()) b.steps.push_back(w.slot(TDP_SLOT_STEP, i));
    for (int s : slots) b.s[s - 1].push_back(w.slot(s, i));
  }
  return out;
}

void as_real(Batch &b) {
  for (size_t i = 0; i < b.params.size(); i++) {
    if (!b.params[i].is_complex()) continue;
    b.params[i] = at::view_as_real(b.params[i]);
    b.grads[i] = at::view_as_real(b.grads[i]);
    for (Tensors &s : b.s)
      if (!s.empty()) s[i] = at::view_as_real(s[i]);
  }
}

bool any_sparse(const Tensors &list) {
  for (const at::Tensor &t : list)
    if (t.layout() != c10::kStrided) return true;
  return false;
}

void advance_all(const Tensors &steps) {
  for (const at::Tensor &t : steps)
    if (!t.is_cpu()) {
      at::_foreach_add_(steps, 1);
      return;
    }
  for (const at::Tensor &t : steps) advance(t);
}

std::vector<at::Scalar> scalars(const std::vector<double> &values) {
  return std::vector<at::Scalar>(values.begin(), values.end());
}

// A gradient scaler's findings on the CPU are known at once: a step to be skipped does nothing.
bool skipped(const at::Tensor &found_inf) {
  return found_inf.defined() && found_inf.is_cpu() && found_inf.item<double>() != 0;
}

std::optional<at::Tensor> on_device(const at::Tensor &t, const c10::Device &device) {
  if (!t.defined()) return std::nullopt;
  return t.to(device, t.scalar_type(), /*non_blocking=*/true);
}

void take_back_steps(const Tensors &steps, const std::optional<at::Tensor> &found_inf) {
  if (found_inf.has_value()) at::_foreach_sub_(steps, Tensors(steps.size(), *found_inf));
}

void check_fused(const OptimWork &w, bool cuda_too) {
  for (const at::Tensor &p : w.params)
    if (!(p.is_cpu() || (cuda_too && p.is_cuda())) || !p.is_floating_point())
      throw Error(TDP_ERR_VALUE, std::string("`fused=True` requires all the params to be floating point Tensors of "
                                             "supported devices: ") +
                                     (cuda_too ? "cpu, cuda" : "cpu") + " but " + std::string(p.dtype().name()) +
                                     " and " + c10::DeviceTypeName(p.device().type(), true));
}

// ---- SGD ----

struct SGD {
  const Options &o;
  bool maximize = flag(o, TDP_OPTIM_MAXIMIZE), nesterov = flag(o, TDP_OPTIM_NESTEROV);

  void single(const OptimWork &w) const {
    std::vector<Slice> slices(w.size());
    std::vector<char> first(w.size());
    for (size_t i = 0; i < w.size(); i++) {
      Slice &x = slices[i];
      x.p = w.params[i];
      x.g = w.grads[i];
      if (o.momentum == 0) continue;
      at::Tensor &buf = w.slot(TDP_SLOT_1, i);
      first[i] = !buf.defined();
      // The first buffer is a copy of the (decayed) gradient, in its layout.
      if (first[i] && x.g.layout() == c10::kStrided) buf = at::empty_like(x.g.detach());
      x.s[0] = buf;
    }
    elementwise(slices, [&](size_t i, auto &x) {
      auto g = x.g;
      auto &buf = x.s[0];
      if (maximize) g = negated(g);
      if (o.weight_decay != 0) g = axpy(g, x.p, o.weight_decay);
      if (o.momentum != 0) {
        if (!first[i]) {
          mul_(buf, o.momentum);
          axpy_(buf, g, 1 - o.dampening);
        } else if (buf.defined()) {
          copy_(buf, g);
        } else if constexpr (std::is_same_v<std::decay_t<decltype(buf)>, at::Tensor>) {
          w.slot(TDP_SLOT_1, i) = buf = g.detach().clone();  // sparse
        }
        g = nesterov ? axpy(g, buf, o.momentum) : buf;
      }
      axpy_(x.p, g, -o.lr);
    });
  }

  void foreach (const OptimWork &w) const {
    for (Batch &b : batches(w, {TDP_SLOT_1})) {
      Tensors grads = b.grads;
      if (maximize) grads = at::_foreach_neg(grads);
      if (o.weight_decay != 0) {
        if (maximize)
          at::_foreach_add_(grads, b.params, o.weight_decay);
        else
          grads = at::_foreach_add(grads, b.params, o.weight_decay);
      }
      if (o.momentum != 0) {
        Tensors &bufs = b.s[0];
        bool all = true;
        for (const at::Tensor &t : bufs) all = all && t.defined();
        if (all) {
          at::_foreach_mul_(bufs, o.momentum);
          at::_foreach_add_(bufs, grads, 1 - o.dampening);
        } else {
          for (size_t i = 0; i < bufs.size(); i++) {
            if (bufs[i].defined())
              mul_(bufs[i], o.momentum), bufs[i].add_(grads[i], 1 - o.dampening);
            else
              w.slot(TDP_SLOT_1, b.index[i]) = bufs[i] = grads[i].detach().clone();
          }
        }
        if (nesterov)
          at::_foreach_add_(grads, bufs, o.momentum);  // with no decay these are the gradients themselves, as in Python
        else
          grads = bufs;
      }
      if (!any_sparse(b.grads)) {
        at::_foreach_add_(b.params, grads, -o.lr);
      } else {
        for (size_t i = 0; i < grads.size(); i++) b.params[i].add_(grads[i], -o.lr);
      }
    }
  }

  void fused(const OptimWork &w, const at::Tensor &grad_scale, const at::Tensor &found_inf) const {
    refuse_sparse(w, "`_fused_sgd` does not support sparse gradients");
    if (skipped(found_inf)) return;
    // Parameters that got their first gradient now go in a call of their own: the kernel has one flag for all.
    std::array<OptimWork, 2> parts;
    for (size_t i = 0; i < w.size(); i++) {
      OptimWork &part = parts[o.momentum != 0 && !w.slot(TDP_SLOT_1, i).defined()];
      part.group = w.group;
      part.index.push_back(w.index[i]);
      part.params.push_back(w.params[i]);
      part.grads.push_back(w.grads[i]);
    }
    for (bool first : {false, true}) {
      const OptimWork &part = parts[first];
      if (part.size() == 0) continue;
      // Zeros rather than uninitialised memory: on CUDA a skipped step leaves the buffer as it is.
      if (first)
        for (size_t i = 0; i < part.size(); i++) part.slot(TDP_SLOT_1, i) = at::zeros_like(part.grads[i].detach());
      for (Batch &b : batches(part, {TDP_SLOT_1})) {
        const c10::Device device = b.params[0].device();
        at::_fused_sgd_(b.params, b.grads, o.momentum == 0 ? at::TensorList() : at::TensorList(b.s[0]), o.weight_decay,
                        o.momentum, o.lr, o.dampening, nesterov, maximize, first, on_device(grad_scale, device),
                        on_device(found_inf, device));
      }
    }
  }
};

// ---- Adam and AdamW ----

struct Adam {
  const Options &o;
  bool maximize = flag(o, TDP_OPTIM_MAXIMIZE), amsgrad = flag(o, TDP_OPTIM_AMSGRAD),
       decoupled = flag(o, TDP_OPTIM_DECOUPLED);

  void init(const OptimWork &w, bool fused) const {
    refuse_sparse(w, "Adam does not support sparse gradients, please consider SparseAdam instead");
    if (amsgrad)
      init_state(w, {TDP_SLOT_1, TDP_SLOT_2, TDP_SLOT_3}, fused);
    else
      init_state(w, {TDP_SLOT_1, TDP_SLOT_2}, fused);
  }

  void single(const OptimWork &w) const {
    init(w, false);
    struct Bias {
      double step_size, root2;
    };
    std::vector<Slice> slices(w.size());
    std::vector<Bias> bias(w.size());
    for (size_t i = 0; i < w.size(); i++) {
      double step = advance(w.slot(TDP_SLOT_STEP, i));
      // pow(x, 0.5), not sqrt: it is what Python's ** calls.
      bias[i] = {o.lr / (1 - std::pow(o.beta1, step)), std::pow(1 - std::pow(o.beta2, step), 0.5)};
      slices[i] = {w.params[i], w.grads[i], {w.slot(TDP_SLOT_1, i), w.slot(TDP_SLOT_2, i), at::Tensor()}};
      if (amsgrad) slices[i].s[2] = w.slot(TDP_SLOT_3, i);
    }
    elementwise(slices, [&](size_t i, auto &operands) {
      auto x = operands;
      if (maximize) x.g = negated(x.g);
      if (o.weight_decay != 0) {
        if (decoupled)
          mul_(x.p, 1 - o.lr * o.weight_decay);
        else
          x.g = axpy(x.g, x.p, o.weight_decay);
      }
      as_real(x);
      auto &[avg, sq, max] = x.s;
      lerp_(avg, x.g, 1 - o.beta1);
      mul_(sq, o.beta2);
      addcmul_(sq, x.g, x.g, 1 - o.beta2);
      if (amsgrad) max_(max, sq);
      auto denom = root(amsgrad ? max : sq);
      div_(denom, bias[i].root2);
      plus_(denom, o.eps);
      addcdiv_(x.p, avg, denom, -bias[i].step_size);
    });
  }

  void foreach (const OptimWork &w) const {
    init(w, false);
    for (Batch &b : batches(w, {TDP_SLOT_1, TDP_SLOT_2, TDP_SLOT_3})) {
      if (!amsgrad) b.s[2].clear();
      if (w.complex) as_real(b);
      auto &[avgs, sqs, maxs] = b.s;
      Tensors grads = b.grads;
      if (maximize) grads = at::_foreach_neg(grads);
      advance_all(b.steps);
      if (o.weight_decay != 0) {
        if (decoupled)
          at::_foreach_mul_(b.params, 1 - o.lr * o.weight_decay);
        else if (maximize)
          at::_foreach_add_(grads, b.params, o.weight_decay);
        else
          grads = at::_foreach_add(grads, b.params, o.weight_decay);
      }
      at::_foreach_lerp_(avgs, grads, 1 - o.beta1);
      at::_foreach_mul_(sqs, o.beta2);
      at::_foreach_addcmul_(sqs, grads, grads, 1 - o.beta2);
      grads.clear();
      std::vector<double> step_size, root2;
      for (const at::Tensor &t : b.steps) {
        double step = t.item<double>();
        step_size.push_back((o.lr / (1 - std::pow(o.beta1, step))) * -1);
        root2.push_back(std::pow(1 - std::pow(o.beta2, step), 0.5));
      }
      if (amsgrad) at::_foreach_maximum_(maxs, sqs);
      Tensors denom = at::_foreach_sqrt(amsgrad ? maxs : sqs);
      at::_foreach_div_(denom, scalars(root2));
      at::_foreach_add_(denom, o.eps);
      at::_foreach_addcdiv_(b.params, avgs, denom, scalars(step_size));
    }
  }

  void fused(const OptimWork &w, const at::Tensor &grad_scale, const at::Tensor &found_inf) const {
    check_fused(w, true);
    init(w, true);
    if (skipped(found_inf)) return;
    for (Batch &b : batches(w, {TDP_SLOT_1, TDP_SLOT_2, TDP_SLOT_3})) {
      if (!amsgrad) b.s[2].clear();
      const c10::Device device = b.params[0].device();
      auto inf = on_device(found_inf, device);
      advance_all(b.steps);
      if (decoupled)
        at::_fused_adamw_(b.params, b.grads, b.s[0], b.s[1], b.s[2], b.steps, o.lr, o.beta1, o.beta2, o.weight_decay,
                          o.eps, amsgrad, maximize, on_device(grad_scale, device), inf);
      else
        at::_fused_adam_(b.params, b.grads, b.s[0], b.s[1], b.s[2], b.steps, o.lr, o.beta1, o.beta2, o.weight_decay,
                         o.eps, amsgrad, maximize, on_device(grad_scale, device), inf);
      take_back_steps(b.steps, inf);
    }
  }
};

// ---- RMSprop ----

struct RMSprop {
  const Options &o;
  bool maximize = flag(o, TDP_OPTIM_MAXIMIZE), centered = flag(o, TDP_OPTIM_CENTERED);

  void init(const OptimWork &w) const {
    refuse_sparse(w, "RMSprop does not support sparse gradients");
    init_state(w, {TDP_SLOT_1}, false);
    if (o.momentum > 0) init_state(w, {TDP_SLOT_2}, false);
    if (centered) init_state(w, {TDP_SLOT_3}, false);
  }

  void single(const OptimWork &w) const {
    init(w);
    std::vector<Slice> slices(w.size());
    for (size_t i = 0; i < w.size(); i++) {
      advance(w.slot(TDP_SLOT_STEP, i));
      slices[i] = {w.params[i], w.grads[i], {w.slot(TDP_SLOT_1, i), at::Tensor(), at::Tensor()}};
      if (o.momentum > 0) slices[i].s[1] = w.slot(TDP_SLOT_2, i);
      if (centered) slices[i].s[2] = w.slot(TDP_SLOT_3, i);
    }
    elementwise(slices, [&](size_t, auto &operands) {
      auto x = operands;
      if (maximize) x.g = negated(x.g);
      if (o.weight_decay != 0) x.g = axpy(x.g, x.p, o.weight_decay);
      as_real(x);
      auto &[square, buf, mean] = x.s;
      mul_(square, o.alpha);
      addcmul_(square, x.g, x.g, 1 - o.alpha);
      auto avg = x.g;
      if (centered) {
        lerp_(mean, x.g, 1 - o.alpha);
        avg = addcmul(square, mean, mean, -1);
        root_(avg);
      } else {
        avg = root(square);
      }
      plus_(avg, o.eps);
      if (o.momentum > 0) {
        mul_(buf, o.momentum);
        addcdiv_(buf, x.g, avg, 1);
        axpy_(x.p, buf, -o.lr);
      } else {
        addcdiv_(x.p, x.g, avg, -o.lr);
      }
    });
  }

  void foreach (const OptimWork &w) const {
    init(w);
    for (Batch &b : batches(w, {TDP_SLOT_1, TDP_SLOT_2, TDP_SLOT_3})) {
      if (!(o.momentum > 0)) b.s[1].clear();
      if (!centered) b.s[2].clear();
      if (w.complex) as_real(b);
      auto &[squares, bufs, means] = b.s;
      Tensors grads = b.grads;
      if (maximize) grads = at::_foreach_neg(grads);
      advance_all(b.steps);
      if (o.weight_decay != 0) {
        if (maximize)
          at::_foreach_add_(grads, b.params, o.weight_decay);
        else
          grads = at::_foreach_add(grads, b.params, o.weight_decay);
      }
      at::_foreach_mul_(squares, o.alpha);
      at::_foreach_addcmul_(squares, grads, grads, 1 - o.alpha);
      Tensors avg;
      if (centered) {
        at::_foreach_lerp_(means, grads, 1 - o.alpha);
        avg = at::_foreach_addcmul(squares, means, means, -1);
        at::_foreach_sqrt_(avg);
      } else {
        avg = at::_foreach_sqrt(squares);
      }
      at::_foreach_add_(avg, o.eps);
      if (o.momentum > 0) {
        at::_foreach_mul_(bufs, o.momentum);
        at::_foreach_addcdiv_(bufs, grads, avg);
        at::_foreach_add_(b.params, bufs, -o.lr);
      } else {
        at::_foreach_addcdiv_(b.params, grads, avg, -o.lr);
      }
    }
  }
};

// ---- Adagrad ----

struct Adagrad {
  const Options &o;
  bool maximize = flag(o, TDP_OPTIM_MAXIMIZE);

  // An embedding's gradient names few rows: only those are touched.
  void sparse_update(const at::Tensor &param, const at::Tensor &sum, at::Tensor g, double clr) const {
    if (maximize) g = g.neg();
    if (o.weight_decay != 0) throw Error(TDP_ERR_VALUE, "weight_decay option is not compatible with sparse gradients");
    g = g.coalesce();
    at::Tensor values = g._values();
    auto like = [&](const at::Tensor &v) { return at::sparse_coo_tensor(g._indices(), v, g.sizes()); };
    at::Tensor(sum).add_(like(values.pow(2)));
    at::Tensor std = sum.sparse_mask(g)._values().sqrt_().add_(o.eps);
    at::Tensor(param).add_(like(values / std), -clr);
  }

  void single(const OptimWork &w) const {
    std::vector<Slice> slices;
    std::vector<double> rates;
    for (size_t i = 0; i < w.size(); i++) {
      double step = advance(w.slot(TDP_SLOT_STEP, i));
      double clr = o.lr / (1 + (step - 1) * o.lr_decay);
      if (w.grads[i].layout() != c10::kStrided) {
        sparse_update(w.params[i], w.slot(TDP_SLOT_1, i), w.grads[i], clr);
        continue;
      }
      slices.push_back({w.params[i], w.grads[i], {w.slot(TDP_SLOT_1, i), at::Tensor(), at::Tensor()}});
      rates.push_back(clr);
    }
    elementwise(slices, [&](size_t i, auto &operands) {
      auto x = operands;
      if (maximize) x.g = negated(x.g);
      if (o.weight_decay != 0) x.g = axpy(x.g, x.p, o.weight_decay);
      as_real(x);
      addcmul_(x.s[0], x.g, x.g, 1);
      auto std = root(x.s[0]);
      plus_(std, o.eps);
      addcdiv_(x.p, x.g, std, -rates[i]);
    });
  }

  void foreach (const OptimWork &w) const {
    if (w.sparse) return single(w);
    for (Batch &b : batches(w, {TDP_SLOT_1})) {
      if (w.complex) as_real(b);
      Tensors grads = b.grads;
      if (maximize) grads = at::_foreach_neg(grads);
      advance_all(b.steps);
      if (o.weight_decay != 0) {
        if (maximize)
          at::_foreach_add_(grads, b.params, o.weight_decay);
        else
          grads = at::_foreach_add(grads, b.params, o.weight_decay);
      }
      std::vector<double> minus_clr;
      for (const at::Tensor &t : b.steps) minus_clr.push_back(-o.lr / (1 + (t.item<double>() - 1) * o.lr_decay));
      at::_foreach_addcmul_(b.s[0], grads, grads, 1);
      Tensors std = at::_foreach_sqrt(b.s[0]);
      at::_foreach_add_(std, o.eps);
      if (o.weight_decay != 0 || maximize)
        at::_foreach_mul_(grads, scalars(minus_clr));
      else
        grads = at::_foreach_mul(grads, scalars(minus_clr));
      at::_foreach_addcdiv_(b.params, grads, std);
    }
  }

  void fused(const OptimWork &w, const at::Tensor &grad_scale, const at::Tensor &found_inf) const {
    check_fused(w, false);
    if (w.sparse || w.complex) throw Error(TDP_ERR_VALUE, "`fused` does not support sparse grad or complex param");
    if (skipped(found_inf)) return;
    for (Batch &b : batches(w, {TDP_SLOT_1})) {
      const c10::Device device = b.params[0].device();
      auto inf = on_device(found_inf, device);
      advance_all(b.steps);
      at::_fused_adagrad_(b.params, b.grads, b.s[0], b.steps, o.lr, o.lr_decay, o.weight_decay, o.eps, maximize,
                          on_device(grad_scale, device), inf);
      take_back_steps(b.steps, inf);
    }
  }
};

// ---- LARS and LAMB: rates per layer, for large batches ----

// |a| and |b| of every pair as vectors of float, without waiting for the device.
std::pair<at::Tensor, at::Tensor> norms(const Tensors &a, const Tensors &b) {
  auto stacked = [](const Tensors &list) {
    Tensors n = at::_foreach_norm(list, 2);
    for (at::Tensor &t : n) t = t.to(c10::kFloat);
    return at::stack(n);
  };
  return {stacked(a), stacked(b)};
}

// numerator/denominator where both norms are positive, otherwise 1.
at::Tensor where_positive(const at::Tensor &ratio, const at::Tensor &a, const at::Tensor &b) {
  return at::where(a.gt(0).logical_and_(b.gt(0)), ratio, at::ones_like(ratio));
}

Tensors unbind_to(const at::Tensor &ratios, c10::ScalarType dtype) { return ratios.to(dtype).unbind(0); }

std::vector<double> on_host(const Tensors &numbers) {
  std::vector<double> out;
  for (const at::Tensor &t : numbers) out.push_back(t.item<double>());
  return out;
}

struct LARS {
  const Options &o;
  bool maximize = flag(o, TDP_OPTIM_MAXIMIZE), nesterov = flag(o, TDP_OPTIM_NESTEROV),
       adapt = !flag(o, TDP_OPTIM_NO_ADAPT);

  void run(const OptimWork &w) const {
    refuse_sparse(w, "LARS does not support sparse gradients");
    for (Batch &b : batches(w, {TDP_SLOT_1})) {
      Tensors trust;
      if (adapt) {
        auto [pn, gn] = norms(b.params, b.grads);
        at::Tensor ratio = pn.mul(o.trust).div_(gn.add(pn, o.weight_decay).add_(o.eps));
        trust = unbind_to(where_positive(ratio, pn, gn), b.params[0].scalar_type());
      }
      if (b.params[0].is_cpu())
        step_cpu(w, b, trust);
      else
        step_device(w, b, trust);
    }
  }

  void step_cpu(const OptimWork &w, const Batch &b, const Tensors &trust) const {
    std::vector<Slice> slices(b.index.size());
    std::vector<char> first(b.index.size());
    for (size_t i = 0; i < slices.size(); i++) {
      slices[i].p = b.params[i];
      slices[i].g = b.grads[i];
      if (o.momentum == 0) continue;
      at::Tensor &buf = w.slot(TDP_SLOT_1, b.index[i]);
      first[i] = !buf.defined();
      if (first[i]) buf = at::empty_like(b.grads[i].detach());
      slices[i].s[0] = buf;
    }
    const std::vector<double> ratio = on_host(trust);
    elementwise(slices, [&](size_t i, auto &x) {
      auto g = x.g;
      if (maximize) g = negated(g);
      if (o.weight_decay != 0) g = axpy(g, x.p, o.weight_decay);
      if (adapt) g = mul(g, ratio[i]);
      if (o.momentum != 0) {
        if (first[i]) {
          copy_(x.s[0], g);
        } else {
          mul_(x.s[0], o.momentum);
          axpy_(x.s[0], g, 1 - o.dampening);
        }
        g = nesterov ? axpy(g, x.s[0], o.momentum) : x.s[0];
      }
      axpy_(x.p, g, -o.lr);
    });
  }

  void step_device(const OptimWork &w, Batch &b, const Tensors &trust) const {
    Tensors g = maximize ? at::_foreach_neg(b.grads) : b.grads;
    if (o.weight_decay != 0) g = at::_foreach_add(g, b.params, o.weight_decay);
    if (adapt) g = at::_foreach_mul(g, trust);
    if (o.momentum != 0) {
      for (size_t i = 0; i < g.size(); i++) {
        at::Tensor &buf = w.slot(TDP_SLOT_1, b.index[i]);
        if (buf.defined())
          mul_(buf, o.momentum), buf.add_(g[i], 1 - o.dampening);
        else
          buf = g[i].clone();
        b.s[0][i] = buf;
      }
      g = nesterov ? at::_foreach_add(g, b.s[0], o.momentum) : b.s[0];
    }
    at::_foreach_add_(b.params, g, -o.lr);
  }
};

struct LAMB {
  const Options &o;
  bool maximize = flag(o, TDP_OPTIM_MAXIMIZE), adapt = !flag(o, TDP_OPTIM_NO_ADAPT);

  void run(const OptimWork &w) const {
    refuse_sparse(w, "LAMB does not support sparse gradients");
    if (w.complex) throw Error(TDP_ERR_VALUE, "LAMB does not support complex parameters");
    init_state(w, {TDP_SLOT_1, TDP_SLOT_2}, false);
    for (Batch &b : batches(w, {TDP_SLOT_1, TDP_SLOT_2})) {
      Tensors updates;
      std::vector<double> bias1, root2;
      std::vector<Slice> slices;
      for (size_t i = 0; i < b.params.size(); i++) {
        double step = advance(b.steps[i]);
        bias1.push_back(1 - std::pow(o.beta1, step));
        root2.push_back(std::sqrt(1 - std::pow(o.beta2, step)));
        updates.push_back(at::empty_like(b.params[i].detach()));
        slices.push_back({b.params[i], b.grads[i], {b.s[0][i], b.s[1][i], updates[i]}});
      }
      elementwise(slices, [&](size_t i, auto &x) {
        auto &[avg, sq, update] = x.s;
        auto g = x.g;
        if (maximize) g = negated(g);
        lerp_(avg, g, 1 - o.beta1);
        mul_(sq, o.beta2);
        addcmul_(sq, g, g, 1 - o.beta2);
        auto denom = root(sq);
        div_(denom, root2[i]);
        plus_(denom, o.eps);
        quotient_to(update, avg, denom);
        div_(update, bias1[i]);
        if (o.weight_decay != 0) axpy_(update, x.p, o.weight_decay);
      });
      Tensors trust;
      if (adapt) {
        auto [pn, un] = norms(b.params, updates);
        trust = unbind_to(where_positive(pn / un, pn, un), b.params[0].scalar_type());
      }
      if (!b.params[0].is_cpu()) {
        if (adapt) at::_foreach_mul_(updates, trust);
        at::_foreach_add_(b.params, updates, -o.lr);
        continue;
      }
      const std::vector<double> ratio = on_host(trust);
      for (size_t i = 0; i < slices.size(); i++) slices[i] = {b.params[i], updates[i], {}};
      elementwise(slices, [&](size_t i, auto &x) {
        if (adapt) mul_(x.g, ratio[i]);
        axpy_(x.p, x.g, -o.lr);
      });
    }
  }
};

// What Python chooses when neither foreach nor fused is given.
int32_t choose(const OptimWork &w, int32_t implementation) {
  if (implementation != TDP_IMPL_DEFAULT) return implementation;
  for (const at::Tensor &p : w.params)
    if (!p.is_cuda()) return TDP_IMPL_SINGLE;
  return TDP_IMPL_FOREACH;
}

template <typename A>
void run_without_fused(const A &algorithm, const OptimWork &w, int32_t implementation, const char *name) {
  if (implementation == TDP_IMPL_FUSED)
    throw Error(TDP_ERR_UNSUPPORTED, std::string(name) + " has no fused implementation");
  if (implementation == TDP_IMPL_FOREACH)
    algorithm.foreach (w);
  else
    algorithm.single(w);
}

template <typename A>
void run_any(const A &algorithm, const OptimWork &w, int32_t implementation, const at::Tensor &grad_scale,
             const at::Tensor &found_inf) {
  if (implementation == TDP_IMPL_FUSED)
    algorithm.fused(w, grad_scale, found_inf);
  else if (implementation == TDP_IMPL_FOREACH)
    algorithm.foreach (w);
  else
    algorithm.single(w);
}

}  // namespace

void optim_run(int32_t algorithm, OptimWork &w, const tdp_optim_options &o, const at::Tensor &grad_scale,
               const at::Tensor &found_inf) {
  const int32_t implementation = choose(w, o.implementation);
  if ((grad_scale.defined() || found_inf.defined()) && implementation != TDP_IMPL_FUSED)
    throw Error(TDP_ERR_VALUE, "Expected grad_scale and found_inf to be None");
  switch (algorithm) {
    case TDP_OPTIM_SGD:
      if (implementation == TDP_IMPL_FUSED) check_fused(w, true);
      return run_any(SGD{o}, w, implementation, grad_scale, found_inf);
    case TDP_OPTIM_ADAM:
      return run_any(Adam{o}, w, implementation, grad_scale, found_inf);
    case TDP_OPTIM_ADAGRAD:
      return run_any(Adagrad{o}, w, implementation, grad_scale, found_inf);
    case TDP_OPTIM_RMSPROP:
      return run_without_fused(RMSprop{o}, w, implementation, "RMSprop");
    case TDP_OPTIM_LARS:
      if (implementation == TDP_IMPL_FUSED) throw Error(TDP_ERR_UNSUPPORTED, "LARS has no fused implementation");
      return LARS{o}.run(w);
    case TDP_OPTIM_LAMB:
      if (implementation == TDP_IMPL_FUSED) throw Error(TDP_ERR_UNSUPPORTED, "LAMB has no fused implementation");
      return LAMB{o}.run(w);
  }
  throw Error(TDP_ERR_VALUE, "unknown optimizer " + std::to_string(algorithm));
}

}  // namespace tdp
