// The types in which activations and KV caches are stored, and conversions of single values.
// Static: sources for different instruction sets include this, and the linker must not merge their copies.
#pragma once

#include <cstdint>
#include <cstring>

namespace jaxinfer {

enum class Stored { f32, f16, bf16, i8, f8e4m3, f8e5m2 };

static inline int bytes_of(Stored type) {
  return type == Stored::f32 ? 4 : type == Stored::f16 || type == Stored::bf16 ? 2 : 1;
}

static inline float float_of(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

}  // namespace jaxinfer
