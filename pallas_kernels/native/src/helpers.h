// Threads of this library that help with the chunks of a call.
//
// Not the pool of XLA: a decoding step is a few hundred calls of some 50 microseconds each, and waking a thread of that
// pool takes as long. Helpers look for the next call for a while before they sleep.
#pragma once

#include <atomic>
#include <condition_variable>
#include <mutex>

#include "parallel.h"

namespace jaxinfer {

class Helpers {
 public:
  // Starts the threads; they live as long as the process.
  explicit Helpers(int64_t count);
  Helpers(const Helpers&) = delete;
  Helpers& operator=(const Helpers&) = delete;

  int64_t count() const { return count_; }

  // Runs the chunks on the calling thread and the helpers. False, and nothing is done, if they help another call.
  bool run(int64_t chunks, Parallel::Body body, void* context);

 private:
  void help();
  uint64_t wait_for_another(uint64_t seen);
  void take_chunks(uint64_t call);

  const int64_t count_;
  std::atomic_flag taken_ = ATOMIC_FLAG_INIT;
  // The call that is helped: its number is written last. Its fields are read only by who has taken a chunk of it.
  alignas(64) std::atomic<uint64_t> call_{0};
  std::atomic<Parallel::Body> body_{nullptr};
  std::atomic<void*> context_{nullptr};
  std::atomic<int64_t> chunks_{0};
  alignas(64) std::atomic<uint64_t> left_{0};  // number of the call << 32 | chunks that nobody has taken
  alignas(64) std::atomic<int64_t> done_{0};
  alignas(64) std::atomic<int64_t> sleeping_{0};
  std::mutex mutex_;
  std::condition_variable wake_;
};

// As many threads as XLA has, of which the caller is one. While other calls are helped, the caller works alone.
class HelpedParallel final : public Parallel {
 public:
  // The helpers of this process are started by its first call; `threads` of later calls does not change their number.
  explicit HelpedParallel(int64_t threads);

  int64_t threads() const override { return helpers_.count() + 1; }
  void run(int64_t chunks, Body body, void* context) override;

 private:
  Helpers& helpers_;
};

}  // namespace jaxinfer
