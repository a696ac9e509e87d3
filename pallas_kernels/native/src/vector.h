// Vectors of float and how stored values become float, for any instruction set: GCC's vector extensions, no intrinsics.
// Each source that includes this is compiled once per instruction set; everything is local to the source.
#pragma once

#include <cstdint>
#include <cstring>

#include "stored.h"

namespace jaxinfer {
namespace SIMD_NAMESPACE {
namespace {

#ifdef __AVX512F__
constexpr int W = 16;
#else
constexpr int W = 8;
#endif

typedef float Floats __attribute__((vector_size(4 * W)));
typedef int32_t Ints __attribute__((vector_size(4 * W)));
typedef uint32_t Bits __attribute__((vector_size(4 * W)));
typedef uint16_t Halves __attribute__((vector_size(2 * W)));
typedef uint8_t Bytes __attribute__((vector_size(W)));
typedef int8_t SignedBytes __attribute__((vector_size(W)));
typedef float Four __attribute__((vector_size(16)));
typedef float Eight __attribute__((vector_size(32)));

template <typename V, typename T>
inline V load(const T* from) {
  V x;
  std::memcpy(&x, from, sizeof(V));
  return x;
}

template <typename V, typename T>
inline void store(T* to, V x) {
  std::memcpy(to, &x, sizeof(V));
}

inline Floats broadcast(float x) { return x - Floats{}; }

inline Floats as_floats(Bits x) { return (Floats)x; }

inline Floats maximum(Floats a, Floats b) { return a > b ? a : b; }

// W values of a stored type as float, exactly.
template <Stored type>
struct Convert;

template <>
struct Convert<Stored::f32> {
  typedef float Element;
  static Floats widen(const float* x) { return load<Floats>(x); }
};

template <>
struct Convert<Stored::bf16> {
  typedef uint16_t Element;
  static Floats widen(const uint16_t* x) {
    return as_floats(__builtin_convertvector(load<Halves>(x), Bits) << 16);
  }
};

// The values of float16, subnormal ones included, without arithmetic on subnormal floats (which may be flushed to 0).
inline Floats widen_f16(Bits x) {
  Bits sign = (x & 0x8000u) << 16, magnitude = (x & 0x7FFFu) << 13;
  Bits exponent = x & 0x7C00u;
  Bits normal = magnitude + (112u << 23);
  Bits special = magnitude | 0x7F800000u;
  Bits tiny = (Bits)(as_floats(magnitude + (113u << 23)) - as_floats(Bits{} + (113u << 23)));
  Bits y = exponent == 0u ? tiny : exponent == 0x7C00u ? special : normal;
  return as_floats(y | sign);
}

template <>
struct Convert<Stored::f16> {
  typedef uint16_t Element;
  static Floats widen(const uint16_t* x) { return widen_f16(__builtin_convertvector(load<Halves>(x), Bits)); }
};

template <>
struct Convert<Stored::f8e5m2> {
  typedef uint8_t Element;
  static Floats widen(const uint8_t* x) { return widen_f16(__builtin_convertvector(load<Bytes>(x), Bits) << 8); }
};

template <>
struct Convert<Stored::f8e4m3> {
  typedef uint8_t Element;
  static Floats widen(const uint8_t* x) {
    Bits bits = __builtin_convertvector(load<Bytes>(x), Bits);
    Bits magnitude = bits & 0x7Fu, sign = (bits & 0x80u) << 24;
    Bits normal = (magnitude << 20) + (120u << 23);
    Bits tiny = (Bits)(__builtin_convertvector((Ints)magnitude, Floats) * 0.001953125f);
    Bits y = magnitude < 8u ? tiny : magnitude == 0x7Fu ? Bits{} + 0x7FC00000u : normal;
    return as_floats(y | sign);
  }
};

template <>
struct Convert<Stored::i8> {
  typedef int8_t Element;
  static Floats widen(const int8_t* x) {
    return __builtin_convertvector(__builtin_convertvector(load<SignedBytes>(x), Ints), Floats);
  }
};

// n values as floats; reads nothing past them.
template <Stored type>
inline void widen_row(const typename Convert<type>::Element* from, int n, float* to) {
  typedef typename Convert<type>::Element Element;
  int i = 0;
  for (; i + W <= n; i += W) store(to + i, Convert<type>::widen(from + i));
  if (i == n) return;
  Element padded[W] = {};
  std::memcpy(padded, from + i, sizeof(Element) * (n - i));
  Floats x = Convert<type>::widen(padded);
  std::memcpy(to + i, &x, sizeof(float) * (n - i));
}

// 2^x for x <= 0: relative error 3e-7, exactly 1 at 0, 0 below -126 (-inf included), NaN for NaN.
// 2^n 2^f with |f| <= 1/2; the polynomial is the minimax one of its degree with a constant term of 1.
inline Floats exp2(Floats x) {
  const float shift = 12582912.f;  // 1.5 * 2^23: adding it rounds to an integer, which is then in the low bits
  Floats shifted = x + shift;
  Floats f = x - (shifted - shift);
  Floats p = f * 1.534580224e-4f + 1.339993090e-3f;
  p = p * f + 9.618489072e-3f;
  p = p * f + 5.550328642e-2f;
  p = p * f + 2.402264625e-1f;
  p = p * f + 6.931471825e-1f;
  p = p * f + 1.f;
  Floats y = as_floats((Bits)p + ((Bits)shifted << 23));
  return x >= -126.f ? y : x != x ? x : Floats{};
}

// tanh: relative error 1e-6. Taylor's series near 0, where the formula with exp cancels.
inline Floats tanh(Floats x) {
  Floats magnitude = x < 0.f ? -x : x;
  Floats e = exp2(magnitude * -2.8853900818f);  // e^(-2 |x|)
  Floats far = (1.f - e) / (1.f + e);
  Floats u = x * x;
  Floats near = u * -0.00886323553f + 0.0218694885f;
  near = near * u - 0.0539682540f;
  near = near * u + 0.1333333333f;
  near = near * u - 0.3333333333f;
  near = (near * u + 1.f) * x;
  return magnitude < 0.3f ? near : x < 0.f ? -far : far;
}

// The sums of the lanes of four vectors.
inline Four sums(Floats a, Floats b, Floats c, Floats d) {
#ifdef __AVX512F__
  auto eight = [](Floats x) {
    return __builtin_shufflevector(x, x, 0, 1, 2, 3, 4, 5, 6, 7) +
           __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15);
  };
#else
  auto eight = [](Floats x) { return x; };
#endif
  auto four = [&](Floats v) {
    Eight x = eight(v);
    return __builtin_shufflevector(x, x, 0, 1, 2, 3) + __builtin_shufflevector(x, x, 4, 5, 6, 7);
  };
  Four p = four(a), q = four(b), r = four(c), s = four(d);
  Four pq = __builtin_shufflevector(p, q, 0, 4, 1, 5) + __builtin_shufflevector(p, q, 2, 6, 3, 7);
  Four rs = __builtin_shufflevector(r, s, 0, 4, 1, 5) + __builtin_shufflevector(r, s, 2, 6, 3, 7);
  return __builtin_shufflevector(pq, rs, 0, 1, 4, 5) + __builtin_shufflevector(pq, rs, 2, 3, 6, 7);
}

}  // namespace
}  // namespace SIMD_NAMESPACE
}  // namespace jaxinfer
