#include "guard.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/Functions.h>
#include <ATen/Parallel.h>
#include <ATen/core/Generator.h>

using tdp::guard;
using tdp::need;

struct tdp_generator {
  at::Generator generator;
};

extern "C" {

tdp_error *tdp_manual_seed(uint64_t seed) {
  return guard([&] { at::manual_seed(seed); });
}

tdp_error *tdp_generator_default(tdp_device device, tdp_generator **out) {
  return guard([&] { *out = new tdp_generator{at::globalContext().defaultGenerator(tdp::to_device(device))}; });
}

tdp_error *tdp_generator_new(tdp_device device, tdp_generator **out) {
  return guard([&] {
    auto d = tdp::to_device(device);
    *out = new tdp_generator{d.is_cpu() ? at::make_generator<at::CPUGeneratorImpl>()
                                        : at::globalContext().defaultGenerator(d).clone()};
  });
}

tdp_error *tdp_generator_manual_seed(tdp_generator *g, uint64_t seed) {
  return guard([&] {
    auto &generator = need(g, "the generator")->generator;
    std::lock_guard<std::mutex> lock(generator.mutex());
    generator.set_current_seed(seed);
  });
}

tdp_error *tdp_generator_initial_seed(tdp_generator *g, uint64_t *out) {
  return guard([&] {
    auto &generator = need(g, "the generator")->generator;
    std::lock_guard<std::mutex> lock(generator.mutex());
    *out = generator.current_seed();
  });
}

tdp_error *tdp_generator_get_state(tdp_generator *g, tdp_tensor *out) {
  return guard([&] {
    auto &generator = need(g, "the generator")->generator;
    std::lock_guard<std::mutex> lock(generator.mutex());
    *out = new at::Tensor(generator.get_state());
  });
}

tdp_error *tdp_generator_set_state(tdp_generator *g, tdp_tensor state) {
  return guard([&] {
    auto &generator = need(g, "the generator")->generator;
    auto &bytes = tdp::need_defined(state, "the generator's state");
    std::lock_guard<std::mutex> lock(generator.mutex());
    generator.set_state(bytes);
  });
}

tdp_error *tdp_generator_random64(tdp_generator *g, int64_t *out) {
  return guard([&] {
    auto value = at::empty({}, at::TensorOptions().dtype(c10::kLong));
    value.random_(need(g, "the generator")->generator);
    *out = value.const_data_ptr<int64_t>()[0];
  });
}

tdp_error *tdp_generator_multinomial(tdp_generator *g, tdp_tensor weights, int64_t n, int32_t replacement,
                                     tdp_tensor *out) {
  return guard([&] {
    *out = new at::Tensor(at::multinomial(tdp::need_defined(weights, "the weights"), n, replacement != 0,
                                          need(g, "the generator")->generator));
  });
}

tdp_error *tdp_generator_free(tdp_generator *g) {
  return guard([&] { delete g; });
}

tdp_error *tdp_set_num_threads(int32_t n) {
  return guard([&] {
    if (n < 1) throw tdp::Error(TDP_ERR_VALUE, "the number of threads must be positive, got " + std::to_string(n));
    at::set_num_threads(n);
  });
}

tdp_error *tdp_get_num_threads(int32_t *out) {
  return guard([&] { *out = at::get_num_threads(); });
}

}  // extern "C"
