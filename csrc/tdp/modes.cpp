// Modes of the reducer that PyTorch has in Python: mixed precision, a delayed reduction, and optimizers that step
// inside the backward.
#include "optim_internal.h"
#include "reducer.h"

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/utils/lambda_post_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <string>
#include <unordered_map>
#include <utility>

using tdp::guard;
using tdp::need;
using tdp::need_defined;
using FuturePtr = c10::intrusive_ptr<c10::ivalue::Future>;
using torch::autograd::Node;
using torch::autograd::variable_list;

namespace tdp {

// Takes a function to a parameter's gradient, to be called each time it has been accumulated. The node must be kept for
// as long as that is wanted.
template <typename F>
std::shared_ptr<Node> after_accumulation(const at::Tensor &param, F fn) {
  auto node = torch::autograd::impl::grad_accumulator(param);
  node->add_post_hook(std::make_unique<torch::autograd::utils::LambdaPostHook>(
      [fn = std::move(fn)](const variable_list &outputs, const variable_list &) {
        fn();
        return outputs;
      }));
  return node;
}

// Parameters change their type from a forward to the end of its backward: what autograd saved of them is themselves, so
// that both must see the same type.
class MixedPrecision {
 public:
  MixedPrecision(std::vector<at::Tensor> trained, const std::vector<at::Tensor> &frozen, c10::ScalarType type)
      : type_(type), trained_(trained.size()), params_(std::move(trained)) {
    params_.insert(params_.end(), frozen.begin(), frozen.end());
    for (size_t i = 0; i < params_.size(); i++) index_[params_[i].unsafeGetTensorImpl()] = i;
  }

  void lower(const std::weak_ptr<c10d::Reducer> &reducer) {
    at::NoGradGuard no_grad;
    restore();
    full_.resize(params_.size());
    for (size_t i = 0; i < params_.size(); i++) {
      at::Tensor &p = params_[i];
      if (!p.is_floating_point()) continue;
      full_[i] = p.variable_data();
      p.set_data(full_[i].to(type_));
      // The backward adds to what has been accumulated in its own type.
      at::Tensor &grad = p.mutable_grad();
      if (grad.defined()) grad = grad.to(type_);
      // The reducer's own hook hangs on the accumulator of the other type.
      if (i < trained_ && p.scalar_type() != full_[i].scalar_type())
        nodes_.push_back(after_accumulation(p, [reducer, i] {
          if (auto r = reducer.lock()) r->autograd_hook(i);
        }));
    }
  }

  void restore() {
    at::NoGradGuard no_grad;
    for (size_t i = 0; i < full_.size(); i++) restore(i);
    full_.clear();
    nodes_.clear();
  }

  void restore(const at::Tensor &param) {
    auto found = index_.find(param.unsafeGetTensorImpl());
    if (found != index_.end() && found->second < full_.size()) restore(found->second);
  }

 private:
  void restore(size_t i) {
    if (!full_[i].defined()) return;
    at::Tensor &p = params_[i];
    p.set_data(full_[i]);
    at::Tensor &grad = p.mutable_grad();
    if (grad.defined()) grad = grad.to(full_[i].scalar_type());
    full_[i].reset();
  }

  c10::ScalarType type_;
  size_t trained_;
  std::vector<at::Tensor> params_;  // the trained ones in the reducer's order, then the frozen ones
  std::vector<at::Tensor> full_;    // what the parameters were, while they are lowered
  std::vector<std::shared_ptr<Node>> nodes_;
  std::unordered_map<const c10::TensorImpl *, size_t> index_;
};

// The reduction of a bucket in mixed precision. Its parameters have all got their gradients: nothing of the backward
// needs them any more, and the full precision's gradient can take what is reduced.
class MixedHook : public c10d::CommHookInterface {
 public:
  MixedHook(std::shared_ptr<Live> live, std::shared_ptr<MixedPrecision> mixed, c10::ScalarType reduce)
      : live_(std::move(live)), mixed_(std::move(mixed)), reduce_(reduce) {}

  FuturePtr runHook(c10d::GradBucket &bucket) override {
    at::NoGradGuard no_grad;
    if (bucket.getBuffer().scalar_type() != reduce_) {
      auto wire = bucket.getBuffer().to(reduce_);
      bucket.setBuffer(wire);
    }
    for (auto &p : bucket.getParameters()) mixed_->restore(p);
    return live_->reducer.lock()->run_allreduce_hook(bucket)->then(
        [size = live_->group->getSize()](c10::ivalue::Future &done) {
          at::NoGradGuard no_grad;
          return c10::IValue(first_tensor(done.value()).div_(size));
        },
        c10::TensorType::get());
  }

  at::Tensor parseHookResult(const c10::IValue &result) override { return first_tensor(result); }

 private:
  std::shared_ptr<Live> live_;
  std::shared_ptr<MixedPrecision> mixed_;
  c10::ScalarType reduce_;
};

// Steps a bucket's parameters when it is reduced, on whichever thread that is noticed.
class OptimHook : public c10d::CommHookInterface {
 public:
  OptimHook(std::shared_ptr<Live> live, tdp_optim *optim) : live_(std::move(live)), optim_(optim) {}

  FuturePtr runHook(c10d::GradBucket &bucket) override {
    std::vector<int64_t> offsets;
    if (!bucket.getBuffer().is_sparse())
      for (auto &g : bucket.getGradients()) offsets.push_back(g.storage_offset());
    return live_->reducer.lock()->run_allreduce_hook(bucket)->then(
        [optim = optim_, params = bucket.getParameters(), offsets = std::move(offsets),
         size = live_->group->getSize()](c10::ivalue::Future &done) {
          at::NoGradGuard no_grad;
          at::Tensor mean = first_tensor(done.value()).div_(size);
          for (size_t i = 0; i < params.size(); i++) {
            auto &p = params[i];
            if (!optim_has(optim, p)) continue;
            if (mean.is_sparse()) {
              optim_step_param(optim, p, mean);
              continue;
            }
            // The bucket keeps a gradient in its parameter's layout, channels-last for instance.
            auto flat = mean.slice(0, offsets[i], offsets[i] + p.numel());
            optim_step_param(optim, p,
                             p.is_non_overlapping_and_dense()
                                 ? flat.as_strided(p.sizes(), p.strides(), flat.storage_offset())
                                 : flat.view(p.sizes()));
          }
          return c10::IValue(mean);
        },
        c10::TensorType::get());
  }

  at::Tensor parseHookResult(const c10::IValue &result) override { return first_tensor(result); }

 private:
  std::shared_ptr<Live> live_;
  tdp_optim *optim_;
};

// Gradients that are views of one buffer, which is reduced when one parameter's gradient comes.
class DelayedReduction : public std::enable_shared_from_this<DelayedReduction> {
 public:
  DelayedReduction(std::shared_ptr<Live> live, std::vector<at::Tensor> params, std::vector<std::string> names,
                   at::Tensor trigger, std::string trigger_name)
      : live_(std::move(live)),
        params_(std::move(params)),
        names_(std::move(names)),
        trigger_(std::move(trigger)),
        trigger_name_(std::move(trigger_name)) {
    at::NoGradGuard no_grad;
    int64_t total = 0;
    for (auto &p : params_) {
      if (p.scalar_type() != params_[0].scalar_type())
        throw Error(TDP_ERR_VALUE, "parameters whose reduction is delayed must be of one dtype: " + names_[0] + " is " +
                                       c10::toString(params_[0].scalar_type()) + ", " + names_[views_.size()] + " is " +
                                       c10::toString(p.scalar_type()));
      total += p.numel();
    }
    buffer_ = at::zeros({total}, params_[0].options().requires_grad(false));
    int64_t at = 0;
    for (auto &p : params_) {
      views_.push_back(buffer_.narrow(0, at, p.numel()).view(p.sizes()));
      at += p.numel();
    }
  }

  ~DelayedReduction() { trigger_.remove_hook(hook_); }

  void listen() {
    auto self = weak_from_this();
    hook_ = trigger_.register_hook([self](const at::Tensor &) {
      if (auto s = self.lock()) s->start();
    });
    for (size_t i = 0; i < params_.size(); i++)
      nodes_.push_back(after_accumulation(params_[i], [self, i] {
        auto s = self.lock();
        if (s != nullptr && s->work_ != nullptr) s->late_ = s->names_[i];
      }));
  }

  void prepare(bool sync) {
    at::NoGradGuard no_grad;
    armed_ = sync;
    work_.reset();
    late_.clear();
    for (size_t i = 0; i < params_.size(); i++) {
      at::Tensor &grad = params_[i].mutable_grad();
      if (grad.defined()) continue;
      grad = views_[i];
      grad.zero_();
    }
  }

  void finish() {
    if (!std::exchange(armed_, false)) return;
    if (work_ == nullptr)
      throw Error(TDP_ERR_VALUE, "the backward did not compute the gradient of " + trigger_name_ +
                                     ", which the delayed reduction waits for: its gradients were not averaged");
    std::exchange(work_, nullptr)->wait();
    if (!late_.empty())
      throw Error(TDP_ERR_VALUE, "the gradient of " + late_ + " came after that of " + trigger_name_ +
                                     ", which starts the delayed reduction: it was not averaged; wait for a parameter "
                                     "whose gradient comes later");
  }

 private:
  void start() {
    if (!armed_ || work_ != nullptr) return;
    at::NoGradGuard no_grad;
    for (size_t i = 0; i < params_.size(); i++) {
      at::Tensor &grad = params_[i].mutable_grad();
      if (!grad.defined() || grad.is_alias_of(views_[i])) continue;
      views_[i].copy_(grad);
      grad = views_[i];
    }
    std::vector<at::Tensor> wire{buffer_.div_(live_->group->getSize())};
    work_ = live_->group->allreduce(wire);
  }

  std::shared_ptr<Live> live_;
  std::vector<at::Tensor> params_;
  std::vector<std::string> names_;
  at::Tensor trigger_;
  std::string trigger_name_;
  at::Tensor buffer_;
  std::vector<at::Tensor> views_;
  std::vector<std::shared_ptr<Node>> nodes_;
  unsigned hook_ = 0;
  bool armed_ = false;
  c10::intrusive_ptr<c10d::Work> work_;
  std::string late_;
};

void modes_before_forward(tdp_reducer &r, bool sync) {
  if (r.mixed != nullptr) r.mixed->lower(r.reducer);
  if (r.delayed != nullptr) r.delayed->prepare(sync);
}

void modes_restore(tdp_reducer &r) {
  if (r.mixed != nullptr) r.mixed->restore();
}

void modes_after_backward(tdp_reducer &r) {
  modes_restore(r);
  r.reducer->check_finalized();
  if (r.delayed != nullptr) r.delayed->finish();
  if (r.synced)
    for (auto &p : r.stepped) p.mutable_grad().reset();
}

}  // namespace tdp

extern "C" {

tdp_error *tdp_reducer_mixed(tdp_reducer *r, const tdp_tensor *frozen, int32_t n, int32_t param, int32_t reduce) {
  return guard([&] {
    auto type = static_cast<c10::ScalarType>(param);
    auto mixed = std::make_shared<tdp::MixedPrecision>(need(r, "the reducer")->params,
                                                       tdp::tensors(frozen, n, "a frozen parameter"), type);
    r->reducer->register_comm_hook(
        std::make_unique<tdp::MixedHook>(r->live, mixed, static_cast<c10::ScalarType>(reduce)));
    r->reducer->set_mixed_precision_param_dtype(type);
    // That alone leaves the first buckets' views on memory of the old type, and the first reduction without gradients.
    r->reducer->initialize_buckets(r->buckets);
    r->logger->set_comm_hook("_reducer_allreduce_and_upcast_hook");
    r->mixed = std::move(mixed);
  });
}

tdp_error *tdp_reducer_delay(tdp_reducer *r, const tdp_tensor *params, const char *const *names, int32_t n,
                             tdp_tensor trigger, const char *trigger_name) {
  return guard([&] {
    std::vector<std::string> list(names, names + n);
    auto delayed = std::make_shared<tdp::DelayedReduction>(
        need(r, "the reducer")->live, tdp::tensors(params, n, "a parameter"), std::move(list),
        need_defined(trigger, "the parameter that starts the delayed reduction"), trigger_name);
    delayed->listen();
    r->delayed = std::move(delayed);
  });
}

tdp_error *tdp_reducer_optim(tdp_reducer *r, tdp_optim *o) {
  return guard([&] {
    need(o, "the optimizer");
    std::vector<at::Tensor> stepped;
    for (auto &p : need(r, "the reducer")->params)
      if (tdp::optim_has(o, p)) stepped.push_back(p);
    if (stepped.empty()) throw tdp::Error(TDP_ERR_VALUE, "the optimizer has none of the model's parameters");
    r->reducer->register_comm_hook(std::make_unique<tdp::OptimHook>(r->live, o));
    // Spares the way back from the buckets; parameters of no optimizer need it.
    if (stepped.size() == r->params.size()) r->reducer->set_optimizer_in_backward();
    r->logger->set_comm_hook("apply_optim_in_backward_hook");
    r->stepped = std::move(stepped);
  });
}

tdp_error *tdp_set_dtype(const tdp_tensor *list, int32_t n, int32_t dtype) {
  return guard([&] {
    at::NoGradGuard no_grad;
    for (auto &t : tdp::tensors(list, n, "a tensor"))
      t.set_data(t.variable_data().to(static_cast<c10::ScalarType>(dtype)));
  });
}

}  // extern "C"
