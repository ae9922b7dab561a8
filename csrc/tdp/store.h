#pragma once

#include "guard.h"

#include <torch/csrc/distributed/c10d/Store.hpp>

struct tdp_store {
  c10::intrusive_ptr<c10d::Store> store;
};

namespace tdp {

// Copies memory into what the caller will free with tdp_bytes_free.
void give(const void *data, size_t size, tdp_bytes *out);

}  // namespace tdp
