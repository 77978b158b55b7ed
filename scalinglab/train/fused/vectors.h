// Vectors of eight floats, partial vectors, exponentials.
#pragma once

#include <immintrin.h>

#include <cmath>
#include <cstdint>

namespace {

using Index = std::int64_t;
using Vec = __m256;
constexpr Index kLanes = 8;
constexpr float kLog2e = 1.44269504088896341f, kLn2 = 0.693147180559945309f;

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

}  // namespace
