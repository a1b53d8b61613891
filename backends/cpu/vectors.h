// Vectors of 16 words, and elements of bf16 or float in them.

#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

// GCC 12 sees uninitialized values in its own intrinsics (GCC bug 105593).
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"

#ifndef __AVX512F__
#error "these kernels need AVX-512"
#endif

namespace {

constexpr int LANES = 16;  // 32-bit words in a vector
using Vec = __m512;

struct bf16 {
  uint16_t bits;
};

template <class T>
constexpr int PER_WORD = 4 / sizeof(T);

// Which lanes of a vector are meant: all of them (a type of its own, since masked moves are slow),
// or those of a mask.
struct All {};

inline __mmask16 first_lanes(int64_t n) {
  return n >= LANES ? 0xFFFF : static_cast<__mmask16>((1u << n) - 1);
}

// Calls f(i, lanes) for the vectors that cover n elements.
template <class F>
[[gnu::always_inline]] inline void for_vectors(int64_t n, F&& f) {
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES) f(i, All{});
  if (i < n) f(i, first_lanes(n - i));
}

inline Vec widen(__m256i x) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16));
}

inline __m256i narrow(Vec x) {  // to bf16, to nearest even; a NaN stays one
#ifdef __AVX512BF16__
  return reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(x));
#else
  __m512i u = _mm512_castps_si512(x);
  __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
  __m512i rounded = _mm512_add_epi32(u, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF)));
  __mmask16 is_nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  rounded = _mm512_mask_blend_epi32(is_nan, rounded, _mm512_set1_epi32(0x7FC00000));
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16));
#endif
}

inline Vec load(const float* p, All = {}) { return _mm512_loadu_ps(p); }
inline Vec load(const bf16* p, All = {}) {
  return widen(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
inline void store(float* p, Vec x, All = {}) { _mm512_storeu_ps(p, x); }
inline void store(bf16* p, Vec x, All = {}) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrow(x));
}
inline Vec load(const float* p, __mmask16 m) { return _mm512_maskz_loadu_ps(m, p); }
inline Vec load(const bf16* p, __mmask16 m) { return widen(_mm256_maskz_loadu_epi16(m, p)); }
inline void store(float* p, Vec x, __mmask16 m) { _mm512_mask_storeu_ps(p, m, x); }
inline void store(bf16* p, Vec x, __mmask16 m) { _mm256_mask_storeu_epi16(p, m, narrow(x)); }

// acc + the products of 16 words of `a` with the words of `b`.
template <class T>
inline Vec multiply_add(Vec acc, Vec a, Vec b);

template <>
inline Vec multiply_add<float>(Vec acc, Vec a, Vec b) {
  return _mm512_fmadd_ps(a, b, acc);
}

template <>
inline Vec multiply_add<bf16>(Vec acc, Vec a, Vec b) {
#ifdef __AVX512BF16__
  return _mm512_dpbf16_ps(acc, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
#else
  const Vec high = _mm512_castsi512_ps(_mm512_set1_epi32(static_cast<int>(0xFFFF0000)));
  auto low = [](Vec x) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(x), 16)); };
  acc = _mm512_fmadd_ps(low(a), low(b), acc);
  return _mm512_fmadd_ps(_mm512_and_ps(a, high), _mm512_and_ps(b, high), acc);
#endif
}

inline Vec broadcast_word(const void* p) {  // may be unaligned
  float word;
  std::memcpy(&word, p, 4);
  return _mm512_set1_ps(word);
}

// e^x for x <= 88, NaN for NaN; relative error below 2e-7 (Cody and Waite's reduction).
inline Vec exponential(Vec x) {
  x = _mm512_max_ps(_mm512_set1_ps(-105.0f), x);  // the second operand is returned for NaN
  Vec n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 8);
  Vec r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693145752f), x);
  r = _mm512_fnmadd_ps(n, _mm512_set1_ps(1.42860677e-6f), r);
  Vec p = _mm512_set1_ps(1.0f / 720);
  for (float c : {1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f})
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(c));
  return _mm512_scalef_ps(p, n);
}

inline Vec sigmoid(Vec x) {
  Vec one = _mm512_set1_ps(1.0f);
  x = _mm512_min_ps(_mm512_set1_ps(88.0f), _mm512_sub_ps(_mm512_setzero_ps(), x));
  return _mm512_div_ps(one, _mm512_add_ps(one, exponential(x)));
}

inline float exponential(float x) { return _mm512_cvtss_f32(exponential(_mm512_set1_ps(x))); }

// Calls f with the number of rows, 1 to MAX, as a constant.
template <int MAX, class F>
[[gnu::always_inline]] inline void with_rows(int64_t rows, F&& f) {
  if constexpr (MAX > 1) {
    if (rows < MAX) return with_rows<MAX - 1>(rows, f);
  }
  f(std::integral_constant<int, MAX>{});
}

}  // namespace
