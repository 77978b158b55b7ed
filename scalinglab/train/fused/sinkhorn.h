// Sinkhorn normalisation of many small n x n matrices, eight tokens to a vector.
#pragma once

#include <algorithm>
#include <vector>

#include "vectors.h"

namespace {

// Entry e of matrices r .. r + 7 in one vector; missing tokens repeat the last one.
INLINE Vec gather(const float* x, Index R, Index r, Index n2, Index e) {
  alignas(32) float lanes[kLanes];
  for (Index q = 0; q < kLanes; ++q) lanes[q] = x[std::min(r + q, R - 1) * n2 + e];
  return load(lanes);
}

INLINE void scatter(Vec v, float* x, Index R, Index r, Index n2, Index e) {
  alignas(32) float lanes[kLanes];
  store(lanes, v);
  for (Index q = 0; q < std::min(kLanes, R - r); ++q) x[(r + q) * n2 + e] = lanes[q];
}

// Line `a` of a matrix [target][source]: a column (`step` n) or a row (`step` 1) begins here.
INLINE Index line(Index n, bool columns, Index a) { return columns ? a : a * n; }

// One half-iteration: every line divided by its sum, which is kept as 1 / sum.
INLINE void divide(Index n, bool columns, const Vec* x, Vec* y, Vec* inverse) {
  const Index step = columns ? n : 1;
  for (Index a = 0; a < n; ++a) {
    const Index at = line(n, columns, a);
    Vec total = zero();
    for (Index b = 0; b < n; ++b) total = add(total, x[at + b * step]);
    inverse[a] = div(splat(1.f), total);
    for (Index b = 0; b < n; ++b) y[at + b * step] = mul(x[at + b * step], inverse[a]);
  }
}

// Its gradient in place: dx = (dy - sum(dy y)) / sum.
INLINE void divide_backward(Index n, bool columns, const Vec* y, const Vec* inverse, Vec* g) {
  const Index step = columns ? n : 1;
  for (Index a = 0; a < n; ++a) {
    const Index at = line(n, columns, a);
    Vec dot = zero();
    for (Index b = 0; b < n; ++b) dot = fma(g[at + b * step], y[at + b * step], dot);
    for (Index b = 0; b < n; ++b) g[at + b * step] = mul(sub(g[at + b * step], dot), inverse[a]);
  }
}

INLINE void exponentials(const float* logits, Index R, Index r, Index n2, Vec* w) {
  Vec top = splat(-INFINITY);
  for (Index e = 0; e < n2; ++e) {
    w[e] = gather(logits, R, r, n2, e);
    top = max(top, w[e]);
  }
  for (Index e = 0; e < n2; ++e) w[e] = exp(sub(w[e], top));
}

// R matrices: exp(logits), then `iterations` times columns and rows divided by their sums.
void sinkhorn_forward(Index R, Index n, Index iterations, const float* logits, float* y) {
  const Index n2 = n * n;
  std::vector<Vec> w(n2), inverse(n);
  for (Index r = 0; r < R; r += kLanes) {
    exponentials(logits, R, r, n2, w.data());
    for (Index half = 0; half < 2 * iterations; ++half)
      divide(n, half % 2 == 0, w.data(), w.data(), inverse.data());
    for (Index e = 0; e < n2; ++e) scatter(w[e], y, R, r, n2, e);
  }
}

// Every half-iteration is done again and kept; the constant that was subtracted from the logits cancels.
void sinkhorn_backward(Index R, Index n, Index iterations, const float* dy, const float* logits, float* dlogits) {
  const Index n2 = n * n, halves = 2 * iterations;
  std::vector<Vec> w((halves + 1) * n2), inverse(halves * n), g(n2);
  for (Index r = 0; r < R; r += kLanes) {
    exponentials(logits, R, r, n2, w.data());
    for (Index half = 0; half < halves; ++half)
      divide(n, half % 2 == 0, &w[half * n2], &w[(half + 1) * n2], &inverse[half * n]);
    for (Index e = 0; e < n2; ++e) g[e] = gather(dy, R, r, n2, e);
    for (Index half = halves; half-- > 0;)
      divide_backward(n, half % 2 == 0, &w[(half + 1) * n2], &inverse[half * n], g.data());
    for (Index e = 0; e < n2; ++e) scatter(mul(g[e], w[e]), dlogits, R, r, n2, e);
  }
}

}  // namespace
