// What the attention kernels compute, and how it is cut into pieces of work. Functions are static for the reason given
// in stored.h.
#pragma once

#include <cstdint>

#include "stored.h"

namespace jaxinfer {

// The arguments of ragged_paged_attention (see its reference.py); letters as there. Optional arrays may be null.
struct Attention {
  int64_t T, H, h, N, K, S, R, M, U;
  Stored activations, pool;
  const void *q_THh, *k_NKSh, *v_NKSh;
  const int32_t *table_RM, *query_start_Q, *context_len_R, *ancestors_TU;
  const float *sinks_H, *k_scale_K, *v_scale_K;
  void* out_THh;
  float scale, soft_cap;  // no cap: 0
  int64_t window;         // no window: 0
};

// Queries, contexts and blocks within the bounds of the arrays, whatever the arguments hold.
static inline int64_t clamp(int64_t x, int64_t high) { return x < 0 ? 0 : x > high ? high : x; }
static inline int64_t start_of(const Attention& a, int64_t row) { return clamp(a.query_start_Q[row], a.T); }
static inline int64_t context_of(const Attention& a, int64_t row) { return clamp(a.context_len_R[row], a.M * a.S); }
static inline int64_t block_of(const Attention& a, int64_t row, int64_t entry) {
  return clamp(a.table_RM[row * a.M + entry], a.N - 1);
}
static inline int64_t group_of(const Attention& a) { return a.H / a.K; }

// Keys that a token sees: begin .. end, and of those from `prefix` on only the ancestors, if it is in a tree.
struct Sight {
  int64_t begin, end, prefix;
  const uint32_t* tree_U;
};

Sight sight(const Attention& a, int64_t row, int64_t token);

// One piece of work: tokens first .. first + count of a row (as positions in T), one KV head, keys begin .. end of its
// context. The pieces of a row depend on nothing but the row, so its numbers do not depend on neighbours or threads.
struct Piece {
  int64_t row, head, first, count, begin, end;
  float* partial;  // where the unfinished softmax goes; null: the piece is the whole and writes the output
};

constexpr int64_t CHUNK = 64;      // keys per step of the online softmax
constexpr int64_t SPLIT = 256;     // keys per piece of a row of few tokens
constexpr int64_t TILE = 64;       // queries of a piece, counting the heads of a group
constexpr int64_t ONE_GROUP = 7;   // most heads of a group that the kernel for single tokens takes
constexpr float LOWEST = -3.402823466e38f;
constexpr float LOG2_E = 1.44269504089f;

static inline int64_t tile_tokens(const Attention& a) { return group_of(a) >= TILE ? 1 : TILE / group_of(a); }

// The unfinished softmax of a piece: maxima (of scores in units of log2), sums of exponentials, weighted sums of values.
struct Partial {
  float *top_P, *sum_P, *values_Ph;
};

static inline int64_t partial_floats(int64_t queries, int64_t h) { return queries * (2 + h); }
static inline Partial partial_at(float* base, int64_t queries) {
  return {base, base + queries, base + 2 * queries};
}

// The kernels for one instruction set.
struct AttentionKernels {
  int64_t (*scratch_floats)(const Attention& a);
  // `scratch` is aligned to 64 bytes and holds scratch_floats(a).
  void (*attend)(const Attention& a, const Piece& piece, float* scratch);
  // Joins the partials of `pieces` successive pieces of a tile, which differ in their keys only, and writes the output.
  void (*merge)(const Attention& a, const Piece* piece, int64_t pieces);
};

namespace v3 {
AttentionKernels attention_kernels();
}
namespace v4 {
AttentionKernels attention_kernels();
}

}  // namespace jaxinfer
