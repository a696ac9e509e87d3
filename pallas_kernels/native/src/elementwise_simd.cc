// Norms and gates of rows of floats, in vectors. A row has the same bits whatever the other rows are.
#include <cmath>

#include "elementwise.h"
#include "vector.h"

namespace jaxinfer {
namespace SIMD_NAMESPACE {
namespace {

constexpr float LOG2_E = 1.44269504088896f;
constexpr int PARTS = 16;  // partial sums of a row, for every width of vectors

// Calls f(vector index) for whole vectors and g(index) for what is left.
template <typename F, typename G>
inline void for_row(int64_t n, F f, G g) {
  int64_t i = 0;
  for (; i + PARTS <= n; i += PARTS)
    for (int j = 0; j < PARTS; j += W) f(i + j, j);
  for (; i < n; i++) g(i);
}

float sum_of_squares(const float* x, int64_t n) {
  Floats parts[PARTS / W] = {};
  float rest = 0;
  for_row(
      n,
      [&](int64_t i, int j) {
        Floats v = load<Floats>(x + i);
        parts[j / W] += v * v;
      },
      [&](int64_t i) { rest += x[i] * x[i]; });
  float part[PARTS];
  for (int j = 0; j < PARTS / W; j++) store(part + j * W, parts[j]);
  for (int half = PARTS / 2; half; half /= 2)
    for (int j = 0; j < half; j++) part[j] += part[j + half];
  return part[0] + rest;
}

void scale(const float* x, float by, const float* factor, int64_t n, float* y) {
  for_row(
      n, [&](int64_t i, int) { store(y + i, load<Floats>(x + i) * by * load<Floats>(factor + i)); },
      [&](int64_t i) { y[i] = x[i] * by * factor[i]; });
}

void add(const float* x, const float* y, int64_t n, float* sum) {
  for_row(
      n, [&](int64_t i, int) { store(sum + i, load<Floats>(x + i) + load<Floats>(y + i)); },
      [&](int64_t i) { sum[i] = x[i] + y[i]; });
}

// 1 / (1 + e^-x), without a power that overflows.
inline Floats sigmoid(Floats x) {
  Floats e = exp2((x < 0.f ? x : -x) * LOG2_E);  // e^-|x|
  return (x < 0.f ? e : broadcast(1.f)) / (1.f + e);
}

struct Silu {
  static Floats of(Floats x) { return x * sigmoid(x); }
};

// The approximation of Hendrycks and Gimpel (2016); (1 + tanh(z)) / 2 is sigmoid(2 z), which does not cancel.
struct GeluTanh {
  static Floats of(Floats x) { return x * sigmoid(1.5957691216f * (x + 0.044715f * x * x * x)); }
};

template <typename Activation>
void gate_row(const float* row, int64_t F, float* y) {
  const auto gated = [](Floats g, Floats up) { return Activation::of(g) * up; };
  int64_t i = 0;
  for (; i + W <= F; i += W) store(y + i, gated(load<Floats>(row + i), load<Floats>(row + F + i)));
  if (i == F) return;
  float g[W] = {}, up[W] = {};
  std::memcpy(g, row + i, sizeof(float) * (F - i));
  std::memcpy(up, row + F + i, sizeof(float) * (F - i));
  Floats last = gated(load<Floats>(g), load<Floats>(up));
  std::memcpy(y + i, &last, sizeof(float) * (F - i));
}

}  // namespace

void rms_norm(const Norm& a, int64_t begin, int64_t end) {
  for (int64_t t = begin; t < end; t++) {
    const float* x = a.x_TD + t * a.D;
    if (a.residual_TD) {
      add(x, a.residual_TD + t * a.D, a.D, a.sum_TD + t * a.D);
      x = a.sum_TD + t * a.D;
    }
    float inverse = 1.f / std::sqrt(sum_of_squares(x, a.D) / float(a.D) + a.eps);
    scale(x, inverse, a.factor_D, a.D, a.y_TD + t * a.D);
  }
}

void gate(const Gated& a, int64_t begin, int64_t end) {
  auto row = a.activation == Gate::kSilu ? gate_row<Silu> : gate_row<GeluTanh>;
  for (int64_t t = begin; t < end; t++) row(a.gate_up_T2F + t * 2 * a.F, a.F, a.y_TF + t * a.F);
}

}  // namespace SIMD_NAMESPACE
}  // namespace jaxinfer
