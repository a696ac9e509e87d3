// y = x @ w.T for bfloat16 weights with activations rounded to bfloat16. Compiled once per SIMD level.
//
// The instruction of AVX-512 adds two products to a float32: of the odd input, then of the even one, each as one fused
// multiply-add; AVX2 does the same in two steps. Every output is summed pair by pair over all inputs, so a row has the
// same bits whatever its neighbours, threads and registers.
#include <utility>

#include "linear_tile.h"

namespace jaxinfer::SIMD_NAMESPACE {
namespace {

using Weights = Format<Bf16, NoFactors, 64, 64>;

constexpr int kMaxRows = kVectors == 4 ? 5 : 12;
constexpr int kMaxSums = kVectors == 4 ? 12 : 24;
template <int Rows>
constexpr int kTogether = Rows * kVectors <= kMaxSums ? kVectors : 2;
// Inputs of a tile that stay in the first-level cache while all groups of rows meet them.
constexpr int64_t kSlicePairs = 128;

// sum + x1 w1 + x0 w0 in each lane; x and w hold bfloat16 pairs.
JAXINFER_INLINE Floats add_products(Floats sum, Words x, Words w) {
#if defined(__AVX512BF16__)
  return reinterpret_cast<Floats>(
      _mm512_dpbf16_ps(reinterpret_cast<__m512>(sum), reinterpret_cast<__m512bh>(w), reinterpret_cast<__m512bh>(x)));
#else
  sum += as_floats(x & 0xffff0000u) * as_floats(w & 0xffff0000u);
  return sum + as_floats(x << 16) * as_floats(w << 16);
#endif
}

// Adds pairs of inputs to y [Rows][lanes], for the vectors from `first` on. x: [pairs][Rows].
template <int Rows>
__attribute__((noinline)) void add_pairs(const uint8_t* w, int first, int64_t pairs, const uint32_t* x, float* y) {
  constexpr int kCount = kTogether<Rows>;
  Floats sums[Rows][kCount];
  y += first * kWidth;
  JAXINFER_UNROLL
  for (int row = 0; row < Rows; ++row)
    for (int v = 0; v < kCount; ++v) sums[row][v] = load<Floats>(y + row * kLanes + v * kWidth);
  for (int64_t pair = 0; pair < pairs; ++pair, w += Weights::kPeriodBytes, x += Rows) {
    __builtin_prefetch(w + 2048);
    __builtin_prefetch(w + 2048 + 64);
    JAXINFER_UNROLL
    for (int v = 0; v < kCount; ++v) {
      const Words weights = word(w, 0, first + v);
      JAXINFER_UNROLL
      for (int row = 0; row < Rows; ++row) sums[row][v] = add_products(sums[row][v], x[row] - Words{}, weights);
    }
  }
  JAXINFER_UNROLL
  for (int row = 0; row < Rows; ++row)
    for (int v = 0; v < kCount; ++v) store(y + row * kLanes + v * kWidth, sums[row][v]);
}

template <int Rows = kMaxRows>
JAXINFER_INLINE void add_group(const uint8_t* w, int64_t first, int64_t pairs, const PreparedGroup& group, float* y) {
  if constexpr (Rows > 0) {
    if (group.rows != Rows) return add_group<Rows - 1>(w, first, pairs, group, y);
    const uint32_t* x = reinterpret_cast<const uint32_t*>(group.x) + first * Rows;
    for (int v = 0; v < kVectors; v += kTogether<Rows>) add_pairs<Rows>(w, v, pairs, x, y);
  }
}

void tile(int, const uint8_t* data, int64_t units, const PreparedGroup* groups, int64_t count, float* y_scratch,
          const TileOutput& out) {
  const int64_t pairs = units * Weights::kUnit / 2;
  int64_t rows = 0;
  for (int64_t g = 0; g < count; ++g) rows += groups[g].rows;
  for (int64_t i = 0; i < rows * kLanes; ++i) y_scratch[i] = 0.0f;
  for (int64_t first = 0; first < pairs; first += kSlicePairs) {
    const int64_t now = kSlicePairs < pairs - first ? kSlicePairs : pairs - first;
    float* y = y_scratch;
    for (int64_t g = 0; g < count; ++g) {
      add_group(data + first * Weights::kPeriodBytes, first, now, groups[g], y);
      y += groups[g].rows * kLanes;
    }
  }
  for (int64_t row = 0; row < rows; ++row) write_row(y_scratch + row * kLanes, out, row);
}

void prepare(int, const void* rows, Float dtype, int count, int64_t inputs, int64_t units, float* x, float*) {
  uint32_t* const pairs = reinterpret_cast<uint32_t*>(x);
  for (int row = 0; row < count; ++row) {
    for (int64_t pair = 0; pair < units * Weights::kUnit / 2; ++pair) {
      uint32_t halves[2];
      for (int i = 0; i < 2; ++i) {
        const int64_t input = 2 * pair + i;
        halves[i] = input < inputs ? float_to_bfloat(read(rows, dtype, row * inputs + input)) : 0;
      }
      pairs[pair * count + row] = halves[1] << 16 | halves[0];
    }
  }
}

FormatInfo info(int) { return {Weights::kUnit, Weights::kUnitBytes, Weights::kBlock, 0}; }

}  // namespace

const LinearKernels& linear_bf16_kernels() {
  static constexpr LinearKernels kernels{kMaxRows, 1, 2, 2, 0, info, prepare, tile, nullptr};
  return kernels;
}

}  // namespace jaxinfer::SIMD_NAMESPACE
