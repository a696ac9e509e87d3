// y = x @ w.T for quantized weights with activations rounded to 8 bits, block by block as the weight is cut. Compiled
// once per SIMD level.
//
// A block's activations are q * scale with q = round(x / scale) and scale = max |x| / 127 (ggml's Q8_1 and others do the
// same). The products of a block are summed as integers, exactly; block sums are then added in one fixed order, with the
// same float operations at every SIMD level. So a row has the same bits whatever its neighbours, threads and registers.
#include <utility>

#include "linear_tile.h"
#include "simd_int8.h"

namespace jaxinfer::SIMD_NAMESPACE {
namespace {

constexpr int kMaxRows = 32;
constexpr float kLargest = 127.0f, kSmallest = 1e-35f;

template <class Format>
constexpr bool kSigned = Format::kMaxCode == 127;

// How the bytes of a block lie in words: those of four-bit codes as two masks of a word give them.
template <class Format>
constexpr bool kNibbles = Format::kMaxCode == 15;

template <class Format, int Word>
JAXINFER_INLINE Words codes_of(const Packed<Format>& source, int v) {
  if constexpr (kNibbles<Format>) {
    const Words w = word(source.period(Word / 2), 0, v);
    return (Word % 2 == 0 ? w : w >> 4) & 0x0f0f0f0fu;
  } else if constexpr (kSigned<Format>) {
    return word(source.period(Word), 0, v);
  } else {
    constexpr int kPeriod = Format::kPeriod, first = Word * 4;
    const auto byte = [&](auto i) {
      constexpr int input = first + decltype(i)::value;
      return Format::template byte<input % kPeriod>(source.period(input / kPeriod), v);
    };
    return byte(std::integral_constant<int, 0>{}) | byte(std::integral_constant<int, 1>{}) << 8 |
           byte(std::integral_constant<int, 2>{}) << 16 | byte(std::integral_constant<int, 3>{}) << 24;
  }
}

template <class Format, int... Word>
JAXINFER_INLINE void codes_of(const Packed<Format>& source, int v, Words* codes, std::integer_sequence<int, Word...>) {
  ((codes[Word] = codes_of<Format, Word>(source, v)), ...);
}

// A block for 8 or 16 outputs and all rows. x: [rows][kBlock]; factors: [scales of the rows][sums of the rows].
template <class Format>
JAXINFER_INLINE void add_block(const Packed<Format>& source, int v, const int8_t* x, const float* factors, int rows,
                               float* y) {
  constexpr int kWords = Format::kBlock / 4;
  Words codes[kWords];
  codes_of(source, v, codes, std::make_integer_sequence<int, kWords>{});
  const Floats scale = source.scale(v);
  const Floats minimum = Format::kMinimum ? source.minimum(v) : scale * static_cast<float>(-Format::kOffset);
  for (int row = 0; row < rows; ++row, x += Format::kBlock) {
    float* const at = y + row * kLanes + v * kWidth;
    const Ints products = byte_products<kSigned<Format>, Format::kMaxCode, kWords>(codes, x);
    const Floats product = to_floats(products) * factors[row];
    Floats total = load<Floats>(at) + scale * product;
    if constexpr (Format::kMinimum || Format::kOffset != 0) total += minimum * factors[rows + row];
    store(at, total);
  }
}

template <class Format>
__attribute__((noinline)) void add_tile(const uint8_t* tile, int64_t blocks, const PreparedGroup& group, float* y) {
  const int8_t* x = reinterpret_cast<const int8_t*>(group.x);
  const float* factors = group.sums;
  Packed<Format> source(tile, 0);
  for (int64_t b = 0; b < blocks; ++b, source.next()) {
    for (int p = 0; p < Format::kBlock / Format::kPeriod; ++p) source.prefetch(p);
    for (int v = 0; v < kVectors; ++v) add_block(source, v, x, factors, group.rows, y);
    x += group.rows * Format::kBlock;
    factors += 2 * group.rows;
  }
}

template <class Format>
void tile_of(const uint8_t* tile, int64_t units, const PreparedGroup* groups, int64_t count, float* y_scratch,
             TileOutput out) {
  for (int64_t g = 0; g < count; ++g) {
    const int rows = groups[g].rows;
    for (int i = 0; i < rows * kLanes; ++i) y_scratch[i] = 0.0f;
    add_tile<Format>(tile, units * (Format::kUnit / Format::kBlock), groups[g], y_scratch);
    for (int row = 0; row < rows; ++row) write_row(y_scratch + row * kLanes, out, row);
    out.skip_rows(rows);
  }
}

float float_of(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof(x));
  return x;
}

// Rounds a block, returns the scale. Whatever is not finite makes the scale NaN, and so the results.
template <class Format>
JAXINFER_INLINE float quantize(const float* x, int8_t* to, float* sum) {
  const uint32_t bits = largest_magnitude<Format::kBlock>(x);
  const float top = float_of(bits);
  const bool finite = bits < 0x7f800000u;
  // Below that, the inverse could be infinite; such a block is 0.
  const float inverse = finite && top > kSmallest ? kLargest / top : 0.0f;
  const float scale = finite ? top / kLargest : float_of(0x7fc00000u);
  *sum = static_cast<float>(round_to_bytes<Format::kBlock, kNibbles<Format>>(x, inverse, to)) * scale;
  return scale;
}

template <class Format>
void prepare_of(const void* rows, Float dtype, int count, int64_t inputs, int64_t units, float* x, float* factors) {
  constexpr int kBlock = Format::kBlock;
  int8_t* const bytes = reinterpret_cast<int8_t*>(x);
  for (int row = 0; row < count; ++row) {
    for (int64_t block = 0; block < units * (Format::kUnit / kBlock); ++block) {
      const int64_t first = row * inputs + block * kBlock;
      float converted[kBlock];
      const float* plain = static_cast<const float*>(rows) + first;
      if (dtype != Float::kF32) {
        for (int i = 0; i < kBlock; ++i) converted[i] = read(rows, dtype, first + i);
        plain = converted;
      }
      float* const at = factors + block * 2 * count + row;
      at[0] = quantize<Format>(plain, bytes + (block * count + row) * kBlock, at + count);
    }
  }
}

void prepare(int format, const void* rows, Float dtype, int count, int64_t inputs, int64_t units, float* x,
             float* factors) {
  with_quantized_format(
      format, [&](auto f) { prepare_of<decltype(f)>(rows, dtype, count, inputs, units, x, factors); });
}

void tile(int format, const uint8_t* data, int64_t units, const PreparedGroup* groups, int64_t count, float* y_scratch,
          const TileOutput& out) {
  with_quantized_format(format, [&](auto f) { tile_of<decltype(f)>(data, units, groups, count, y_scratch, out); });
}

FormatInfo info(int format) {
  FormatInfo result{};
  with_quantized_format(format, [&](auto f) {
    using Format = decltype(f);
    result = {Format::kUnit, Format::kUnitBytes, Format::kBlock, Format::kBlock * 2 + kNibbles<Format>};
  });
  return result;
}

}  // namespace

const LinearKernels& linear_int8_kernels() {
  static constexpr LinearKernels kernels{kMaxRows, 3, 9, 1, 2, info, prepare, tile, nullptr};
  return kernels;
}

}  // namespace jaxinfer::SIMD_NAMESPACE
