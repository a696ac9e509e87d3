// What every thread that computes a piece of work needs.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <vector>

namespace jaxinfer {

// Subnormal floats count as 0 while this lives, on whatever thread: as in the programs of XLA.
class FlushSubnormal {
 public:
  FlushSubnormal() : saved_(_mm_getcsr()) { _mm_setcsr(saved_ | 0x8040); }
  ~FlushSubnormal() { _mm_setcsr(saved_); }
  FlushSubnormal(const FlushSubnormal&) = delete;
  FlushSubnormal& operator=(const FlushSubnormal&) = delete;

 private:
  const unsigned saved_;
};

// Memory of this thread, at least `floats` of them, aligned to 64 bytes; kept for the next piece.
static inline float* scratch(int64_t floats) {
  thread_local std::vector<float> memory;
  if (int64_t(memory.size()) < floats + 16) memory.resize(floats + 16);
  return reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(memory.data()) + 63) & ~uintptr_t(63));
}

}  // namespace jaxinfer
