/*
 * tdp_nn.h: the operations of torch.nn.functional that models/nn is made of, and what a module tree does with its
 * parameters. The rules are those of tdp.h. A NULL handle stands for None where a comment allows it; every out is a
 * new, owned handle.
 */
#ifndef TDP_NN_H
#define TDP_NN_H

#include "tdp.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- activations and shapes ---- */

enum { TDP_NN_RELU = 1, TDP_NN_GELU = 2, TDP_NN_GELU_TANH = 3, TDP_NN_SILU = 4, TDP_NN_SIGMOID = 5, TDP_NN_TANH = 6 };

/* inplace writes the result into x; out is then a second handle on it. GELU, sigmoid and tanh have no in-place form. */
tdp_error *tdp_nn_activation(int32_t kind, tdp_tensor x, int32_t inplace, tdp_tensor *out);
tdp_error *tdp_nn_softmax(tdp_tensor x, int64_t dim, int32_t log, tdp_tensor *out);
tdp_error *tdp_nn_flatten(tdp_tensor x, int64_t start_dim, int64_t end_dim, tdp_tensor *out);
/* One size may be -1: what is left over. A view where the strides allow it. */
tdp_error *tdp_nn_reshape(tdp_tensor x, const int64_t *sizes, int32_t ndim, tdp_tensor *out);
tdp_error *tdp_nn_dropout(tdp_tensor x, double p, int32_t train, int32_t inplace, tdp_tensor *out);
/* x + y, or x += y. */
tdp_error *tdp_nn_add(tdp_tensor x, tdp_tensor y, int32_t inplace, tdp_tensor *out);
/* F.pad: pad has num_pad entries, the last dimension's pair first. mode: "constant", "reflect", "replicate",
 * "circular". */
tdp_error *tdp_nn_pad(tdp_tensor x, const int64_t *pad, int32_t num_pad, const char *mode, double value,
                      tdp_tensor *out);

/* ---- layers with weights ---- */

/* bias may be NULL. */
tdp_error *tdp_nn_linear(tdp_tensor x, tdp_tensor weight, tdp_tensor bias, tdp_tensor *out);
/* dims spatial dimensions (1, 2, 3), that many entries in each list. padding NULL: "same". bias may be NULL. */
tdp_error *tdp_nn_conv(tdp_tensor x, tdp_tensor weight, tdp_tensor bias, int32_t dims, const int64_t *stride,
                       const int64_t *padding, const int64_t *dilation, int64_t groups, tdp_tensor *out);
/* One call does what BatchNorm's forward does: with count it adds one to it first; momentum < 0 means the cumulative
 * average, 1/count. weight, bias, the running tensors and count may be NULL. */
tdp_error *tdp_nn_batch_norm(tdp_tensor x, tdp_tensor weight, tdp_tensor bias, tdp_tensor running_mean,
                             tdp_tensor running_var, tdp_tensor count, int32_t training, double momentum, double eps,
                             tdp_tensor *out);
/* weight and bias may be NULL. */
tdp_error *tdp_nn_layer_norm(tdp_tensor x, const int64_t *shape, int32_t ndim, tdp_tensor weight, tdp_tensor bias,
                             double eps, tdp_tensor *out);
tdp_error *tdp_nn_group_norm(tdp_tensor x, int64_t groups, tdp_tensor weight, tdp_tensor bias, double eps,
                             tdp_tensor *out);
/* padding_idx < 0: none. */
tdp_error *tdp_nn_embedding(tdp_tensor weight, tdp_tensor indices, int64_t padding_idx, int32_t scale_grad_by_freq,
                            int32_t sparse, tdp_tensor *out);

/* ---- pooling ---- */

tdp_error *tdp_nn_max_pool(tdp_tensor x, int32_t dims, const int64_t *kernel, const int64_t *stride,
                           const int64_t *padding, const int64_t *dilation, int32_t ceil_mode, tdp_tensor *out);
/* divisor 0: the size of the window. */
tdp_error *tdp_nn_avg_pool(tdp_tensor x, int32_t dims, const int64_t *kernel, const int64_t *stride,
                           const int64_t *padding, int32_t ceil_mode, int32_t count_include_pad, int64_t divisor,
                           tdp_tensor *out);
/* size < 0: as large as the input's. */
tdp_error *tdp_nn_adaptive_avg_pool(tdp_tensor x, int32_t dims, const int64_t *size, tdp_tensor *out);

/* ---- losses ---- */

enum {
  TDP_NN_CROSS_ENTROPY = 1, /* parameter: label smoothing */
  TDP_NN_NLL = 2,
  TDP_NN_MSE = 3,
  TDP_NN_L1 = 4,
  TDP_NN_SMOOTH_L1 = 5, /* parameter: beta */
  TDP_NN_BCE_LOGITS = 6
};

enum { TDP_NN_NONE = 0, TDP_NN_MEAN = 1, TDP_NN_SUM = 2 };

/* weight and pos_weight may be NULL. */
tdp_error *tdp_nn_loss(int32_t kind, tdp_tensor input, tdp_tensor target, tdp_tensor weight, tdp_tensor pos_weight,
                       int32_t reduction, int64_t ignore_index, double parameter, tdp_tensor *out);

/* ---- a module's parameters ---- */

enum { TDP_NN_FILL = 1, TDP_NN_UNIFORM = 2, TDP_NN_NORMAL = 3, TDP_NN_EYE = 4 };

/* Fills t in place, unseen by autograd. fill: a. uniform: [a, b). normal: mean a, deviation b. Draws from
 * the device's default generator. */
tdp_error *tdp_nn_init(tdp_tensor t, int32_t kind, double a, double b);
/* normal(mean, std) cut to [lo, hi], as torch.nn.init.trunc_normal_ draws it. */
tdp_error *tdp_nn_trunc_normal(tdp_tensor t, double mean, double std, double lo, double hi);
/* t[index] = 0 along the first dimension, unseen by autograd. */
tdp_error *tdp_nn_zero_row(tdp_tensor t, int64_t index);
/* Moves a parameter or buffer, and its gradient, in place: the tensor stays the one that optimizers and DDP hold. dtype
 * < 0 keeps the dtype; others apply to floating point tensors only. device_type < 0 keeps the device. memory_format < 0
 * keeps the strides; otherwise it is c10::MemoryFormat: contiguous (0), or for tensors of 4 and of 5 dimensions
 * channels last (2, 3). */
tdp_error *tdp_nn_move(tdp_tensor t, tdp_device device, int32_t dtype, int32_t memory_format);

#ifdef __cplusplus
}
#endif
#endif
