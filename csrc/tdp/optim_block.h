// The elementwise operations of optimizers on short runs of memory.
//
// Python's default optimizers on the CPU go through the whole parameter once per operation. The same operations done on
// a block that stays in the first cache, one block after another, give the same bits in less than half of the time.
// That holds only if every operation rounds exactly as libtorch's kernel does on this processor, so blocks_match()
// compares them all before the first use.
#pragma once

#include <ATen/Functions.h>
#include <ATen/ScalarOps.h>
#include <ATen/core/Tensor.h>

#include <cstdint>

namespace tdp {

// Elements of a block: with parameter, gradient, three states and two temporaries half of a first cache of 32 KiB.
// Twice as many were slower: large tensors begin at like addresses, so their blocks compete for the same lines.
constexpr int kBlock = 512;

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
// Without contraction the compiler fuses a multiply and an add only where __builtin_fma says so.
#define TDP_KERNEL \
  __attribute__((noinline, target("avx2,fma"), optimize("O3", "fp-contract=off", "no-math-errno", "no-trapping-math")))
#elif defined(__GNUC__) && !defined(__clang__)
#define TDP_KERNEL __attribute__((noinline, optimize("O3", "fp-contract=off", "no-math-errno", "no-trapping-math")))
#else
#define TDP_KERNEL __attribute__((noinline))
#endif

namespace kernel {

// The multiply-adds below are those that libtorch's kernels do in one rounding.
#define TDP_DEFINE_KERNELS(T, FMA, SQRT)                                                 \
  TDP_KERNEL inline void neg(T *r, const T *x, int n) {                                  \
    for (int i = 0; i < n; i++) r[i] = -x[i];                                            \
  }                                                                                      \
  TDP_KERNEL inline void axpy(T *r, const T *x, const T *y, T a, int n) {                \
    for (int i = 0; i < n; i++) r[i] = FMA(y[i], a, x[i]);                               \
  }                                                                                      \
  TDP_KERNEL inline void mul(T *r, const T *x, T a, int n) {                             \
    for (int i = 0; i < n; i++) r[i] = x[i] * a;                                         \
  }                                                                                      \
  TDP_KERNEL inline void div(T *r, const T *x, T a, int n) {                             \
    for (int i = 0; i < n; i++) r[i] = x[i] / a;                                         \
  }                                                                                      \
  TDP_KERNEL inline void quotient(T *r, const T *x, const T *y, int n) {                 \
    for (int i = 0; i < n; i++) r[i] = x[i] / y[i];                                      \
  }                                                                                      \
  TDP_KERNEL inline void plus(T *r, const T *x, T a, int n) {                            \
    for (int i = 0; i < n; i++) r[i] = x[i] + a;                                         \
  }                                                                                      \
  TDP_KERNEL inline void ieee_root(T *r, const T *x, int n) {                            \
    for (int i = 0; i < n; i++) r[i] = SQRT(x[i]);                                       \
  }                                                                                      \
  TDP_KERNEL inline void max(T *r, const T *x, const T *y, int n) {                      \
    for (int i = 0; i < n; i++) r[i] = (x[i] != x[i]) || x[i] > y[i] ? x[i] : y[i];      \
  }                                                                                      \
  TDP_KERNEL inline void lerp(T *r, const T *x, const T *y, T w, bool small, int n) {    \
    if (small) {                                                                         \
      for (int i = 0; i < n; i++) r[i] = FMA(w, y[i] - x[i], x[i]);                      \
    } else {                                                                             \
      const T c = w - T(1);                                                              \
      for (int i = 0; i < n; i++) r[i] = FMA(c, y[i] - x[i], y[i]);                      \
    }                                                                                    \
  }                                                                                      \
  TDP_KERNEL inline void addcmul(T *r, const T *x, const T *y, const T *z, T a, int n) { \
    for (int i = 0; i < n; i++) r[i] = FMA(a * y[i], z[i], x[i]);                        \
  }                                                                                      \
  TDP_KERNEL inline void addcdiv(T *r, const T *x, const T *y, const T *z, T a, int n) { \
    for (int i = 0; i < n; i++) r[i] = x[i] + (a * y[i]) / z[i];                         \
  }

TDP_DEFINE_KERNELS(float, __builtin_fmaf, __builtin_sqrtf)
TDP_DEFINE_KERNELS(double, __builtin_fma, __builtin_sqrt)
#undef TDP_DEFINE_KERNELS

// libtorch's square root is MKL's where it was built with it, and that one does not always round to nearest.
void root(float *r, const float *x, int n);
void root(double *r, const double *x, int n);

}  // namespace kernel

// While it lives, MKL works on the calling thread alone. Otherwise it would look for helpers at every block, which
// takes longer than the block.
class SerialMath {
 public:
  SerialMath();
  ~SerialMath();
  SerialMath(const SerialMath &) = delete;
  SerialMath &operator=(const SerialMath &) = delete;

 private:
  int before_ = 0;
};

// Room for the temporaries of one block.
template <typename T>
struct Scratch {
  static constexpr int kCount = 4;
  alignas(64) T memory[kCount][kBlock];
  int used = 0;
  T *take() { return memory[used++ % kCount]; }
};

// A run of at most kBlock elements, with the operations that the algorithms are written in. The overloads for
// at::Tensor below mean the same.
template <typename T>
struct Block {
  T *data = nullptr;
  int n = 0;
  Scratch<T> *scratch = nullptr;

  bool defined() const { return data != nullptr; }
  Block temp() const { return {scratch->take(), n, scratch}; }
};

template <typename T>
Block<T> negated(const Block<T> &x) {
  Block<T> r = x.temp();
  kernel::neg(r.data, x.data, x.n);
  return r;
}
template <typename T>
Block<T> axpy(const Block<T> &x, const Block<T> &y, double a) {
  Block<T> r = x.temp();
  kernel::axpy(r.data, x.data, y.data, static_cast<T>(a), x.n);
  return r;
}
template <typename T>
void axpy_(const Block<T> &x, const Block<T> &y, double a) {
  kernel::axpy(x.data, x.data, y.data, static_cast<T>(a), x.n);
}
template <typename T>
void copy_(const Block<T> &x, const Block<T> &y) {
  for (int i = 0; i < x.n; i++) x.data[i] = y.data[i];
}
template <typename T>
void mul_(const Block<T> &x, double a) {
  kernel::mul(x.data, x.data, static_cast<T>(a), x.n);
}
template <typename T>
Block<T> mul(const Block<T> &x, double a) {
  Block<T> r = x.temp();
  kernel::mul(r.data, x.data, static_cast<T>(a), x.n);
  return r;
}
template <typename T>
void div_(const Block<T> &x, double a) {
  kernel::div(x.data, x.data, static_cast<T>(a), x.n);
}
template <typename T>
void quotient_to(const Block<T> &r, const Block<T> &x, const Block<T> &y) {
  kernel::quotient(r.data, x.data, y.data, x.n);
}
template <typename T>
void plus_(const Block<T> &x, double a) {
  kernel::plus(x.data, x.data, static_cast<T>(a), x.n);
}
template <typename T>
Block<T> root(const Block<T> &x) {
  Block<T> r = x.temp();
  kernel::root(r.data, x.data, x.n);
  return r;
}
template <typename T>
void root_(const Block<T> &x) {
  kernel::root(x.data, x.data, x.n);
}
template <typename T>
void max_(const Block<T> &x, const Block<T> &y) {
  kernel::max(x.data, x.data, y.data, x.n);
}
template <typename T>
void lerp_(const Block<T> &x, const Block<T> &y, double w) {
  T weight = static_cast<T>(w);
  kernel::lerp(x.data, x.data, y.data, weight, (weight < 0 ? -weight : weight) < T(0.5), x.n);
}
template <typename T>
void addcmul_(const Block<T> &x, const Block<T> &y, const Block<T> &z, double a) {
  kernel::addcmul(x.data, x.data, y.data, z.data, static_cast<T>(a), x.n);
}
template <typename T>
Block<T> addcmul(const Block<T> &x, const Block<T> &y, const Block<T> &z, double a) {
  Block<T> r = x.temp();
  kernel::addcmul(r.data, x.data, y.data, z.data, static_cast<T>(a), x.n);
  return r;
}
template <typename T>
void addcdiv_(const Block<T> &x, const Block<T> &y, const Block<T> &z, double a) {
  kernel::addcdiv(x.data, x.data, y.data, z.data, static_cast<T>(a), x.n);
}

// The same on tensors. Python multiplies by a number as by a tensor; the C++ overload for scalars swaps the factors,
// which in half precision rounds the number first.
inline at::Tensor negated(const at::Tensor &x) { return x.neg(); }
inline at::Tensor axpy(const at::Tensor &x, const at::Tensor &y, double a) { return x.add(y, a); }
inline void axpy_(const at::Tensor &x, const at::Tensor &y, double a) { x.add_(y, a); }
inline void copy_(const at::Tensor &x, const at::Tensor &y) { x.copy_(y); }
inline void mul_(const at::Tensor &x, double a) { x.mul_(at::native::wrapped_scalar_tensor(a)); }
inline at::Tensor mul(const at::Tensor &x, double a) { return x.mul(at::native::wrapped_scalar_tensor(a)); }
inline void div_(const at::Tensor &x, double a) { x.div_(a); }
inline void quotient_to(const at::Tensor &r, const at::Tensor &x, const at::Tensor &y) {
  at::Tensor out = r;
  at::div_out(out, x, y);
}
inline void plus_(const at::Tensor &x, double a) { x.add_(a); }
inline at::Tensor root(const at::Tensor &x) { return x.sqrt(); }
inline void root_(const at::Tensor &x) { x.sqrt_(); }
inline void max_(const at::Tensor &x, const at::Tensor &y) {
  at::Tensor out = x;
  at::maximum_out(out, x, y);
}
inline void lerp_(const at::Tensor &x, const at::Tensor &y, double w) { x.lerp_(y, w); }
inline void addcmul_(const at::Tensor &x, const at::Tensor &y, const at::Tensor &z, double a) { x.addcmul_(y, z, a); }
inline at::Tensor addcmul(const at::Tensor &x, const at::Tensor &y, const at::Tensor &z, double a) {
  return x.addcmul(y, z, a);
}
inline void addcdiv_(const at::Tensor &x, const at::Tensor &y, const at::Tensor &z, double a) { x.addcdiv_(y, z, a); }

// Whether blocks give libtorch's bits on this processor. Found out once, on numbers of many sizes.
bool blocks_match();

}  // namespace tdp
