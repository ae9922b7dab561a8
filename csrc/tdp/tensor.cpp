#include "guard.h"

#include <ATen/Functions.h>
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/Storage.h>
#include <c10/util/accumulate.h>
#include <sys/mman.h>

#include <cstring>
#include <memory>

using tdp::guard;
using tdp::need;
using tdp::need_defined;

namespace {

uint64_t bytes_needed(c10::IntArrayRef sizes, c10::ScalarType dtype) {
  return static_cast<uint64_t>(c10::multiply_integers(sizes)) * c10::elementSize(dtype);
}

c10::ScalarType to_dtype(int32_t dtype) {
  if (dtype < 0 || dtype >= static_cast<int32_t>(c10::ScalarType::NumOptions) ||
      dtype == static_cast<int32_t>(c10::ScalarType::Undefined))
    throw tdp::Error(TDP_ERR_VALUE, "unknown dtype number " + std::to_string(dtype));
  return static_cast<c10::ScalarType>(dtype);
}

void check_bytes(uint64_t given, uint64_t needed) {
  if (given != needed)
    throw tdp::Error(TDP_ERR_VALUE, "the tensor needs " + std::to_string(needed) + " bytes, the memory given has " +
                                        std::to_string(given));
}

struct Mapping {
  void *addr;
  size_t length;
};

void unmap(void *context) {
  auto *m = static_cast<Mapping *>(context);
  ::munmap(m->addr, m->length);
  delete m;
}

}  // namespace

static_assert(static_cast<int>(c10::DeviceType::CPU) == 0 && static_cast<int>(c10::DeviceType::CUDA) == 1);
static_assert(static_cast<int>(c10::ScalarType::Byte) == 0 && static_cast<int>(c10::ScalarType::Long) == 4 &&
              static_cast<int>(c10::ScalarType::Float) == 6 && static_cast<int>(c10::ScalarType::Bool) == 11 &&
              static_cast<int>(c10::ScalarType::BFloat16) == 15 &&
              static_cast<int>(c10::ScalarType::Float8_e5m2) == 23 &&
              static_cast<int>(c10::ScalarType::Float8_e4m3fn) == 24 &&
              static_cast<int>(c10::ScalarType::Float8_e5m2fnuz) == 25 &&
              static_cast<int>(c10::ScalarType::Float8_e4m3fnuz) == 26 &&
              static_cast<int>(c10::ScalarType::UInt16) == 27 && static_cast<int>(c10::ScalarType::UInt32) == 28 &&
              static_cast<int>(c10::ScalarType::UInt64) == 29 &&
              static_cast<int>(c10::ScalarType::Float8_e8m0fnu) == 44);

// What a handle points to is read from Go as well: see Impl in internal/tdp.
static_assert(sizeof(at::Tensor) == sizeof(void *) && std::is_standard_layout_v<at::Tensor>, "a tensor is one pointer");

extern "C" {

tdp_error *tdp_tensor_describe(tdp_tensor t, tdp_tensor_info *out) {
  return guard([&] {
    need(t, "the tensor");
    std::memset(out, 0, offsetof(tdp_tensor_info, sizes));
    if (!t->defined()) return;
    out->flags = TDP_TENSOR_DEFINED;
    auto flag = [&](bool on, int32_t bit) { out->flags |= on ? bit : 0; };
    flag(t->requires_grad(), TDP_TENSOR_REQUIRES_GRAD);
    flag(t->is_leaf(), TDP_TENSOR_LEAF);
    flag(t->is_conj(), TDP_TENSOR_CONJ);
    flag(t->is_neg(), TDP_TENSOR_NEG);
    out->dtype = static_cast<int32_t>(t->scalar_type());
    out->device = {static_cast<int32_t>(t->device().type()), t->device().index()};
    out->impl = reinterpret_cast<uint64_t>(t->unsafeGetTensorImpl());
    if (t->dim() > TDP_MAX_DIMS) throw tdp::Error(TDP_ERR_UNSUPPORTED, "a tensor of more than 64 dimensions");
    out->ndim = static_cast<int32_t>(t->dim());
    out->element_size = static_cast<int32_t>(t->element_size());
    out->numel = t->numel();
    for (int64_t i = 0; i < t->dim(); i++) out->sizes[i] = t->size(i);
    if (t->layout() != c10::kStrided) {
      out->flags |= TDP_TENSOR_SPARSE;
      return;
    }
    flag(t->is_contiguous(), TDP_TENSOR_CONTIGUOUS);
    flag(t->device().is_cpu() && t->is_pinned(), TDP_TENSOR_PINNED);
    for (int64_t i = 0; i < t->dim(); i++) out->strides[i] = t->stride(i);
    out->storage_offset = t->storage_offset();
    out->storage_bytes = static_cast<int64_t>(t->storage().nbytes());
    out->storage = reinterpret_cast<uint64_t>(t->storage().data());
    out->data = const_cast<void *>(t->const_data_ptr());
  });
}

tdp_error *tdp_tensor_empty(const int64_t *sizes, int32_t ndim, int32_t dtype, tdp_device device, int32_t pinned,
                            tdp_tensor *out) {
  return guard([&] {
    auto options = at::TensorOptions().dtype(to_dtype(dtype)).device(tdp::to_device(device)).pinned_memory(pinned != 0);
    *out = new at::Tensor(at::empty(c10::IntArrayRef(sizes, ndim), options));
  });
}

tdp_error *tdp_tensor_from_data(const void *data, uint64_t nbytes, const int64_t *sizes, int32_t ndim, int32_t dtype,
                                tdp_device device, tdp_tensor *out) {
  return guard([&] {
    c10::IntArrayRef shape(sizes, ndim);
    check_bytes(nbytes, bytes_needed(shape, to_dtype(dtype)));
    at::Tensor host = at::empty(shape, at::TensorOptions().dtype(to_dtype(dtype)));
    if (nbytes > 0) std::memcpy(host.mutable_data_ptr(), data, nbytes);
    auto target = tdp::to_device(device);
    *out = new at::Tensor(target.is_cpu() ? host : host.to(target));
  });
}

tdp_error *tdp_tensor_to_data(tdp_tensor t, void *data, uint64_t nbytes) {
  return guard([&] {
    at::NoGradGuard no_grad;
    at::Tensor host = need_defined(t, "the tensor").detach().resolve_conj().resolve_neg().to(c10::kCPU).contiguous();
    check_bytes(nbytes, host.nbytes());
    if (nbytes > 0) std::memcpy(data, host.const_data_ptr(), nbytes);
  });
}

tdp_error *tdp_tensor_from_mmap(void *addr, uint64_t offset, uint64_t nbytes, uint64_t mapped, tdp_tensor *out) {
  return guard([&] {
    if (offset > mapped || nbytes > mapped - offset)
      throw tdp::Error(TDP_ERR_VALUE, "the tensor would lie outside the mapped pages");
    auto *m = new Mapping{addr, static_cast<size_t>(mapped)};
    try {
      c10::Storage storage(c10::Storage::use_byte_size_t(), static_cast<size_t>(nbytes),
                           c10::DataPtr(static_cast<char *>(addr) + offset, m, nullptr, c10::Device(c10::kCPU)),
                           /*allocator=*/nullptr, /*resizable=*/false);
      int64_t size = static_cast<int64_t>(nbytes);
      at::Tensor view = at::empty({0}, at::TensorOptions().dtype(c10::kByte)).set_(storage, 0, {size}, {1});
      auto handle = std::make_unique<at::Tensor>(std::move(view));
      // From here on the pages are the tensor's. Until then a failure must leave them to the caller.
      auto owned = c10::DataPtr(static_cast<char *>(addr) + offset, m, &unmap, c10::Device(c10::kCPU));
      handle->storage().set_data_ptr_noswap(std::move(owned));
      *out = handle.release();
    } catch (...) {
      delete m;
      throw;
    }
  });
}

tdp_error *tdp_tensor_view_storage(tdp_tensor base, int32_t dtype, const int64_t *sizes, const int64_t *strides,
                                   int32_t ndim, int64_t offset, tdp_tensor *out) {
  return guard([&] {
    at::NoGradGuard no_grad;
    at::Tensor &b = need_defined(base, "the base tensor");
    c10::IntArrayRef shape(sizes, ndim), steps(strides, ndim);
    // set_ grows a storage that is too small; a view of foreign bytes must not.
    int64_t last = offset;
    bool empty = false;
    for (int32_t i = 0; i < ndim; i++) {
      if (shape[i] < 0 || steps[i] < 0) throw tdp::Error(TDP_ERR_VALUE, "negative size or stride");
      empty = empty || shape[i] == 0;
      int64_t span = 0;
      if (shape[i] > 0 &&
          (__builtin_mul_overflow(shape[i] - 1, steps[i], &span) || __builtin_add_overflow(last, span, &last)))
        throw tdp::Error(TDP_ERR_VALUE, "the view's extent overflows");
    }
    int64_t item = static_cast<int64_t>(c10::elementSize(to_dtype(dtype)));
    int64_t held = static_cast<int64_t>(b.storage().nbytes()) / item;
    if (offset < 0 || (!empty && last >= held) || offset > held)
      throw tdp::Error(TDP_ERR_VALUE, "the view reaches element " + std::to_string(last) + " of a storage with " +
                                          std::to_string(held));
    *out = new at::Tensor(at::empty({0}, b.options().dtype(to_dtype(dtype))).set_(b.storage(), offset, shape, steps));
  });
}

tdp_error *tdp_tensor_storage(tdp_tensor t, tdp_tensor *out) {
  return guard([&] {
    at::NoGradGuard no_grad;
    at::Tensor &b = need_defined(t, "the tensor");
    int64_t size = static_cast<int64_t>(b.storage().nbytes());
    *out = new at::Tensor(
        at::empty({0}, b.options().dtype(c10::kByte).requires_grad(false)).set_(b.storage(), 0, {size}, {1}));
  });
}

tdp_error *tdp_tensor_share(tdp_tensor t, tdp_tensor *out) {
  return guard([&] { *out = new at::Tensor(*need(t, "the tensor")); });
}

tdp_error *tdp_tensor_copy(tdp_tensor dst, tdp_tensor src, int32_t non_blocking) {
  return guard([&] {
    at::NoGradGuard no_grad;
    need_defined(dst, "the destination").copy_(need_defined(src, "the source"), non_blocking != 0);
  });
}

tdp_error *tdp_tensor_set_requires_grad(tdp_tensor t, int32_t requires_grad) {
  return guard([&] { need_defined(t, "the tensor").set_requires_grad(requires_grad != 0); });
}

tdp_error *tdp_tensor_grad(tdp_tensor t, tdp_tensor *out) {
  return guard([&] {
    const at::Tensor &g = need_defined(t, "the tensor").grad();
    *out = g.defined() ? new at::Tensor(g) : nullptr;
  });
}

tdp_error *tdp_tensor_set_grad(tdp_tensor t, tdp_tensor grad) {
  return guard([&] {
    at::Tensor &p = need_defined(t, "the tensor");
    if (grad == nullptr || !grad->defined())
      p.mutable_grad().reset();
    else
      p.mutable_grad() = *grad;
  });
}

tdp_error *tdp_zero_grad(const tdp_tensor *params, int32_t n, int32_t set_to_none) {
  return guard([&] {
    at::NoGradGuard no_grad;
    for (int32_t i = 0; i < n; i++) {
      at::Tensor &grad = need_defined(params[i], "a parameter").mutable_grad();
      if (!grad.defined()) continue;
      if (set_to_none)
        grad.reset();
      else
        grad.zero_();
    }
  });
}

tdp_error *tdp_tensor_free(tdp_tensor t) {
  return guard([&] { delete t; });
}

}  // extern "C"
