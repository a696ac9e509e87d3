// How a batch is cut into pieces of work.
#pragma once

#include <memory>
#include <vector>

#include "attention.h"

namespace jaxinfer {

struct AttentionPlan {
  std::vector<Piece> pieces;
  // Runs of pieces (first, number) whose partials are joined at the end.
  std::vector<std::pair<int64_t, int64_t>> merges;
  std::unique_ptr<float[]> partials;
  double operations = 0;  // products of two numbers
};

AttentionPlan plan_attention(const Attention& a);

}  // namespace jaxinfer
