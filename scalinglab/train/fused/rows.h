// What works row by row: RMSNorm, readout with cross-entropy, AdamW.
#pragma once

#include "products.h"

namespace {

// ---------------------------------------------------------------- norm

void norm_forward(Index K, Index M, Index d, float eps, const float* x, const Weight& gain, float* y, float* inverse) {
  for (Index k = 0; k < K; ++k)
    for (Index r = k * M; r < (k + 1) * M; ++r) {
      const float *row = x + r * d, *g = gain.of(k);
      float* out = y + r * d;
      Vec squares = zero();
      for_lanes(
          d, [&](Index j) { squares = fma(load(row + j), load(row + j), squares); },
          [&](Index j, Lanes part) { squares = fma(load(row + j, part), load(row + j, part), squares); });
      inverse[r] = 1.f / std::sqrt(sum(squares) / d + eps);
      const Vec s = splat(inverse[r]);
      for_lanes(
          d, [&](Index j) { store(out + j, mul(mul(load(row + j), s), load(g + j))); },
          [&](Index j, Lanes part) { store(out + j, part, mul(mul(load(row + j, part), s), load(g + j, part))); });
    }
}

void norm_backward(Index K, Index M, Index d, const float* dy, const float* x, const Weight& gain, const float* inverse,
                   float* dx, const Gradient& dgain) {
  constexpr Index kRows = 64;  // the gain's gradient is summed in blocks, for precision
  arena.reserve(d + 16);
  float* partial = arena.take(d);
  for (Index k = 0; k < K; ++k)
    for (Index block = 0; block < M; block += kRows) {
      std::fill(partial, partial + d, 0.f);
      for (Index r = k * M + block; r < k * M + std::min(M, block + kRows); ++r) {
        const float *row = x + r * d, *g = gain.of(k), *grad = dy + r * d;
        float* out = dx + r * d;
        const Vec s = splat(inverse[r]);
        Vec dot = zero();
        const auto collect = [&](Vec unit, Vec e, Vec gains, Vec so_far) __attribute__((always_inline)) {
          dot = fma(mul(e, gains), unit, dot);
          return fma(e, unit, so_far);
        };
        for_lanes(
            d,
            [&](Index j) {
              store(partial + j, collect(mul(load(row + j), s), load(grad + j), load(g + j), load(partial + j)));
            },
            [&](Index j, Lanes part) {
              store(partial + j, part,
                    collect(mul(load(row + j, part), s), load(grad + j, part), load(g + j, part),
                            load(partial + j, part)));
            });
        const Vec mean = splat(sum(dot) / d);
        const auto project = [&](Vec unit, Vec e, Vec gains) __attribute__((always_inline)) {
          return mul(s, fnma(unit, mean, mul(e, gains)));
        };
        for_lanes(
            d, [&](Index j) { store(out + j, project(mul(load(row + j), s), load(grad + j), load(g + j))); },
            [&](Index j, Lanes part) {
              store(out + j, part, project(mul(load(row + j, part), s), load(grad + j, part), load(g + j, part)));
            });
      }
      if (dgain.data)
        for (Index j = 0; j < d; ++j) dgain.of(k)[j] += partial[j];
    }
}

// ---------------------------------------------------------------- readout and cross-entropy

constexpr Index kLogitRows = 96;  // a block of logits is read several times: keep it close

// loss[m] = logsumexp(logits) - logits[target] with logits = multiplier * h W^T. `weights` (exp(logits - max), with
// rows of V rounded up to 8) and `total` (their sums) are what the backward pass needs; null keeps neither.
void head_forward(Index K, Index M, Index d, Index V, float multiplier, const float* h, const Weight& w,
                  const std::int64_t* targets, float* loss, float* weights, float* total) {
  const Index ld = round_up(V, kLanes), R = std::min(kLogitRows, block_rows(V));
  arena.reserve(panel_floats(d, ld) + R * ld + 64);
  const Panels readout = take_panels(d, ld);
  float* scratch = arena.take(R * ld);
  for (Index k = 0; k < K; ++k) {
    pack_transposed(w.of(k), d, {readout.data, d, V});
    if (multiplier != 1.f)
      for (Index i = 0; i < d * ld; ++i) readout.data[i] *= multiplier;
    for (Index r = k * M; r < (k + 1) * M; r += R) {
      const Index m = std::min(R, (k + 1) * M - r);
      float* logits = weights ? weights + r * ld : scratch;
      multiply(m, h + r * d, d, readout, logits, ld);
      for (Index i = 0; i < m; ++i) {
        float* row = logits + i * ld;
        const float hit = row[targets[r + i]];
        Vec top = splat(-INFINITY), sums = zero();
        for_lanes(
            V, [&](Index j) { top = max(top, load(row + j)); },
            [&](Index j, Lanes part) {
              top = max(top, keep(load(row + j), part, splat(-INFINITY)));
            });
        const float peak = largest(top);
        const auto weigh = [&](Index j, Vec e) __attribute__((always_inline)) {
          store(row + j, e);
          sums = add(sums, e);
        };
        for_lanes(
            V, [&](Index j) { weigh(j, exp(sub(load(row + j), splat(peak)))); },
            [&](Index j, Lanes part) { weigh(j, keep(exp(sub(load(row + j), splat(peak))), part)); });
        const float z = sum(sums);
        if (weights) total[r + i] = z;
        loss[r + i] = std::log(z) + (peak - hit);
      }
    }
  }
}

void head_backward(Index K, Index M, Index d, Index V, float multiplier, const float* dloss, const float* h,
                   const Weight& w, const std::int64_t* targets, const float* weights, const float* total, float* dh,
                   const Gradient& dw) {
  const Index ld = round_up(V, kLanes), R = std::min(kLogitRows, block_rows(V));
  arena.reserve(panel_floats(V, d) + panel_floats(R, d) + R * ld + 64);
  const Panels readout = take_panels(V, d);
  float *packed_h = arena.take(panel_floats(R, d)), *dlogits = arena.take(R * ld);
  for (Index k = 0; k < K; ++k) {
    pack(w.of(k), d, readout);
    for (Index r = k * M; r < (k + 1) * M; r += R) {
      const Index m = std::min(R, (k + 1) * M - r);
      for (Index i = 0; i < m; ++i) {
        const float* row = weights + (r + i) * ld;
        const float g = dloss[r + i] * multiplier;
        const Vec factor = splat(g / total[r + i]);
        for (Index j = 0; j < ld; j += kLanes) store(dlogits + i * ld + j, mul(factor, load(row + j)));
        dlogits[i * ld + targets[r + i]] -= g;
      }
      multiply(m, dlogits, ld, readout, dh + r * d, d);
      if (dw.data) {
        const Panels right{packed_h, m, d};
        pack(h + r * d, d, right);
        add_transposed(V, dlogits, ld, right, dw.of(k), d);
      }
    }
  }
}

// ---------------------------------------------------------------- AdamW

// One step over [K, P]. Rates, epsilons and decays are products of a number per replica and one per parameter:
// p <- p (1 - rate decay) - rate / correction1 * mean / (sqrt(square) / sqrt(correction2) + epsilon).
void adamw(Index K, Index P, float beta1, float beta2, float correction1, float correction2, float* param,
           const float* grad, float* mean, float* square, const float* rate_p, const float* decay_p,
           const float* epsilon_p, const float* rate_k, const float* decay_k, const float* clip_k) {
  const Vec b1 = splat(beta1), b2 = splat(beta2), rest1 = splat(1.f - beta1), rest2 = splat(1.f - beta2);
  const Vec scale1 = splat(1.f / correction1), scale2 = splat(1.f / std::sqrt(correction2)), one = splat(1.f);
  for (Index k = 0; k < K; ++k, param += P, grad += P, mean += P, square += P) {
    const Vec rates = splat(rate_k[k]), decays = splat(decay_k[k]), clip = splat(clip_k[k]);
    const auto step = [&](Vec p, Vec g, Vec& m, Vec& v, Vec rate, Vec decay, Vec epsilon)
                          __attribute__((always_inline)) {
      g = mul(g, clip);
      m = fma(b1, m, mul(rest1, g));
      v = fma(b2, v, mul(mul(rest2, g), g));
      rate = mul(rate, rates);
      const Vec change = div(mul(m, scale1), fma(_mm256_sqrt_ps(v), scale2, epsilon));
      return fnma(rate, change, mul(p, fnma(rate, mul(decay, decays), one)));
    };
    for_lanes(
        P,
        [&](Index j) {
          Vec m = load(mean + j), v = load(square + j);
          store(param + j, step(load(param + j), load(grad + j), m, v, load(rate_p + j), load(decay_p + j),
                                load(epsilon_p + j)));
          store(mean + j, m), store(square + j, v);
        },
        [&](Index j, Lanes part) {
          Vec m = load(mean + j, part), v = load(square + j, part);
          store(param + j, part, step(load(param + j, part), load(grad + j, part), m, v, load(rate_p + j, part),
                                      load(decay_p + j, part), load(epsilon_p + j, part)));
          store(mean + j, part, m), store(square + j, part, v);
        });
  }
}

}  // namespace
