// What the two attention kernels share.
#pragma once

#include "attention.h"
#include "narrow.h"

namespace jaxinfer {
namespace SIMD_NAMESPACE {
namespace {

inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

// End of the chunk in which `key` lies.
inline int64_t chunk_end(int64_t key, int64_t end) { return least(end, (key / CHUNK + 1) * CHUNK); }

template <typename T>
inline void fill(T* to, int64_t n, T x) {
  for (int64_t i = 0; i < n; i++) to[i] = x;
}

inline void copy(const float* from, int64_t n, float* to) { std::memcpy(to, from, sizeof(float) * n); }

inline int64_t round_up(int64_t x, int64_t unit) { return (x + unit - 1) / unit * unit; }

// Factor of q k for scores in units of log2, or, under a soft cap, in units of the cap.
inline float query_factor(const Attention& a, int64_t head) {
  float factor = a.scale * (a.k_scale_K ? a.k_scale_K[head] : 1.f);
  return a.soft_cap > 0 ? factor / a.soft_cap : factor * LOG2_E;
}

// Scaled query of a token and head.
inline void read_query(const Attention& a, int64_t token, int64_t head, float factor, float* to_h) {
  int64_t at = (token * a.H + head) * a.h;
  widen_activations(a.activations, static_cast<const char*>(a.q_THh) + at * bytes_of(a.activations), a.h, to_h);
  for (int64_t i = 0; i < a.h; i++) to_h[i] *= factor;
}

// Pointers to the stored rows of keys begin .. end of a row's context, in both pools.
template <typename Element>
inline void find_rows(const Attention& a, int64_t row, int64_t head, int64_t begin, int64_t end, const Element** k,
                      const Element** v) {
  for (int64_t key = begin; key < end;) {
    int64_t entry = key / a.S, offset = key % a.S;
    int64_t n = a.S - offset < end - key ? a.S - offset : end - key;
    int64_t at = ((block_of(a, row, entry) * a.K + head) * a.S + offset) * a.h;
    for (int64_t i = 0; i < n; i++, at += a.h) {
      *k++ = (const Element*)a.k_NKSh + at;
      *v++ = (const Element*)a.v_NKSh + at;
    }
    key += n;
  }
}

// Output of a token and head: the weighted sum of values over the sum of weights; 0 for a query that saw nothing. The
// sums of values are overwritten.
inline void write_output(const Attention& a, int64_t token, int64_t head, float* values_h, float sum) {
  float factor = (a.v_scale_K ? a.v_scale_K[head / group_of(a)] : 1.f) / (sum == 0.f ? 1.f : sum);
  for (int64_t i = 0; i < a.h; i++) values_h[i] *= factor;
  int64_t at = (token * a.H + head) * a.h * bytes_of(a.activations);
  narrow_row(a.activations, values_h, a.h, static_cast<char*>(a.out_THh) + at);
}

}  // namespace

void attend_one(const Attention& a, const Piece& piece, float* scratch);
void attend_tile(const Attention& a, const Piece& piece, float* scratch);
bool takes_one(const Attention& a, const Piece& piece);
int64_t one_floats(const Attention& a);
int64_t tile_floats(const Attention& a);

}  // namespace SIMD_NAMESPACE
}  // namespace jaxinfer
