/* Part of tdp.h: stores, process groups and collectives. */
#ifndef TDP_GROUP_H
#define TDP_GROUP_H

#include "tdp.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- stores ---- */

typedef struct tdp_store tdp_store;

/* Memory that the library made for the caller. */
typedef struct tdp_bytes {
  uint8_t *data;
  uint64_t size;
} tdp_bytes;

void tdp_bytes_free(tdp_bytes *bytes);

/* num_workers < 0: not known. listen_fd >= 0: a bound socket to serve on, taken over; otherwise port is bound. */
tdp_error *tdp_store_new_tcp(const char *host, uint16_t port, int32_t is_server, int64_t num_workers,
                             int32_t wait_workers, int64_t timeout_ms, int32_t multi_tenant, int32_t listen_fd,
                             tdp_store **out);
tdp_error *tdp_store_new_file(const char *path, int32_t num_workers, tdp_store **out);
tdp_error *tdp_store_new_hash(tdp_store **out);
tdp_error *tdp_store_new_prefix(const char *prefix, tdp_store *store, tdp_store **out);
/* A second connection to the same keys, so that a wait on one does not keep the other waiting. */
tdp_error *tdp_store_clone(tdp_store *s, tdp_store **out);
/* The port a TCP store listens on or is connected to. */
tdp_error *tdp_store_port(tdp_store *s, uint16_t *out);
tdp_error *tdp_store_set_timeout(tdp_store *s, int64_t timeout_ms);
tdp_error *tdp_store_set(tdp_store *s, const char *key, const void *value, uint64_t size);
/* Waits for the key, at most the store's timeout. */
tdp_error *tdp_store_get(tdp_store *s, const char *key, tdp_bytes *out);
/* Like get for n keys that all exist or will: out has room for n. */
tdp_error *tdp_store_multi_get(tdp_store *s, const char *const *keys, int32_t n, tdp_bytes *out);
/* values[i] has sizes[i] bytes; all n keys are written in one round trip where the store can. */
tdp_error *tdp_store_multi_set(tdp_store *s, const char *const *keys, const char *const *values, const uint64_t *sizes,
                               int32_t n);
tdp_error *tdp_store_append(tdp_store *s, const char *key, const void *value, uint64_t size);
tdp_error *tdp_store_add(tdp_store *s, const char *key, int64_t delta, int64_t *out);
tdp_error *tdp_store_compare_set(tdp_store *s, const char *key, const void *expected, uint64_t expected_size,
                                 const void *desired, uint64_t desired_size, tdp_bytes *out);
tdp_error *tdp_store_check(tdp_store *s, const char *const *keys, int32_t n, int32_t *out);
tdp_error *tdp_store_wait(tdp_store *s, const char *const *keys, int32_t n, int64_t timeout_ms);
tdp_error *tdp_store_delete(tdp_store *s, const char *key, int32_t *out);
tdp_error *tdp_store_num_keys(tdp_store *s, int64_t *out);
tdp_error *tdp_store_queue_push(tdp_store *s, const char *key, const void *value, uint64_t size);
/* block = 0: an empty queue is an error at once; otherwise it waits, at most the store's timeout. */
tdp_error *tdp_store_queue_pop(tdp_store *s, const char *key, int32_t block, tdp_bytes *out);
tdp_error *tdp_store_queue_len(tdp_store *s, const char *key, int64_t *out);
/* All keys, each ended by a NUL byte. */
tdp_error *tdp_store_list_keys(tdp_store *s, tdp_bytes *out);
tdp_error *tdp_store_free(tdp_store *s);

/* ---- process groups ---- */

typedef struct tdp_pg tdp_pg;
typedef struct tdp_work tdp_work;

enum { TDP_BACKEND_GLOO = 1, TDP_BACKEND_NCCL = 2 };

enum {
  TDP_SUM = 0,
  TDP_AVG = 1,
  TDP_PRODUCT = 2,
  TDP_MIN = 3,
  TDP_MAX = 4,
  TDP_BAND = 5,
  TDP_BOR = 6,
  TDP_BXOR = 7,
  TDP_PREMUL_SUM = 8 /* multiplies by a factor before it sums */
};

/* A group without a backend. The store is the group's own, prefixed by the caller. */
tdp_error *tdp_pg_new(tdp_store *store, int32_t rank, int32_t size, const char *name, const char *description,
                      tdp_pg **out);
/* Connects to every peer. interfaces and hostnames choose the addresses; with neither, the one that the machine's
 * host name resolves to. Gloo starts threads threads. With a helper store, a second Gloo group on it compares every
 * collective before it runs: c10d's ProcessGroupWrapper. global_ranks has the group's size. */
tdp_error *tdp_pg_add_gloo(tdp_pg *pg, int32_t device_type, tdp_store *store, tdp_store *helper_store,
                           const int64_t *global_ranks, int64_t timeout_ms, const char *const *interfaces,
                           int32_t num_interfaces, const char *const *hostnames, int32_t num_hostnames,
                           int32_t threads);
/* bound_device >= 0 ties the group to that GPU and connects at once. */
tdp_error *tdp_pg_add_nccl(tdp_pg *pg, tdp_store *store, tdp_store *helper_store, const int64_t *global_ranks,
                           int64_t timeout_ms, int32_t high_priority, int32_t bound_device);
/* Makes pg's NCCL backend out of parent's by ncclCommSplit. ranks are the parent's. All ranks of the parent call it;
 * pg is NULL on those that are in no part. */
tdp_error *tdp_pg_split_nccl(tdp_pg *pg, tdp_pg *parent, tdp_store *store, const int32_t *ranks, int32_t n,
                             int64_t timeout_ms);
/* Uses for device_type the backend that was added for other_type. */
tdp_error *tdp_pg_share_backend(tdp_pg *pg, int32_t device_type, int32_t other_type);
/* The backend that decides for operations that name no device, and the group's own. */
tdp_error *tdp_pg_set_default_backend(tdp_pg *pg, int32_t backend);
tdp_error *tdp_pg_set_timeout(tdp_pg *pg, int64_t timeout_ms);
/* Lets no two groups of the process that ask for it start operations at the same time. */
tdp_error *tdp_pg_serialise_starts(tdp_pg *pg, int32_t on);
/* What the backends say of themselves: 0 well, 1 timed out, 2 failed, 3 a peer reported a failure. */
tdp_error *tdp_pg_health(tdp_pg *pg, int32_t *out);
/* Ends operations in flight with an error, where the backend can. */
tdp_error *tdp_pg_abort(tdp_pg *pg);
/* Waits for operations in flight and closes the connections. */
tdp_error *tdp_pg_shutdown(tdp_pg *pg);
tdp_error *tdp_pg_free(tdp_pg *pg);

/* ---- collectives ----
 *
 * With work == NULL they return when done; otherwise *work is the operation in flight, owned, and keeps its tensors
 * alive. timeout_ms < 0: the group's. site is the caller's, kept in the group's history. factor is for
 * TDP_PREMUL_SUM. Lists have one tensor a rank unless said otherwise. */
tdp_error *tdp_broadcast(tdp_pg *pg, tdp_tensor t, int32_t root, int64_t timeout_ms, uint64_t site, tdp_work **work);
tdp_error *tdp_allreduce(tdp_pg *pg, tdp_tensor t, int32_t op, double factor, int64_t timeout_ms, uint64_t site,
                         tdp_work **work);
tdp_error *tdp_reduce(tdp_pg *pg, tdp_tensor t, int32_t root, int32_t op, double factor, int64_t timeout_ms,
                      uint64_t site, tdp_work **work);
tdp_error *tdp_allgather(tdp_pg *pg, const tdp_tensor *outputs, int32_t n, tdp_tensor input, int64_t timeout_ms,
                         uint64_t site, tdp_work **work);
tdp_error *tdp_allgather_into(tdp_pg *pg, tdp_tensor output, tdp_tensor input, int64_t timeout_ms, uint64_t site,
                              tdp_work **work);
/* outputs only on the root. */
tdp_error *tdp_gather(tdp_pg *pg, const tdp_tensor *outputs, int32_t n, tdp_tensor input, int32_t root,
                      int64_t timeout_ms, uint64_t site, tdp_work **work);
/* inputs only on the root. */
tdp_error *tdp_scatter(tdp_pg *pg, tdp_tensor output, const tdp_tensor *inputs, int32_t n, int32_t root,
                       int64_t timeout_ms, uint64_t site, tdp_work **work);
tdp_error *tdp_reduce_scatter(tdp_pg *pg, tdp_tensor output, const tdp_tensor *inputs, int32_t n, int32_t op,
                              double factor, int64_t timeout_ms, uint64_t site, tdp_work **work);
tdp_error *tdp_reduce_scatter_tensor(tdp_pg *pg, tdp_tensor output, tdp_tensor input, int32_t op, double factor,
                                     int64_t timeout_ms, uint64_t site, tdp_work **work);
tdp_error *tdp_alltoall(tdp_pg *pg, const tdp_tensor *outputs, int32_t n, const tdp_tensor *inputs, int32_t m,
                        int64_t timeout_ms, uint64_t site, tdp_work **work);
/* No splits: equal parts. */
tdp_error *tdp_alltoall_single(tdp_pg *pg, tdp_tensor output, tdp_tensor input, const int64_t *output_splits, int32_t n,
                               const int64_t *input_splits, int32_t m, int64_t timeout_ms, uint64_t site,
                               tdp_work **work);
tdp_error *tdp_barrier(tdp_pg *pg, tdp_device device, int64_t timeout_ms, uint64_t site, tdp_work **work);
/* Gloo only: rank 0 hears from every rank, and names those that did not come. */
tdp_error *tdp_monitored_barrier(tdp_pg *pg, int64_t timeout_ms, int32_t wait_all_ranks, uint64_t site);
/* Many tensors as one operation. */
tdp_error *tdp_allreduce_coalesced(tdp_pg *pg, const tdp_tensor *tensors, int32_t n, int32_t op, double factor,
                                   int64_t timeout_ms, uint64_t site, tdp_work **work);
tdp_error *tdp_allgather_into_coalesced(tdp_pg *pg, const tdp_tensor *outputs, const tdp_tensor *inputs, int32_t n,
                                        int64_t timeout_ms, uint64_t site, tdp_work **work);
tdp_error *tdp_reduce_scatter_coalesced(tdp_pg *pg, const tdp_tensor *outputs, const tdp_tensor *inputs, int32_t n,
                                        int32_t op, double factor, int64_t timeout_ms, uint64_t site, tdp_work **work);
/* Broadcasts many tensors in place, in buckets of about bucket_bytes, as DDP does with a module's state. */
tdp_error *tdp_broadcast_coalesced(tdp_pg *pg, const tdp_tensor *tensors, int32_t n, uint64_t bucket_bytes,
                                   int32_t root);

/* Point to point. peer < 0 receives from whoever sends with this tag; *source is who did, where work is NULL. */
tdp_error *tdp_send(tdp_pg *pg, tdp_tensor t, int32_t peer, int32_t tag, int64_t timeout_ms, uint64_t site,
                    tdp_work **work);
tdp_error *tdp_recv(tdp_pg *pg, tdp_tensor t, int32_t peer, int32_t tag, int64_t timeout_ms, uint64_t site,
                    int32_t *source, tdp_work **work);
/* n sends and receives that start together; all of them are one operation in flight. */
tdp_error *tdp_batch_p2p(tdp_pg *pg, const tdp_tensor *tensors, const int32_t *is_send, const int32_t *peers,
                         const int32_t *tags, int32_t n, int64_t timeout_ms, uint64_t site, tdp_work **work);

/* timeout_ms < 0: as long as the operation's own timeout lets it. */
tdp_error *tdp_work_wait(tdp_work *w, int64_t timeout_ms);
tdp_error *tdp_work_is_completed(tdp_work *w, int32_t *out);
/* Who sent what a receive from any source got, once it is done. */
tdp_error *tdp_work_source(tdp_work *w, int32_t *out);
tdp_error *tdp_work_free(tdp_work *w);

/* ---- what a group did last ---- */

enum { TDP_HISTORY_ISSUED = 0, TDP_HISTORY_DONE = 1, TDP_HISTORY_FAILED = 2 };
enum { TDP_HISTORY_DIMS = 6, TDP_HISTORY_SIZE = 64 };
/* c10d::OpType, and one of our own. */
enum { TDP_OP_MONITORED_BARRIER = 200 };

typedef struct tdp_history_entry {
  uint64_t seq;  /* counts from 1: collectives, and apart from them point-to-point operations */
  uint64_t site; /* the caller's; 0 for what the reducer and others of libtorch started */
  int64_t age_us;
  int64_t sizes[TDP_HISTORY_DIMS]; /* of the first tensor, its first dimensions */
  int32_t op;
  int32_t state;
  int32_t dtype; /* -1: no tensor */
  int32_t ndim;
  int32_t tensors;
  int32_t peer; /* root, source or destination; -1 where there is none */
} tdp_history_entry;

/* The last operations, oldest first: at most TDP_HISTORY_SIZE, which out has room for. */
tdp_error *tdp_pg_history(tdp_pg *pg, tdp_history_entry *out, int32_t *n);

/* libtorch's flight recorder of this process, all groups together, as JSON or as the pickle that its analyser reads. */
tdp_error *tdp_flight_recorder_dump(int32_t nccl, int32_t json, int32_t collectives, int32_t stacks,
                                    int32_t only_active, tdp_bytes *out);

/* c10d's debug level: 0 off, 1 info, 2 detail. */
tdp_error *tdp_set_debug_level(int32_t level);

#ifdef __cplusplus
}
#endif
#endif
