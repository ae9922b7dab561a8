#pragma once
#include <chrono>
#include <memory>

namespace gloo {
namespace transport {
class Context;
class Device;
class UnboundBuffer;
}  // namespace transport

// Only used through a pointer; the member is resolved in libtorch_cpu.
class Context {
 public:
  void setTimeout(std::chrono::milliseconds timeout);
};
}  // namespace gloo
