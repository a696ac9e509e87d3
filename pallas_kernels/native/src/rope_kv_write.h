// What the fused head norms, rotation and KV write compute.
#pragma once

#include <cstdint>

#include "stored.h"

namespace jaxinfer {

// The arguments of rope_kv_write (see its reference.py); letters as there. The norms may be null; pools are written.
struct RopeWrite {
  int64_t T, H, K, h, i, N, S;
  Stored activations, pool;
  const void* qkv_TAh;
  const float *cos_Ti, *sin_Ti, *k_scale_K, *v_scale_K, *q_norm_h, *k_norm_h;
  const int32_t* slot_T;
  void *q_THh, *k_NKSh, *v_NKSh;
  float norm_eps;
};

// Tokens begin .. end; `scratch` holds 2 h floats.
namespace v3 {
void rope_kv_write(const RopeWrite& a, int64_t begin, int64_t end, float* scratch);
}
namespace v4 {
void rope_kv_write(const RopeWrite& a, int64_t begin, int64_t end, float* scratch);
}

}  // namespace jaxinfer
