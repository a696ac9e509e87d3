// What the two products, with float32 and with 8-bit activations, share: a tile's blocks, and its results.
#pragma once

#include "linear_formats.h"
#include "linear_kernels.h"

namespace jaxinfer::SIMD_NAMESPACE {
namespace {

// Blocks straight from the weight, which streams through the cache.
template <class F>
struct Packed {
  using Format = F;
  static constexpr int kPeriod = Format::kPeriod, kBlocks = Format::kUnit / Format::kBlock;
  static constexpr int kBlockBytes = Format::kBlock / kPeriod * Format::kPeriodBytes;
  static constexpr int kPrefetchBytes = 2048;

  const uint8_t* unit;
  int64_t block;

  Packed(const uint8_t* tile, int64_t first) : unit(tile + first / kBlocks * Format::kUnitBytes), block(first % kBlocks) {}

  JAXINFER_INLINE const uint8_t* period(int p) const { return unit + block * kBlockBytes + p * Format::kPeriodBytes; }
  JAXINFER_INLINE void prefetch(int p) const {
    for (int line = 0; line < Format::kPeriodBytes; line += 64) __builtin_prefetch(period(p) + kPrefetchBytes + line);
  }
  template <int K>
  static JAXINFER_INLINE Floats code(const uint8_t* period, int v) {
    return Format::template code<K>(period, v);
  }
  JAXINFER_INLINE Floats scale(int v) const { return Format::scale(unit + Format::kCodeBytes, static_cast<int>(block), v); }
  JAXINFER_INLINE Floats minimum(int v) const {
    return Format::minimum(unit + Format::kCodeBytes, static_cast<int>(block), v);
  }
  JAXINFER_INLINE void next() {
    if (++block == kBlocks) {
      block = 0;
      unit += Format::kUnitBytes;
    }
  }
};

inline float read(const void* from, Float dtype, int64_t index) {
  switch (dtype) {
    case Float::kF32:
      return static_cast<const float*>(from)[index];
    case Float::kBf16:
      return bfloat_to_float(static_cast<const uint16_t*>(from)[index]);
    default:
      return half_to_float(static_cast<const uint16_t*>(from)[index]);
  }
}

JAXINFER_INLINE void write(void* to, Float dtype, int64_t index, float value) {
  switch (dtype) {
    case Float::kF32:
      static_cast<float*>(to)[index] = value;
      break;
    case Float::kBf16:
      static_cast<uint16_t*>(to)[index] = float_to_bfloat(value);
      break;
    default:
      static_cast<uint16_t*>(to)[index] = float_to_half(value);
  }
}

inline void write_row(const float* y, const TileOutput& out, int64_t row) {
  const int64_t at = row * out.row_stride;
  if (out.dtype == Float::kF32 && out.outputs == kLanes) {
    float* const to = static_cast<float*>(out.y) + at;
    for (int v = 0; v < kVectors; ++v) {
      const Floats value = load<Floats>(y + v * kWidth);
      store(to + v * kWidth, out.bias == nullptr ? value : value + load<Floats>(out.bias + v * kWidth));
    }
    return;
  }
  for (int64_t lane = 0; lane < out.outputs; ++lane)
    write(out.y, out.dtype, at + lane, out.bias == nullptr ? y[lane] : y[lane] + out.bias[lane]);
}

}  // namespace
}  // namespace jaxinfer::SIMD_NAMESPACE
