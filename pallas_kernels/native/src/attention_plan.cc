#include "attention_plan.h"

#include <algorithm>

namespace jaxinfer {

Sight sight(const Attention& a, int64_t row, int64_t token) {
  int64_t first = start_of(a, row), context = context_of(a, row);
  int64_t prefix = context - (start_of(a, row + 1) - first);
  int64_t position = prefix + token - first;
  Sight sight = {0, std::min(position + 1, context), prefix, nullptr};
  const uint32_t* words = a.ancestors_TU ? reinterpret_cast<const uint32_t*>(a.ancestors_TU) + token * a.U : nullptr;
  int64_t seen = 0;
  for (int64_t u = 0; words && u < a.U; u++) seen += __builtin_popcount(words[u]);
  if (seen) {
    position = prefix + seen - 1;
    sight = {0, std::min(context, prefix + 32 * a.U), prefix, words};
  }
  if (a.window) sight.begin = std::max<int64_t>(0, position - a.window + 1);
  if (seen) sight.begin = std::min(sight.begin, std::max<int64_t>(prefix, 0));
  return sight;
}

namespace {

// The pieces of `count` tokens from `first` on and all heads; `split`: cut their keys at the multiples of SPLIT.
void add_tile(const Attention& a, int64_t row, int64_t first, int64_t count, bool split, AttentionPlan* plan) {
  int64_t begin = a.M * a.S, end = 0;
  for (int64_t token = first; token < first + count; token++) {
    Sight s = sight(a, row, token);
    if (s.begin >= s.end) continue;
    begin = std::min(begin, s.begin);
    end = std::max(end, s.end);
  }
  begin = std::min(begin, end);
  int64_t cuts = split && end > begin ? (end - 1) / SPLIT - begin / SPLIT : 0;
  for (int64_t head = 0; head < a.K; head++) {
    if (cuts) plan->merges.emplace_back(plan->pieces.size(), cuts + 1);
    for (int64_t i = 0; i <= cuts; i++) {
      int64_t from = i ? (begin / SPLIT + i) * SPLIT : begin, to = i < cuts ? (begin / SPLIT + i + 1) * SPLIT : end;
      plan->pieces.push_back({row, head, first, count, from, to, nullptr});
    }
  }
  plan->operations += 2. * double(end - begin) * double(count * a.H * a.h);
}

// Room for the partials of all pieces that are joined.
void give_partials(const Attention& a, AttentionPlan* plan) {
  int64_t floats = 0;
  for (auto [first, n] : plan->merges) floats += n * partial_floats(plan->pieces[first].count * group_of(a), a.h);
  plan->partials.reset(new float[floats]);
  float* next = plan->partials.get();
  for (auto [first, n] : plan->merges)
    for (int64_t i = first; i < first + n; i++) {
      plan->pieces[i].partial = next;
      next += partial_floats(plan->pieces[i].count * group_of(a), a.h);
    }
}

}  // namespace

AttentionPlan plan_attention(const Attention& a) {
  AttentionPlan plan;
  int64_t tile = tile_tokens(a);
  for (int64_t row = 0; row < a.R; row++) {
    int64_t start = start_of(a, row), stop = start_of(a, row + 1);
    for (int64_t first = start; first < stop; first += tile)
      add_tile(a, row, first, std::min(tile, stop - first), stop - start <= tile, &plan);
  }
  give_partials(a, &plan);
  return plan;
}

}  // namespace jaxinfer
