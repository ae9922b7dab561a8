/*
 * tdp_jit.h: TorchScript modules, as torch.jit.save wrote them. The rules are those of tdp.h.
 */
#ifndef TDP_JIT_H
#define TDP_JIT_H

#include "tdp.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct tdp_script tdp_script;

/* device.type < 0 leaves every tensor where it was saved. */
tdp_error *tdp_script_load(const char *path, tdp_device device, tdp_script **out);
tdp_error *tdp_script_load_data(const void *data, uint64_t size, tdp_device device, tdp_script **out);
tdp_error *tdp_script_save(tdp_script *s, const char *path);
tdp_error *tdp_script_save_data(tdp_script *s, tdp_bytes *out);
tdp_error *tdp_script_free(tdp_script *s);

enum { TDP_SCRIPT_MODULE = 0, TDP_SCRIPT_PARAMETER = 1, TDP_SCRIPT_BUFFER = 2 };

/* A module with what it owns, as Python's RecursiveScriptModule lists it: a module comes before its parameters, these
 * before its buffers, and these before its children. */
typedef struct tdp_script_entry {
  int32_t kind;
  int32_t parent; /* the entry of the module it belongs to; -1 for the root */
  char *name;     /* within its parent */
  char *type;     /* of a module: the name of its Python class */
  tdp_tensor tensor;
} tdp_script_entry;

typedef struct tdp_script_entries {
  tdp_script_entry *entries;
  int32_t n;
} tdp_script_entries;

tdp_error *tdp_script_tree(tdp_script *s, tdp_script_entries *out);
/* Frees the list and its strings. The tensors are owned by the caller, who clears the handles it keeps. */
void tdp_script_entries_free(tdp_script_entries *list);

/* Sets the modules, in the order of the tree, to training or evaluation. */
tdp_error *tdp_script_train(tdp_script *s, const uint8_t *flags, int32_t n);

/* A value that goes in or out. Which fields count depends on the kind. */
enum {
  TDP_VALUE_NONE = 0,
  TDP_VALUE_TENSOR = 1,
  TDP_VALUE_INT = 2,
  TDP_VALUE_DOUBLE = 3,
  TDP_VALUE_BOOL = 4,
  TDP_VALUE_STRING = 5,
  TDP_VALUE_LIST = 6,
  TDP_VALUE_TUPLE = 7,
  TDP_VALUE_DICT = 8 /* items are key, value, key, value... in order */
};

typedef struct tdp_value {
  int32_t kind;
  int64_t i; /* int and bool */
  double d;
  char *s; /* n bytes */
  tdp_tensor t;
  struct tdp_value *items;
  int64_t n;  /* of items, or of s */
  char *name; /* of a named tuple's field, in results only */
} tdp_value;

/* Calls a method, such as "forward". out is freed with tdp_value_clear; its tensors are owned by the caller, who clears
 * the handles it keeps. */
tdp_error *tdp_script_call(tdp_script *s, const char *method, const tdp_value *args, int32_t n, tdp_value *out);
void tdp_value_clear(tdp_value *v);

/* Whether TorchScript may rewrite graphs at run time, for the whole process, and whether it might before. It then
 * replaces batch norms by code that no hook sees. */
tdp_error *tdp_script_optimize(int32_t enabled, int32_t *previous);

#ifdef __cplusplus
}
#endif
#endif
