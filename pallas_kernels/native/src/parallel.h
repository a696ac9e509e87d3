// Work on several threads. The kernels see only `Parallel`, so that they can be tested without XLA.
#pragma once

#include <cstdint>
#include <type_traits>

namespace jaxinfer {

// Calls body(context, chunk) for every chunk of [0, chunks), in any order, on any threads; returns when all are done.
// Chunks must be independent and must not depend on the number of threads: then no number does.
class Parallel {
 public:
  using Body = void (*)(void* context, int64_t chunk);
  virtual ~Parallel() = default;
  virtual int64_t threads() const = 0;
  virtual void run(int64_t chunks, Body body, void* context) = 0;

  // The same with a lambda of the chunk.
  template <typename F>
  void each(int64_t chunks, F&& f) {
    using Function = std::remove_reference_t<F>;
    run(chunks, [](void* context, int64_t chunk) { (*static_cast<Function*>(context))(chunk); }, &f);
  }
};

}  // namespace jaxinfer
