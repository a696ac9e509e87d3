// Norms and gates of rows of floats.
#pragma once

#include <cstdint>

namespace jaxinfer {

enum class Gate : int { kSilu, kGeluTanh };

// The arguments of rms_norm (see its reference.py).
struct Norm {
  int64_t T, D;
  const float *x_TD, *residual_TD, *factor_D;  // no residual: null, and then there is no sum
  float *sum_TD, *y_TD;
  float eps;
};

// The arguments of gate (see its reference.py).
struct Gated {
  int64_t T, F;
  const float* gate_up_T2F;
  float* y_TF;
  Gate activation;
};

// Rows begin .. end.
namespace v3 {
void rms_norm(const Norm& a, int64_t begin, int64_t end);
void gate(const Gated& a, int64_t begin, int64_t end);
}  // namespace v3
namespace v4 {
void rms_norm(const Norm& a, int64_t begin, int64_t end);
void gate(const Gated& a, int64_t begin, int64_t end);
}  // namespace v4

}  // namespace jaxinfer
