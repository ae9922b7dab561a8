/* Part of tdp.h: what DistributedDataParallel needs beside process groups. */
#ifndef TDP_DDP_H
#define TDP_DDP_H

#include "tdp.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- the gradient reducer ---- */

typedef struct tdp_reducer tdp_reducer;

typedef struct tdp_reducer_options {
  const char *const *names;     /* one a parameter */
  const uint8_t *expect_sparse; /* one a parameter, or NULL */
  const int64_t *bucket_limits; /* bytes; how the first buckets are cut */
  int32_t num_bucket_limits;
  int64_t bucket_bytes;       /* how buckets are cut after the first iteration, */
  int64_t first_bucket_bytes; /* and the first of them */
  int32_t find_unused;
  int32_t gradient_as_bucket_view;
  int32_t static_graph;
  /* for the logging data only */
  const char *module_name;
  int32_t device_index; /* -1 on CPU */
  int32_t broadcast_buffers;
  int32_t has_sync_bn;
} tdp_reducer_options;

/* What every rank's parameters must agree on, as Python's DDP asks it: first the counts of all ranks (this rank has n;
 * counts has room for the group's size), then sizes and strides against rank 0's; mismatch is the first parameter that
 * differs, or -1. */
tdp_error *tdp_verify_param_counts(tdp_pg *pg, tdp_device device, int32_t n, int64_t *counts);
tdp_error *tdp_verify_param_shapes(tdp_pg *pg, const tdp_tensor *params, int32_t n, int32_t *mismatch);

tdp_error *tdp_reducer_new(tdp_pg *pg, const tdp_tensor *params, int32_t n, const tdp_reducer_options *options,
                           tdp_reducer **out);
/* Before a forward. sync = 0: inside no_sync. grad_enabled tells the calling thread's grad mode: with it off nothing
 * is prepared. rebuilt tells whether buckets were cut anew. With join, ranks whose data has ended are told that this
 * one still trains, by an all-reduce of 1 that the reducer divides by unless divide_by_size is set. */
tdp_error *tdp_reducer_pre_forward(tdp_reducer *r, int32_t sync, tdp_pg *join, tdp_device device,
                                   int32_t divide_by_size, int32_t *grad_enabled, int32_t *rebuilt);
/* After it, with the model's n outputs. Where the reducer looks for unused parameters, or learns a static graph, each
 * output that has a history is replaced, in its handle, by one that tells the reducer about the backward. */
tdp_error *tdp_reducer_post_forward(tdp_reducer *r, const tdp_tensor *outputs, int32_t n);
/* loss.backward(gradient) and, with a reducer, tdp_reducer_end_backward. gradient may be NULL. */
tdp_error *tdp_backward(tdp_tensor loss, tdp_tensor gradient, int32_t retain_graph, tdp_reducer *r);
/* The check that every gradient was reduced, and what the modes below have to do after a backward. */
tdp_error *tdp_reducer_end_backward(tdp_reducer *r);
tdp_error *tdp_reducer_free(tdp_reducer *r);
/* c10d's DDP logging data, as "name\0value\0" pairs. */
tdp_error *tdp_reducer_logging_data(tdp_reducer *r, tdp_bytes *out);
/* Times are taken in the first 10 iterations and every rate-th after. */
tdp_error *tdp_reducer_set_sample_rate(tdp_reducer *r, int32_t rate);
/* Goes on with another group, after an error for instance: what was begun is forgotten. */
tdp_error *tdp_reducer_update_group(tdp_reducer *r, tdp_pg *pg);

/* ---- modes of the reducer: set right after it was made ---- */

/* Parameters, trained and frozen, are of type param from each forward to the end of its backward, and gradients are
 * reduced as type reduce; both are c10::ScalarType. The reducer's averaging hook is taken. */
tdp_error *tdp_reducer_mixed(tdp_reducer *r, const tdp_tensor *frozen, int32_t n, int32_t param, int32_t reduce);
/* Gives parameters their own type back, where a forward is not followed by a backward. Nothing without the mode. */
tdp_error *tdp_reducer_restore(tdp_reducer *r);
/* Parameters that the reducer does not have are reduced at once, when the gradient of trigger is there. */
tdp_error *tdp_reducer_delay(tdp_reducer *r, const tdp_tensor *params, const char *const *names, int32_t n,
                             tdp_tensor trigger, const char *trigger_name);

/* Gives tensors another dtype in place, as Python's t.data = t.data.to(dtype) does. */
tdp_error *tdp_set_dtype(const tdp_tensor *tensors, int32_t n, int32_t dtype);

/* ---- communication hooks ---- */

typedef struct tdp_bucket tdp_bucket; /* valid during the hook's call only */
typedef struct tdp_future tdp_future; /* the tensor that a bucket becomes */

enum { TDP_HOOK_ALLREDUCE = 0, TDP_HOOK_FP16 = 1, TDP_HOOK_BF16 = 2 };

/* Called on autograd's thread for every bucket that is ready: gives a future, or an error's text (malloc'd). */
typedef char *(*tdp_hook_fn)(uintptr_t state, tdp_bucket *bucket, tdp_future **out);
/* Called when a future that tdp_future_then chained on is done, on whichever thread completes it: takes the tensor
 * and gives a new one in *out (owned by the callee's caller), or an error's text (malloc'd). */
typedef char *(*tdp_then_fn)(uintptr_t state, tdp_tensor value, tdp_tensor *out);

tdp_error *tdp_reducer_builtin_hook(tdp_reducer *r, tdp_pg *pg, int32_t hook, const char *name);
tdp_error *tdp_reducer_hook(tdp_reducer *r, tdp_hook_fn fn, uintptr_t state, const char *name);
tdp_error *tdp_bucket_info(tdp_bucket *b, int32_t *index, int32_t *is_last, int32_t *num_gradients);
tdp_error *tdp_bucket_buffer(tdp_bucket *b, tdp_tensor *out);
/* The gradients (views of the buffer) and the parameters of the bucket: room for num_gradients each. */
tdp_error *tdp_bucket_gradients(tdp_bucket *b, tdp_tensor *gradients, tdp_tensor *parameters);
tdp_error *tdp_future_ready(tdp_tensor value, tdp_future **out);
/* The first tensor of a collective in flight, when it is done. */
tdp_error *tdp_future_of_work(tdp_work *w, tdp_future **out);
tdp_error *tdp_future_then(tdp_future *f, tdp_then_fn fn, uintptr_t state, tdp_future **out);
tdp_error *tdp_future_free(tdp_future *f);

/* ---- uneven inputs ---- */

/* The collectives of one forward and backward, with zeros: what a joined rank contributes. */
tdp_error *tdp_reducer_shadow(tdp_reducer *r, tdp_pg *pg, int32_t find_unused);
/* Cuts the buckets anew where the others do in their forward. */
tdp_error *tdp_reducer_rebuild(tdp_reducer *r);

/* ---- a module's state over ranks ---- */

enum { TDP_BUFFERS_BROADCAST = 0, TDP_BUFFERS_AVERAGE = 1 };

/* Gives all ranks root's buffers, or the mean of all, in memory of their own: what autograd saved of the old ones
 * stays as it was, so that a module may run forward twice before its backward. Integers are always broadcast. */
tdp_error *tdp_sync_buffers(tdp_pg *pg, const tdp_tensor *buffers, int32_t n, int32_t mode, uint64_t bucket_bytes,
                            int32_t root);
/* A hash of each tensor's elements, equal where they are equal to the bit. */
tdp_error *tdp_hash_tensors(const tdp_tensor *tensors, int32_t n, uint64_t *out);
/* Multiplies the gradients of n parameters in place; those without one are left out. */
tdp_error *tdp_scale_gradients(const tdp_tensor *params, int32_t n, double factor);

/* ---- synchronised batch norm ---- */

/* Batch norm in training mode over the whole group's batch, with gradients. weight, bias, running_mean and
 * running_var may be NULL or undefined. */
tdp_error *tdp_sync_batch_norm(tdp_pg *pg, tdp_tensor input, tdp_tensor weight, tdp_tensor bias,
                               tdp_tensor running_mean, tdp_tensor running_var, double momentum, double eps,
                               tdp_tensor *out);
/* From now on every aten::batch_norm in training mode that is given key as its running mean (or, without one, its
 * weight) is synchronised over the group. NULL for the group takes that back. */
tdp_error *tdp_sync_batch_norm_register(tdp_tensor key, tdp_pg *pg);
tdp_error *tdp_sync_batch_norm_registered(tdp_tensor key, int32_t *out);

#ifdef __cplusplus
}
#endif
#endif
