#include "optim_block.h"

#include <ATen/Functions.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <memory>

// Functions of MKL, which libtorch holds and exports on x86-64. Weak: other builds are without.
extern "C" {
void vmsSqrt(int n, const float *a, float *r, long long mode) __attribute__((weak));
void vmdSqrt(int n, const double *a, double *r, long long mode) __attribute__((weak));
int MKL_Set_Num_Threads_Local(int n) __attribute__((weak));
}

namespace tdp {
namespace kernel {

// High accuracy, denormals as they are, no error reports: what libtorch asks for.
constexpr long long kMode = 0x2 | 0x140000 | 0x100;

void root(float *r, const float *x, int n) {
  if (vmsSqrt != nullptr)
    vmsSqrt(n, x, r, kMode);
  else
    ieee_root(r, x, n);
}

void root(double *r, const double *x, int n) {
  if (vmdSqrt != nullptr)
    vmdSqrt(n, x, r, kMode);
  else
    ieee_root(r, x, n);
}

}  // namespace kernel

SerialMath::SerialMath() {
  if (MKL_Set_Num_Threads_Local != nullptr) before_ = MKL_Set_Num_Threads_Local(1);
}

SerialMath::~SerialMath() {
  if (MKL_Set_Num_Threads_Local != nullptr) MKL_Set_Num_Threads_Local(before_);
}

namespace {

bool has_instructions() {
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#else
  return true;
#endif
}

// A generator of its own: the user's streams of random numbers are not for us to draw from.
struct Numbers {
  uint64_t state = 0x9e3779b97f4a7c15ULL;
  double next() {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    double mantissa = static_cast<double>(state >> 11) / 9007199254740992.0 + 0.5;
    int exponent = static_cast<int>(state % 41) - 20;
    return std::ldexp(state & 64 ? -mantissa : mantissa, exponent);
  }
};

template <typename T>
struct Check {
  static constexpr int kSize = 3 * kBlock + 61;  // whole vectors and a rest
  Numbers numbers;
  c10::ScalarType dtype;
  Scratch<T> scratch;

  at::Tensor make(bool positive) {
    at::Tensor t = at::empty({kSize}, at::TensorOptions().dtype(dtype));
    T *d = t.mutable_data_ptr<T>();
    for (int i = 0; i < kSize; i++) {
      T x = static_cast<T>(numbers.next());
      d[i] = positive && x < 0 ? -x : x;
    }
    if (!positive) {
      d[0] = 0;
      d[1] = std::numeric_limits<T>::infinity();
      d[2] = std::numeric_limits<T>::quiet_NaN();
      d[3] = std::numeric_limits<T>::denorm_min() * 3;
    }
    return t;
  }

  // Runs op on tensors and on blocks of copies, and compares what it left in the first.
  template <typename F>
  bool same(bool positive, const F &op) {
    at::Tensor x = make(positive), y = make(positive), z = make(positive);
    at::Tensor x2 = x.clone(), y2 = y.clone(), z2 = z.clone();
    op(x, y, z);
    for (int at = 0; at < kSize; at += kBlock) {
      int n = std::min(kBlock, kSize - at);
      scratch.used = 0;
      auto block = [&](at::Tensor &t) { return Block<T>{t.mutable_data_ptr<T>() + at, n, &scratch}; };
      op(block(x2), block(y2), block(z2));
    }
    const T *a = x.const_data_ptr<T>(), *b = x2.const_data_ptr<T>();
    for (int i = 0; i < kSize; i++) {
      bool equal = std::isnan(a[i]) ? std::isnan(b[i]) : std::memcmp(a + i, b + i, sizeof(T)) == 0;
      if (!equal) return false;
    }
    return true;
  }

  bool all() {
    bool ok = true;
    for (double a : {1e-4, 0.9, -0.1, 1.0, -1e-3}) {
      ok = ok && same(false, [&](auto &&x, auto &&y, auto &&) { axpy_(x, y, a); });
      ok = ok && same(false, [&](auto &&x, auto &&y, auto &&) { copy_(x, axpy(x, y, a)); });
      ok = ok && same(false, [&](auto &&x, auto &&, auto &&) { mul_(x, a); });
      ok = ok && same(false, [&](auto &&x, auto &&, auto &&) { copy_(x, mul(x, a)); });
      ok = ok && same(false, [&](auto &&x, auto &&, auto &&) { div_(x, a); });
      ok = ok && same(false, [&](auto &&x, auto &&, auto &&) { plus_(x, a); });
      ok = ok && same(false, [&](auto &&x, auto &&y, auto &&) { lerp_(x, y, a); });
      ok = ok && same(false, [&](auto &&x, auto &&y, auto &&z) { addcmul_(x, y, z, a); });
      ok = ok && same(false, [&](auto &&x, auto &&y, auto &&z) { copy_(x, addcmul(x, y, z, a)); });
      ok = ok && same(false, [&](auto &&x, auto &&y, auto &&z) { addcdiv_(x, y, z, a); });
    }
    ok = ok && same(false, [&](auto &&x, auto &&, auto &&) { copy_(x, negated(x)); });
    ok = ok && same(false, [&](auto &&x, auto &&y, auto &&) { max_(x, y); });
    ok = ok && same(false, [&](auto &&x, auto &&y, auto &&z) { quotient_to(x, y, z); });
    ok = ok && same(true, [&](auto &&x, auto &&, auto &&) { root_(x); });
    ok = ok && same(true, [&](auto &&x, auto &&, auto &&) { copy_(x, root(x)); });
    return ok;
  }
};

bool check() {
  if (!has_instructions()) return false;
  // Outside whatever mode the caller is in.
  at::NoGradGuard no_grad;
  at::AutoDispatchBelowADInplaceOrView below;
  auto f = std::make_unique<Check<float>>();
  f->dtype = c10::kFloat;
  auto d = std::make_unique<Check<double>>();
  d->dtype = c10::kDouble;
  return f->all() && d->all();
}

}  // namespace

bool blocks_match() {
  static const bool match = check();
  return match;
}

}  // namespace tdp
