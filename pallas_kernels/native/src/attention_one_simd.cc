// Attention of one token (a decode) over a range of keys: the heads of a group share every read of K and V.
//
// K and V are read where they lie, each row once for up to three heads; scores are sums over lanes.

#include "attention_kernel.h"

namespace jaxinfer {
namespace SIMD_NAMESPACE {
namespace {

constexpr int64_t HEADS = ONE_GROUP;

struct One {
  float *q_Gh, *scores_GC, *values_Gh, *k_Ch, *v_Ch;
  float top_G[HEADS], sum_G[HEADS], keep_G[HEADS];
};

int64_t lay_out(const Attention& a, float* at, One* one) {
  float* start = at;
  auto take = [&](int64_t floats) {
    float* here = at;
    at += round_up(floats, 16);
    return here;
  };
  one->q_Gh = take(HEADS * a.h);
  one->scores_GC = take(HEADS * CHUNK);
  one->values_Gh = take(HEADS * a.h);
  one->k_Ch = take(CHUNK * a.h);
  one->v_Ch = take(CHUNK * a.h);
  return at - start;
}

// Asks for a row that is needed half a chunk later. Blocks lie anywhere, so the processor cannot foresee it.
template <typename Element>
inline void foresee(const Element* row, int64_t h) {
  const char* at = reinterpret_cast<const char*>(row);
  for (int64_t byte = 0; byte < h * int64_t(sizeof(Element)); byte += 64) __builtin_prefetch(at + byte);
}

// Scores of KEYS (at most 4) keys and HEADS heads.
template <Stored type, int N, int KEYS>
inline void score_block(const typename Convert<type>::Element* const* k, const float* q_Gh, int64_t h, float* scores) {
  Floats sum[N][4] = {};
  for (int64_t i = 0; i < h; i += W) {
    Floats x[KEYS];
    for (int c = 0; c < KEYS; c++) x[c] = Convert<type>::widen(k[c] + i);
    for (int g = 0; g < N; g++) {
      Floats q = load<Floats>(q_Gh + g * h + i);
      for (int c = 0; c < KEYS; c++) sum[g][c] += q * x[c];
    }
  }
  for (int g = 0; g < N; g++) store(scores + g * CHUNK, sums(sum[g][0], sum[g][1], sum[g][2], sum[g][3]));
}

template <Stored type, int N>
void score(const typename Convert<type>::Element* const* k, int64_t n, const float* q_Gh, int64_t h, float* scores,
           const typename Convert<type>::Element* const* later) {
  int64_t c = 0;
  for (; c + 4 <= n; c += 4) {
    for (int64_t i = c; later && i < c + 4; i++) foresee(later[i], h);
    score_block<type, N, 4>(k + c, q_Gh, h, scores + c);
  }
  switch (n - c) {
    case 3: return score_block<type, N, 3>(k + c, q_Gh, h, scores + c);
    case 2: return score_block<type, N, 2>(k + c, q_Gh, h, scores + c);
    case 1: return score_block<type, N, 1>(k + c, q_Gh, h, scores + c);
  }
}

// The online softmax of one head over n scores, which become weights.
void softmax(One& one, int64_t g, int64_t n, float cap) {
  float* scores = one.scores_GC + g * CHUNK;
  int64_t padded = round_up(n, W);
  if (cap > 0)
    for (int64_t c = 0; c < padded; c += W) store(scores + c, tanh(load<Floats>(scores + c)) * cap);
  fill(scores + n, padded - n, -__builtin_inff());
  Floats highest = broadcast(one.top_G[g]);
  for (int64_t c = 0; c < padded; c += W) highest = maximum(load<Floats>(scores + c), highest);
  float top = highest[0];
  for (int j = 1; j < W; j++) top = highest[j] > top ? highest[j] : top;
  Floats total = {};
  for (int64_t c = 0; c < padded; c += W) {
    Floats p = exp2(load<Floats>(scores + c) - top);
    store(scores + c, p);
    total += p;
  }
  Four sum = sums(total, Floats{}, Floats{}, Floats{});
  one.keep_G[g] = exp2(broadcast(one.top_G[g] - top))[0];
  one.sum_G[g] = one.sum_G[g] * one.keep_G[g] + sum[0];
  one.top_G[g] = top;
}

template <Stored type, int N, int VECTORS>
inline void weigh_block(const One& one, const typename Convert<type>::Element* const* v, int64_t n, int64_t g,
                        int64_t h, int64_t i, const typename Convert<type>::Element* const* later) {
  Floats sum[N][VECTORS];
  float* values = one.values_Gh + g * h + i;
  for (int q = 0; q < N; q++)
    for (int j = 0; j < VECTORS; j++) sum[q][j] = load<Floats>(values + q * h + j * W) * one.keep_G[g + q];
  const float* weights = one.scores_GC + g * CHUNK;
  for (int64_t c = 0; c < n; c++) {
    if (later) foresee(later[c], h);
    Floats x[VECTORS];
    for (int j = 0; j < VECTORS; j++) x[j] = Convert<type>::widen(v[c] + i + j * W);
    for (int q = 0; q < N; q++)
      for (int j = 0; j < VECTORS; j++) sum[q][j] += weights[q * CHUNK + c] * x[j];
  }
  for (int q = 0; q < N; q++)
    for (int j = 0; j < VECTORS; j++) store(values + q * h + j * W, sum[q][j]);
}

template <Stored type, int N>
void weigh(const One& one, const typename Convert<type>::Element* const* v, int64_t n, int64_t g, int64_t h,
           const typename Convert<type>::Element* const* later) {
  int64_t i = 0;
  for (; i + 4 * W <= h; i += 4 * W) weigh_block<type, N, 4>(one, v, n, g, h, i, i ? nullptr : later);
  for (; i < h; i += W) weigh_block<type, N, 1>(one, v, n, g, h, i, i ? nullptr : later);
}

// Heads are taken in threes, twos and ones, as evenly as it goes.
template <typename F1, typename F2, typename F3>
void by_threes(int64_t heads, F1 one, F2 two, F3 three) {
  int64_t blocks = (heads + 2) / 3, g = 0;
  for (int64_t left = blocks; left > 0; left--) {
    int64_t n = (heads - g + left - 1) / left;
    n == 3 ? three(g) : n == 2 ? two(g) : one(g);
    g += n;
  }
}

// One step of the online softmax. `next_k` (null at the end): the keys of the next chunk, asked for early as V is here.
template <Stored type>
void chunk(const Attention& a, One& one, const typename Convert<type>::Element* const* k,
           const typename Convert<type>::Element* const* v, int64_t n,
           const typename Convert<type>::Element* const* next_k) {
  int64_t G = group_of(a), h = a.h;
  auto q = [&](int64_t g) { return one.q_Gh + g * h; };
  auto scores = [&](int64_t g) { return one.scores_GC + g * CHUNK; };
  auto v_once = [&](int64_t g) { return g ? nullptr : v; };
  auto k_once = [&](int64_t g) { return g ? nullptr : next_k; };
  by_threes(
      G, [&](int64_t g) { score<type, 1>(k, n, q(g), h, scores(g), v_once(g)); },
      [&](int64_t g) { score<type, 2>(k, n, q(g), h, scores(g), v_once(g)); },
      [&](int64_t g) { score<type, 3>(k, n, q(g), h, scores(g), v_once(g)); });
  for (int64_t g = 0; g < G; g++) softmax(one, g, n, a.soft_cap * LOG2_E);
  by_threes(
      G, [&](int64_t g) { weigh<type, 1>(one, v, n, g, h, k_once(g)); },
      [&](int64_t g) { weigh<type, 2>(one, v, n, g, h, k_once(g)); },
      [&](int64_t g) { weigh<type, 3>(one, v, n, g, h, k_once(g)); });
}

template <Stored type>
constexpr bool cheap() {
  return type == Stored::f32 || type == Stored::bf16 || type == Stored::i8;
}

template <Stored type>
void attend(const Attention& a, const Piece& piece, float* scratch) {
  typedef typename Convert<type>::Element Element;
  One one;
  lay_out(a, scratch, &one);
  int64_t G = group_of(a), first = piece.head * G;
  bool sink = a.sinks_H && !piece.partial;
  for (int64_t g = 0; g < G; g++) {
    read_query(a, piece.first, first + g, query_factor(a, piece.head), one.q_Gh + g * a.h);
    one.top_G[g] = sink ? a.sinks_H[first + g] * LOG2_E : LOWEST;
    one.sum_G[g] = sink ? 1.f : 0.f;
  }
  fill(one.values_Gh, G * a.h, 0.f);
  const Element *k[2][CHUNK], *v[2][CHUNK];
  int64_t begin = piece.begin, end = chunk_end(begin, piece.end);
  find_rows(a, piece.row, piece.head, begin, end, k[0], v[0]);
  for (int now = 0; begin < end; now = !now) {
    int64_t n = end - begin, next_end = chunk_end(end, piece.end);
    find_rows(a, piece.row, piece.head, end, next_end, k[!now], v[!now]);
    if (cheap<type>()) {
      // Only a whole chunk follows a whole one, or the last, whose end need not be foreseen.
      chunk<type>(a, one, k[now], v[now], n, next_end - end == n ? k[!now] : nullptr);
    } else {
      const float *k_rows[CHUNK], *v_rows[CHUNK];
      for (int64_t c = 0; c < n; c++) {
        widen_row<type>(k[now][c], a.h, one.k_Ch + c * a.h);
        widen_row<type>(v[now][c], a.h, one.v_Ch + c * a.h);
        k_rows[c] = one.k_Ch + c * a.h;
        v_rows[c] = one.v_Ch + c * a.h;
      }
      chunk<Stored::f32>(a, one, k_rows, v_rows, n, nullptr);
    }
    begin = end;
    end = next_end;
  }
  for (int64_t g = 0; g < G; g++) {
    if (!piece.partial) {
      write_output(a, piece.first, first + g, one.values_Gh + g * a.h, one.sum_G[g]);
      continue;
    }
    Partial to = partial_at(piece.partial, G);
    to.top_P[g] = one.top_G[g];
    to.sum_P[g] = one.sum_G[g];
    copy(one.values_Gh + g * a.h, a.h, to.values_Ph + g * a.h);
  }
}

}  // namespace

bool takes_one(const Attention& a, const Piece& piece) {
  int64_t row_tokens = start_of(a, piece.row + 1) - start_of(a, piece.row);
  return row_tokens == 1 && group_of(a) <= HEADS && a.h % W == 0;
}

int64_t one_floats(const Attention& a) {
  One one;
  return lay_out(a, nullptr, &one);
}

void attend_one(const Attention& a, const Piece& piece, float* scratch) {
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
