/*
 * tdp_optim.h: optimizers, gradient clipping, weight averages and mixed precision. Part of tdp.h, and under its rules.
 */
#ifndef TDP_OPTIM_H
#define TDP_OPTIM_H

#include "tdp.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- optimizers: one call a step ---- */

/* An optimizer holds its parameters and their state, in groups that each have options of their own. */
typedef struct tdp_optim tdp_optim;

enum {
  TDP_OPTIM_SGD = 1,
  TDP_OPTIM_ADAM = 2, /* and AdamW, with TDP_OPTIM_DECOUPLED */
  TDP_OPTIM_RMSPROP = 3,
  TDP_OPTIM_ADAGRAD = 4,
  TDP_OPTIM_LARS = 5,
  TDP_OPTIM_LAMB = 6
};

enum {
  TDP_IMPL_DEFAULT = 0, /* what Python takes when foreach and fused are None: foreach on CUDA, otherwise one by one */
  TDP_IMPL_SINGLE = 1,
  TDP_IMPL_FOREACH = 2,
  TDP_IMPL_FUSED = 3
};

enum {
  TDP_OPTIM_NESTEROV = 1 << 0,
  TDP_OPTIM_MAXIMIZE = 1 << 1,
  TDP_OPTIM_AMSGRAD = 1 << 2,
  TDP_OPTIM_DECOUPLED = 1 << 3, /* weight decay outside the gradient */
  TDP_OPTIM_CENTERED = 1 << 4,
  TDP_OPTIM_NO_ADAPT = 1 << 5 /* LARS, LAMB: no trust ratio for this group */
};

/* Which state tensor of a parameter. A slot means different things for different algorithms. */
enum {
  TDP_SLOT_STEP = 0,
  TDP_SLOT_1 = 1, /* momentum_buffer (SGD, LARS), exp_avg, square_avg, sum */
  TDP_SLOT_2 = 2, /* exp_avg_sq, momentum_buffer (RMSprop) */
  TDP_SLOT_3 = 3, /* max_exp_avg_sq, grad_avg */
  TDP_NUM_SLOTS = 4
};

typedef struct tdp_optim_options {
  double lr, weight_decay, momentum, dampening, beta1, beta2, eps, alpha, lr_decay;
  double initial; /* Adagrad's first accumulator, used when the group is added */
  double trust;   /* LARS's trust coefficient */
  int32_t implementation;
  int32_t flags;
} tdp_optim_options;

tdp_error *tdp_optim_new(int32_t algorithm, tdp_optim **out);
/* Adds a group. On error the optimizer is as it was. */
tdp_error *tdp_optim_add_group(tdp_optim *o, const tdp_tensor *params, int32_t n, const tdp_optim_options *options);
/* One step over all groups; options has one entry a group. grad_scale and found_inf may be NULL: with fused kernels
 * they are what a gradient scaler hands over. */
tdp_error *tdp_optim_step(tdp_optim *o, const tdp_optim_options *options, tdp_tensor grad_scale, tdp_tensor found_inf);
tdp_error *tdp_optim_zero_grad(tdp_optim *o, int32_t set_to_none);
/* A state tensor, owned handle, or NULL where the parameter has none yet. It is the state itself, not a copy. */
tdp_error *tdp_optim_state(tdp_optim *o, int32_t group, int32_t param, int32_t slot, tdp_tensor *out);
/* Copies value into a state tensor of the parameter's dtype and device. value == NULL drops it. The step count
 * goes to the CPU, or with step_on_device, which fused kernels need, beside the parameter. */
tdp_error *tdp_optim_set_state(tdp_optim *o, int32_t group, int32_t param, int32_t slot, tdp_tensor value,
                               int32_t step_on_device);
/* With TDP_IN_BACKWARD_HOOKS every parameter is stepped inside backward, as soon as its gradient is complete, with the
 * options given (one entry a group), and its gradient is dropped. With TDP_IN_BACKWARD_OPTIONS the options are only
 * kept, for a reducer that steps (tdp_reducer_optim). Call it again to change options. */
enum { TDP_IN_BACKWARD_OFF = 0, TDP_IN_BACKWARD_HOOKS = 1, TDP_IN_BACKWARD_OPTIONS = 2 };
tdp_error *tdp_optim_in_backward(tdp_optim *o, const tdp_optim_options *options, int32_t mode);
/* Right after a reducer was made: every bucket's parameters are stepped by the optimizer as soon as the bucket is
 * reduced, with the options that TDP_IN_BACKWARD_OPTIONS left, and their gradients are dropped after the backward. The
 * optimizer must outlive the last backward. The averaging hook is taken. */
tdp_error *tdp_reducer_optim(tdp_reducer *r, tdp_optim *o);
tdp_error *tdp_optim_free(tdp_optim *o);

/* ---- gradient clipping ---- */

/* torch.nn.utils.clip_grad_norm_: the total norm before clipping goes to *total_norm, owned. */
tdp_error *tdp_clip_grad_norm(const tdp_tensor *params, int32_t n, double max_norm, double norm_type,
                              int32_t error_if_nonfinite, int32_t implementation, tdp_tensor *total_norm);
tdp_error *tdp_clip_grad_value(const tdp_tensor *params, int32_t n, double clip_value, int32_t implementation);

/* ---- averages of weights ---- */

enum {
  TDP_AVERAGE_COPY = 0,  /* averages = values */
  TDP_AVERAGE_EMA = 1,   /* averages = decay * averages + (1 - decay) * values */
  TDP_AVERAGE_EQUAL = 2, /* averages += (values - averages) / (count + 1) */
  TDP_AVERAGE_SWAP = 3   /* exchanges the contents */
};
tdp_error *tdp_average(const tdp_tensor *averages, const tdp_tensor *values, int32_t n, int32_t mode, double decay,
                       int64_t count);

/* ---- mixed precision ---- */

/* Thread-local autocast of one device type (0 CPU, 1 CUDA). */
typedef struct tdp_autocast_state {
  int32_t enabled;
  int32_t dtype; /* c10::ScalarType */
  int32_t cache_enabled;
} tdp_autocast_state;

tdp_error *tdp_autocast_get(int32_t device_type, tdp_autocast_state *out);
/* Enters a scope (nesting +1) or leaves one (nesting -1; the outermost exit drops the cache of cast weights). Only for
 * goroutines that stay on their thread. previous, may be NULL, gets the state before. */
tdp_error *tdp_autocast_enter(int32_t device_type, const tdp_autocast_state *state, tdp_autocast_state *previous);
tdp_error *tdp_autocast_exit(int32_t device_type, const tdp_autocast_state *previous);

/* Whether CUDA can be used in this process. */
tdp_error *tdp_amp_cuda_available(int32_t *out);

/* value * scale, as GradScaler.scale multiplies. */
tdp_error *tdp_amp_scale(tdp_tensor value, tdp_tensor scale, tdp_tensor *out);
/* Multiplies the gradients of all parameters by 1/scale (or, check_only, by 1) and looks for infinities and NaNs:
 * *found_inf, owned, is a float scalar on the scale's device, positive when there were any. It is NULL when no
 * parameter had a gradient. */
tdp_error *tdp_amp_unscale(tdp_optim *o, tdp_tensor scale, int32_t check_only, int32_t allow_fp16,
                           tdp_tensor *found_inf);
/* torch._amp_update_scale_ with the sum of n found_inf tensors. */
tdp_error *tdp_amp_update(tdp_tensor scale, tdp_tensor growth_tracker, const tdp_tensor *found_infs, int32_t n,
                          double growth_factor, double backoff_factor, int64_t growth_interval);

#ifdef __cplusplus
}
#endif
#endif
