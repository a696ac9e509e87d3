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
  // float32 [inputs padded to units][rows], scaled by the powers of two of the format's codes; or int8 [blocks][rows][block];
  // or bfloat16 [pairs of inputs][rows][2]
  const float* x;
  const float* sums;  // [blocks][rows] of the unscaled activations; or [blocks][2][rows]: scales of the int8 values, sums
  int rows;
};

struct TileOutput {
  void* y;              // first element of the tile
  int64_t row_stride;   // elements
  int64_t outputs;      // of the tile that exist, at most 32
  Float dtype;
  const float* bias;    // of the tile, or null

  void skip_rows(int64_t rows) {
    y = static_cast<char*>(y) + rows * row_stride * (dtype == Float::kF32 ? 4 : 2);
  }
};

struct LinearKernels {
  int max_rows;  // of a group
  int first_format, formats;  // those from first_format up to formats are served
  int input_bytes;   // of a prepared activation
  int block_floats;  // of a block's prepared sums, per row
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
const LinearKernels& linear_int8_kernels();
const LinearKernels& linear_bf16_kernels();
}  // namespace v3
namespace v4 {
const LinearKernels& linear_kernels();
const LinearKernels& linear_int8_kernels();
const LinearKernels& linear_bf16_kernels();
}  // namespace v4

}  // namespace jaxinfer
