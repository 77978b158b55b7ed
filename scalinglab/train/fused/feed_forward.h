// down(silu(gate x) up x) and down(gelu(up x)).
#pragma once

#include "products.h"

namespace {

INLINE Vec sigmoid(Vec x) { return div(splat(1.f), add(splat(1.f), exp(sub(zero(), x)))); }

// Normal distribution function (absolute error 1e-7; Abramowitz & Stegun 7.1.26) and density.
INLINE void normal(Vec x, Vec& below, Vec& density) {
  const Vec size = _mm256_andnot_ps(splat(-0.f), x);
  const Vec e = exp(mul(mul(x, x), splat(-0.5f)));
  const Vec t = div(splat(1.f), fma(splat(0.3275911f * 0.707106781f), size, splat(1.f)));
  Vec p = fma(splat(1.061405429f), t, splat(-1.453152027f));
  p = fma(p, t, splat(1.421413741f));
  p = fma(p, t, splat(-0.284496736f));
  p = fma(p, t, splat(0.254829592f));
  const Vec tail = mul(mul(mul(p, t), e), splat(0.5f));
  below = _mm256_blendv_ps(sub(splat(1.f), tail), tail, x);  // by the sign of x
  density = mul(e, splat(0.39894228f));
}

// `pre` holds [gate, up] (or only up) per token. inner = silu(gate) up, or gelu(up).
INLINE Vec activate(Vec gate, Vec up) { return mul(mul(gate, sigmoid(gate)), up); }
INLINE Vec activate(Vec up) {
  Vec below, density;
  normal(up, below, density);
  return mul(up, below);
}

void activate_row(const float* pre, Index f, bool gated, float* inner) {
  const float* up = pre + f;
  if (gated)
    for_lanes(
        f, [&](Index j) { store(inner + j, activate(load(pre + j), load(up + j))); },
        [&](Index j, Lanes part) { store(inner + j, part, activate(load(pre + j, part), load(up + j, part))); });
  else
    for_lanes(
        f, [&](Index j) { store(inner + j, activate(load(pre + j))); },
        [&](Index j, Lanes part) { store(inner + j, part, activate(load(pre + j, part))); });
}

// From the gradient of `inner`: inner again, and the gradient of `pre`.
INLINE void derive(Vec gate, Vec up, Vec dinner, Vec& inner, Vec& dgate, Vec& dup) {
  const Vec s = sigmoid(gate), silu = mul(gate, s);
  inner = mul(silu, up);
  dup = mul(dinner, silu);
  dgate = mul(mul(dinner, up), fma(silu, sub(splat(1.f), s), s));
}
INLINE void derive(Vec up, Vec dinner, Vec& inner, Vec& dup) {
  Vec below, density;
  normal(up, below, density);
  inner = mul(up, below);
  dup = mul(dinner, fma(up, density, below));
}

void derive_row(const float* pre, Index f, bool gated, const float* dinner, float* inner, float* dpre) {
  Vec a, b, c;
  if (gated)
    for_lanes(
        f,
        [&](Index j) {
          derive(load(pre + j), load(pre + f + j), load(dinner + j), a, b, c);
          store(inner + j, a), store(dpre + j, b), store(dpre + f + j, c);
        },
        [&](Index j, Lanes part) {
          derive(load(pre + j, part), load(pre + f + j, part), load(dinner + j, part), a, b, c);
          store(inner + j, part, a), store(dpre + j, part, b), store(dpre + f + j, part, c);
        });
  else
    for_lanes(
        f,
        [&](Index j) {
          derive(load(pre + j), load(dinner + j), a, b);
          store(inner + j, a), store(dpre + j, b);
        },
        [&](Index j, Lanes part) {
          derive(load(pre + j, part), load(dinner + j, part), a, b);
          store(inner + j, part, a), store(dpre + j, part, b);
        });
}

void stack_inputs(Stacked& stacked, const Weight& gate, const Weight& up, Index k, Index f, Index d) {
  stacked.rows = 0;
  if (gate.data) stacked.append(gate.of(k), f, d);
  stacked.append(up.of(k), f, d);
}

void feed_forward_forward(Index K, Index M, Index d, Index f, const float* x, const Weight& gate, const Weight& up,
                          const Weight& down, float* y, float* pre) {
  const bool gated = gate.data;
  const Index n = gated ? 2 * f : f, R = block_rows(n + f);
  arena.reserve(n * d + panel_floats(d, n) + panel_floats(f, d) + R * f + 128);
  Stacked stacked{arena.take(n * d)};
  const Panels first = take_panels(d, n), second = take_panels(f, d);
  float* inner = arena.take(R * f);
  for (Index k = 0; k < K; ++k) {
    stack_inputs(stacked, gate, up, k, f, d);
    pack_transposed(stacked.data, d, first);
    pack_transposed(down.of(k), f, second);
    for (Index r = k * M; r < (k + 1) * M; r += R) {
      const Index m = std::min(R, (k + 1) * M - r);
      multiply(m, x + r * d, d, first, pre + r * n, n);
      for (Index i = 0; i < m; ++i) activate_row(pre + (r + i) * n, f, gated, inner + i * f);
      multiply(m, inner, f, second, y + r * d, d);
    }
  }
}

void feed_forward_backward(Index K, Index M, Index d, Index f, const float* dy, const float* x, const float* pre,
                           const Weight& gate, const Weight& up, const Weight& down, float* dx, const Gradient& dgate,
                           const Gradient& dup, const Gradient& ddown) {
  const bool gated = gate.data;
  const Index n = gated ? 2 * f : f, R = block_rows(n + 2 * f);
  arena.reserve(n * d + panel_floats(n, d) + panel_floats(d, f) + R * (2 * f + n) + panel_floats(R, f) +
                panel_floats(R, d) + 256);
  Stacked stacked{arena.take(n * d)};
  const Panels first = take_panels(n, d), second = take_panels(d, f);
  float *inner = arena.take(R * f), *dinner = arena.take(R * f), *dpre = arena.take(R * n);
  float *packed_inner = arena.take(panel_floats(R, f)), *packed_x = arena.take(panel_floats(R, d));
  for (Index k = 0; k < K; ++k) {
    stack_inputs(stacked, gate, up, k, f, d);
    pack(stacked.data, d, first);
    pack(down.of(k), f, second);
    for (Index r = k * M; r < (k + 1) * M; r += R) {
      const Index m = std::min(R, (k + 1) * M - r);
      const float* g = dy + r * d;
      multiply(m, g, d, second, dinner, f);
      for (Index i = 0; i < m; ++i)
        derive_row(pre + (r + i) * n, f, gated, dinner + i * f, inner + i * f, dpre + i * n);
      if (ddown.data) {
        const Panels right{packed_inner, m, f};
        pack(inner, f, right);
        add_transposed(d, g, d, right, ddown.of(k), f);
      }
      const Panels right{packed_x, m, d};
      if (dgate.data || dup.data) pack(x + r * d, d, right);
      if (dgate.data) add_transposed(f, dpre, n, right, dgate.of(k), d);
      if (dup.data) add_transposed(f, dpre + n - f, n, right, dup.of(k), d);
      multiply(m, dpre, n, first, dx + r * d, d);
    }
  }
}

}  // namespace
