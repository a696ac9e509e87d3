#include "helpers.h"

#include <immintrin.h>
#include <sched.h>

#include <chrono>
#include <thread>

namespace jaxinfer {
namespace {

constexpr uint64_t kChunkBits = 32, kChunkMask = (uint64_t{1} << kChunkBits) - 1;
// Between two calls of a step lie a few microseconds of XLA; between two steps there may be a millisecond of Python, for
// which waiting is not worth a core.
constexpr auto kLooking = std::chrono::microseconds(200);
constexpr int kPauses = 16;

// A moment of waiting that leaves the core to a thread that has something to do.
void relax() {
  for (int i = 0; i < kPauses; ++i) _mm_pause();
  sched_yield();
}

}  // namespace

Helpers::Helpers(int64_t count) : count_(count) {
  for (int64_t i = 0; i < count; ++i) std::thread([this] { help(); }).detach();
}

bool Helpers::run(int64_t chunks, Parallel::Body body, void* context) {
  if (taken_.test_and_set(std::memory_order_acquire)) return false;
  const uint64_t call = call_.load(std::memory_order_relaxed) + 1;
  body_.store(body, std::memory_order_relaxed);
  context_.store(context, std::memory_order_relaxed);
  chunks_.store(chunks, std::memory_order_relaxed);
  done_.store(0, std::memory_order_relaxed);
  left_.store(call << kChunkBits | static_cast<uint64_t>(chunks), std::memory_order_release);
  call_.store(call, std::memory_order_seq_cst);
  if (sleeping_.load(std::memory_order_seq_cst) > 0) {
    { const std::lock_guard<std::mutex> lock(mutex_); }
    wake_.notify_all();
  }
  take_chunks(call);
  // Only chunks that have been started are waited for: a helper that does not get to run delays nobody.
  while (done_.load(std::memory_order_acquire) < chunks) relax();
  taken_.clear(std::memory_order_release);
  return true;
}

void Helpers::take_chunks(uint64_t call) {
  uint64_t left = left_.load(std::memory_order_acquire);
  while (left >> kChunkBits == (call & kChunkMask) && (left & kChunkMask) != 0) {
    if (!left_.compare_exchange_weak(left, left - 1, std::memory_order_acq_rel)) continue;
    // The call cannot end before this chunk has, so now, and not earlier, the fields are those of the call.
    const int64_t chunk = chunks_.load(std::memory_order_relaxed) - static_cast<int64_t>(left & kChunkMask);
    body_.load(std::memory_order_relaxed)(context_.load(std::memory_order_relaxed), chunk);
    done_.fetch_add(1, std::memory_order_release);
    left = left_.load(std::memory_order_acquire);
  }
}

uint64_t Helpers::wait_for_another(uint64_t seen) {
  const auto until = std::chrono::steady_clock::now() + kLooking;
  do {
    if (const uint64_t call = call_.load(std::memory_order_acquire); call != seen) return call;
    relax();
  } while (std::chrono::steady_clock::now() < until);
  std::unique_lock<std::mutex> lock(mutex_);
  sleeping_.fetch_add(1, std::memory_order_seq_cst);
  wake_.wait(lock, [&] { return call_.load(std::memory_order_seq_cst) != seen; });
  sleeping_.fetch_sub(1, std::memory_order_relaxed);
  return call_.load(std::memory_order_acquire);
}

void Helpers::help() {
  for (uint64_t call = 0;;) {
    call = wait_for_another(call);
    take_chunks(call);
  }
}

HelpedParallel::HelpedParallel(int64_t threads)
    // Never destroyed: helpers may be looking for calls when the process ends.
    : helpers_([threads]() -> Helpers& {
        static Helpers* const helpers = new Helpers(threads < 1 ? 0 : threads - 1);
        return *helpers;
      }()) {}

void HelpedParallel::run(int64_t chunks, Body body, void* context) {
  if (chunks > 1 && helpers_.count() > 0 && helpers_.run(chunks, body, context)) return;
  for (int64_t chunk = 0; chunk < chunks; ++chunk) body(context, chunk);
}

}  // namespace jaxinfer
