// Floats to stored values: to the nearest, ties to even. 1-byte types saturate at their largest finite value.
#pragma once

#include "vector.h"

namespace jaxinfer {
namespace SIMD_NAMESPACE {
namespace {

// Rounds |x| to a float of `mantissa` bits whose exponent has the bias `bias`, subnormal values included. The sum with
// 2^23 rounds what is below the least normal value to a multiple of the least subnormal one.
inline Bits narrow_magnitude(Floats x, uint32_t mantissa, uint32_t bias) {
  Bits magnitude = (Bits)x & 0x7FFFFFFFu;
  uint32_t dropped = 23 - mantissa;
  Bits normal = (magnitude + ((1u << (dropped - 1)) - 1) + (magnitude >> dropped & 1u)) >> dropped;
  normal -= (127 - bias) << mantissa;
  float steps = float_of((127 + bias - 1 + mantissa) << 23);  // 1 / the least subnormal value
  Bits tiny = (Bits)(as_floats(magnitude) * steps + 8388608.f) - 0x4B000000u;
  return magnitude < Bits{} + ((127 - bias + 1) << 23) ? tiny : normal;
}

inline Bits is_nan(Floats x) { return (Bits)(x != x); }

inline Floats clip(Floats x, float low, float high) {
  x = x < low ? broadcast(low) : x;
  return x > high ? broadcast(high) : x;
}

template <Stored type>
struct Narrow;

template <>
struct Narrow<Stored::f32> {
  typedef float Element;
  static void put(Floats x, float* to) { store(to, x); }
};

template <>
struct Narrow<Stored::bf16> {
  typedef uint16_t Element;
  static void put(Floats x, uint16_t* to) {
    Bits bits = (Bits)x;
    Bits rounded = (bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16;
    store(to, __builtin_convertvector(is_nan(x) ? bits >> 16 | 0x40u : rounded, Halves));
  }
};

template <>
struct Narrow<Stored::f16> {
  typedef uint16_t Element;
  static void put(Floats x, uint16_t* to) {
    Bits magnitude = narrow_magnitude(x, 10, 15);
    magnitude = ((Bits)x & 0x7FFFFFFFu) >= Bits{} + 0x477FF000u ? Bits{} + 0x7C00u : magnitude;  // from 65520 on
    magnitude = is_nan(x) ? Bits{} + 0x7E00u : magnitude;
    store(to, __builtin_convertvector(magnitude | ((Bits)x >> 16 & 0x8000u), Halves));
  }
};

template <>
struct Narrow<Stored::f8e5m2> {
  typedef uint8_t Element;
  static void put(Floats x, uint8_t* to) {
    Bits magnitude = narrow_magnitude(clip(x, -57344.f, 57344.f), 2, 15);
    magnitude = is_nan(x) ? Bits{} + 0x7Eu : magnitude;
    store(to, __builtin_convertvector(magnitude | ((Bits)x >> 24 & 0x80u), Bytes));
  }
};

template <>
struct Narrow<Stored::f8e4m3> {
  typedef uint8_t Element;
  static void put(Floats x, uint8_t* to) {
    Bits magnitude = narrow_magnitude(clip(x, -448.f, 448.f), 3, 7);
    magnitude = is_nan(x) ? Bits{} + 0x7Fu : magnitude;
    store(to, __builtin_convertvector(magnitude | ((Bits)x >> 24 & 0x80u), Bytes));
  }
};

template <>
struct Narrow<Stored::i8> {
  typedef int8_t Element;
  static void put(Floats x, int8_t* to) {
    const float shift = 12582912.f;  // as in exp2
    Ints rounded = (Ints)(clip(x, -128.f, 127.f) + shift) - 0x4B400000;
    rounded = x != x ? Ints{} : rounded;
    store(to, __builtin_convertvector(rounded, SignedBytes));
  }
};

template <Stored type>
inline void narrow_row(const float* from, int64_t n, void* to) {
  typedef typename Narrow<type>::Element Element;
  Element* out = static_cast<Element*>(to);
  int64_t i = 0;
  for (; i + W <= n; i += W) Narrow<type>::put(load<Floats>(from + i), out + i);
  if (i == n) return;
  float padded[W] = {};
  Element narrowed[W];
  std::memcpy(padded, from + i, sizeof(float) * (n - i));
  Narrow<type>::put(load<Floats>(padded), narrowed);
  std::memcpy(out + i, narrowed, sizeof(Element) * (n - i));
}

inline void narrow_row(Stored type, const float* from, int64_t n, void* to) {
  switch (type) {
    case Stored::f32: return narrow_row<Stored::f32>(from, n, to);
    case Stored::f16: return narrow_row<Stored::f16>(from, n, to);
    case Stored::bf16: return narrow_row<Stored::bf16>(from, n, to);
    case Stored::i8: return narrow_row<Stored::i8>(from, n, to);
    case Stored::f8e4m3: return narrow_row<Stored::f8e4m3>(from, n, to);
    case Stored::f8e5m2: return narrow_row<Stored::f8e5m2>(from, n, to);
  }
}

// Activations (no 1-byte types) as floats.
inline void widen_activations(Stored type, const void* from, int64_t n, float* to) {
  if (type == Stored::f32) {
    std::memcpy(to, from, sizeof(float) * n);
  } else if (type == Stored::bf16) {
    widen_row<Stored::bf16>(static_cast<const uint16_t*>(from), n, to);
  } else {
    widen_row<Stored::f16>(static_cast<const uint16_t*>(from), n, to);
  }
}

}  // namespace
}  // namespace SIMD_NAMESPACE
}  // namespace jaxinfer
