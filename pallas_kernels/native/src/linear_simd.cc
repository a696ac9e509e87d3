// y = x @ w.T for packed weights: the inner loops. Compiled once per SIMD level.
//
// Every output is summed in one fixed order, whatever the other rows are, how many there are, how wide the vectors are
// or which thread computes it: input by input within a block, with one fused multiply-add each, then block by block,
// multiplied by the block's factors. A lane of a register is one output, so nothing is ever summed across lanes.
#include <utility>

#include "linear_tile.h"

namespace jaxinfer::SIMD_NAMESPACE {
namespace {

// Sums fit the registers: 12 of 16 (AVX2), 12 of 32 (AVX-512, whose registers are twice as wide; more rows were slower).
// A code is turned into a float once for all rows of a group: with AVX2, more than three rows take half of the outputs
// at a time, rather than the codes twice. (Six rows would fit too, but compilers then spill.)
constexpr int kMaxSums = 12;
constexpr int kMaxRows = kVectors == 4 ? 5 : 6;
// Vectors of outputs at a time.
template <int Rows>
constexpr int kTogether = Rows * kVectors <= kMaxSums ? kVectors : 2;
// From so many rows on, codes are turned into floats once for all rows, not once for each group of rows: what is saved
// is then more than writing and reading the floats takes.
constexpr int64_t kUnpackRows = 24;
// What stays in the first-level cache while all groups of rows meet it: unpacked codes, and codes as they are.
constexpr int kUnpackedInputs = 64, kPackedInputs = 512;

template <int Rows>
using Sums = Floats[Rows][kTogether<Rows>];

// Unpacked: floats, one block after the other: [scale, minimum, codes of each input][lanes].
template <class F>
struct Unpacked {
  using Format = F;
  static constexpr int kPeriod = 1, kBlockFloats = (2 + Format::kBlock) * kLanes;

  const float* at;

  JAXINFER_INLINE const float* period(int p) const { return at + (2 + p) * kLanes; }
  JAXINFER_INLINE void prefetch(int) const {}
  template <int K>
  static JAXINFER_INLINE Floats code(const float* period, int v) {
    return load<Floats>(period + v * kWidth);
  }
  JAXINFER_INLINE Floats scale(int v) const { return load<Floats>(at + v * kWidth); }
  JAXINFER_INLINE Floats minimum(int v) const { return load<Floats>(at + kLanes + v * kWidth); }
  JAXINFER_INLINE void next() { at += kBlockFloats; }
};

template <class Source, int Rows, class Period, int... K>
JAXINFER_INLINE void add_period(Period period, int first, const float* x, Sums<Rows>& sums,
                                std::integer_sequence<int, K...>) {
  const auto add_input = [&](auto input) {
    constexpr int k = decltype(input)::value;
    JAXINFER_UNROLL
    for (int v = 0; v < kTogether<Rows>; ++v) {
      const Floats code = Source::template code<k>(period, first + v);
      JAXINFER_UNROLL
      for (int row = 0; row < Rows; ++row) sums[row][v] += code * x[k * Rows + row];
    }
  };
  (add_input(std::integral_constant<int, K>{}), ...);
}

// Adds `blocks` blocks to y [Rows][lanes], for the vectors from `first` on.  Not inlined: registers are allocated better.
template <class Source, int Rows>
__attribute__((noinline)) void add_blocks(Source source, int first, int64_t blocks, const float* x, const float* x_sums,
                                          float* y) {
  using Format = typename Source::Format;
  constexpr int kPeriod = Source::kPeriod;
  for (int64_t b = 0; b < blocks; ++b, x_sums += Rows) {
    Sums<Rows> sums;
    JAXINFER_UNROLL
    for (int row = 0; row < Rows; ++row)
      for (int v = 0; v < kTogether<Rows>; ++v)
        sums[row][v] = Format::kOffset == 0 ? Floats{} : Floats{} - Format::kOffset * x_sums[row];
    for (int p = 0; p < Format::kBlock / kPeriod; ++p) {
      if (first == 0) source.prefetch(p);
      add_period<Source, Rows>(source.period(p), first, x, sums, std::make_integer_sequence<int, kPeriod>{});
      x += kPeriod * Rows;
    }
    JAXINFER_UNROLL
    for (int v = 0; v < kTogether<Rows>; ++v) {
      const Floats scale = source.scale(first + v), minimum = source.minimum(first + v);
      JAXINFER_UNROLL
      for (int row = 0; row < Rows; ++row) {
        float* const at = y + row * kLanes + (first + v) * kWidth;
        Floats total = load<Floats>(at);
        if constexpr (Format::kScaled) {
          total += scale * sums[row][v];
        } else {
          total += sums[row][v];
        }
        if constexpr (Format::kMinimum) total += minimum * x_sums[row];
        store(at, total);
      }
    }
    source.next();
  }
}

template <class Source, int Rows = kMaxRows>
JAXINFER_INLINE void add_group(const Source& source, int64_t first, int64_t blocks, const PreparedGroup& group, float* y) {
  if constexpr (Rows > 0) {
    if (group.rows != Rows) return add_group<Source, Rows - 1>(source, first, blocks, group, y);
    const float* x = group.x + first * Source::Format::kBlock * Rows;
    for (int v = 0; v < kVectors; v += kTogether<Rows>)
      add_blocks<Source, Rows>(source, v, blocks, x, group.sums + first * Rows, y);
  }
}

template <class Format, int... K>
JAXINFER_INLINE void unpack_period(const uint8_t* period, float* to, std::integer_sequence<int, K...>) {
  const auto unpack_input = [&](auto input) {
    constexpr int k = decltype(input)::value;
    JAXINFER_UNROLL
    for (int v = 0; v < kVectors; ++v) store(to + k * kLanes + v * kWidth, Format::template code<k>(period, v));
  };
  (unpack_input(std::integral_constant<int, K>{}), ...);
}

template <class Format>
__attribute__((noinline)) void unpack_blocks(Packed<Format> source, int64_t blocks, float* to) {
  constexpr int kPeriod = Format::kPeriod;
  for (int64_t b = 0; b < blocks; ++b, source.next()) {
    for (int v = 0; v < kVectors; ++v) {
      store(to + v * kWidth, source.scale(v));
      store(to + kLanes + v * kWidth, source.minimum(v));
    }
    to += 2 * kLanes;
    for (int p = 0; p < Format::kBlock / kPeriod; ++p, to += kPeriod * kLanes)
      unpack_period<Format>(source.period(p), to, std::make_integer_sequence<int, kPeriod>{});
  }
}

template <class Format>
void tile_of(const uint8_t* tile, int64_t units, const PreparedGroup* groups, int64_t count, float* y_scratch,
             const TileOutput& out) {
  constexpr int64_t kBlocks = kUnpackedInputs / Format::kBlock;
  alignas(64) float unpacked[kBlocks * Unpacked<Format>::kBlockFloats];
  const int64_t blocks = units * (Format::kUnit / Format::kBlock);
  int64_t rows = 0;
  for (int64_t g = 0; g < count; ++g) rows += groups[g].rows;
  for (int64_t i = 0; i < rows * kLanes; ++i) y_scratch[i] = 0.0f;
  const bool unpack = rows >= kUnpackRows;
  const int64_t slice = unpack ? kBlocks : kPackedInputs / Format::kBlock;
  for (int64_t first = 0; first < blocks; first += slice) {
    const int64_t now = slice < blocks - first ? slice : blocks - first;
    const Packed<Format> packed(tile, first);
    if (unpack) unpack_blocks<Format>(packed, now, unpacked);
    float* y = y_scratch;
    for (int64_t g = 0; g < count; ++g) {
      if (unpack) {
        add_group(Unpacked<Format>{unpacked}, first, now, groups[g], y);
      } else {
        add_group(packed, first, now, groups[g], y);
      }
      y += groups[g].rows * kLanes;
    }
  }
  for (int64_t row = 0; row < rows; ++row) write_row(y_scratch + row * kLanes, out, row);
}

template <class Format, int... K>
constexpr void fill_scales(float* scales, std::integer_sequence<int, K...>) {
  ((scales[K] = Format::template kScale<K>), ...);
}

// The order of a block's sum is fixed as well: eight partial sums, then pairwise.
template <int Block>
float block_sum(const float* x) {
  float part[8];
  for (int j = 0; j < 8; ++j) part[j] = x[j];
  for (int k = 8; k < Block; k += 8)
    for (int j = 0; j < 8; ++j) part[j] += x[k + j];
  return ((part[0] + part[4]) + (part[2] + part[6])) + ((part[1] + part[5]) + (part[3] + part[7]));
}

template <class Format>
void prepare_of(const void* rows, Float dtype, int count, int64_t inputs, int64_t units, float* x, float* sums) {
  constexpr int kBlock = Format::kBlock, kPeriod = Format::kPeriod;
  float scales[kPeriod];
  fill_scales<Format>(scales, std::make_integer_sequence<int, kPeriod>{});
  const int64_t blocks = units * (Format::kUnit / kBlock);
  for (int row = 0; row < count; ++row) {
    for (int64_t block = 0; block < blocks; ++block) {
      float plain[kBlock];
      const int64_t first = block * kBlock, left = inputs - first;
      if (dtype == Float::kF32 && left >= kBlock) {
        std::memcpy(plain, static_cast<const float*>(rows) + row * inputs + first, sizeof(plain));
      } else {
        for (int i = 0; i < kBlock; ++i) plain[i] = i < left ? read(rows, dtype, row * inputs + first + i) : 0.0f;
      }
      float* to = x + first * count + row;
      if (count == 1) {
        for (int i = 0; i < kBlock; ++i) to[i] = plain[i] * scales[i % kPeriod];
      } else {
        for (int i = 0; i < kBlock; ++i) to[i * count] = plain[i] * scales[i % kPeriod];
      }
      sums[block * count + row] = block_sum<kBlock>(plain);
    }
  }
}

template <class Format>
void row_of(const uint8_t* tile, int lane, int64_t inputs, void* to, Float dtype) {
  constexpr int kBlock = Format::kBlock, kPeriod = Format::kPeriod;
  float scales[kPeriod], unpacked[Unpacked<Format>::kBlockFloats];
  fill_scales<Format>(scales, std::make_integer_sequence<int, kPeriod>{});
  for (int64_t first = 0; first < inputs; first += kBlock) {
    unpack_blocks<Format>(Packed<Format>(tile, first / kBlock), 1, unpacked);
    const int64_t count = kBlock < inputs - first ? kBlock : inputs - first;
    for (int64_t i = 0; i < count; ++i) {
      float value = unpacked[(2 + i) * kLanes + lane] * scales[i % kPeriod] - Format::kOffset;
      if (Format::kScaled) value *= unpacked[lane];
      if (Format::kMinimum) value += unpacked[kLanes + lane];
      write(to, dtype, first + i, value);
    }
  }
}

FormatInfo info(int format) {
  FormatInfo result{};
  with_format(format, [&](auto f) {
    using Format = decltype(f);
    // Activations depend on the period's scales and on the blocks of the sums.
    result = {Format::kUnit, Format::kUnitBytes, Format::kBlock, Format::kPeriod == 2 ? 1 : Format::kPeriod};
  });
  return result;
}

void prepare(int format, const void* rows, Float dtype, int count, int64_t inputs, int64_t units, float* x,
             float* sums) {
  with_format(format, [&](auto f) { prepare_of<decltype(f)>(rows, dtype, count, inputs, units, x, sums); });
}

void tile(int format, const uint8_t* data, int64_t units, const PreparedGroup* groups, int64_t count, float* y_scratch,
          const TileOutput& out) {
  with_format(format, [&](auto f) { tile_of<decltype(f)>(data, units, groups, count, y_scratch, out); });
}

void row(int format, const uint8_t* tile, int lane, int64_t inputs, void* to, Float dtype) {
  with_format(format, [&](auto f) { row_of<decltype(f)>(tile, lane, inputs, to, dtype); });
}

}  // namespace

const LinearKernels& linear_kernels() {
  static constexpr LinearKernels kernels{kMaxRows, 0, 9, 4, 1, info, prepare, tile, row};
  return kernels;
}

}  // namespace jaxinfer::SIMD_NAMESPACE
