// Matrix products of packed operands, the scratch memory that they live in, and weights with a replica axis.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <type_traits>

#include "vectors.h"

namespace {

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
INLINE void tile(Index begin, Index end, const float* a, Index lda, const float* b, float* c, Index ldc,
                 bool accumulate, Lanes last) {
  Vec s[ROWS][NV];
  UNROLL for (int i = 0; i < ROWS; ++i)
    UNROLL for (int j = 0; j < NV; ++j)
      s[i][j] = !accumulate              ? zero()
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
  if (NV == 1 && x.m - i >= 8) rows(std::integral_constant<int, 8>());
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

}  // namespace
