// What the SIMD levels of the matrix product offer; see linear_simd.cc.
#pragma once

#include <cstdint>

namespace jaxinfer {

enum class Float : int { kF32, kBf16, kF16 };

constexpr int64_t kTileOutputs = 32;

// Sizes of a weight format, as in pallas_kernels/linear/formats.py.
struct FormatInfo {
  int64_t unit;        // inputs
  int64_t unit_bytes;  // of a tile
  int64_t block;       // inputs
  int preparation;     // formats with the same number share prepared activations
};

// A few rows of activations as the kernel of a format wants them.
struct PreparedGroup {
  const float* x;     // [inputs padded to units][rows], scaled by the powers of two of the format's codes
  const float* sums;  // [blocks][rows] of the unscaled activations
  int rows;
};

struct TileOutput {
  void* y;              // first element of the tile
  int64_t row_stride;   // elements
  int64_t outputs;      // of the tile that exist, at most 32
  Float dtype;
  const float* bias;    // of the tile, or null
};

struct LinearKernels {
  int max_rows;  // of a group
  int formats;
  FormatInfo (*info)(int format);
  // Rows [rows][inputs] of any dtype to a group; `x` and `sums` as in PreparedGroup, inputs padded to `units`.
  void (*prepare)(int format, const void* rows, Float dtype, int count, int64_t inputs, int64_t units, float* x,
                  float* sums);
  // One tile of outputs for `count` groups whose rows follow each other; y_scratch has 32 floats a row.
  void (*tile)(int format, const uint8_t* tile, int64_t units, const PreparedGroup* groups, int64_t count,
               float* y_scratch, const TileOutput& out);
  // One output's weights as numbers [inputs].
  void (*row)(int format, const uint8_t* tile, int lane, int64_t inputs, void* to, Float dtype);
};

namespace v3 {
const LinearKernels& linear_kernels();
}
namespace v4 {
const LinearKernels& linear_kernels();
}

}  // namespace jaxinfer
