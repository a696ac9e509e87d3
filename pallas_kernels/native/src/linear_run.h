// The matrix product of packed weights, without XLA.
#pragma once

#include <cstdint>
#include <vector>

#include "linear_kernels.h"
#include "parallel.h"

namespace jaxinfer {

struct LinearPart {
  int format;
  const uint8_t* data;
  int64_t outputs;
};

struct RowsCall {
  const int32_t* ids;  // [rows]; clipped to the outputs
  int64_t rows;
  int64_t inputs;
  std::vector<LinearPart> parts;
  void* y;  // [rows, inputs]
  Float y_dtype;
};

struct LinearCall {
  const void* x;  // [rows, inputs]
  Float x_dtype;
  int64_t rows;
  int64_t inputs;
  std::vector<LinearPart> parts;
  const float* bias;  // [outputs of all parts], or null
  void* y;            // [rows, outputs of all parts]
  Float y_dtype;
};

// The kernels of this processor: with float32 activations; with activations that are rounded to 8 bits, which serve
// quantized weights only; and rounded to bfloat16, which serve weights of that type only.
const LinearKernels& linear_kernels();
const LinearKernels& linear_int8_kernels();
const LinearKernels& linear_bf16_kernels();

// Whether kernels serve the formats of all parts.
bool serves(const LinearKernels& kernels, const std::vector<LinearPart>& parts);

// Bytes of a part's data.
int64_t part_bytes(const LinearKernels& kernels, int format, int64_t outputs, int64_t inputs);

void linear_run(const LinearKernels& kernels, Parallel& parallel, const LinearCall& call);

// Rows of the weight: the look-up of embeddings.
void rows_run(const LinearKernels& kernels, Parallel& parallel, const RowsCall& call);

}  // namespace jaxinfer
