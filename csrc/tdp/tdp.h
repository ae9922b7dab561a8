/*
 * tdp.h: the C ABI between goddp and libtorch's C++.
 *
 * Rules that every function here keeps:
 *
 *   - It returns its own error: NULL on success, otherwise a record that the caller frees with tdp_error_free.
 *     There is no "last error" anywhere: a goroutine can move to another thread between two calls.
 *   - No C++ exception crosses the border, from destructors and setters neither.
 *   - Results are written only on success. What is marked "owned" is the caller's to free; the rest is borrowed
 *     for the length of the call.
 *   - Tensors cross as gotch's handles, which are at::Tensor*. A tdp_tensor result is a new, owned handle.
 *   - Thread-local modes of libtorch (grad mode, device, stream) never outlive a call.
 *   - This layer knows nothing of policy: no defaults, no names, no environment.
 */
#ifndef TDP_H
#define TDP_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
#include <ATen/core/Tensor.h>
typedef at::Tensor *tdp_tensor;
extern "C" {
#else
typedef void *tdp_tensor;
#endif

/* ---- errors ---- */

/* What kind of failure it was, for errors.Is on the Go side. */
enum {
  TDP_OK = 0,
  TDP_ERR_OTHER = 1,
  TDP_ERR_TIMEOUT = 2,
  TDP_ERR_PEER = 3,  /* a peer closed its connection, or cannot be reached */
  TDP_ERR_STORE = 4, /* the store answered with an error */
  TDP_ERR_BACKEND = 5,
  TDP_ERR_OOM = 6,
  TDP_ERR_VALUE = 7, /* wrong shape, dtype, device, rank, index or option */
  TDP_ERR_UNSUPPORTED = 8,
  TDP_ERR_CANCELLED = 9,
  TDP_ERR_REDUCTION = 10, /* the reducer's own checks: unused or twice used parameters */
  TDP_ERR_DESYNC = 11     /* ranks ran different collectives at the same time */
};

typedef struct tdp_error {
  int32_t code;
  char *message; /* c10's text without the C++ stack */
} tdp_error;

void tdp_error_free(tdp_error *err);

/* ---- what this library is ---- */

/* Changes with every incompatible change of this header: a program linked with another build of the library
 * fails at link time instead of at run time. */
#define TDP_ABI tdp_abi_1_run_goddp_setup
int32_t TDP_ABI(void);

const char *tdp_source_key(void);    /* hash of the sources the library was built from */
const char *tdp_torch_version(void); /* "2.11.0" */
int32_t tdp_built_with_cuda(void);
/* What libtorch logs to stderr: 0 info, 1 warnings, 2 errors, 3 nothing but what ends the process. */
tdp_error *tdp_set_log_level(int32_t level);

/* ---- tensors ---- */

typedef struct tdp_device {
  int32_t type;  /* c10::DeviceType: 0 CPU, 1 CUDA */
  int32_t index; /* -1: the current one */
} tdp_device;

enum {
  TDP_TENSOR_DEFINED = 1 << 0,
  TDP_TENSOR_REQUIRES_GRAD = 1 << 1,
  TDP_TENSOR_LEAF = 1 << 2,
  TDP_TENSOR_CONTIGUOUS = 1 << 3,
  TDP_TENSOR_CONJ = 1 << 4,
  TDP_TENSOR_NEG = 1 << 5,
  TDP_TENSOR_SPARSE = 1 << 6,
  TDP_TENSOR_PINNED = 1 << 7,
  TDP_TENSOR_HAS_GRAD = 1 << 8
};

#define TDP_MAX_DIMS 64

typedef struct tdp_tensor_info {
  int32_t flags;
  int32_t dtype; /* c10::ScalarType */
  tdp_device device;
  int32_t ndim;
  int32_t element_size;
  int64_t numel;
  int64_t storage_offset; /* in elements */
  int64_t storage_bytes;
  uint64_t storage; /* address of the storage's memory, 0 for none: equal for tensors that share it */
  uint64_t impl;    /* identity of the tensor itself */
  void *data;       /* first element */
  int64_t sizes[TDP_MAX_DIMS];
  int64_t strides[TDP_MAX_DIMS];
} tdp_tensor_info;

tdp_error *tdp_tensor_describe(tdp_tensor t, tdp_tensor_info *out);

/* An uninitialised tensor. pinned asks for page-locked host memory. */
tdp_error *tdp_tensor_empty(const int64_t *sizes, int32_t ndim, int32_t dtype, tdp_device device, int32_t pinned,
                            tdp_tensor *out);
/* A copy of host memory. nbytes must be what sizes and dtype need. */
tdp_error *tdp_tensor_from_data(const void *data, uint64_t nbytes, const int64_t *sizes, int32_t ndim, int32_t dtype,
                                tdp_device device, tdp_tensor *out);
/* Copies the elements, in row-major order, into host memory of exactly nbytes. */
tdp_error *tdp_tensor_to_data(tdp_tensor t, void *data, uint64_t nbytes);
/* A one-dimensional uint8 tensor over pages that mmap returned; freeing the last view unmaps them. On error the pages
 * stay the caller's. */
tdp_error *tdp_tensor_from_mmap(void *addr, uint64_t offset, uint64_t nbytes, uint64_t mapped, tdp_tensor *out);
/* A view of another dtype and geometry on base's storage; offset is in elements of dtype. */
tdp_error *tdp_tensor_view_storage(tdp_tensor base, int32_t dtype, const int64_t *sizes, const int64_t *strides,
                                   int32_t ndim, int64_t offset, tdp_tensor *out);
/* The whole storage of t as a one-dimensional uint8 tensor that shares it. */
tdp_error *tdp_tensor_storage(tdp_tensor t, tdp_tensor *out);
/* A second handle on the same tensor. */
tdp_error *tdp_tensor_share(tdp_tensor t, tdp_tensor *out);
/* dst.copy_(src) without recording it for autograd. */
tdp_error *tdp_tensor_copy(tdp_tensor dst, tdp_tensor src, int32_t non_blocking);
tdp_error *tdp_tensor_set_requires_grad(tdp_tensor t, int32_t requires_grad);
/* t.grad() as an owned handle, or NULL where there is none. */
tdp_error *tdp_tensor_grad(tdp_tensor t, tdp_tensor *out);
tdp_error *tdp_tensor_set_grad(tdp_tensor t, tdp_tensor grad /* or NULL */);
/* Lets go of the gradients of n tensors (set_to_none), or zeroes them in place, without touching autograd's views. */
tdp_error *tdp_zero_grad(const tdp_tensor *params, int32_t n, int32_t set_to_none);
tdp_error *tdp_tensor_free(tdp_tensor t);

/* ---- random numbers and threads ---- */

typedef struct tdp_generator tdp_generator;

/* Seeds the default generators of every device, as torch.manual_seed does. */
tdp_error *tdp_manual_seed(uint64_t seed);
/* The default generator of a device, or a fresh one of its own. Both owned. */
tdp_error *tdp_generator_default(tdp_device device, tdp_generator **out);
tdp_error *tdp_generator_new(tdp_device device, tdp_generator **out);
tdp_error *tdp_generator_manual_seed(tdp_generator *g, uint64_t seed);
tdp_error *tdp_generator_initial_seed(tdp_generator *g, uint64_t *out);
/* torch.Generator.get_state / set_state: a uint8 tensor. */
tdp_error *tdp_generator_get_state(tdp_generator *g, tdp_tensor *out);
tdp_error *tdp_generator_set_state(tdp_generator *g, tdp_tensor state);
/* One int64 as torch.empty((), dtype=torch.int64).random_(generator=g).item() draws it. */
tdp_error *tdp_generator_random64(tdp_generator *g, int64_t *out);
/* torch.multinomial with a generator of its own. */
tdp_error *tdp_generator_multinomial(tdp_generator *g, tdp_tensor weights, int64_t n, int32_t replacement,
                                     tdp_tensor *out);
tdp_error *tdp_generator_free(tdp_generator *g);

tdp_error *tdp_set_num_threads(int32_t n);
tdp_error *tdp_get_num_threads(int32_t *out);

/* ---- streams ---- */

/* Copies n tensors to a device on a stream that is not the one computations run on, and waits until that is done:
 * the sources may be written again then. From pinned memory the device computes on meanwhile. */
tdp_error *tdp_copy_aside(tdp_device device, const tdp_tensor *src, int32_t n, tdp_tensor *out);
/* Tells the allocator that the calling thread's current stream uses tensors that another stream made: their memory
 * is not given away before that stream has come as far as it is now queued when they are freed. */
tdp_error *tdp_record_stream(const tdp_tensor *tensors, int32_t n);

/* ---- modes of the calling thread ---- */

/* Sets grad mode and tells what it was. Only for scopes that keep their goroutine on its thread. */
tdp_error *tdp_grad_mode(int32_t enabled, int32_t *previous);

#ifdef __cplusplus
}
#endif
#include "tdp_group.h"
#include "tdp_ddp.h"
#include "tdp_optim.h"
#endif
