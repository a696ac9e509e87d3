// Random problems for the attention kernels and the KV write, in arrays of exactly the size that they may touch; for
// sanitizers (test_native_library.py). Results are compared with plain loops in double.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <memory>
#include <random>
#include <vector>

#include "attention.h"
#include "attention_plan.h"
#include "rope_kv_write.h"
#include "workers.h"

using namespace jaxinfer;

namespace {

std::mt19937 generator;

int64_t pick(std::initializer_list<int64_t> from) { return from.begin()[generator() % from.size()]; }
int64_t below(int64_t n) { return int64_t(generator() % uint32_t(n)); }
float normal() { return std::normal_distribution<float>()(generator); }

// A value whose conversion is simple, so that this file needs no conversions of its own: its bits in a pool, and itself.
std::pair<uint32_t, float> stored_value(Stored type) {
  int64_t power = below(4);
  bool minus = below(2);
  float x = float(1 << power) / 4 * (minus ? -1 : 1);
  uint32_t bits = 0, exponent = uint32_t(power) - 2;
  switch (type) {
    case Stored::f32: std::memcpy(&bits, &x, 4); break;
    case Stored::bf16: bits = (127 + exponent) << 7 | uint32_t(minus) << 15; break;
    case Stored::f16: bits = (15 + exponent) << 10 | uint32_t(minus) << 15; break;
    case Stored::f8e5m2: bits = (15 + exponent) << 2 | uint32_t(minus) << 7; break;
    case Stored::f8e4m3: bits = (7 + exponent) << 3 | uint32_t(minus) << 7; break;
    case Stored::i8: x *= 4, bits = uint32_t(int32_t(x)) & 0xFF; break;
  }
  return {bits, x};
}

struct Pool {
  std::unique_ptr<char[]> bytes;
  std::vector<float> values;
  Pool(Stored type, int64_t n) : bytes(new char[n * bytes_of(type)]), values(n) {
    for (int64_t i = 0; i < n; i++) {
      auto [bits, x] = stored_value(type);
      std::memcpy(&bytes[i * bytes_of(type)], &bits, bytes_of(type));
      values[i] = x;
    }
  }
};

struct Problem {
  Attention a = {};
  std::vector<float> q, out, sinks, k_scale, v_scale;
  std::vector<int32_t> table, start, context, ancestors;
  std::unique_ptr<Pool> k, v;

  explicit Problem(bool hostile) {
    a.K = pick({1, 2, 3}), a.H = a.K * pick({1, 2, 3, 5, 7, 8, 20}), a.h = pick({1, 8, 16, 20, 64, 72});
    a.S = pick({1, 3, 4, 16}), a.R = 1 + below(4), a.M = 1 + below(600 / a.S), a.N = 1 + below(a.R * a.M + 1);
    a.pool = Stored(below(6)), a.activations = Stored::f32;
    a.window = pick({0, 0, 1, 40, 300}), a.soft_cap = float(pick({0, 0, 3})), a.scale = 0.3f / std::sqrt(float(a.h));
    start.push_back(0);
    for (int64_t r = 0; r < a.R; r++) {
      int64_t c = below(a.M * a.S + 1), n = std::min<int64_t>(c, pick({0, 1, 1, 2, 5, 40, 130}));
      context.push_back(int32_t(c));
      start.push_back(int32_t(start.back() + n));
    }
    a.T = start.back() + below(3) + 1;
    if (below(3) == 0 && !a.window) grow_trees();
    if (below(3) == 0) fill(sinks, a.H);
    if (bytes_of(a.pool) == 1) fill(k_scale, a.K), fill(v_scale, a.K);
    fill(q, a.T * a.H * a.h);
    out.assign(q.size(), NAN);
    for (int64_t i = 0; i < a.R * a.M; i++) table.push_back(int32_t(hostile ? generator() : below(a.N)));
    if (hostile) start[below(a.R + 1)] = int32_t(generator()), context[below(a.R)] = int32_t(generator());
    int64_t n = a.N * a.K * a.S * a.h;
    k = std::make_unique<Pool>(a.pool, n), v = std::make_unique<Pool>(a.pool, n);
    point();
  }

  static void fill(std::vector<float>& x, int64_t n) {
    x.resize(n);
    for (float& value : x) value = normal();
  }

  void grow_trees() {
    a.U = 1 + below(2);
    ancestors.assign(a.T * a.U, 0);
    for (int64_t r = 0; r < a.R; r++) {
      int64_t n = start[r + 1] - start[r];
      for (int64_t t = 0; n <= 32 * a.U && t < n; t++) {
        int32_t* mine = &ancestors[(start[r] + t) * a.U];
        if (t) std::copy_n(&ancestors[(start[r] + below(t)) * a.U], a.U, mine);
        mine[t / 32] |= int32_t(1u << t % 32);
      }
    }
  }

  void point() {
    a.q_THh = q.data(), a.out_THh = out.data(), a.k_NKSh = k->bytes.get(), a.v_NKSh = v->bytes.get();
    a.table_RM = table.data(), a.query_start_Q = start.data(), a.context_len_R = context.data();
    a.ancestors_TU = a.U ? ancestors.data() : nullptr, a.sinks_H = sinks.empty() ? nullptr : sinks.data();
    a.k_scale_K = k_scale.empty() ? nullptr : k_scale.data(), a.v_scale_K = v_scale.empty() ? nullptr : v_scale.data();
  }

  void run() {
    AttentionKernels kernels = v3::attention_kernels();
    AttentionPlan plan = plan_attention(a);
    for (const Piece& piece : plan.pieces) kernels.attend(a, piece, scratch(kernels.scratch_floats(a)));
    for (auto [first, n] : plan.merges) kernels.merge(a, &plan.pieces[first], n);
  }

  bool sees(int64_t row, int64_t token, int64_t key) const {
    int64_t prefix = context[row] - (start[row + 1] - start[row]), i = token - start[row];
    const int32_t* mask = a.U ? &ancestors[token * a.U] : nullptr;
    if (a.U && (mask[0] || mask[a.U - 1]) && key >= prefix)
      return key - prefix < 32 * a.U && mask[(key - prefix) / 32] >> (key - prefix) % 32 & 1;
    return key <= prefix + i && (!a.window || key > prefix + i - a.window);
  }

  double error() const {
    double worst = 0;
    for (int64_t r = 0; r < a.R; r++)
      for (int64_t token = start[r]; token < start[r + 1]; token++)
        for (int64_t head = 0; head < a.H; head++) worst = std::fmax(worst, error(r, token, head));
    return worst;
  }

  double error(int64_t row, int64_t token, int64_t head) const {
    int64_t kv = head / (a.H / a.K), at = (token * a.H + head) * a.h;
    double sum = sinks.empty() ? 0 : std::exp(double(sinks[head])), worst = 0;
    std::vector<double> want(a.h);
    for (int64_t key = 0; key < context[row]; key++) {
      if (!sees(row, token, key)) continue;
      int64_t from = ((table[row * a.M + key / a.S] * a.K + kv) * a.S + key % a.S) * a.h;
      double s = 0;
      for (int64_t d = 0; d < a.h; d++) s += double(q[at + d]) * k->values[from + d];
      s *= a.scale * (k_scale.empty() ? 1. : k_scale[kv]);
      if (a.soft_cap > 0) s = a.soft_cap * std::tanh(s / a.soft_cap);
      sum += std::exp(s);
      for (int64_t d = 0; d < a.h; d++) want[d] += std::exp(s) * v->values[from + d];
    }
    for (int64_t d = 0; d < a.h; d++) {
      double x = sum ? want[d] / sum * (v_scale.empty() ? 1. : v_scale[kv]) : 0;
      double off = std::fabs(out[at + d] - x) / (1 + std::fabs(x));
      worst = std::isnan(off) ? INFINITY : std::fmax(worst, off);
    }
    return worst;
  }
};

void write_somewhere() {
  RopeWrite a = {};
  a.T = 1 + below(20), a.K = 1 + below(3), a.H = a.K * (1 + below(4)), a.h = pick({2, 8, 20, 64}), a.N = 1 + below(5);
  a.S = pick({1, 4, 16}), a.i = a.h / 2 - below(2) * (a.h / 4), a.pool = Stored(below(6)), a.activations = Stored(below(3));
  int64_t act = bytes_of(a.activations), heads = a.H + 2 * a.K, pool = a.N * a.K * a.S * a.h * bytes_of(a.pool);
  std::unique_ptr<char[]> qkv(new char[a.T * heads * a.h * act]), q(new char[a.T * a.H * a.h * act]);
  for (int64_t i = 0; i < a.T * heads * a.h * act; i++) qkv[i] = char(generator());
  std::unique_ptr<char[]> k(new char[pool]), v(new char[pool]);
  std::vector<float> table(a.T * a.i, 0.6f), factors(a.h, 1.1f), scale(a.K, 0.01f);
  std::vector<int32_t> slots(a.T);
  for (int32_t& slot : slots) slot = below(4) ? int32_t(below(a.N * a.S)) : int32_t(generator());
  a.qkv_TAh = qkv.get(), a.q_THh = q.get(), a.k_NKSh = k.get(), a.v_NKSh = v.get(), a.slot_T = slots.data();
  a.cos_Ti = a.sin_Ti = table.data(), a.k_scale_K = a.v_scale_K = scale.data(), a.norm_eps = 1e-6f;
  if (below(2)) a.q_norm_h = a.k_norm_h = factors.data();
  std::unique_ptr<float[]> spare(new float[2 * a.h]);
  v3::rope_kv_write(a, 0, a.T, spare.get());
}

}  // namespace

int main() {
  const int cases = 300;
  for (int seed = 0; seed < cases; seed++) {
    generator.seed(seed);
    Problem problem(seed % 5 == 4);
    problem.run();
    if (seed % 5 != 4 && problem.error() > 1e-4) {
      std::printf("seed %d: error %g\n", seed, problem.error());
      return 1;
    }
    write_somewhere();
  }
  std::printf("%d cases\n", cases);
  return 0;
}
