// What the generated functions below are made of. Each calls one of gotch's C functions and brings its error back in the
// same call: a goroutine may be on another thread by the time it makes a second one.
#pragma once
#include <cstdlib>
#include <cstring>
#include <exception>
#include <new>
#include <string>

// An error is a malloc'd string whose first byte says what it is. The Go side frees it.
namespace goddp {

struct Misuse : std::exception {
  char code;
  std::string text;
  Misuse(char code, std::string text) : code(code), text(std::move(text)) {}
  const char* what() const noexcept override { return text.c_str(); }
};

inline char* message(char code, const char* text) noexcept {
  size_t n = strlen(text);
  char* out = static_cast<char*>(malloc(n + 2));
  if (out == nullptr) return const_cast<char*>(""); // Go does not free the empty string
  out[0] = code;
  memcpy(out + 1, text, n + 1);
  return out;
}

// caught turns the exception in flight into an error. c10's backtrace is left out: it is long, and names no Go code.
__attribute__((noinline, cold)) inline char* caught() noexcept {
  try {
    throw;
  } catch (const Misuse& e) {
    return message(e.code, e.what());
  } catch (const c10::OutOfMemoryError& e) {
    return message('M', e.what_without_backtrace());
  } catch (const c10::IndexError& e) {
    return message('I', e.what_without_backtrace());
  } catch (const c10::ValueError& e) {
    return message('V', e.what_without_backtrace());
  } catch (const c10::TypeError& e) {
    return message('T', e.what_without_backtrace());
  } catch (const c10::NotImplementedError& e) {
    return message('N', e.what_without_backtrace());
  } catch (const c10::LinAlgError& e) {
    return message('L', e.what_without_backtrace());
  } catch (const c10::Error& e) {
    const char* text = e.what_without_backtrace();
    return message(strstr(text, "can't allocate memory") ? 'M' : 'E', text); // the CPU's allocator has no type of its own
  } catch (const std::bad_alloc& e) {
    return message('M', "out of memory");
  } catch (const std::exception& e) {
    return message('E', e.what());
  } catch (...) {
    return message('E', "C++ exception of an unknown type");
  }
}

// The Go side sends this address for a tensor that has been dropped, so that an optional argument left out (NULL) and one
// that was freed too early are not the same.
inline char dropped_mark;

__attribute__((noinline, cold)) inline void refuse(const void* p, const char* name) {
  throw Misuse('D', std::string("argument ") + name +
                        (p == nullptr ? " is nil" : " was dropped before this call"));
}
inline void need(const void* p, const char* name) {
  if (__builtin_expect(p == nullptr || p == &dropped_mark, 0)) refuse(p, name);
}
inline void optional(const void* p, const char* name) {
  if (__builtin_expect(p == &dropped_mark, 0)) refuse(p, name);
}
template <class T> void need_all(T* const* list, int n, const char* name) {
  for (int i = 0; i < n; ++i) need(list[i], name);
}
template <class T> void optional_all(T* const* list, int n, const char* name) {
  for (int i = 0; i < n; ++i) optional(list[i], name);
}

// adopt makes self the tensor that an in-place operator returned, and frees the handle that came with it. It is nearly
// always the same tensor already; then the handle is left alone, as other threads may be reading it.
inline void adopt(at::Tensor* self, at::Tensor* out) {
  if (self->unsafeGetTensorImpl() != out->unsafeGetTensorImpl()) *self = std::move(*out);
  delete out;
}

} // namespace goddp
