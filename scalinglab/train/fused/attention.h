// Causal self-attention with its projections. Scores of a block of queries stay in the cache; the backward pass
// computes them again. One softmax may run over a shelf of earlier sublayers too (see shelf.h).
#pragma once

#include "products.h"
#include "shelf.h"

namespace {

constexpr Index kQueries = 48;  // queries per block

struct Heads {
  Index T, H, G, c;
  Index q() const { return H * c; }
  Index kv() const { return G * c; }
  Index all() const { return q() + 2 * kv(); }
};

// Slots [key, before rotation | value] of the same token that its queries also attend to: the first `count`, and the next
// one takes this sublayer's own where `keeps` is set. No shelf: data is null.
struct Depth {
  Shelf shelf;
  float* grads;
  Index count, keeps;

  bool reads() const { return shelf.data && count; }
  Shelf gradients() const { return {grads, shelf.blocks, shelf.capacity, shelf.w}; }
};

// Logits of `rows` queries (base 2) with all slots, [groups of 8][count][8], and the largest of each query.
void depth_scores(const Depth& depth, Index sequence, Index first, Index rows, const float* query, Index ld, Index c,
                  Index channel, float* lanes, float* scores, float* top) {
  for (Index i = 0; i < rows; i += kLanes) {
    to_lanes(query + i * ld, ld, std::min(kLanes, rows - i), c, lanes);
    Vec most = splat(-INFINITY);
    for (Index s = 0; s < depth.count; ++s) {
      const float* key = depth.shelf.at(sequence, (first + i) / kLanes, s) + channel * kLanes;
      Vec total = zero();
      for (Index j = 0; j < c; ++j) total = fma(load(lanes + j * kLanes), load(key + j * kLanes), total);
      store(scores + (i * depth.count) + s * kLanes, total);
      most = max(most, total);
    }
    store(top + i, most);
  }
}

// Adds exp2(score - peak) to `total` and gives the sums of values with these weights, [rows, c].
void depth_values(const Depth& depth, Index sequence, Index first, Index rows, const float* scores, const float* peak,
                  Index c, Index channel, float* lanes, float* total, float* mixed) {
  for (Index i = 0; i < rows; i += kLanes) {
    std::fill(lanes, lanes + c * kLanes, 0.f);
    Vec all = load(total + i);
    for (Index s = 0; s < depth.count; ++s) {
      const float* value = depth.shelf.at(sequence, (first + i) / kLanes, s) + channel * kLanes;
      const Vec e = exp2_negative(sub(load(scores + i * depth.count + s * kLanes), load(peak + i)));
      all = add(all, e);
      for (Index j = 0; j < c; ++j) store(lanes + j * kLanes, fma(e, load(value + j * kLanes), load(lanes + j * kLanes)));
    }
    store(total + i, all);
    from_lanes<false>(lanes, std::min(kLanes, rows - i), c, mixed + i * c, c);
  }
}

// Gradients of the slots, added to the shelf of gradients, and of the queries, [rows, c]. `dout` has 1 / sum in it.
void depth_backward(const Depth& depth, Index sequence, Index first, Index rows, const float* query, Index ld,
                    const float* dout, Index dout_ld, Index c, Index key_channel, Index value_channel, const float* peak,
                    const float* mean, float* lanes, float* dquery) {
  float *q = lanes, *g = lanes + c * kLanes, *dq = lanes + 2 * c * kLanes;
  for (Index i = 0; i < rows; i += kLanes) {
    const Index n = std::min(kLanes, rows - i), block = (first + i) / kLanes;
    to_lanes(query + i * ld, ld, n, c, q);
    to_lanes(dout + i * dout_ld, dout_ld, n, c, g);
    std::fill(dq, dq + c * kLanes, 0.f);
    for (Index s = 0; s < depth.count; ++s) {
      const float* slot = depth.shelf.at(sequence, block, s);
      float* grads = depth.gradients().at(sequence, block, s);
      const float *key = slot + key_channel * kLanes, *value = slot + value_channel * kLanes;
      float *dkey = grads + key_channel * kLanes, *dvalue = grads + value_channel * kLanes;
      Vec score = zero(), de = zero();
      for (Index j = 0; j < c; ++j) {
        score = fma(load(q + j * kLanes), load(key + j * kLanes), score);
        de = fma(load(g + j * kLanes), load(value + j * kLanes), de);
      }
      const Vec e = exp2_negative(sub(score, load(peak + i)));
      de = mul(e, sub(de, load(mean + i)));
      const Vec dk = mul(splat(kLn2), de);  // the saved queries carry log2(e)
      for (Index j = 0; j < c; ++j) {
        store(dkey + j * kLanes, fma(dk, load(q + j * kLanes), load(dkey + j * kLanes)));
        store(dvalue + j * kLanes, fma(e, load(g + j * kLanes), load(dvalue + j * kLanes)));
        store(dq + j * kLanes, fma(de, load(key + j * kLanes), load(dq + j * kLanes)));
      }
    }
    from_lanes<false>(dq, n, c, dquery + i * c, c);
  }
}

INLINE void add_rows(const float* rows, Index m, Index c, float* to, Index ld) {
  for (Index i = 0; i < m; ++i)
    for (Index j = 0; j < c; ++j) to[i * ld + j] += rows[i * c + j];
}

INLINE void scale_row(float* row, Index n, float factor) {
  const Vec f = splat(factor);
  for_lanes(
      n, [&](Index j) { store(row + j, mul(f, load(row + j))); },
      [&](Index j, Lanes part) { store(row + j, part, mul(f, load(row + j, part))); });
}

// Rotates the halves of `heads` heads of each position (sign -1: backwards) and scales them; null tables only scale.
void rotate(float* x, Index ld, Index heads, const Heads& s, const float* cosines, const float* sines, float sign,
            float factor) {
  const Index half = s.c / 2;
  const Vec f = splat(factor);
  for (Index t = 0; t < s.T; ++t) {
    float* row = x + t * ld;
    if (!cosines) {
      if (factor != 1.f) scale_row(row, heads * s.c, factor);
      continue;
    }
    const float *cosine = cosines + t * half, *sine = sines + t * half;
    for (Index h = 0; h < heads; ++h, row += s.c) {
      const auto turn = [&](Index j, Lanes part) __attribute__((always_inline)) {
        const Vec a = load(row + j, part), b = load(row + half + j, part);
        const Vec u = mul(f, load(cosine + j, part)), v = mul(splat(sign * factor), load(sine + j, part));
        store(row + j, part, fnma(b, v, mul(a, u)));
        store(row + half + j, part, fma(a, v, mul(b, u)));
      };
      for_lanes(half, [&](Index j) { turn(j, first_lanes(kLanes)); }, turn);
    }
  }
}

// Causality for row i of scores: zeros up to where the widest tile reads.
INLINE void clear_future(float* row, Index length, Index end) {
  for (Index j = length; j < std::min(end, length + 12); ++j) row[j] = 0.f;
}

void attention_forward(Index K, Index B, const Heads& s, Index d, float scale, const float* x, const Weight (&w)[4],
                       const float* cosines, const float* sines, const Depth& depth, float* y, float* qkv,
                       float* mixed, float* softmax) {
  const Index q = s.q(), kv = s.kv(), n = s.all(), T = s.T, ld = round_up(T, kLanes) + 16;
  arena.reserve(n * d + panel_floats(d, n) + panel_floats(q, d) + panel_floats(s.c, round_up(T, kLanes)) +
                panel_floats(T, s.c) + kQueries * (ld + depth.count + s.c) + kLanes * s.c + 256);
  Stacked stacked{arena.take(n * d)};
  const Panels project = take_panels(d, n), output = take_panels(q, d);
  const Panels keys = take_panels(s.c, round_up(T, kLanes)), values = take_panels(T, s.c);
  float* scores = arena.take(kQueries * ld);
  float *across = arena.take(kQueries * depth.count), *deep = arena.take(kQueries * s.c), *lanes = arena.take(kLanes * s.c);
  for (Index k = 0; k < K; ++k) {
    stacked.rows = 0;
    stacked.append(w[0].of(k), q, d);
    stacked.append(w[1].of(k), kv, d);
    stacked.append(w[2].of(k), kv, d);
    pack_transposed(stacked.data, d, project);
    pack_transposed(w[3].of(k), q, output);
    for (Index b = k * B; b < (k + 1) * B; ++b) {
      float *p = qkv + b * T * n, *o = mixed + b * T * q;
      multiply(T, x + b * T * d, d, project, p, n);
      if (depth.keeps) shelve(depth.shelf, b, depth.count, T, p + q, n);
      // Scores are kept in base 2: a factor on the queries costs nothing here.
      rotate(p, n, s.H, s, cosines, sines, 1.f, scale * kLog2e);
      rotate(p + q, n, s.G, s, cosines, sines, 1.f, 1.f);
      for (Index h = 0; h < s.H; ++h) {
        if (h % (s.H / s.G) == 0) {
          const float* key = p + q + h / (s.H / s.G) * s.c;
          pack_transposed(key, n, {keys.data, s.c, T});
          pack(key + kv, n, values);
        }
        for (Index first = 0; first < T; first += kQueries) {
          const Index m = std::min(kQueries, T - first), end = first + m, group = h / (s.H / s.G) * s.c;
          float peak[kQueries], total[kQueries] = {};
          std::fill(peak, peak + kQueries, -INFINITY);
          multiply_terms<false, Terms::columns>({p + first * n + h * s.c, n, scores, ld, m, false, first}, keys, end);
          if (depth.reads()) depth_scores(depth, b, first, m, p + first * n + h * s.c, n, s.c, group, lanes, across, peak);
          for (Index i = 0; i < m; ++i) {
            float* row = scores + i * ld;
            const Index length = first + i + 1;
            Vec top = splat(peak[i]), along = zero();
            for_lanes(
                length, [&](Index j) { top = max(top, load(row + j)); },
                [&](Index j, Lanes part) {
                  top = max(top, keep(load(row + j), part, splat(-INFINITY)));
                });
            peak[i] = largest(top);
            for_lanes(
                length,
                [&](Index j) {
                  const Vec e = exp2_negative(sub(load(row + j), splat(peak[i])));
                  store(row + j, e);
                  along = add(along, e);
                },
                [&](Index j, Lanes part) {
                  const Vec e = keep(exp2_negative(sub(load(row + j), splat(peak[i]))), part);
                  store(row + j, e);
                  along = add(along, e);
                });
            clear_future(row, length, end);
            total[i] = sum(along);
          }
          float* out = o + first * q + h * s.c;
          multiply_terms<false, Terms::until>({scores, ld, out, q, m, false, first}, values, s.c);
          if (depth.reads()) {
            depth_values(depth, b, first, m, across, peak, s.c, kv + group, lanes, total, deep);
            add_rows(deep, m, s.c, out, q);
          }
          for (Index i = 0; i < m; ++i) {
            float* kept = softmax + 2 * ((b * s.H + h) * T + first + i);
            kept[0] = peak[i];
            kept[1] = 1.f / total[i];
            scale_row(out + i * q, s.c, kept[1]);
          }
        }
      }
      multiply(T, o, q, output, y + b * T * d, d);
    }
  }
}

void attention_backward(Index K, Index B, const Heads& s, Index d, float scale, const float* dy, const float* x,
                        const Weight (&w)[4], const float* cosines, const float* sines, const Depth& depth,
                        const float* qkv, const float* mixed, const float* softmax, float* dx,
                        const Gradient (&dw)[4]) {
  const Index q = s.q(), kv = s.kv(), n = s.all(), T = s.T, Tp = round_up(T, kLanes), ld = Tp + 16;
  arena.reserve(n * d + panel_floats(n, d) + panel_floats(d, q) + 2 * panel_floats(s.c, Tp) + panel_floats(T, s.c) +
                2 * panel_floats(kQueries, s.c) + 2 * kQueries * ld + T * (q + n) +
                panel_floats(T, std::max(q, d)) + (kQueries + 3 * kLanes) * s.c + 512);
  Stacked stacked{arena.take(n * d)};
  const Panels project = take_panels(n, d), output = take_panels(d, q);
  const Panels keys_t = take_panels(s.c, Tp), values_t = take_panels(s.c, Tp), keys = take_panels(T, s.c);
  float *queries_data = arena.take(panel_floats(kQueries, s.c)), *grads_data = arena.take(panel_floats(kQueries, s.c));
  float *scores = arena.take(kQueries * ld), *dscores = arena.take(kQueries * ld);
  float *deep = arena.take(kQueries * s.c), *lanes = arena.take(3 * kLanes * s.c);
  float *dmixed = arena.take(T * q), *dqkv = arena.take(T * n), *tokens = arena.take(panel_floats(T, std::max(q, d)));
  for (Index k = 0; k < K; ++k) {
    stacked.rows = 0;
    stacked.append(w[0].of(k), q, d);
    stacked.append(w[1].of(k), kv, d);
    stacked.append(w[2].of(k), kv, d);
    pack(stacked.data, d, project);
    pack(w[3].of(k), q, output);
    for (Index b = k * B; b < (k + 1) * B; ++b) {
      const float *p = qkv + b * T * n, *o = mixed + b * T * q, *g = dy + b * T * d;
      multiply(T, g, d, output, dmixed, q);
      if (dw[3].data) {
        const Panels right{tokens, T, q};
        pack(o, q, right);
        add_transposed(d, g, d, right, dw[3].of(k), q);
      }
      for (Index t = 0; t < T; ++t) std::memset(dqkv + t * n + q, 0, 2 * kv * sizeof(float));
      for (Index h = 0; h < s.H; ++h) {
        const Index group = h / (s.H / s.G) * s.c, head = h * s.c;
        if (h % (s.H / s.G) == 0) {
          pack_transposed(p + q + group, n, {keys_t.data, s.c, T});
          pack_transposed(p + q + kv + group, n, {values_t.data, s.c, T});
          pack(p + q + group, n, keys);
        }
        for (Index first = 0; first < T; first += kQueries) {
          const Index m = std::min(kQueries, T - first), end = first + m;
          const float *query = p + first * n + head, *kept = softmax + 2 * ((b * s.H + h) * T + first);
          float *grad = dmixed + first * q + head, peaks[kQueries] = {}, means[kQueries] = {};
          // The 1 / sum of the softmax goes onto the gradient, so that scores need only be exp2(score - peak).
          for (Index i = 0; i < m; ++i) scale_row(grad + i * q, s.c, kept[2 * i + 1]);
          multiply_terms<false, Terms::columns>({query, n, scores, ld, m, false, first}, keys_t, end);
          multiply_terms<false, Terms::columns>({grad, q, dscores, ld, m, false, first}, values_t, end);
          for (Index i = 0; i < m; ++i) {
            float *row = scores + i * ld, *drow = dscores + i * ld;
            const float *out = o + (first + i) * q + head, *dout = grad + i * q;
            const Index length = first + i + 1;
            Vec dot = zero();
            for_lanes(
                s.c, [&](Index j) { dot = fma(load(out + j), load(dout + j), dot); },
                [&](Index j, Lanes part) { dot = fma(load(out + j, part), load(dout + j, part), dot); });
            means[i] = sum(dot);
            peaks[i] = kept[2 * i];
            const Vec mean = splat(means[i]), peak = splat(peaks[i]);
            for_lanes(
                length,
                [&](Index j) {
                  const Vec e = exp2_negative(sub(load(row + j), peak));
                  store(row + j, e);
                  store(drow + j, mul(e, sub(load(drow + j), mean)));
                },
                [&](Index j, Lanes part) {
                  const Vec e = keep(exp2_negative(sub(load(row + j), peak)), part);
                  store(row + j, e);
                  store(drow + j, keep(mul(e, sub(load(drow + j), mean)), part));
                });
            clear_future(row, length, end);
            clear_future(drow, length, end);
          }
          const Panels queries{queries_data, m, s.c}, grads{grads_data, m, s.c};
          pack(query, n, queries);
          pack(grad, q, grads);
          float *dkey = dqkv + q + group, *dvalue = dkey + kv;
          multiply_terms<false, Terms::until>({dscores, ld, dqkv + first * n + head, n, m, false, first}, keys, s.c);
          if (depth.reads()) {
            depth_backward(depth, b, first, m, query, n, grad, q, s.c, group, kv + group, peaks, means, lanes, deep);
            add_rows(deep, m, s.c, dqkv + first * n + head, n);
          }
          multiply_terms<true, Terms::after>({dscores, ld, dkey, n, end, true, first}, queries, s.c);
          multiply_terms<true, Terms::after>({scores, ld, dvalue, n, end, true, first}, grads, s.c);
        }
      }
      rotate(dqkv, n, s.H, s, cosines, sines, -1.f, scale);
      rotate(dqkv + q, n, s.G, s, cosines, sines, -1.f, kLn2);  // the saved queries carry log2(e)
      if (depth.keeps) unshelve<true>(depth.gradients(), b, depth.count, T, 0, 2 * kv, dqkv + q, n);
      multiply(T, dqkv, n, project, dx + b * T * d, d);
      const Panels right{tokens, T, d};
      if (dw[0].data || dw[1].data || dw[2].data) pack(x + b * T * d, d, right);
      if (dw[0].data) add_transposed(q, dqkv, n, right, dw[0].of(k), d);
      if (dw[1].data) add_transposed(kv, dqkv + q, n, right, dw[1].of(k), d);
      if (dw[2].data) add_transposed(kv, dqkv + q + kv, n, right, dw[2].of(k), d);
    }
  }
}

}  // namespace
