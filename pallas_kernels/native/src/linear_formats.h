// How each weight format is read into vectors: the other side of pallas_kernels/linear/formats.py.
//
// A format says how many inputs a *period* of its codes has (kPeriod), how many bytes (kPeriodBytes), and gives the code
// of input K of a period as floats, up to a power of two (kScale) that is multiplied into the activation instead:
// codes are masked where they lie in a word, and conversion to float is exact there.
#pragma once

#include "simd.h"

namespace jaxinfer::SIMD_NAMESPACE {

constexpr int kLanes = 32;
constexpr int kVectors = kLanes / kWidth;

JAXINFER_INLINE Words word(const uint8_t* period, int index, int vector) {
  return load<Words>(period + (index * kLanes + vector * kWidth) * 4);
}

constexpr float inverse_power(int shift) { return 1.0f / static_cast<float>(1u << shift); }

struct F32 {
  static constexpr int kPeriod = 1, kPeriodBytes = kLanes * 4;
  template <int K>
  static constexpr float kScale = 1.0f;
  template <int K>
  static JAXINFER_INLINE Floats code(const uint8_t* period, int v) {
    return load<Floats>(period + v * kWidth * 4);
  }
};

struct Bf16 {
  static constexpr int kPeriod = 2, kPeriodBytes = kLanes * 4;
  template <int K>
  static constexpr float kScale = 1.0f;
  template <int K>
  static JAXINFER_INLINE Floats code(const uint8_t* period, int v) {
    return as_floats(K == 0 ? word(period, 0, v) << 16 : word(period, 0, v) & 0xffff0000u);
  }
};

struct F16 {
  static constexpr int kPeriod = 1, kPeriodBytes = kLanes * 2;
  template <int K>
  static constexpr float kScale = 1.0f;
  template <int K>
  static JAXINFER_INLINE Floats code(const uint8_t* period, int v) {
    return load_halves(period + v * kWidth * 2);
  }
};

// Four signed codes in a word. Each goes to the upper byte, where its sign is the word's.
struct SignedByteCodes {
  static constexpr int kPeriod = 4, kPeriodBytes = kLanes * 4;
  static constexpr int kMaxCode = 127;
  template <int K>
  static constexpr float kScale = inverse_power(24);
  template <int K>
  static JAXINFER_INLINE Floats code(const uint8_t* period, int v) {
    const Words up = word(period, 0, v) << (24 - 8 * K);
    return to_floats(reinterpret_cast<Ints>(K == 0 ? up : up & 0xff000000u));
  }
};

// Eight codes of four bits in a word. The last would reach the sign, so it is shifted down.
struct Nibbles {
  static constexpr int kPeriod = 8, kPeriodBytes = kLanes * 4;
  static constexpr int kMaxCode = 15;
  template <int K>
  static constexpr float kScale = K == 7 ? 1.0f : inverse_power(4 * K);
  template <int K>
  static JAXINFER_INLINE Floats code(const uint8_t* period, int v) {
    const Words w = word(period, 0, v);
    return to_floats(K == 7 ? w >> 28 : w & (15u << (4 * K)));
  }
};

// Six codes of five bits in each of five words; two more codes in the upper two bits of the words.
struct Fives {
  static constexpr int kPeriod = 32, kPeriodBytes = 5 * kLanes * 4;
  static constexpr int kMaxCode = 31;
  template <int K>
  static constexpr float kScale = K >= 30 ? 1.0f : inverse_power(5 * (K % 6));
  template <int K>
  static JAXINFER_INLINE Floats code(const uint8_t* period, int v) {
    if constexpr (K < 30) return to_floats(word(period, K / 6, v) & (31u << (5 * (K % 6))));
    constexpr int first = K == 30 ? 0 : 2;
    const Words last = word(period, 4, v);
    const Words top = K == 30 ? (last >> 26) & 16u : (last >> 27) & 16u;
    return to_floats(word(period, first, v) >> 30 | (word(period, first + 1, v) >> 28 & 12u) | top);
  }
  template <int K>
  static JAXINFER_INLINE Words byte(const uint8_t* period, int v) {
    if constexpr (K < 30) return word(period, K / 6, v) >> (5 * (K % 6)) & 31u;
    return to_words(code<K>(period, v));
  }
};

// Five codes of six bits in each of three words; one more code in the upper two bits of the words.
struct Sixes {
  static constexpr int kPeriod = 16, kPeriodBytes = 3 * kLanes * 4;
  static constexpr int kMaxCode = 63;
  template <int K>
  static constexpr float kScale = K == 15 ? 1.0f : inverse_power(6 * (K % 5));
  template <int K>
  static JAXINFER_INLINE Floats code(const uint8_t* period, int v) {
    if constexpr (K < 15) return to_floats(word(period, K / 5, v) & (63u << (6 * (K % 5))));
    return to_floats(word(period, 0, v) >> 30 | (word(period, 1, v) >> 28 & 12u) | (word(period, 2, v) >> 26 & 48u));
  }
  template <int K>
  static JAXINFER_INLINE Words byte(const uint8_t* period, int v) {
    if constexpr (K < 15) return word(period, K / 5, v) >> (6 * (K % 5)) & 63u;
    return to_words(code<K>(period, v));
  }
};

// What turns the sum of a block into a part of the result.

struct NoFactors {
  static constexpr bool kScaled = false, kMinimum = false;
  static constexpr int kOffset = 0, kFactorBytes = 0;
  static JAXINFER_INLINE Floats scale(const uint8_t*, int, int) { return Floats{}; }
  static JAXINFER_INLINE Floats minimum(const uint8_t*, int, int) { return Floats{}; }
};

// One float16 scale for a unit of one block, and perhaps a minimum that is added.
template <int Offset, bool Minimum>
struct UnitFactors {
  static constexpr bool kScaled = true, kMinimum = Minimum;
  static constexpr int kOffset = Offset, kFactorBytes = kLanes * (Minimum ? 4 : 2);
  static JAXINFER_INLINE Floats scale(const uint8_t* factors, int, int v) { return load_halves(factors + v * kWidth * 2); }
  static JAXINFER_INLINE Floats minimum([[maybe_unused]] const uint8_t* factors, int, [[maybe_unused]] int v) {
    if constexpr (Minimum) {
      return load_halves(factors + (kLanes + v * kWidth) * 2);
    } else {
      return Floats{};
    }
  }
};

// Q4_K: scale * block scale, and minimum * block minimum that is subtracted. The products are exact.
struct Q4KFactors {
  static constexpr bool kScaled = true, kMinimum = true;
  static constexpr int kOffset = 0, kFactorBytes = kLanes * (4 + 8 + 8);
  static JAXINFER_INLINE Floats scale(const uint8_t* factors, int block, int v) {
    return load_halves(factors + v * kWidth * 2) *
           load_uint8(factors + kLanes * (4 + block) + v * kWidth);
  }
  static JAXINFER_INLINE Floats minimum(const uint8_t* factors, int block, int v) {
    return -load_halves(factors + (kLanes + v * kWidth) * 2) *
           load_uint8(factors + kLanes * (4 + 8 + block) + v * kWidth);
  }
};

// Q6_K: scale * signed block scale, exact too.
struct Q6KFactors {
  static constexpr bool kScaled = true, kMinimum = false;
  static constexpr int kOffset = 32, kFactorBytes = kLanes * (2 + 16);
  static JAXINFER_INLINE Floats scale(const uint8_t* factors, int block, int v) {
    return load_halves(factors + v * kWidth * 2) *
           load_int8(factors + kLanes * (2 + block) + v * kWidth);
  }
  static JAXINFER_INLINE Floats minimum(const uint8_t*, int, int) { return Floats{}; }
};

template <class Codes, class Factors, int Unit, int Block>
struct Format : Codes, Factors {
  static constexpr int kUnit = Unit, kBlock = Block;
  static constexpr int kCodeBytes = Unit / Codes::kPeriod * Codes::kPeriodBytes;
  static constexpr int kUnitBytes = kCodeBytes + Factors::kFactorBytes;
};

// Calls visit(format) for the format of that index in formats.py.
template <class Visit>
JAXINFER_INLINE void with_quantized_format(int index, Visit&& visit) {
  switch (index) {
    case 3: return visit(Format<Nibbles, UnitFactors<8, false>, 32, 32>{});
    case 4: return visit(Format<Nibbles, UnitFactors<0, true>, 32, 32>{});
    case 5: return visit(Format<Fives, UnitFactors<16, false>, 32, 32>{});
    case 6: return visit(Format<SignedByteCodes, UnitFactors<0, false>, 32, 32>{});
    case 7: return visit(Format<Nibbles, Q4KFactors, 256, 32>{});
    case 8: return visit(Format<Sixes, Q6KFactors, 256, 16>{});
  }
}

template <class Visit>
JAXINFER_INLINE void with_format(int index, Visit&& visit) {
  switch (index) {
    case 0: return visit(Format<F32, NoFactors, 64, 64>{});
    case 1: return visit(Format<Bf16, NoFactors, 64, 64>{});
    case 2: return visit(Format<F16, NoFactors, 64, 64>{});
    default: return with_quantized_format(index, visit);
  }
}

}  // namespace jaxinfer::SIMD_NAMESPACE
