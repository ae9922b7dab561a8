// The one place where C++ exceptions become error records.
#pragma once

#include "tdp.h"

#include <exception>
#include <string>
#include <utility>
#include <vector>

namespace tdp {

// An error of our own with a code, for checks that libtorch does not make.
class Error : public std::exception {
 public:
  Error(int32_t code, std::string message) : code_(code), message_(std::move(message)) {}
  const char *what() const noexcept override { return message_.c_str(); }
  int32_t code() const noexcept { return code_; }

 private:
  int32_t code_;
  std::string message_;
};

// Turns the exception being handled into a record. Call it only inside a catch block.
tdp_error *current_exception_record() noexcept;

template <typename F>
tdp_error *guard(F &&body) noexcept {
  try {
    body();
    return nullptr;
  } catch (...) {
    return current_exception_record();
  }
}

// A handle that the caller forgot to fill in, or used after its free, reads as NULL here.
template <typename T>
T *need(T *handle, const char *what) {
  if (handle == nullptr) throw Error(TDP_ERR_VALUE, std::string(what) + " is closed or was never made");
  return handle;
}

inline at::Tensor &need_defined(tdp_tensor t, const char *what) {
  need(t, what);
  if (!t->defined()) throw Error(TDP_ERR_VALUE, std::string(what) + " is an undefined tensor");
  return *t;
}

inline std::vector<at::Tensor> tensors(const tdp_tensor *handles, int32_t n, const char *what) {
  std::vector<at::Tensor> list;
  list.reserve(n);
  for (int32_t i = 0; i < n; i++) list.push_back(need_defined(handles[i], what));
  return list;
}

inline c10::Device to_device(tdp_device d) {
  return c10::Device(static_cast<c10::DeviceType>(d.type), static_cast<c10::DeviceIndex>(d.index));
}

}  // namespace tdp
