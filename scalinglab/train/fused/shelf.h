// What earlier sublayers left for later ones to read at the same token: slots of w channels, eight tokens to a vector.
//
// A shelf of R sequences of T tokens is [R, ceil(T / 8), capacity, w, 8]: all slots of eight tokens lie together, and the
// tokens that fill up the last vector are zeros. Readers ADD the gradients of slots to a second shelf of the same layout;
// the sublayer that filled a slot takes them from there, once all later readers have run, and leaves zeros.
#pragma once

#include <algorithm>
#include <vector>

#include "vectors.h"

namespace {

struct Shelf {
  float* data;
  Index blocks, capacity, w;  // blocks of eight tokens in one sequence

  float* at(Index sequence, Index block, Index slot) const {
    return data + ((sequence * blocks + block) * capacity + slot) * w * kLanes;
  }
};

INLINE Index token_blocks(Index T) { return (T + kLanes - 1) / kLanes; }

// rows [n <= 8, w] to vectors [w], zeros for the missing rows; and back, in the place of what is there or added to it.
INLINE void to_lanes(const float* rows, Index ld, Index n, Index w, float* lanes) {
  for (Index j = 0; j < w; ++j)
    for (Index i = 0; i < kLanes; ++i) lanes[j * kLanes + i] = i < n ? rows[i * ld + j] : 0.f;
}

template <bool add>
INLINE void from_lanes(const float* lanes, Index n, Index w, float* rows, Index ld) {
  for (Index i = 0; i < n; ++i)
    for (Index j = 0; j < w; ++j) rows[i * ld + j] = (add ? rows[i * ld + j] : 0.f) + lanes[j * kLanes + i];
}

// A sequence's rows [T, w] into a slot.
void shelve(const Shelf& shelf, Index sequence, Index slot, Index T, const float* rows, Index ld) {
  for (Index b = 0; b < shelf.blocks; ++b)
    to_lanes(rows + b * kLanes * ld, ld, std::min(kLanes, T - b * kLanes), shelf.w, shelf.at(sequence, b, slot));
}

// The gradient of channels first .. first + count of a slot, added to rows [T, count] or in their place; zeros stay behind.
template <bool add>
void unshelve(const Shelf& grads, Index sequence, Index slot, Index T, Index first, Index count, float* rows, Index ld) {
  for (Index b = 0; b < grads.blocks; ++b) {
    float* lanes = grads.at(sequence, b, slot) + first * kLanes;
    from_lanes<add>(lanes, std::min(kLanes, T - b * kLanes), count, rows + b * kLanes * ld, ld);
    std::fill(lanes, lanes + count * kLanes, 0.f);
  }
}

void put_forward(Index R, Index T, Index w, Index capacity, Index slot, const float* x, float* data) {
  const Shelf shelf{data, token_blocks(T), capacity, w};
  for (Index r = 0; r < R; ++r) shelve(shelf, r, slot, T, x + r * T * w, w);
}

void put_backward(Index R, Index T, Index w, Index capacity, Index slot, float* grads, float* dx) {
  const Shelf shelf{grads, token_blocks(T), capacity, w};
  for (Index r = 0; r < R; ++r) unshelve<false>(shelf, r, slot, T, 0, w, dx + r * T * w, w);
}

// Attention over slots with one query per replica, keys normalised and values not: with inverse_s = 1 / rms(v_s),
//   y = sum_s softmax_s(inverse_s (query . v_s)) v_s      for the n slots named.
// `kept` [R, blocks, 2, 8] takes the largest logit and 1 / sum.
struct Reader {
  Index K, B, T, d, capacity, n;
  const Index* slots;
  float eps;
};

INLINE Vec inverse_rms(const float* v, Index d, float eps) {
  Vec squares = zero();
  for (Index j = 0; j < d; ++j) {
    const Vec x = load(v + j * kLanes);
    squares = fma(x, x, squares);
  }
  const Vec mean = fma(squares, splat(1.f / static_cast<float>(d)), splat(eps));
  return div(splat(1.f), _mm256_sqrt_ps(mean));
}

INLINE Vec dot_splat(const float* q, const float* v, Index d) {
  Vec total = zero();
  for (Index j = 0; j < d; ++j) total = fma(splat(q[j]), load(v + j * kLanes), total);
  return total;
}

void read_forward(const Reader& s, const float* query, float* data, float* y, float* kept) {
  const Shelf shelf{data, token_blocks(s.T), s.capacity, s.d};
  std::vector<float> logits(s.n * kLanes), sums(s.d * kLanes);
  for (Index r = 0; r < s.K * s.B; ++r) {
    const float* q = query + r / s.B * s.d;
    for (Index b = 0; b < shelf.blocks; ++b) {
      Vec top = splat(-INFINITY), total = zero();
      for (Index i = 0; i < s.n; ++i) {
        const float* v = shelf.at(r, b, s.slots[i]);
        const Vec logit = mul(dot_splat(q, v, s.d), inverse_rms(v, s.d, s.eps));
        store(&logits[i * kLanes], logit);
        top = max(top, logit);
      }
      std::fill(sums.begin(), sums.end(), 0.f);
      for (Index i = 0; i < s.n; ++i) {
        const float* v = shelf.at(r, b, s.slots[i]);
        const Vec e = exp(sub(load(&logits[i * kLanes]), top));
        total = add(total, e);
        for (Index j = 0; j < s.d; ++j)
          store(&sums[j * kLanes], fma(e, load(v + j * kLanes), load(&sums[j * kLanes])));
      }
      const Vec inverse = div(splat(1.f), total);
      for (Index j = 0; j < s.d; ++j) store(&sums[j * kLanes], mul(inverse, load(&sums[j * kLanes])));
      from_lanes<false>(sums.data(), std::min(kLanes, s.T - b * kLanes), s.d, y + (r * s.T + b * kLanes) * s.d, s.d);
      float* saved = kept + (r * shelf.blocks + b) * 2 * kLanes;
      store(saved, top);
      store(saved + kLanes, inverse);
    }
  }
}

void read_backward(const Reader& s, const float* query, float* data, const float* kept, const float* dy, float* grads,
                   float* dquery) {
  const Shelf shelf{data, token_blocks(s.T), s.capacity, s.d}, into{grads, shelf.blocks, s.capacity, s.d};
  const Vec per_channel = splat(1.f / static_cast<float>(s.d));
  std::vector<float> g(s.d * kLanes), dq(s.d * kLanes), weight(s.n * kLanes), dweight(s.n * kLanes);
  std::vector<double> sums(s.d);
  for (Index r = 0; r < s.K * s.B; ++r) {
    const float* q = query + r / s.B * s.d;
    if (r % s.B == 0) std::fill(sums.begin(), sums.end(), 0.0);
    for (Index b = 0; b < shelf.blocks; ++b) {
      const Index rows = std::min(kLanes, s.T - b * kLanes);
      const Lanes real = first_lanes(rows);
      const float* saved = kept + (r * shelf.blocks + b) * 2 * kLanes;
      const Vec top = load(saved), inverse_sum = load(saved + kLanes);
      to_lanes(dy + (r * s.T + b * kLanes) * s.d, s.d, rows, s.d, g.data());
      std::fill(dq.begin(), dq.end(), 0.f);
      Vec mean = zero();
      for (Index i = 0; i < s.n; ++i) {
        const float* v = shelf.at(r, b, s.slots[i]);
        const Vec logit = mul(dot_splat(q, v, s.d), inverse_rms(v, s.d, s.eps));
        const Vec w = mul(exp(sub(logit, top)), inverse_sum);
        Vec dw = zero();
        for (Index j = 0; j < s.d; ++j) dw = fma(load(&g[j * kLanes]), load(v + j * kLanes), dw);
        store(&weight[i * kLanes], w);
        store(&dweight[i * kLanes], dw);
        mean = fma(w, dw, mean);
      }
      for (Index i = 0; i < s.n; ++i) {
        const float* v = shelf.at(r, b, s.slots[i]);
        float* dv = into.at(r, b, s.slots[i]);
        const Vec w = load(&weight[i * kLanes]), inverse = inverse_rms(v, s.d, s.eps);
        // Rows that only fill up the vector have 1 / rms = 1 / 0 where eps is 0.
        const Vec dlogit = keep(mul(w, sub(load(&dweight[i * kLanes]), mean)), real);
        const Vec along_query = keep(mul(dlogit, inverse), real);
        const Vec squared = mul(inverse, inverse);
        const Vec along_v = keep(mul(mul(mul(along_query, squared), dot_splat(q, v, s.d)), per_channel), real);
        for (Index j = 0; j < s.d; ++j) {
          const Vec x = load(v + j * kLanes);
          Vec total = fma(w, load(&g[j * kLanes]), load(dv + j * kLanes));
          total = fma(along_query, splat(q[j]), total);
          store(dv + j * kLanes, fnma(along_v, x, total));
          store(&dq[j * kLanes], fma(along_query, x, load(&dq[j * kLanes])));
        }
      }
      for (Index j = 0; j < s.d; ++j) sums[j] += sum(load(&dq[j * kLanes]));
    }
    if (r % s.B == s.B - 1)
      for (Index j = 0; j < s.d; ++j) dquery[r / s.B * s.d + j] = static_cast<float>(sums[j]);
  }
}

}  // namespace
