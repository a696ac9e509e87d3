// The table of the attention kernels of this instruction set, and the joining of softmaxes over parts of a context
// (split-K decoding as in Flash-Decoding, Dao et al. 2023).

#include "attention_kernel.h"

namespace jaxinfer {
namespace SIMD_NAMESPACE {
namespace {

int64_t scratch_floats(const Attention& a) {
  int64_t one = one_floats(a), tile = tile_floats(a);
  return one > tile ? one : tile;
}

void attend(const Attention& a, const Piece& piece, float* scratch) {
  takes_one(a, piece) ? attend_one(a, piece, scratch) : attend_tile(a, piece, scratch);
}

float weight(float x) { return exp2(broadcast(x))[0]; }

void merge(const Attention& a, const Piece* piece, int64_t pieces) {
  int64_t queries = piece->count * group_of(a);
  float* values_Ph = partial_at(piece->partial, queries).values_Ph;
  for (int64_t p = 0; p < queries; p++) {
    int64_t token = piece->first + p / group_of(a), head = piece->head * group_of(a) + p % group_of(a);
    float top = a.sinks_H ? a.sinks_H[head] * LOG2_E : LOWEST;
    for (int64_t i = 0; i < pieces; i++) {
      float other = partial_at(piece[i].partial, queries).top_P[p];
      top = other > top ? other : top;
    }
    float sum = a.sinks_H ? weight(a.sinks_H[head] * LOG2_E - top) : 0.f;
    float* joined_h = values_Ph + p * a.h;
    for (int64_t i = 0; i < pieces; i++) {
      Partial from = partial_at(piece[i].partial, queries);
      float factor = weight(from.top_P[p] - top);
      sum += factor * from.sum_P[p];
      const float* values_h = from.values_Ph + p * a.h;
      for (int64_t d = 0; d < a.h; d++) joined_h[d] = (i ? joined_h[d] : 0.f) + factor * values_h[d];
    }
    write_output(a, token, head, joined_h, sum);
  }
}

}  // namespace

AttentionKernels attention_kernels() { return {scratch_floats, attend, merge}; }

}  // namespace SIMD_NAMESPACE
}  // namespace jaxinfer
