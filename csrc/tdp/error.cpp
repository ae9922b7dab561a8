#include "guard.h"

#include <c10/util/Exception.h>
#include <c10/util/Logging.h>
#include <torch/version.h>

#include <cstdlib>
#include <cstring>
#include <new>
#include <stdexcept>

namespace tdp {
namespace {

bool has(const char *text, const char *part) { return std::strstr(text, part) != nullptr; }

// Gloo and the stores throw plain runtime errors whose kind stands only in their text.
int32_t code_from_text(const char *m, int32_t otherwise) {
  if (has(m, "Detected mismatch between collectives")) return TDP_ERR_DESYNC;
  if (has(m, "imed out") || has(m, "imeout") || has(m, "failed to pass monitoredBarrier")) return TDP_ERR_TIMEOUT;
  if (has(m, "Connection closed by peer") || has(m, "Connection reset by peer") || has(m, "Broken pipe") ||
      has(m, "Connection refused") || has(m, "Connection was likely closed") || has(m, "recvValue failed") ||
      has(m, "sendBytes failed") || has(m, "failed to recv") || has(m, "Socket closed") || has(m, "EOF"))
    return TDP_ERR_PEER;
  if (has(m, "Expected to have finished reduction") || has(m, "Expected to mark a variable ready only once") ||
      has(m, "Your training graph has changed"))
    return TDP_ERR_REDUCTION;
  if (has(m, "does not support") || has(m, "not supported") || has(m, "Cannot use ReduceOp") ||
      has(m, "is not implemented"))
    return TDP_ERR_UNSUPPORTED;
  // What c10d's backends say of tensors that they cannot take.
  if (has(m, "ProcessGroupGloo::") || has(m, "Invalid scalar type") || has(m, "invalid tensor")) return TDP_ERR_VALUE;
  return otherwise;
}

// malloc, not new: an error record must be possible when memory is short.
tdp_error *record(int32_t code, const char *message) noexcept {
  static tdp_error out_of_memory = {TDP_ERR_OOM, const_cast<char *>("out of memory")};
  auto *e = static_cast<tdp_error *>(std::malloc(sizeof(tdp_error)));
  if (e == nullptr) return &out_of_memory;
  e->code = code;
  e->message = ::strdup(message);
  if (e->message == nullptr) {
    std::free(e);
    return &out_of_memory;
  }
  return e;
}

}  // namespace

tdp_error *current_exception_record() noexcept {
  try {
    throw;
  } catch (const Error &e) {
    return record(e.code(), e.what());
  } catch (const c10::OutOfMemoryError &e) {
    return record(TDP_ERR_OOM, e.what_without_backtrace());
  } catch (const c10::DistNetworkError &e) {
    return record(code_from_text(e.what_without_backtrace(), TDP_ERR_PEER), e.what_without_backtrace());
  } catch (const c10::DistStoreError &e) {
    return record(code_from_text(e.what_without_backtrace(), TDP_ERR_STORE), e.what_without_backtrace());
  } catch (const c10::DistError &e) {
    return record(code_from_text(e.what_without_backtrace(), TDP_ERR_BACKEND), e.what_without_backtrace());
  } catch (const c10::NotImplementedError &e) {
    return record(TDP_ERR_UNSUPPORTED, e.what_without_backtrace());
  } catch (const c10::ValueError &e) {
    return record(code_from_text(e.what_without_backtrace(), TDP_ERR_VALUE), e.what_without_backtrace());
  } catch (const c10::IndexError &e) {
    return record(TDP_ERR_VALUE, e.what_without_backtrace());
  } catch (const c10::TypeError &e) {
    return record(TDP_ERR_VALUE, e.what_without_backtrace());
  } catch (const c10::Error &e) {
    return record(code_from_text(e.what_without_backtrace(), TDP_ERR_OTHER), e.what_without_backtrace());
  } catch (const std::invalid_argument &e) {
    return record(code_from_text(e.what(), TDP_ERR_VALUE), e.what());
  } catch (const std::bad_alloc &) {
    return record(TDP_ERR_OOM, "out of memory");
  } catch (const std::exception &e) {
    return record(code_from_text(e.what(), TDP_ERR_OTHER), e.what());
  } catch (...) {
    return record(TDP_ERR_OTHER, "an exception that is no std::exception");
  }
}

}  // namespace tdp

extern "C" {

void tdp_error_free(tdp_error *err) {
  if (err == nullptr || std::strcmp(err->message, "out of memory") == 0) return;
  std::free(err->message);
  std::free(err);
}

int32_t TDP_ABI(void) { return 1; }

const char *tdp_source_key(void) { return TDP_SOURCE_KEY; }

const char *tdp_torch_version(void) { return TORCH_VERSION; }

int32_t tdp_built_with_cuda(void) {
#ifdef TDP_CUDA
  return 1;
#else
  return 0;
#endif
}

tdp_error *tdp_set_log_level(int32_t level) {
  return tdp::guard([&] {
    FLAGS_caffe2_log_level = level;
    c10::UpdateLoggingLevelsFromFlags();
  });
}

}  // extern "C"
