// Included before gotch's C++: overloads that take the arguments gotch's wrappers pass and put them where they belong. They
// are found by overload resolution, so nothing of gotch's text needs to know. The first three operators changed their
// signature between libtorch 2.1 and 2.11. The wrappers of the others leave out arguments in the middle, so that a flag or a
// dimension silently became a factor or a distance (a bool and an int64_t convert to a Scalar; an exact match is preferred).
#pragma once
#ifdef __cplusplus
#include <torch/torch.h>
#include <optional>
#include <tuple>
namespace at {
inline Tensor _cslt_sparse_mm(const Tensor& compressed, const Tensor& dense, const Tensor& bias, bool transpose) {
  return at::_cslt_sparse_mm(compressed, dense, std::optional<Tensor>(bias), std::nullopt, std::nullopt, transpose, 0);
}
// The second output, amax, is gone: it comes back undefined.
inline std::tuple<Tensor, Tensor> _scaled_mm(const Tensor& a, const Tensor& b, const Tensor& bias,
                                             std::optional<ScalarType> dtype, const Tensor& scale_a,
                                             const Tensor& scale_b, const Tensor& scale_result) {
  return {at::_scaled_mm(a, b, scale_a, scale_b, bias, scale_result, dtype, false), Tensor()};
}
inline std::tuple<Tensor, Tensor> _scaled_mm_out(Tensor& out, Tensor& amax, const Tensor& a, const Tensor& b,
                                                 const Tensor& bias, std::optional<ScalarType> dtype,
                                                 const Tensor& scale_a, const Tensor& scale_b,
                                                 const Tensor& scale_result) {
  return {at::_scaled_mm_out(out, a, b, scale_a, scale_b, bias, scale_result, dtype, false), amax};
}

inline Tensor _addmm_activation(const Tensor& self, const Tensor& mat1, const Tensor& mat2, bool use_gelu) {
  return at::_addmm_activation(self, mat1, mat2, Scalar(1), Scalar(1), use_gelu);
}
inline Tensor& _addmm_activation_out(Tensor& out, const Tensor& self, const Tensor& mat1, const Tensor& mat2, bool use_gelu) {
  return at::_addmm_activation_out(out, self, mat1, mat2, Scalar(1), Scalar(1), use_gelu);
}
// The slopes that rrelu draws from by default.
constexpr double rrelu_lower = 1.0 / 8, rrelu_upper = 1.0 / 3;
inline Tensor rrelu(const Tensor& self, bool training) { return at::rrelu(self, rrelu_lower, rrelu_upper, training); }
inline Tensor& rrelu_(Tensor& self, bool training) { return at::rrelu_(self, rrelu_lower, rrelu_upper, training); }
inline Tensor rrelu_with_noise(const Tensor& self, Tensor& noise, bool training) {
  return at::rrelu_with_noise(self, noise, rrelu_lower, rrelu_upper, training);
}
inline Tensor& rrelu_with_noise_(Tensor& self, Tensor& noise, bool training) {
  return at::rrelu_with_noise_(self, noise, rrelu_lower, rrelu_upper, training);
}
inline Tensor& rrelu_with_noise_out(Tensor& out, const Tensor& self, Tensor& noise, bool training) {
  return at::rrelu_with_noise_out(out, self, noise, rrelu_lower, rrelu_upper, training);
}
inline Tensor trapezoid(const Tensor& y, int64_t dim) { return at::trapezoid(y, Scalar(1), dim); }
inline Tensor cumulative_trapezoid(const Tensor& y, int64_t dim) { return at::cumulative_trapezoid(y, Scalar(1), dim); }
} // namespace at

namespace goddp {
// An optional tensor argument. gotch passes an undefined tensor for one that is left out, which libtorch by now takes for a
// tensor where it declares std::optional; nothing is the right thing there. Both NULL and an undefined tensor mean it.
class Opt {
  std::optional<at::Tensor> held;

 public:
  explicit Opt(const at::Tensor* t) {
    if (t && t->defined()) held = *t;
  }
  operator const at::Tensor&() const {
    static const at::Tensor undefined;
    return held ? *held : undefined;
  }
  // A reference, for then it is this that an std::optional parameter binds to, and not a new optional around the tensor.
  operator const std::optional<at::Tensor>&() const { return held; }
};
} // namespace goddp
#endif
