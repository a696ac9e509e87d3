// The vector register of one instruction set. Everything else about SIMD is written with the compiler's vector
// extension, so that all levels are the same source. Where a processor has both, v4 (AVX-512) is used, and tests compare
// its numbers with those of v3 (AVX2).
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#if defined(__clang__)
#define JAXINFER_UNROLL _Pragma("unroll")
#else
#define JAXINFER_UNROLL _Pragma("GCC unroll 32")
#endif
#define JAXINFER_INLINE inline __attribute__((always_inline))

namespace jaxinfer::SIMD_NAMESPACE {

#if defined(__AVX512F__)
constexpr int kWidth = 16;
using HalfBits = __m256i;
using ByteBits = __m128i;
#else
constexpr int kWidth = 8;
using HalfBits = __m128i;
using ByteBits = int64_t;
#endif

typedef float Floats __attribute__((vector_size(kWidth * 4)));
typedef int32_t Ints __attribute__((vector_size(kWidth * 4)));
typedef uint32_t Words __attribute__((vector_size(kWidth * 4)));

template <typename Vector>
JAXINFER_INLINE Vector load(const void* from) {
  Vector value;
  std::memcpy(&value, from, sizeof(value));
  return value;
}

JAXINFER_INLINE void store(void* to, Floats value) { std::memcpy(to, &value, sizeof(value)); }

JAXINFER_INLINE Floats to_floats(Ints value) { return __builtin_convertvector(value, Floats); }
JAXINFER_INLINE Floats to_floats(Words value) { return to_floats(reinterpret_cast<Ints>(value)); }  // below 2^31
JAXINFER_INLINE Words to_words(Floats value) {  // of integers, below 2^31
  return reinterpret_cast<Words>(__builtin_convertvector(value, Ints));
}
JAXINFER_INLINE Floats as_floats(Words value) { return reinterpret_cast<Floats>(value); }

// float16 numbers. The instruction is right for subnormals even where the thread flushes those of float32.
JAXINFER_INLINE Floats load_halves(const void* from) {
#if defined(__AVX512F__)
  return reinterpret_cast<Floats>(_mm512_maskz_cvtph_ps(0xffff, load<HalfBits>(from)));
#else
  return reinterpret_cast<Floats>(_mm256_cvtph_ps(load<HalfBits>(from)));
#endif
}

// Signed and unsigned bytes. (Compilers convert vectors of bytes to floats with many shuffles.)
JAXINFER_INLINE Floats load_int8(const void* from) {
#if defined(__AVX512F__)
  return to_floats(reinterpret_cast<Ints>(_mm512_cvtepi8_epi32(load<ByteBits>(from))));
#else
  return to_floats(reinterpret_cast<Ints>(_mm256_cvtepi8_epi32(_mm_cvtsi64_si128(load<ByteBits>(from)))));
#endif
}

JAXINFER_INLINE Words load_bytes(const void* from) {
#if defined(__AVX512F__)
  return reinterpret_cast<Words>(_mm512_maskz_cvtepu8_epi32(0xffff, load<ByteBits>(from)));
#else
  return reinterpret_cast<Words>(_mm256_cvtepu8_epi32(_mm_cvtsi64_si128(load<ByteBits>(from))));
#endif
}

JAXINFER_INLINE Floats load_uint8(const void* from) { return to_floats(load_bytes(from)); }

JAXINFER_INLINE float half_to_float(uint16_t bits) { return _cvtsh_ss(bits); }
JAXINFER_INLINE uint16_t float_to_half(float value) { return _cvtss_sh(value, _MM_FROUND_TO_NEAREST_INT); }

JAXINFER_INLINE float bfloat_to_float(uint16_t bits) {
  const uint32_t word = static_cast<uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &word, sizeof(value));
  return value;
}

// To nearest, ties to even; NaN stays NaN.
JAXINFER_INLINE uint16_t float_to_bfloat(float value) {
  uint32_t word;
  std::memcpy(&word, &value, sizeof(word));
  if ((word & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>(word >> 16 | 0x40);
  return static_cast<uint16_t>((word + 0x7fff + (word >> 16 & 1)) >> 16);
}

}  // namespace jaxinfer::SIMD_NAMESPACE
