// Attention of a tile of queries over a range of keys, with queries in the lanes of vectors.
//
// Scores are formed transposed, keys by queries: the queries are transposed once per tile, keys are read where they
// lie, and the softmax (online: Milakov and Gimelshein 2018, arXiv:1805.02867) needs no sums across lanes. Every score
// is one chain of additions over h, every output one over the keys, whatever else is in the tile.

#include "attention_kernel.h"

namespace jaxinfer {
namespace SIMD_NAMESPACE {
namespace {

struct Tile {
  int64_t queries, lanes, stride, width;  // queries, rounded up to vectors; row lengths of scores_CP and of values_Ph
  float *q_panels, *scores_CP, *values_Ph, *top_P, *sum_P, *keep_P, *k_Ch, *v_Ch;
  uint32_t* seen_2P;
  Sight* sight_t;
};

int64_t lay_out(const Attention& a, int64_t count, float* at, Tile* tile) {
  float* start = at;
  auto take = [&](int64_t floats) {
    float* here = at;
    at += round_up(floats, 16);
    return here;
  };
  tile->queries = count * group_of(a);
  tile->lanes = round_up(tile->queries, W);
  tile->stride = tile->lanes + 16;  // not a power of two: rows would fall on the same lines of the cache
  tile->width = round_up(a.h, W);
  tile->q_panels = take(tile->lanes * a.h);
  tile->scores_CP = take(CHUNK * tile->stride);
  tile->values_Ph = take(tile->queries * tile->width);
  tile->top_P = take(tile->lanes);
  tile->sum_P = take(tile->lanes);
  tile->keep_P = take(tile->lanes);
  tile->seen_2P = (uint32_t*)take(2 * tile->lanes);
  tile->sight_t = (Sight*)take(count * sizeof(Sight) / 4);
  tile->k_Ch = take(CHUNK * tile->width);
  tile->v_Ch = take(CHUNK * tile->width);
  return at - start;
}

void read_queries(const Attention& a, const Piece& piece, const Tile& tile, float* row_h) {
  float factor = query_factor(a, piece.head);
  fill(tile.q_panels, tile.lanes * a.h, 0.f);
  for (int64_t p = 0; p < tile.queries; p++) {
    read_query(a, piece.first + p / group_of(a), piece.head * group_of(a) + p % group_of(a), factor, row_h);
    float* panel = tile.q_panels + p / W * W * a.h + p % W;
    for (int64_t i = 0; i < a.h; i++) panel[i * W] = row_h[i];
  }
}

template <int KEYS, int PANELS>
inline void score_block(const float* const* k, const float* q_panels, int64_t h, float* scores, int64_t stride) {
  Floats sum[KEYS][PANELS] = {};
  for (int64_t i = 0; i < h; i++) {
    Floats q[PANELS];
    for (int j = 0; j < PANELS; j++) q[j] = load<Floats>(q_panels + (j * h + i) * W);
    for (int c = 0; c < KEYS; c++)
      for (int j = 0; j < PANELS; j++) sum[c][j] += k[c][i] * q[j];
  }
  for (int c = 0; c < KEYS; c++)
    for (int j = 0; j < PANELS; j++) store(scores + c * stride + j * W, sum[c][j]);
}

template <int PANELS>
void score_panels(const float* const* k, int64_t n, const float* q_panels, int64_t h, float* scores, int64_t stride) {
  int64_t c = 0;
  for (; c + 6 <= n; c += 6) score_block<6, PANELS>(k + c, q_panels, h, scores + c * stride, stride);
  switch (n - c) {
    case 5: return score_block<5, PANELS>(k + c, q_panels, h, scores + c * stride, stride);
    case 4: return score_block<4, PANELS>(k + c, q_panels, h, scores + c * stride, stride);
    case 3: return score_block<3, PANELS>(k + c, q_panels, h, scores + c * stride, stride);
    case 2: return score_block<2, PANELS>(k + c, q_panels, h, scores + c * stride, stride);
    case 1: return score_block<1, PANELS>(k + c, q_panels, h, scores + c * stride, stride);
  }
}

void score(const Tile& tile, const float* const* k, int64_t n, int64_t h) {
  int64_t lane = 0;
  for (; lane + 2 * W <= tile.lanes; lane += 2 * W)
    score_panels<2>(k, n, tile.q_panels + lane * h, h, tile.scores_CP + lane, tile.stride);
  if (lane < tile.lanes) score_panels<1>(k, n, tile.q_panels + lane * h, h, tile.scores_CP + lane, tile.stride);
}

uint64_t seen_keys(const Sight& sight, int64_t begin, int64_t n) {
  uint64_t seen = 0;
  for (int64_t c = 0; c < n; c++) {
    int64_t key = begin + c, node = key - sight.prefix;
    bool sees = key >= sight.begin && key < sight.end;
    if (sees && sight.tree_U && node >= 0) sees = sight.tree_U[node / 32] >> (node % 32) & 1;
    seen |= uint64_t(sees) << c;
  }
  return seen;
}

// Fills seen_2P with bit masks over the keys of a chunk; false if every query sees all of them.
bool mask(const Attention& a, const Piece& piece, const Tile& tile, int64_t begin, int64_t n) {
  bool any = false;
  for (int64_t t = 0; t < piece.count; t++) {
    const Sight& sight = tile.sight_t[t];
    bool partly = begin < sight.begin || begin + n > sight.end || (sight.tree_U && begin + n > sight.prefix);
    uint64_t seen = partly ? seen_keys(sight, begin, n) : ~uint64_t(0);
    any |= partly;
    for (int64_t p = t * group_of(a); p < (t + 1) * group_of(a); p++) {
      tile.seen_2P[p] = uint32_t(seen);
      tile.seen_2P[tile.lanes + p] = uint32_t(seen >> 32);
    }
  }
  return any;
}

template <bool CAPPED, bool MASKED>
void softmax_lanes(const Tile& tile, int64_t lane, int64_t n, float cap) {
  float* scores = tile.scores_CP + lane;
  Floats top = load<Floats>(tile.top_P + lane);
  Floats highest = top;
  for (int64_t c = 0; c < n; c++) {
    Floats s = load<Floats>(scores + c * tile.stride);
    if (CAPPED) s = tanh(s) * cap;
    if (MASKED) {
      Bits seen = load<Bits>(tile.seen_2P + c / 32 * tile.lanes + lane) >> uint32_t(c % 32) & 1u;
      s = seen != 0u ? s : broadcast(-__builtin_inff());
    }
    if (CAPPED || MASKED) store(scores + c * tile.stride, s);
    highest = maximum(s, highest);
  }
  Floats keep = exp2(top - highest), total = load<Floats>(tile.sum_P + lane) * keep;
  for (int64_t c = 0; c < n; c++) {
    Floats p = exp2(load<Floats>(scores + c * tile.stride) - highest);
    store(scores + c * tile.stride, p);
    total += p;
  }
  store(tile.top_P + lane, highest);
  store(tile.keep_P + lane, keep);
  store(tile.sum_P + lane, total);
}

void softmax(const Tile& tile, int64_t n, float cap, bool masked) {
  auto lanes = cap > 0 ? masked ? softmax_lanes<true, true> : softmax_lanes<true, false>
                       : masked ? softmax_lanes<false, true> : softmax_lanes<false, false>;
  for (int64_t lane = 0; lane < tile.lanes; lane += W) lanes(tile, lane, n, cap);
}

template <int QUERIES, int VECTORS>
inline void weigh_block(const Tile& tile, const float* const* v, int64_t n, int64_t p, int64_t i) {
  Floats sum[QUERIES][VECTORS];
  float* values = tile.values_Ph + p * tile.width + i;
  for (int q = 0; q < QUERIES; q++)
    for (int j = 0; j < VECTORS; j++)
      sum[q][j] = load<Floats>(values + q * tile.width + j * W) * tile.keep_P[p + q];
  const float* weights = tile.scores_CP + p;
  for (int64_t c = 0; c < n; c++, weights += tile.stride) {
    Floats x[VECTORS];
    for (int j = 0; j < VECTORS; j++) x[j] = load<Floats>(v[c] + i + j * W);
    for (int q = 0; q < QUERIES; q++)
      for (int j = 0; j < VECTORS; j++) sum[q][j] += weights[q] * x[j];
  }
  for (int q = 0; q < QUERIES; q++)
    for (int j = 0; j < VECTORS; j++) store(values + q * tile.width + j * W, sum[q][j]);
}

template <int VECTORS>
void weigh_slab(const Tile& tile, const float* const* v, int64_t n, int64_t i) {
  int64_t p = 0;
  for (; p + 6 <= tile.queries; p += 6) weigh_block<6, VECTORS>(tile, v, n, p, i);
  switch (tile.queries - p) {
    case 5: return weigh_block<5, VECTORS>(tile, v, n, p, i);
    case 4: return weigh_block<4, VECTORS>(tile, v, n, p, i);
    case 3: return weigh_block<3, VECTORS>(tile, v, n, p, i);
    case 2: return weigh_block<2, VECTORS>(tile, v, n, p, i);
    case 1: return weigh_block<1, VECTORS>(tile, v, n, p, i);
  }
}

void weigh(const Tile& tile, const float* const* v, int64_t n) {
  int64_t i = 0;
  for (; i + 2 * W <= tile.width; i += 2 * W) weigh_slab<2>(tile, v, n, i);
  if (i < tile.width) weigh_slab<1>(tile, v, n, i);
}

void start(const Attention& a, const Piece& piece, const Tile& tile) {
  bool sink = a.sinks_H && !piece.partial;
  fill(tile.values_Ph, tile.queries * tile.width, 0.f);
  for (int64_t p = 0; p < tile.lanes; p++) {
    tile.top_P[p] = sink ? a.sinks_H[piece.head * group_of(a) + p % group_of(a)] * LOG2_E : LOWEST;
    tile.sum_P[p] = sink ? 1.f : 0.f;
  }
  fill(tile.seen_2P, 2 * tile.lanes, 0u);
  for (int64_t t = 0; t < piece.count; t++) tile.sight_t[t] = sight(a, piece.row, piece.first + t);
}

void finish(const Attention& a, const Piece& piece, const Tile& tile) {
  for (int64_t p = 0; p < tile.queries; p++) {
    float* values_h = tile.values_Ph + p * tile.width;
    if (!piece.partial) {
      write_output(a, piece.first + p / group_of(a), piece.head * group_of(a) + p % group_of(a), values_h, tile.sum_P[p]);
      continue;
    }
    Partial to = partial_at(piece.partial, tile.queries);
    to.top_P[p] = tile.top_P[p];
    to.sum_P[p] = tile.sum_P[p];
    copy(values_h, a.h, to.values_Ph + p * a.h);
  }
}

// Rows of floats: where they lie, if they are floats (and, for vector loads, whole vectors), else converted.
template <Stored type>
void as_rows(const typename Convert<type>::Element* const* stored, int64_t n, const Attention& a, bool in_place,
             float* converted, const float** rows) {
  int64_t width = round_up(a.h, W);
  for (int64_t c = 0; c < n; c++) {
    if (type == Stored::f32 && in_place) {
      rows[c] = (const float*)stored[c];
      continue;
    }
    rows[c] = converted + c * width;
    widen_row<type>(stored[c], a.h, converted + c * width);
  }
}

template <Stored type>
void attend(const Attention& a, const Piece& piece, float* scratch) {
  typedef typename Convert<type>::Element Element;
  Tile tile;
  lay_out(a, piece.count, scratch, &tile);
  read_queries(a, piece, tile, tile.k_Ch);
  start(a, piece, tile);
  fill(tile.v_Ch, CHUNK * tile.width, 0.f);
  float cap = a.soft_cap * LOG2_E;
  for (int64_t begin = piece.begin; begin < piece.end;) {
    int64_t end = chunk_end(begin, piece.end), n = end - begin;
    const Element *k_stored[CHUNK], *v_stored[CHUNK];
    const float *k[CHUNK], *v[CHUNK];
    find_rows(a, piece.row, piece.head, begin, end, k_stored, v_stored);
    as_rows<type>(k_stored, n, a, true, tile.k_Ch, k);
    as_rows<type>(v_stored, n, a, a.h % W == 0, tile.v_Ch, v);
    score(tile, k, n, a.h);
    softmax(tile, n, cap, mask(a, piece, tile, begin, n));
    weigh(tile, v, n);
    begin = end;
  }
  finish(a, piece, tile);
}

}  // namespace

int64_t tile_floats(const Attention& a) {
  Tile tile;
  return lay_out(a, tile_tokens(a), nullptr, &tile);
}

void attend_tile(const Attention& a, const Piece& piece, float* scratch) {
  switch (a.pool) {
    case Stored::f32: return attend<Stored::f32>(a, piece, scratch);
    case Stored::f16: return attend<Stored::f16>(a, piece, scratch);
    case Stored::bf16: return attend<Stored::bf16>(a, piece, scratch);
    case Stored::i8: return attend<Stored::i8>(a, piece, scratch);
    case Stored::f8e4m3: return attend<Stored::f8e4m3>(a, piece, scratch);
    case Stored::f8e5m2: return attend<Stored::f8e5m2>(a, piece, scratch);
  }
}

}  // namespace SIMD_NAMESPACE
}  // namespace jaxinfer
