// Work on XLA's own threads. The kernels see only `Parallel`, so that they can be tested without XLA.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>
#include <type_traits>

#include "xla/ffi/api/ffi.h"

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

// On the pool of the XLA client. The calling thread, which may be of that pool, takes chunks too and waits only for
// chunks that have been started: a helper that the pool never gets to run delays nobody, so there is no deadlock.
class XlaParallel final : public Parallel {
 public:
  explicit XlaParallel(xla::ffi::ThreadPool pool) : pool_(pool) {}

  int64_t threads() const override { return pool_.num_threads() < 1 ? 1 : pool_.num_threads(); }

  void run(int64_t chunks, Body body, void* context) override {
    const int64_t workers = threads() < chunks ? threads() : chunks;
    if (workers <= 1) {
      for (int64_t chunk = 0; chunk < chunks; ++chunk) body(context, chunk);
      return;
    }
    // Shared, because a helper may start after the work is done and this frame is gone; it then finds no chunk.
    auto work = std::make_shared<Work>(chunks, body, context);
    for (int64_t helper = 1; helper < workers; ++helper) pool_.Schedule([work] { work->take(); });
    work->take();
    for (int64_t spins = 0; work->done.load(std::memory_order_acquire) < chunks; ++spins) {
      if (spins < kSpins) {
        __builtin_ia32_pause();
      } else {
        std::this_thread::yield();  // another process has the core of the helper
      }
    }
  }

 private:
  static constexpr int64_t kSpins = 1000;

  struct Work {
    Work(int64_t chunks, Body body, void* context) : chunks(chunks), body(body), context(context) {}

    void take() {
      for (int64_t chunk = next.fetch_add(1); chunk < chunks; chunk = next.fetch_add(1)) {
        body(context, chunk);
        done.fetch_add(1, std::memory_order_release);
      }
    }

    const int64_t chunks;
    const Body body;
    void* const context;
    alignas(64) std::atomic<int64_t> next{0};
    alignas(64) std::atomic<int64_t> done{0};
  };

  xla::ffi::ThreadPool pool_;
};

}  // namespace jaxinfer
