#include "reducer.h"

#include "store.h"

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/distributed/c10d/logger.hpp>
#include <torch/csrc/distributed/c10d/reducer.hpp>

#include <algorithm>

using tdp::group_of;
using tdp::guard;
using tdp::need;
using tdp::need_defined;

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Stands between the model's outputs and the loss. Its backward runs first: there the static graph's first iteration
// asks for the reduction at the end. Undefined gradients, of outputs that the loss does not use, pass as they are.
class Sink : public torch::autograd::Function<Sink> {
 public:
  struct State : torch::CustomClassHolder {
    std::weak_ptr<c10d::Reducer> reducer;
    bool static_graph = false;
    std::shared_ptr<bool> delay_queued;
  };

  static variable_list forward(AutogradContext *ctx, at::TensorList outputs, const c10::intrusive_ptr<State> &state) {
    ctx->set_materialize_grads(false);
    ctx->saved_data["state"] = c10::IValue::make_capsule(state);
    variable_list clones;
    for (auto &t : outputs) clones.push_back(t.clone());
    return clones;
  }

  static variable_list backward(AutogradContext *ctx, variable_list grads) {
    auto state = c10::static_intrusive_pointer_cast<State>(ctx->saved_data["state"].toCapsule());
    if (state->static_graph && !*state->delay_queued) {
      *state->delay_queued = true;
      torch::autograd::Engine::get_default_engine().queue_callback([weak = state->reducer] {
        if (auto reducer = weak.lock()) reducer->delay_all_reduce();
      });
    }
    grads.emplace_back();  // the state's
    return grads;
  }
};

}  // namespace

extern "C" {

tdp_error *tdp_verify_param_counts(tdp_pg *pg, tdp_device device, int32_t n, int64_t *counts) {
  return guard([&] {
    at::NoGradGuard no_grad;
    auto &group = group_of(pg);
    std::vector<at::Tensor> mine{
        at::full({1}, static_cast<int64_t>(n), at::TensorOptions().dtype(c10::kLong).device(tdp::to_device(device)))};
    std::vector<std::vector<at::Tensor>> all(1);
    for (int i = 0; i < group->getSize(); i++) all[0].push_back(at::empty_like(mine[0]));
    group->allgather(all, mine)->wait();
    for (int i = 0; i < group->getSize(); i++) counts[i] = all[0][i].item().toLong();
  });
}

tdp_error *tdp_verify_param_shapes(tdp_pg *pg, const tdp_tensor *params, int32_t n, int32_t *mismatch) {
  return guard([&] {
    at::NoGradGuard no_grad;
    *mismatch = -1;
    auto list = tdp::tensors(params, n, "a parameter");
    std::vector<int64_t> mine;
    for (auto &p : list) {
      mine.insert(mine.end(), p.sizes().begin(), p.sizes().end());
      mine.insert(mine.end(), p.strides().begin(), p.strides().end());
    }
    auto theirs = at::tensor(mine, at::TensorOptions().dtype(c10::kLong));
    if (n > 0) theirs = theirs.to(list[0].device());
    std::vector<at::Tensor> wire{theirs};
    group_of(pg)->broadcast(wire)->wait();
    auto host = wire[0].to(c10::kCPU);
    const int64_t *rank0 = host.const_data_ptr<int64_t>();
    size_t at = 0;
    for (int32_t i = 0; i < n && *mismatch < 0; i++) {
      for (int64_t k = 0; k < 2 * list[i].dim(); k++, at++)
        if (rank0[at] != mine[at]) *mismatch = i;
    }
  });
}

tdp_error *tdp_reducer_new(tdp_pg *pg, const tdp_tensor *params, int32_t n, const tdp_reducer_options *o,
                           tdp_reducer **out) {
  return guard([&] {
    auto list = tdp::tensors(params, n, "a parameter");
    std::vector<bool> sparse(n, false);
    if (o->expect_sparse != nullptr)
      for (int32_t i = 0; i < n; i++) sparse[i] = o->expect_sparse[i] != 0;
    std::unordered_map<size_t, std::string> names;
    for (int32_t i = 0; i < n; i++) names[i] = o->names[i];
    std::vector<size_t> limits(o->bucket_limits, o->bucket_limits + o->num_bucket_limits);

    // Reversed: gradients come roughly in the opposite order of the forward's parameters.
    auto [buckets, bucket_limits] = c10d::compute_bucket_assignment_by_size(list, limits, sparse);
    std::reverse(buckets.begin(), buckets.end());

    auto handle = std::make_unique<tdp_reducer>();
    handle->params = list;
    handle->buckets = buckets;
    handle->find_unused = o->find_unused != 0;
    handle->static_graph = o->static_graph != 0;
    handle->reducer = std::make_shared<c10d::Reducer>(
        list, std::move(buckets), group_of(pg), sparse, o->bucket_bytes, o->find_unused != 0,
        o->gradient_as_bucket_view != 0, std::move(names), o->first_bucket_bytes,
        /*skip_all_reduce_unused_params=*/false, /*use_python_reducer=*/false, std::vector<int64_t>{});
    handle->live->reducer = handle->reducer;
    handle->live->group = group_of(pg);
    handle->logger = std::make_shared<c10d::Logger>(handle->reducer);
    handle->reducer->set_logger(handle->logger);
    std::vector<int> device_ids;
    if (o->device_index >= 0) device_ids.push_back(o->device_index);
    handle->logger->set_construction_data_and_log(o->module_name, device_ids, o->device_index,
                                                  o->broadcast_buffers != 0, o->has_sync_bn != 0, o->static_graph != 0);
    if (o->static_graph) {
      handle->reducer->set_static_graph();
      handle->logger->set_static_graph();
    }
    *out = handle.release();
  });
}

tdp_error *tdp_reducer_pre_forward(tdp_reducer *r, int32_t sync, tdp_pg *join, tdp_device device,
                                   int32_t divide_by_size, int32_t *grad_enabled, int32_t *rebuilt) {
  return guard([&] {
    need(r, "the reducer");
    *rebuilt = 0;
    *grad_enabled = at::GradMode::is_enabled() ? 1 : 0;
    r->synced = *grad_enabled && sync;
    if (r->synced) {
      r->logger->set_runtime_stats_and_log();
      r->reducer->prepare_for_forward();
    }
    if (join != nullptr) {
      r->logger->set_uneven_input_join();
      std::vector<at::Tensor> one{at::ones({1}, at::TensorOptions().device(tdp::to_device(device)))};
      r->reducer->set_forward_pass_work_handle(group_of(join)->allreduce(one), divide_by_size != 0);
    }
    if (*grad_enabled) *rebuilt = r->reducer->rebuild_buckets() ? 1 : 0;
    tdp::modes_before_forward(*r, r->synced);
  });
}

tdp_error *tdp_reducer_post_forward(tdp_reducer *r, const tdp_tensor *outputs, int32_t n) {
  return guard([&] {
    need(r, "the reducer");
    bool search = r->find_unused && !r->static_graph;
    r->reducer->prepare_for_backward(search ? tdp::tensors(outputs, n, "an output") : std::vector<at::Tensor>{});
    if (!search && !(r->static_graph && !*r->delay_queued)) return;
    variable_list with_history;
    for (int32_t i = 0; i < n; i++)
      if (need_defined(outputs[i], "an output").grad_fn() != nullptr) with_history.push_back(*outputs[i]);
    if (with_history.empty()) return;
    auto state = c10::make_intrusive<Sink::State>();
    state->reducer = r->reducer;
    state->static_graph = r->static_graph;
    state->delay_queued = r->delay_queued;
    auto sunk = Sink::apply(at::TensorList(with_history), state);
    for (int32_t i = 0, k = 0; i < n; i++)
      if (outputs[i]->grad_fn() != nullptr) *outputs[i] = sunk[k++];
  });
}

tdp_error *tdp_backward(tdp_tensor loss, tdp_tensor gradient, int32_t retain_graph, tdp_reducer *r) {
  return guard([&] {
    try {
      need_defined(loss, "the loss")
          .backward(gradient == nullptr ? at::Tensor() : need_defined(gradient, "the loss's gradient"),
                    retain_graph != 0);
    } catch (...) {
      if (r != nullptr) tdp::modes_restore(*r);
      throw;
    }
    if (r != nullptr) tdp::modes_after_backward(*r);
  });
}

tdp_error *tdp_reducer_end_backward(tdp_reducer *r) {
  return guard([&] { tdp::modes_after_backward(*need(r, "the reducer")); });
}

tdp_error *tdp_reducer_restore(tdp_reducer *r) {
  return guard([&] { tdp::modes_restore(*need(r, "the reducer")); });
}

tdp_error *tdp_reducer_free(tdp_reducer *r) {
  return guard([&] {
    if (r != nullptr) tdp::modes_restore(*r);
    delete r;
  });
}

tdp_error *tdp_reducer_logging_data(tdp_reducer *r, tdp_bytes *out) {
  return guard([&] {
    auto data = need(r, "the reducer")->logger->get_ddp_logging_data();
    std::string text;
    auto put = [&](const std::string &name, const std::string &value) {
      text.append(name).push_back('\0');
      text.append(value).push_back('\0');
    };
    for (auto &[name, value] : data.strs_map) put(name, value);
    for (auto &[name, value] : data.ints_map) put(name, std::to_string(value));
    // The logger tells this only when it ends.
    if (!data.ints_map.count("can_set_static_graph"))
      put("can_set_static_graph", r->reducer->ddp_graph_static() ? "1" : "0");
    tdp::give(text.data(), text.size(), out);
  });
}

tdp_error *tdp_reducer_set_sample_rate(tdp_reducer *r, int32_t rate) {
  return guard([&] { need(r, "the reducer")->reducer->set_ddp_runtime_logging_sample_rate(rate); });
}

tdp_error *tdp_reducer_update_group(tdp_reducer *r, tdp_pg *pg) {
  return guard([&] {
    need(r, "the reducer");
    tdp::modes_restore(*r);
    r->reducer->reset_state();
    r->reducer->update_process_group(group_of(pg));
    r->live->group = group_of(pg);
  });
}

tdp_error *tdp_reducer_shadow(tdp_reducer *r, tdp_pg *pg, int32_t find_unused) {
  return guard([&] {
    at::NoGradGuard no_grad;
    auto &reducer = *need(r, "the reducer")->reducer;
    r->logger->set_uneven_input_join();
    // In the order in which the others' backward reduces them, and all begun before the first is waited for.
    std::vector<c10::intrusive_ptr<c10::ivalue::Future>> reductions;
    for (auto &bucket : reducer.get_grad_buckets(/*return_zero_tensors=*/true))
      reductions.push_back(reducer.run_comm_hook(bucket));
    for (auto &f : reductions) f->waitAndThrow();
    if (find_unused) {
      std::vector<at::Tensor> used{reducer.get_local_used_map_on_device()};
      group_of(pg)->allreduce(used)->wait();
    }
    reducer.push_rebuilt_params_for_all_indices();
  });
}

tdp_error *tdp_reducer_rebuild(tdp_reducer *r) {
  return guard([&] { need(r, "the reducer")->reducer->rebuild_buckets(); });
}

tdp_error *tdp_scale_gradients(const tdp_tensor *params, int32_t n, double factor) {
  return guard([&] {
    at::NoGradGuard no_grad;
    for (int32_t i = 0; i < n; i++) {
      at::Tensor &grad = need_defined(params[i], "a parameter").mutable_grad();
      if (grad.defined()) grad.mul_(factor);
    }
  });
}

tdp_error *tdp_grad_mode(int32_t enabled, int32_t *previous) {
  return guard([&] {
    *previous = at::GradMode::is_enabled() ? 1 : 0;
    at::GradMode::set_enabled(enabled != 0);
  });
}

}  // extern "C"
