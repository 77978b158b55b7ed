// Sublayers of small decoders in float32 on one CPU thread (AVX2 + FMA), with a leading replica axis.
//
// Sizes: K replicas, B sequences, T positions, M = B T tokens, d width, f feed-forward width, V vocabulary,
// H query heads of c channels, of which consecutive groups share one of G key/value heads.
// Activations are contiguous [K, M, ...]. A weight matrix is [out, in] per replica, contiguous inside, with a stride
// between replicas; its gradient is ADDED to and has a stride of its own.
//
// Every product goes through one register tile (12x8, 6x16 or 4x24 outputs). Its right operand is packed into column
// panels padded with zeros to 8 lanes and partial vectors are masked, so no size has to be a multiple of anything.
// Rows are worked off in blocks that stay in the cache. Sums have a fixed order: results repeat to the bit, and no
// replica depends on another. Written for -fno-fast-math: NaN and infinity travel as IEEE says.

#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <type_traits>

namespace {

using Index = std::int64_t;
using Vec = __m256;
constexpr Index kLanes = 8;
constexpr float kLog2e = 1.44269504088896341f, kLn2 = 0.693147180559945309f;

// ---------------------------------------------------------------- vectors

#define INLINE inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 12")  // keeps a tile in registers at any optimisation level

INLINE Vec load(const float* p) { return _mm256_loadu_ps(p); }
INLINE void store(float* p, Vec x) { _mm256_storeu_ps(p, x); }
INLINE Vec splat(float x) { return _mm256_set1_ps(x); }
INLINE Vec zero() { return _mm256_setzero_ps(); }
INLINE Vec add(Vec a, Vec b) { return _mm256_add_ps(a, b); }
INLINE Vec sub(Vec a, Vec b) { return _mm256_sub_ps(a, b); }
INLINE Vec mul(Vec a, Vec b) { return _mm256_mul_ps(a, b); }
INLINE Vec div(Vec a, Vec b) { return _mm256_div_ps(a, b); }
INLINE Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }    // a b + c
INLINE Vec fnma(Vec a, Vec b, Vec c) { return _mm256_fnmadd_ps(a, b, c); }  // c - a b
// If one argument is NaN, max and min return the second: constants go first.
INLINE Vec max(Vec a, Vec b) { return _mm256_max_ps(a, b); }
INLINE Vec min(Vec a, Vec b) { return _mm256_min_ps(a, b); }

INLINE float sum(Vec x) {
  __m128 a = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  a = _mm_add_ps(a, _mm_movehl_ps(a, a));
  return _mm_cvtss_f32(_mm_add_ss(a, _mm_movehdup_ps(a)));
}

INLINE float largest(Vec x) {
  __m128 a = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  a = _mm_max_ps(a, _mm_movehl_ps(a, a));
  return _mm_cvtss_f32(_mm_max_ss(a, _mm_movehdup_ps(a)));
}

struct Lanes {  // the first n lanes, 0 < n <= 8
  __m256i mask;
  Index n;
};

INLINE Lanes first_lanes(Index n) {
  alignas(32) static const std::int32_t bits[16] = {-1, -1, -1, -1, -1, -1, -1, -1};
  return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(bits + 8 - n)), n};
}

INLINE Vec load(const float* p, Lanes part) { return _mm256_maskload_ps(p, part.mask); }
INLINE Vec keep(Vec x, Lanes part) { return _mm256_and_ps(x, _mm256_castsi256_ps(part.mask)); }
INLINE Vec keep(Vec x, Lanes part, Vec other) { return _mm256_blendv_ps(other, x, _mm256_castsi256_ps(part.mask)); }
INLINE void store(float* p, Lanes part, Vec x) {  // in pieces: masked stores are slow on AMD
  if (part.n == kLanes) return store(p, x);
  __m128 low = _mm256_castps256_ps128(x);
  if (part.n & 4) {
    _mm_storeu_ps(p, low);
    low = _mm256_extractf128_ps(x, 1);
    p += 4;
  }
  if (part.n & 2) {
    _mm_storel_pi(reinterpret_cast<__m64*>(p), low);
    low = _mm_movehl_ps(low, low);
    p += 2;
  }
  if (part.n & 1) _mm_store_ss(p, low);
}

// whole(j) for the vectors of n numbers, part(j, lanes) for the last one if it is partial.
template <class Whole, class Part>
INLINE void for_lanes(Index n, Whole whole, Part part) {
  Index j = 0;
  for (; j + kLanes <= n; j += kLanes) whole(j);
  if (j < n) part(j, first_lanes(n - j));
}

// p(r) 2^n, where the low bits of `shifted` are n + 127; NaN stays NaN because the last step is a product.
INLINE Vec scaled_polynomial(Vec r, Vec shifted, const float (&c)[6]) {
  Vec p = splat(c[5]);
  for (int i = 4; i >= 0; --i) p = fma(p, r, splat(c[i]));
  return mul(p, _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(shifted), 23)));
}

constexpr float kShift = 12582912.f + 127.f;  // 1.5 * 2^23: adding it rounds to a whole number

// 2^x for x <= 0, relative error 2e-7; below 2^-126 it stays there.
INLINE Vec exp2_negative(Vec x) {
  static const float c[6] = {1.f, 0.693147004f, 0.240222424f, 0.0555073358f, 0.00967151299f, 0.00132647238f};
  x = max(splat(-126.f), x);
  const Vec shifted = add(x, splat(kShift)), n = sub(shifted, splat(kShift));
  return scaled_polynomial(sub(x, n), shifted, c);
}

// e^x, relative error 2e-7, clamped to the normal numbers.
INLINE Vec exp(Vec x) {
  static const float c[6] = {1.f, 0.999999702f, 0.499991506f, 0.166676372f, 0.0418979749f, 0.00829030387f};
  x = min(splat(88.f), max(splat(-87.f), x));
  const Vec shifted = fma(x, splat(kLog2e), splat(kShift)), n = sub(shifted, splat(kShift));
  const Vec r = fnma(n, splat(-2.12194440e-4f), fnma(n, splat(0.693359375f), x));  // ln 2 in two parts
  return scaled_polynomial(r, shifted, c);
}

// ---------------------------------------------------------------- scratch memory, one arena per thread

class Arena {
 public:
  ~Arena() { std::free(data_); }
  // Floats for one call; what an earlier call got is lost.
  void reserve(Index floats) {
    used_ = 0;
    if (floats <= size_) return;
    std::free(data_);
    size_ = (floats + 15) / 16 * 16;
    data_ = static_cast<float*>(std::aligned_alloc(64, size_ * sizeof(float)));
    if (!data_) std::abort();
  }
  float* take(Index floats) {
    float* p = data_ + used_;
    used_ += (floats + 15) / 16 * 16;
    if (used_ > size_) std::abort();
    return p;
  }

 private:
  float* data_ = nullptr;
  Index size_ = 0, used_ = 0;
};

thread_local Arena arena;

constexpr Index round_up(Index n, Index to) { return (n + to - 1) / to * to; }

// ---------------------------------------------------------------- packed operands

// The right operand of a product, k x n, as panels of 8, 16 or 24 columns; panel j starts at data + k j.
struct Panels {
  float* data;
  Index k, n;
};

INLINE Index panel_width(Index columns_left) {
  const Index w = round_up(columns_left, kLanes);
  return w == 24 ? 24 : std::min<Index>(w, 16);
}

Panels take_panels(Index k, Index n) { return {arena.take(k * round_up(n, kLanes)), k, n}; }
Index panel_floats(Index k, Index n) { return k * round_up(n, kLanes) + 16; }

// source [k, n]
void pack(const float* source, Index ld, const Panels& to) {
  for (Index j = 0; j < to.n;) {
    const Index w = panel_width(to.n - j), columns = std::min(w, to.n - j);
    float* out = to.data + to.k * j;
    for (Index p = 0; p < to.k; ++p, out += w) {
      const float* row = source + p * ld + j;
      Index q = 0;
      for (; q + kLanes <= columns; q += kLanes) store(out + q, load(row + q));
      if (q < w) store(out + q, load(row + q, first_lanes(columns - q)));
    }
    j += w;
  }
}

INLINE void transpose8(const float* source, Index ld, float* out, Index out_ld) {
  Vec r[8], t[8];
  for (int i = 0; i < 8; ++i) r[i] = load(source + i * ld);
  for (int i = 0; i < 8; i += 2) {
    t[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
    t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
  }
  for (int i = 0; i < 8; i += 4) {
    r[i] = _mm256_shuffle_ps(t[i], t[i + 2], 0x44);
    r[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], 0xEE);
    r[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44);
    r[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xEE);
  }
  for (int i = 0; i < 4; ++i) {
    store(out + i * out_ld, _mm256_permute2f128_ps(r[i], r[i + 4], 0x20));
    store(out + (i + 4) * out_ld, _mm256_permute2f128_ps(r[i], r[i + 4], 0x31));
  }
}

// source [n, k]: its rows become the columns
void pack_transposed(const float* source, Index ld, const Panels& to) {
  for (Index j = 0; j < to.n;) {
    const Index w = panel_width(to.n - j);
    float* out = to.data + to.k * j;
    for (Index q = 0; q < w; q += kLanes) {
      const Index columns = std::min(kLanes, to.n - j - q);
      const float* rows = source + (j + q) * ld;
      Index p = 0;
      if (columns == kLanes)
        for (; p + kLanes <= to.k; p += kLanes) transpose8(rows + p, ld, out + p * w + q, w);
      for (; p < to.k; ++p)
        for (Index c = 0; c < kLanes; ++c) out[p * w + q + c] = c < columns ? rows[c * ld + p] : 0.f;
    }
    j += w;
  }
}

// ---------------------------------------------------------------- products

// Which terms of a product causality leaves. Row i of the block is query (or, for `after`, key) i; `first` is the
// position of the block's first query. The entries that a tile still visits beyond these bounds are zero.
enum class Terms {
  all,
  until,    // row i is query first + i, terms are keys: k <= first + i
  after,    // row i is a key, terms are queries first + k: k >= i - first
  columns,  // row i is query first + i, columns are keys: others than j <= first + i are left undefined
};

struct Product {
  const float* a;  // left operand [m, k], or [k, m] if transposed
  Index lda;
  float* c;
  Index ldc;
  Index m;
  bool accumulate;
  Index first;
};

// c[rows, 8 NV] (+)= a b for k in [begin, end)
template <int ROWS, int NV, bool TRANSPOSED, bool PARTIAL>
INLINE void tile(Index begin, Index end, const float* a, Index lda, const float* b, float* c, Index ldc, bool accumulate,
                 Lanes last) {
  Vec s[ROWS][NV];
  UNROLL for (int i = 0; i < ROWS; ++i)
    UNROLL for (int j = 0; j < NV; ++j)
      s[i][j] = !accumulate                   ? zero()
                : PARTIAL && j == NV - 1 ? load(c + i * ldc + 8 * j, last)
                                              : load(c + i * ldc + 8 * j);
  for (Index p = begin; p < end; ++p) {
    Vec row[NV];
    UNROLL for (int j = 0; j < NV; ++j) row[j] = load(b + p * 8 * NV + 8 * j);
    UNROLL for (int i = 0; i < ROWS; ++i) {
      const Vec x = _mm256_broadcast_ss(TRANSPOSED ? a + p * lda + i : a + i * lda + p);
      UNROLL for (int j = 0; j < NV; ++j) s[i][j] = fma(x, row[j], s[i][j]);
    }
  }
  UNROLL for (int i = 0; i < ROWS; ++i)
    UNROLL for (int j = 0; j < NV; ++j) {
      if (PARTIAL && j == NV - 1)
        store(c + i * ldc + 8 * j, last, s[i][j]);
      else
        store(c + i * ldc + 8 * j, s[i][j]);
    }
}

// All rows of one column panel, for terms [k0, k1).
template <int NV, bool TRANSPOSED, Terms TERMS, bool PARTIAL>
void strip(const Product& x, Index column, const float* b, Index k0, Index k1, bool accumulate, Lanes last) {
  constexpr int kRows = NV == 1 ? 12 : NV == 2 ? 6 : 4;
  Index i = TERMS == Terms::columns ? std::max<Index>(0, column - x.first) : 0;
  const auto rows = [&](auto count) __attribute__((always_inline)) {
    constexpr int R = decltype(count)::value;
    const Index begin = TERMS == Terms::after ? std::max(k0, i - x.first) : k0;
    const Index end = TERMS == Terms::until ? std::min(k1, x.first + i + R) : k1;
    tile<R, NV, TRANSPOSED, PARTIAL>(begin, end, TRANSPOSED ? x.a + i : x.a + i * x.lda, x.lda, b,
                                     x.c + i * x.ldc + column, x.ldc, accumulate, last);
    i += R;
  };
  Index full = std::max<Index>(0, x.m - i) / kRows;
  const Index rest = (x.m - i) % kRows;
  if (NV == 2 && full > 0 && (rest == 1 || rest == 2)) --full;  // 6+1 -> 4+3, 6+2 -> 4+4
  for (; full > 0; --full) rows(std::integral_constant<int, kRows>());
  while (x.m - i >= 4) rows(std::integral_constant<int, 4>());
  if (x.m - i == 3) rows(std::integral_constant<int, 3>());
  if (x.m - i == 2) rows(std::integral_constant<int, 2>());
  if (x.m - i == 1) rows(std::integral_constant<int, 1>());
}

template <bool TRANSPOSED, Terms TERMS>
void multiply_terms(const Product& x, const Panels& b, Index n) {
  constexpr Index kTerms = 320;  // 20 KB of a panel: it stays in the first cache
  Index k0 = 0;
  do {
    const Index k1 = std::min(b.k, k0 + kTerms);
    const bool accumulate = x.accumulate || k0 > 0;
    for (Index j = 0; j < n;) {
      const Index w = panel_width(b.n - j), columns = std::min(w, b.n - j);
      const float* panel = b.data + b.k * j;
      const Lanes last = first_lanes((columns - 1) % kLanes + 1);
      const bool partial = columns % kLanes;
      switch ((w / kLanes) * 2 + partial) {
        case 2: strip<1, TRANSPOSED, TERMS, false>(x, j, panel, k0, k1, accumulate, last); break;
        case 3: strip<1, TRANSPOSED, TERMS, true>(x, j, panel, k0, k1, accumulate, last); break;
        case 4: strip<2, TRANSPOSED, TERMS, false>(x, j, panel, k0, k1, accumulate, last); break;
        case 5: strip<2, TRANSPOSED, TERMS, true>(x, j, panel, k0, k1, accumulate, last); break;
        case 6: strip<3, TRANSPOSED, TERMS, false>(x, j, panel, k0, k1, accumulate, last); break;
        default: strip<3, TRANSPOSED, TERMS, true>(x, j, panel, k0, k1, accumulate, last);
      }
      j += w;
    }
    k0 = k1;
  } while (k0 < b.k);
}

// c[m, n] = a[m, k] b
void multiply(Index m, const float* a, Index lda, const Panels& b, float* c, Index ldc) {
  multiply_terms<false, Terms::all>({a, lda, c, ldc, m, false, 0}, b, b.n);
}

// c[m, n] += a^T b with a [k, m]: the gradient of a weight matrix
void add_transposed(Index m, const float* a, Index lda, const Panels& b, float* c, Index ldc) {
  multiply_terms<true, Terms::all>({a, lda, c, ldc, m, true, 0}, b, b.n);
}

// ---------------------------------------------------------------- weights

struct Weight {
  const float* data;
  Index stride;
  const float* of(Index replica) const { return data + replica * stride; }
};

struct Gradient {  // data may be null: not wanted
  float* data;
  Index stride;
  float* of(Index replica) const { return data + replica * stride; }
};

// Rows [out, in] of several matrices below each other.
struct Stacked {
  float* data;
  Index rows = 0;
  void append(const float* matrix, Index count, Index in) {
    std::memcpy(data + rows * in, matrix, count * in * sizeof(float));
    rows += count;
  }
};

// Rows of a block so that about `floats_per_row` numbers of each stay in the second cache.
Index block_rows(Index floats_per_row) {
  return std::clamp<Index>(98304 / floats_per_row / 12 * 12, 24, 252);
}

// ---------------------------------------------------------------- attention

constexpr Index kQueries = 48;  // queries per block

struct Heads {
  Index T, H, G, c;
  Index q() const { return H * c; }
  Index kv() const { return G * c; }
  Index all() const { return q() + 2 * kv(); }
};

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
                       const float* cosines, const float* sines, float* y, float* qkv, float* mixed, float* softmax) {
  const Index q = s.q(), kv = s.kv(), n = s.all(), T = s.T, ld = round_up(T, kLanes) + 16;
  arena.reserve(n * d + panel_floats(d, n) + panel_floats(q, d) + panel_floats(s.c, round_up(T, kLanes)) +
                panel_floats(T, s.c) + kQueries * ld + 256);
  Stacked stacked{arena.take(n * d)};
  const Panels project = take_panels(d, n), output = take_panels(q, d);
  const Panels keys = take_panels(s.c, round_up(T, kLanes)), values = take_panels(T, s.c);
  float* scores = arena.take(kQueries * ld);
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
          const Index m = std::min(kQueries, T - first), end = first + m;
          float inverse[kQueries];
          multiply_terms<false, Terms::columns>({p + first * n + h * s.c, n, scores, ld, m, false, first}, keys, end);
          for (Index i = 0; i < m; ++i) {
            float* row = scores + i * ld;
            const Index length = first + i + 1;
            Vec top = splat(-INFINITY), total = zero();
            for_lanes(
                length, [&](Index j) { top = max(top, load(row + j)); },
                [&](Index j, Lanes part) {
                  top = max(top, keep(load(row + j), part, splat(-INFINITY)));
                });
            const float peak = largest(top);
            for_lanes(
                length,
                [&](Index j) {
                  const Vec e = exp2_negative(sub(load(row + j), splat(peak)));
                  store(row + j, e);
                  total = add(total, e);
                },
                [&](Index j, Lanes part) {
                  const Vec e = keep(exp2_negative(sub(load(row + j), splat(peak))), part);
                  store(row + j, e);
                  total = add(total, e);
                });
            clear_future(row, length, end);
            const float z = sum(total);
            inverse[i] = 1.f / z;
            float* kept = softmax + 2 * ((b * s.H + h) * T + first + i);
            kept[0] = peak;
            kept[1] = inverse[i];
          }
          float* out = o + first * q + h * s.c;
          multiply_terms<false, Terms::until>({scores, ld, out, q, m, false, first}, values, s.c);
          for (Index i = 0; i < m; ++i) scale_row(out + i * q, s.c, inverse[i]);
        }
      }
      multiply(T, o, q, output, y + b * T * d, d);
    }
  }
}

void attention_backward(Index K, Index B, const Heads& s, Index d, float scale, const float* dy, const float* x,
                        const Weight (&w)[4], const float* cosines, const float* sines, const float* qkv,
                        const float* mixed, const float* softmax, float* dx, const Gradient (&dw)[4]) {
  const Index q = s.q(), kv = s.kv(), n = s.all(), T = s.T, Tp = round_up(T, kLanes), ld = Tp + 16;
  arena.reserve(n * d + panel_floats(n, d) + panel_floats(d, q) + 2 * panel_floats(s.c, Tp) + panel_floats(T, s.c) +
                2 * panel_floats(kQueries, s.c) + 2 * kQueries * ld + T * (q + n) + panel_floats(T, std::max(q, d)) + 512);
  Stacked stacked{arena.take(n * d)};
  const Panels project = take_panels(n, d), output = take_panels(d, q);
  const Panels keys_t = take_panels(s.c, Tp), values_t = take_panels(s.c, Tp), keys = take_panels(T, s.c);
  float *queries_data = arena.take(panel_floats(kQueries, s.c)), *grads_data = arena.take(panel_floats(kQueries, s.c));
  float *scores = arena.take(kQueries * ld), *dscores = arena.take(kQueries * ld);
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
          float* grad = dmixed + first * q + head;
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
            const Vec mean = splat(sum(dot)), peak = splat(kept[2 * i]);
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
          multiply_terms<true, Terms::after>({dscores, ld, dkey, n, end, true, first}, queries, s.c);
          multiply_terms<true, Terms::after>({scores, ld, dvalue, n, end, true, first}, grads, s.c);
        }
      }
      rotate(dqkv, n, s.H, s, cosines, sines, -1.f, scale);
      rotate(dqkv + q, n, s.G, s, cosines, sines, -1.f, kLn2);  // the saved queries carry log2(e)
      multiply(T, dqkv, n, project, dx + b * T * d, d);
      const Panels right{tokens, T, d};
      if (dw[0].data || dw[1].data || dw[2].data) pack(x + b * T * d, d, right);
      if (dw[0].data) add_transposed(q, dqkv, n, right, dw[0].of(k), d);
      if (dw[1].data) add_transposed(kv, dqkv + q, n, right, dw[1].of(k), d);
      if (dw[2].data) add_transposed(kv, dqkv + q + kv, n, right, dw[2].of(k), d);
    }
  }
}

// ---------------------------------------------------------------- feed-forward

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
                    collect(mul(load(row + j, part), s), load(grad + j, part), load(g + j, part), load(partial + j, part)));
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

// loss[m] = logsumexp(logits) - logits[target] with logits = multiplier * h W^T. `weights` (exp(logits - max), with rows
// of V rounded up to 8) and `total` (their sums) are what the backward pass needs; null keeps neither.
void head_forward(Index K, Index M, Index d, Index V, float multiplier, const float* h, const Weight& w,
                  const std::int64_t* targets, float* loss, float* weights, float* total) {
  const Index ld = round_up(V, kLanes), R = block_rows(V);
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
  const Index ld = round_up(V, kLanes), R = block_rows(V);
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

}  // namespace

// ---------------------------------------------------------------- C interface: weights as (pointer, replica stride)

extern "C" {

void scalinglab_attention_forward(Index K, Index B, Index T, Index d, Index H, Index G, Index c, float scale,
                                  const float* x, const float* query, Index query_stride, const float* key,
                                  Index key_stride, const float* value, Index value_stride, const float* output,
                                  Index output_stride, const float* cosines, const float* sines, float* y, float* qkv,
                                  float* mixed, float* softmax) {
  attention_forward(K, B, {T, H, G, c}, d, scale, x,
                    {{query, query_stride}, {key, key_stride}, {value, value_stride}, {output, output_stride}}, cosines,
                    sines, y, qkv, mixed, softmax);
}

void scalinglab_attention_backward(Index K, Index B, Index T, Index d, Index H, Index G, Index c, float scale,
                                   const float* dy, const float* x, const float* query, Index query_stride,
                                   const float* key, Index key_stride, const float* value, Index value_stride,
                                   const float* output, Index output_stride, const float* cosines, const float* sines,
                                   const float* qkv, const float* mixed, const float* softmax, float* dx, float* dquery,
                                   Index dquery_stride, float* dkey, Index dkey_stride, float* dvalue,
                                   Index dvalue_stride, float* doutput, Index doutput_stride) {
  attention_backward(K, B, {T, H, G, c}, d, scale, dy, x,
                     {{query, query_stride}, {key, key_stride}, {value, value_stride}, {output, output_stride}}, cosines,
                     sines, qkv, mixed, softmax, dx,
                     {{dquery, dquery_stride}, {dkey, dkey_stride}, {dvalue, dvalue_stride}, {doutput, doutput_stride}});
}

void scalinglab_feed_forward_forward(Index K, Index M, Index d, Index f, const float* x, const float* gate,
                                     Index gate_stride, const float* up, Index up_stride, const float* down,
                                     Index down_stride, float* y, float* pre) {
  feed_forward_forward(K, M, d, f, x, {gate, gate_stride}, {up, up_stride}, {down, down_stride}, y, pre);
}

void scalinglab_feed_forward_backward(Index K, Index M, Index d, Index f, const float* dy, const float* x,
                                      const float* pre, const float* gate, Index gate_stride, const float* up,
                                      Index up_stride, const float* down, Index down_stride, float* dx, float* dgate,
                                      Index dgate_stride, float* dup, Index dup_stride, float* ddown,
                                      Index ddown_stride) {
  feed_forward_backward(K, M, d, f, dy, x, pre, {gate, gate_stride}, {up, up_stride}, {down, down_stride}, dx,
                        {dgate, dgate_stride}, {dup, dup_stride}, {ddown, ddown_stride});
}

void scalinglab_norm_forward(Index K, Index M, Index d, float eps, const float* x, const float* gain, Index gain_stride,
                             float* y, float* inverse) {
  norm_forward(K, M, d, eps, x, {gain, gain_stride}, y, inverse);
}

void scalinglab_norm_backward(Index K, Index M, Index d, const float* dy, const float* x, const float* gain,
                              Index gain_stride, const float* inverse, float* dx, float* dgain, Index dgain_stride) {
  norm_backward(K, M, d, dy, x, {gain, gain_stride}, inverse, dx, {dgain, dgain_stride});
}

// Returns the number of targets outside [0, V); nothing is computed unless it is 0.
Index scalinglab_head_forward(Index K, Index M, Index d, Index V, float multiplier, const float* h, const float* w,
                              Index w_stride, const std::int64_t* targets, float* loss, float* weights, float* total) {
  const Index wrong = std::count_if(targets, targets + K * M, [V](std::int64_t t) { return t < 0 || t >= V; });
  if (!wrong) head_forward(K, M, d, V, multiplier, h, {w, w_stride}, targets, loss, weights, total);
  return wrong;
}

void scalinglab_head_backward(Index K, Index M, Index d, Index V, float multiplier, const float* dloss, const float* h,
                              const float* w, Index w_stride, const std::int64_t* targets, const float* weights,
                              const float* total, float* dh, float* dw, Index dw_stride) {
  head_backward(K, M, d, V, multiplier, dloss, h, {w, w_stride}, targets, weights, total, dh, {dw, dw_stride});
}

}  // extern "C"
