// Weighted sums over few sources, token by token: what multi-stream and cross-layer topologies do to the residual stream.
#pragma once

#include <vector>

#include "vectors.h"

namespace {

// y[r] = W[r / share] x[r] for R rows of s sources and m sums, d channels each. `share` consecutive rows have one W.
void mix_forward(Index R, Index share, Index m, Index s, Index d, const float* weights, const float* sources, float* y) {
  for (Index r = 0; r < R; ++r) {
    const float *w = weights + r / share * m * s, *x = sources + r * s * d;
    for (Index i = 0; i < m; ++i) {
      float* out = y + (r * m + i) * d;
      for_lanes(
          d,
          [&](Index j) {
            Vec total = zero();
            for (Index q = 0; q < s; ++q) total = fma(splat(w[i * s + q]), load(x + q * d + j), total);
            store(out + j, total);
          },
          [&](Index j, Lanes part) {
            Vec total = zero();
            for (Index q = 0; q < s; ++q) total = fma(splat(w[i * s + q]), load(x + q * d + j, part), total);
            store(out + j, part, total);
          });
    }
  }
}

// Gradients of the weights and, with them, of the sources; a shared W sums over its rows in double precision.
void mix_backward(Index R, Index share, Index m, Index s, Index d, const float* dy, const float* weights,
                  const float* sources, float* dweights, float* dsources) {
  std::vector<double> sums(m * s);
  for (Index r = 0; r < R; ++r) {
    const float *w = weights + r / share * m * s, *x = sources + r * s * d, *g = dy + r * m * d;
    float* dx = dsources + r * s * d;
    if (r % share == 0) std::fill(sums.begin(), sums.end(), 0.0);
    for (Index q = 0; q < s; ++q) {
      for_lanes(
          d,
          [&](Index j) {
            Vec total = zero();
            for (Index i = 0; i < m; ++i) total = fma(splat(w[i * s + q]), load(g + i * d + j), total);
            store(dx + q * d + j, total);
          },
          [&](Index j, Lanes part) {
            Vec total = zero();
            for (Index i = 0; i < m; ++i) total = fma(splat(w[i * s + q]), load(g + i * d + j, part), total);
            store(dx + q * d + j, part, total);
          });
      for (Index i = 0; i < m; ++i) {
        Vec dot = zero();
        for_lanes(
            d, [&](Index j) { dot = fma(load(g + i * d + j), load(x + q * d + j), dot); },
            [&](Index j, Lanes part) { dot = fma(load(g + i * d + j, part), load(x + q * d + j, part), dot); });
        sums[i * s + q] += sum(dot);
      }
    }
    if (r % share == share - 1)
      for (Index i = 0; i < m * s; ++i) dweights[r / share * m * s + i] = static_cast<float>(sums[i]);
  }
}

}  // namespace
