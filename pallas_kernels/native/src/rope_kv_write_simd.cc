// Head norms, rotation and KV write of a range of tokens, head by head. The roundings are those of the reference as XLA
// compiles it for CPUs: a product, then a fused multiply-add; to the dtype of the activations after each of the steps.

#include "rope_kv_write.h"

#include "narrow.h"

namespace jaxinfer {
namespace SIMD_NAMESPACE {
namespace {

void round_to_activations(const RopeWrite& a, float* x_h, void* narrow_h) {
  if (a.activations == Stored::f32) return;
  narrow_row(a.activations, x_h, a.h, narrow_h);
  widen_activations(a.activations, narrow_h, a.h, x_h);
}

// Root mean square norm (Zhang and Sennrich, 2019).
void norm(const RopeWrite& a, const float* factor_h, float* x_h, void* spare_h) {
  Floats squares = {};
  int64_t d = 0;
  for (; d + W <= a.h; d += W) squares += load<Floats>(x_h + d) * load<Floats>(x_h + d);
  float sum = sums(squares, Floats{}, Floats{}, Floats{})[0];
  for (; d < a.h; d++) sum += x_h[d] * x_h[d];
  float inverse = 1.f / __builtin_sqrtf(sum / float(a.h) + a.norm_eps);
  for (d = 0; d < a.h; d++) x_h[d] = x_h[d] * inverse * factor_h[d];
  round_to_activations(a, x_h, spare_h);
}

// Rotation of pairs (Su et al., 2021) of feature j and feature j + i.
void rotate(const float* cos_i, const float* sin_i, int64_t i, float* __restrict first, float* __restrict second) {
  for (int64_t j = 0; j < i; j++) {
    float x = first[j], y = second[j];
    first[j] = __builtin_fmaf(x, cos_i[j], -(y * sin_i[j]));
    second[j] = __builtin_fmaf(y, cos_i[j], x * sin_i[j]);
  }
}

void write(const RopeWrite& a, float* x_h, float scale, int64_t head, int64_t slot, void* pool) {
  if (bytes_of(a.pool) == 1)
    for (int64_t d = 0; d < a.h; d++) x_h[d] /= scale;
  int64_t at = ((slot / a.S * a.K + head) * a.S + slot % a.S) * a.h;
  narrow_row(a.pool, x_h, a.h, static_cast<char*>(pool) + at * bytes_of(a.pool));
}

void token(const RopeWrite& a, int64_t t, float* x_h, void* spare_h) {
  int64_t heads = a.H + 2 * a.K, row = a.h * bytes_of(a.activations), slot = a.slot_T[t];
  // Block 0 is where padding points to; nobody reads it, and threads would race for it.
  bool writes = slot >= a.S && slot < a.N * a.S;
  const char* qkv_Ah = static_cast<const char*>(a.qkv_TAh) + t * heads * row;
  char* q_Hh = static_cast<char*>(a.q_THh) + t * a.H * row;
  for (int64_t head = 0; head < (writes ? heads : a.H); head++) {
    widen_activations(a.activations, qkv_Ah + head * row, a.h, x_h);
    if (head >= a.H + a.K) {
      write(a, x_h, a.v_scale_K[head - a.H - a.K], head - a.H - a.K, slot, a.v_NKSh);
      continue;
    }
    const float* factor_h = head < a.H ? a.q_norm_h : a.k_norm_h;
    if (factor_h) norm(a, factor_h, x_h, spare_h);
    rotate(a.cos_Ti + t * a.i, a.sin_Ti + t * a.i, a.i, x_h, x_h + a.i);
    if (head < a.H) {
      narrow_row(a.activations, x_h, a.h, q_Hh + head * row);
    } else {
      round_to_activations(a, x_h, spare_h);
      write(a, x_h, a.k_scale_K[head - a.H], head - a.H, slot, a.k_NKSh);
    }
  }
}

}  // namespace

void rope_kv_write(const RopeWrite& a, int64_t begin, int64_t end, float* scratch) {
  for (int64_t t = begin; t < end; t++) token(a, t, scratch, scratch + a.h);
}

}  // namespace SIMD_NAMESPACE
}  // namespace jaxinfer
