// Communication hooks: what happens to a bucket of gradients instead of a plain all-reduce.
#include "group.h"

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/distributed/c10d/default_comm_hooks.hpp>
#include <torch/csrc/distributed/c10d/logger.hpp>
#include <torch/csrc/distributed/c10d/reducer.hpp>

#include "reducer.h"

#include <cstdlib>
#include <memory>

using tdp::first_tensor;
using tdp::group_of;
using tdp::guard;
using tdp::need;
using tdp::need_defined;
using FuturePtr = c10::intrusive_ptr<c10::ivalue::Future>;

struct tdp_bucket {
  c10d::GradBucket *bucket;
};

struct tdp_future {
  FuturePtr future;
};

namespace {

[[noreturn]] void fail(char *text) {
  std::string message = text;
  std::free(text);
  throw std::runtime_error(message);
}

FuturePtr completed(const at::Tensor &value) {
  auto f = c10::make_intrusive<c10::ivalue::Future>(
      c10::TensorType::get(), value.is_cuda() ? std::vector<c10::Device>{value.device()} : std::vector<c10::Device>{});
  f->markCompleted(value);
  return f;
}

class GoHook : public c10d::CommHookInterface {
 public:
  GoHook(tdp_hook_fn fn, uintptr_t state) : fn_(fn), state_(state) {}

  FuturePtr runHook(c10d::GradBucket &bucket) override {
    tdp_bucket handle{&bucket};
    tdp_future *out = nullptr;
    if (char *error = fn_(state_, &handle, &out)) fail(error);
    FuturePtr future = std::move(out->future);
    delete out;
    // The reducer would copy whatever it is given: a result of another size must not pass.
    return future->then(
        [wanted = bucket.getBuffer().numel()](c10::ivalue::Future &f) {
          at::Tensor value = first_tensor(f.value());
          if (value.numel() != wanted)
            throw tdp::Error(TDP_ERR_VALUE, "the communication hook gave " + std::to_string(value.numel()) +
                                                " elements for a bucket of " + std::to_string(wanted));
          return c10::IValue(value);
        },
        c10::TensorType::get());
  }

  at::Tensor parseHookResult(const c10::IValue &result) override { return first_tensor(result); }

 private:
  tdp_hook_fn fn_;
  uintptr_t state_;
};

// c10d has this for half precision only.
class BF16Hook : public c10d::CppCommHookInterface<c10::intrusive_ptr<c10d::ProcessGroup>> {
 public:
  using CppCommHookInterface::CppCommHookInterface;

  FuturePtr runHook(c10d::GradBucket &bucket) override {
    at::NoGradGuard no_grad;
    std::vector<at::Tensor> small{bucket.getBuffer().to(c10::kBFloat16)};
    small[0].div_(state_->getSize());
    auto work = state_->allreduce(small);
    return work->getFuture()->then(
        [buffer = bucket.getBuffer()](c10::ivalue::Future &f) {
          at::NoGradGuard no_grad;
          at::Tensor out = buffer;
          return c10::IValue(out.copy_(first_tensor(f.value())));
        },
        c10::TensorType::get());
  }
};

}  // namespace

at::Tensor tdp::first_tensor(const c10::IValue &v) {
  if (v.isTensor()) return v.toTensor();
  if (v.isTensorList() && v.toTensorList().size() == 1) return v.toTensorList().get(0);
  throw Error(TDP_ERR_VALUE, "a communication hook's future must hold one tensor");
}

extern "C" {

tdp_error *tdp_reducer_builtin_hook(tdp_reducer *r, tdp_pg *pg, int32_t hook, const char *name) {
  return guard([&] {
    need(r, "the reducer");
    switch (hook) {
      case TDP_HOOK_ALLREDUCE:
        r->reducer->register_builtin_comm_hook(c10d::BuiltinCommHookType::ALLREDUCE);
        break;
      case TDP_HOOK_FP16:
        r->reducer->register_builtin_comm_hook(c10d::BuiltinCommHookType::FP16_COMPRESS);
        break;
      case TDP_HOOK_BF16:
        r->reducer->register_comm_hook(std::make_unique<BF16Hook>(group_of(pg)));
        break;
      default:
        throw tdp::Error(TDP_ERR_VALUE, "unknown communication hook number " + std::to_string(hook));
    }
    r->logger->set_comm_hook(name);
  });
}

tdp_error *tdp_reducer_hook(tdp_reducer *r, tdp_hook_fn fn, uintptr_t state, const char *name) {
  return guard([&] {
    need(r, "the reducer")->reducer->register_comm_hook(std::make_unique<GoHook>(fn, state));
    r->logger->set_comm_hook(name);
  });
}

tdp_error *tdp_bucket_info(tdp_bucket *b, int32_t *index, int32_t *is_last, int32_t *num_gradients) {
  return guard([&] {
    auto &bucket = *need(b, "the bucket")->bucket;
    *index = static_cast<int32_t>(bucket.getIndex());
    *is_last = bucket.isLast() ? 1 : 0;
    *num_gradients = static_cast<int32_t>(bucket.getParameters().size());
  });
}

tdp_error *tdp_bucket_buffer(tdp_bucket *b, tdp_tensor *out) {
  return guard([&] { *out = new at::Tensor(need(b, "the bucket")->bucket->getBuffer()); });
}

tdp_error *tdp_bucket_gradients(tdp_bucket *b, tdp_tensor *gradients, tdp_tensor *parameters) {
  return guard([&] {
    auto &bucket = *need(b, "the bucket")->bucket;
    auto grads = bucket.getGradients();
    auto params = bucket.getParameters();
    for (size_t i = 0; i < grads.size(); i++) gradients[i] = new at::Tensor(grads[i]);
    for (size_t i = 0; i < params.size(); i++) parameters[i] = new at::Tensor(params[i]);
  });
}

tdp_error *tdp_future_ready(tdp_tensor value, tdp_future **out) {
  return guard([&] { *out = new tdp_future{completed(need_defined(value, "the hook's result"))}; });
}

tdp_error *tdp_future_of_work(tdp_work *w, tdp_future **out) {
  return guard(
      [&] { *out = new tdp_future{need(need(w, "the collective")->work.get(), "the collective")->getFuture()}; });
}

tdp_error *tdp_future_then(tdp_future *f, tdp_then_fn fn, uintptr_t state, tdp_future **out) {
  return guard([&] {
    auto next = need(f, "the future")
                    ->future->then(
                        [fn, state](c10::ivalue::Future &done) -> c10::IValue {
                          at::Tensor in = first_tensor(done.value());  // throws the collective's own error, if any
                          tdp_tensor result = nullptr;
                          if (char *error = fn(state, new at::Tensor(in), &result)) fail(error);
                          std::unique_ptr<at::Tensor> value(result);
                          return *value;
                        },
                        c10::TensorType::get());
    *out = new tdp_future{std::move(next)};
  });
}

tdp_error *tdp_future_free(tdp_future *f) {
  return guard([&] { delete f; });
}

}  // extern "C"
