// Products of bytes, four to a lane, summed in the lane.
#pragma once

#include "simd.h"

namespace jaxinfer::SIMD_NAMESPACE {

// The same four bytes in every lane.
JAXINFER_INLINE Words four_bytes(const int8_t* from) {
  uint32_t word;
  std::memcpy(&word, from, sizeof(word));
  return word - Words{};
}

// The sum of `Count` words of codes times activations. Codes are unsigned, at most MaxCode, or signed; activations are
// signed, at most 127 in magnitude. Sums are exact.
template <bool Signed, int MaxCode, int Count>
JAXINFER_INLINE Ints byte_products(const Words* codes, const int8_t* x) {
  Ints total{};
#if defined(__AVX512VNNI__)
  // dpbusd multiplies unsigned with signed bytes: signed codes are shifted, and what that adds is taken away.
  const __m512i shift = _mm512_set1_epi8(Signed ? -128 : 0);
  __m512i sum = _mm512_setzero_si512(), shifted = _mm512_setzero_si512();
  JAXINFER_UNROLL
  for (int i = 0; i < Count; ++i) {
    const __m512i b = reinterpret_cast<__m512i>(four_bytes(x + 4 * i));
    sum = _mm512_dpbusd_epi32(sum, _mm512_xor_si512(reinterpret_cast<__m512i>(codes[i]), shift), b);
    if constexpr (Signed) shifted = _mm512_dpbusd_epi32(shifted, shift, b);
  }
  total = reinterpret_cast<Ints>(_mm512_sub_epi32(sum, shifted));
#else
  // maddubs multiplies unsigned with signed bytes and adds pairs in 16 bits; so many of these sums can be added there.
  constexpr int kTogether = Signed ? 1 : 32767 / (2 * 127 * MaxCode);
  static_assert(Count % kTogether == 0);
  JAXINFER_UNROLL
  for (int first = 0; first < Count; first += kTogether) {
    __m256i pairs = _mm256_setzero_si256();
    JAXINFER_UNROLL
    for (int i = 0; i < kTogether; ++i) {
      __m256i c = reinterpret_cast<__m256i>(codes[first + i]);
      __m256i b = reinterpret_cast<__m256i>(four_bytes(x + 4 * (first + i)));
      if constexpr (Signed) {  // the sign of a code goes to its activation
        b = _mm256_sign_epi8(b, c);
        c = _mm256_abs_epi8(c);
      }
      const __m256i products = _mm256_maddubs_epi16(c, b);
      pairs = i == 0 ? products : _mm256_add_epi16(pairs, products);
      // Without this the compiler loads all activations first, and codes leave their registers for them.
      asm("" : "+x"(pairs));
    }
    total += reinterpret_cast<Ints>(_mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
  }
#endif
  return total;
}

// The largest magnitude as bits: what is not finite is larger than all numbers.
template <int Count>
JAXINFER_INLINE uint32_t largest_magnitude(const float* x) {
  __m256i top = _mm256_setzero_si256();
  for (int i = 0; i < Count; i += 8) {
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x + i));
    top = _mm256_max_epi32(top, _mm256_and_si256(bits, _mm256_set1_epi32(0x7fffffff)));
  }
  __m128i half = _mm_max_epi32(_mm256_castsi256_si128(top), _mm256_extracti128_si256(top, 1));
  half = _mm_max_epi32(half, _mm_shuffle_epi32(half, 0x4e));
  half = _mm_max_epi32(half, _mm_shuffle_epi32(half, 0xb1));
  return static_cast<uint32_t>(_mm_cvtsi128_si32(half));
}

// round(x * factor) as bytes, ties to even; returns their sum. The magnitudes are at most 127. Of each eight bytes, those
// with even indices come first if `EvenFirst`.
template <int Count, bool EvenFirst>
JAXINFER_INLINE int round_to_bytes(const float* x, float factor, int8_t* to) {
  static_assert(Count % 16 == 0);
  const __m256 f = _mm256_set1_ps(factor);
  const __m128i order = _mm_set_epi8(15, 13, 11, 9, 14, 12, 10, 8, 7, 5, 3, 1, 6, 4, 2, 0);
  __m128i sums = _mm_setzero_si128();
  for (int i = 0; i < Count; i += 16) {
    const __m256i low = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + i), f));
    const __m256i high = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + i + 8), f));
    const __m256i halves = _mm256_permute4x64_epi64(_mm256_packs_epi32(low, high), 0xd8);
    __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(halves), _mm256_extracti128_si256(halves, 1));
    // Unsigned bytes are summed: all of them are 128 more.
    sums = _mm_add_epi64(sums, _mm_sad_epu8(_mm_xor_si128(bytes, _mm_set1_epi8(-128)), _mm_setzero_si128()));
    if (EvenFirst) bytes = _mm_shuffle_epi8(bytes, order);
    std::memcpy(to + i, &bytes, sizeof(bytes));
  }
  return _mm_cvtsi128_si32(sums) + _mm_extract_epi16(sums, 4) - 128 * Count;
}

}  // namespace jaxinfer::SIMD_NAMESPACE
