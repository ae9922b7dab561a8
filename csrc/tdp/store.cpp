#include "store.h"

#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <cstdlib>
#include <cstring>

using tdp::guard;
using tdp::need;

namespace {

std::vector<uint8_t> bytes(const void *data, uint64_t size) {
  auto *p = static_cast<const uint8_t *>(data);
  return std::vector<uint8_t>(p, p + size);
}

void give(const std::vector<uint8_t> &value, tdp_bytes *out) { tdp::give(value.data(), value.size(), out); }

std::vector<std::string> strings(const char *const *s, int32_t n) { return std::vector<std::string>(s, s + n); }

c10d::Store &store_of(tdp_store *s) { return *need(s, "the store")->store; }

}  // namespace

void tdp::give(const void *data, size_t size, tdp_bytes *out) {
  // One byte at least: malloc(0) may give NULL.
  auto *p = static_cast<uint8_t *>(std::malloc(size + 1));
  if (p == nullptr) throw std::bad_alloc();
  if (size > 0) std::memcpy(p, data, size);
  *out = {p, size};
}

extern "C" {

void tdp_bytes_free(tdp_bytes *b) {
  std::free(b->data);
  *b = {nullptr, 0};
}

tdp_error *tdp_store_new_tcp(const char *host, uint16_t port, int32_t is_server, int64_t num_workers,
                             int32_t wait_workers, int64_t timeout_ms, int32_t multi_tenant, int32_t listen_fd,
                             tdp_store **out) {
  return guard([&] {
    c10d::TCPStoreOptions o;
    o.port = port;
    o.isServer = is_server != 0;
    if (num_workers >= 0) o.numWorkers = static_cast<std::size_t>(num_workers);
    o.waitWorkers = wait_workers != 0;
    o.timeout = std::chrono::milliseconds(timeout_ms);
    o.multiTenant = multi_tenant != 0;
    if (listen_fd >= 0) o.masterListenFd = listen_fd;
    *out = new tdp_store{c10::make_intrusive<c10d::TCPStore>(std::string(host), o)};
  });
}

tdp_error *tdp_store_new_file(const char *path, int32_t num_workers, tdp_store **out) {
  return guard([&] { *out = new tdp_store{c10::make_intrusive<c10d::FileStore>(std::string(path), num_workers)}; });
}

tdp_error *tdp_store_new_hash(tdp_store **out) {
  return guard([&] { *out = new tdp_store{c10::make_intrusive<c10d::HashStore>()}; });
}

tdp_error *tdp_store_new_prefix(const char *prefix, tdp_store *store, tdp_store **out) {
  return guard([&] {
    *out = new tdp_store{c10::make_intrusive<c10d::PrefixStore>(std::string(prefix), need(store, "the store")->store)};
  });
}

tdp_error *tdp_store_port(tdp_store *s, uint16_t *out) {
  return guard([&] {
    auto *tcp = dynamic_cast<c10d::TCPStore *>(&store_of(s));
    if (tcp == nullptr) throw tdp::Error(TDP_ERR_UNSUPPORTED, "only a TCP store has a port");
    *out = tcp->getPort();
  });
}

tdp_error *tdp_store_set_timeout(tdp_store *s, int64_t timeout_ms) {
  return guard([&] { store_of(s).setTimeout(std::chrono::milliseconds(timeout_ms)); });
}

tdp_error *tdp_store_set(tdp_store *s, const char *key, const void *value, uint64_t size) {
  return guard([&] { store_of(s).set(std::string(key), bytes(value, size)); });
}

tdp_error *tdp_store_get(tdp_store *s, const char *key, tdp_bytes *out) {
  return guard([&] { give(store_of(s).get(std::string(key)), out); });
}

tdp_error *tdp_store_multi_get(tdp_store *s, const char *const *keys, int32_t n, tdp_bytes *out) {
  return guard([&] {
    auto &store = store_of(s);
    auto names = strings(keys, n);
    std::vector<std::vector<uint8_t>> values;
    if (store.hasExtendedApi()) {
      values = store.multiGet(names);
    } else {
      for (auto &name : names) values.push_back(store.get(name));
    }
    for (int32_t i = 0; i < n; i++) give(values[i], &out[i]);
  });
}

tdp_error *tdp_store_add(tdp_store *s, const char *key, int64_t delta, int64_t *out) {
  return guard([&] { *out = store_of(s).add(std::string(key), delta); });
}

tdp_error *tdp_store_compare_set(tdp_store *s, const char *key, const void *expected, uint64_t expected_size,
                                 const void *desired, uint64_t desired_size, tdp_bytes *out) {
  return guard([&] {
    give(store_of(s).compareSet(std::string(key), bytes(expected, expected_size), bytes(desired, desired_size)), out);
  });
}

tdp_error *tdp_store_check(tdp_store *s, const char *const *keys, int32_t n, int32_t *out) {
  return guard([&] { *out = store_of(s).check(strings(keys, n)) ? 1 : 0; });
}

tdp_error *tdp_store_wait(tdp_store *s, const char *const *keys, int32_t n, int64_t timeout_ms) {
  return guard([&] { store_of(s).wait(strings(keys, n), std::chrono::milliseconds(timeout_ms)); });
}

tdp_error *tdp_store_delete(tdp_store *s, const char *key, int32_t *out) {
  return guard([&] { *out = store_of(s).deleteKey(std::string(key)) ? 1 : 0; });
}

tdp_error *tdp_store_num_keys(tdp_store *s, int64_t *out) {
  return guard([&] { *out = store_of(s).getNumKeys(); });
}

tdp_error *tdp_store_clone(tdp_store *s, tdp_store **out) {
  return guard([&] { *out = new tdp_store{store_of(s).clone()}; });
}

tdp_error *tdp_store_multi_set(tdp_store *s, const char *const *keys, const char *const *values, const uint64_t *sizes,
                               int32_t n) {
  return guard([&] {
    auto &store = store_of(s);
    auto names = strings(keys, n);
    std::vector<std::vector<uint8_t>> list;
    for (int32_t i = 0; i < n; i++) list.push_back(bytes(values[i], sizes[i]));
    if (store.hasExtendedApi()) {
      store.multiSet(names, list);
      return;
    }
    for (int32_t i = 0; i < n; i++) store.set(names[i], list[i]);
  });
}

tdp_error *tdp_store_append(tdp_store *s, const char *key, const void *value, uint64_t size) {
  return guard([&] { store_of(s).append(std::string(key), bytes(value, size)); });
}

tdp_error *tdp_store_queue_push(tdp_store *s, const char *key, const void *value, uint64_t size) {
  return guard([&] { store_of(s).queuePush(std::string(key), bytes(value, size)); });
}

tdp_error *tdp_store_queue_pop(tdp_store *s, const char *key, int32_t block, tdp_bytes *out) {
  return guard([&] { give(store_of(s).queuePop(std::string(key), block != 0), out); });
}

tdp_error *tdp_store_queue_len(tdp_store *s, const char *key, int64_t *out) {
  return guard([&] { *out = store_of(s).queueLen(std::string(key)); });
}

tdp_error *tdp_store_list_keys(tdp_store *s, tdp_bytes *out) {
  return guard([&] {
    std::string all;
    for (auto &key : store_of(s).listKeys()) {
      all += key;
      all += '\0';
    }
    tdp::give(all.data(), all.size(), out);
  });
}

tdp_error *tdp_store_free(tdp_store *s) {
  return guard([&] { delete s; });
}

}  // extern "C"
