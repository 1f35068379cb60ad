// Sixteen lanes in one register of AVX-512. See simd.h.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace quire {

using Floats = float __attribute__((vector_size(64)));
using Ints = int32_t __attribute__((vector_size(64)));
using Words = uint32_t __attribute__((vector_size(64)));

constexpr Ints LANE = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

inline Floats fill(float x) { return x - Floats{}; }

template <class V>
inline V load_lanes(const void* p) {
  V x;
  std::memcpy(&x, p, sizeof x);
  return x;
}

template <class V>
inline void store_lanes(void* p, V x) {
  std::memcpy(p, &x, sizeof x);
}

inline Words widen(const uint16_t* p) {
  // GCC widens a half vector at a time, and joins the two: four shuffles for one.
  const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return (Words)_mm512_cvtepu16_epi32(bits);
}
inline Words widen(const uint8_t* p) {
  return (Words)_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
inline Ints widen(const int8_t* p) {
  return (Ints)_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}

inline void narrow(Words x, uint16_t* p) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16((__m512i)x));
}
inline void narrow(Words x, uint8_t* p) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8((__m512i)x));
}

inline Floats load_float8(const uint8_t* p) {
  // The bits of a half whose exponent counts from 15 and not from 7, subnormal ones included.
  const __m256i wide = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  const __m256i size = _mm256_and_si256(_mm256_slli_epi16(wide, 7), _mm256_set1_epi16(0x3F80));
  const __m256i sign = _mm256_and_si256(_mm256_slli_epi16(wide, 8), _mm256_set1_epi16(-0x8000));
  return (Floats)_mm512_cvtph_ps(_mm256_or_si256(size, sign)) * 256.0f;
}

inline Floats to_floats(Ints x) { return __builtin_convertvector(x, Floats); }
inline Ints nearest(Floats x) { return (Ints)_mm512_cvtps_epi32((__m512)x); }

template <class V>
inline V select(Ints where, V x, V y) {
  return where ? x : y;
}

inline Floats larger(Floats a, Floats b) { return a > b ? a : b; }

inline bool any_not_less(Floats a, Floats b) {
  return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_NLT_UQ) != 0;
}

#define QUIRE_SHUFFLE __builtin_shufflevector

inline Floats zip_low(Floats a, Floats b) {
  return QUIRE_SHUFFLE(a, b, 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29);
}
inline Floats zip_high(Floats a, Floats b) {
  return QUIRE_SHUFFLE(a, b, 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31);
}
inline Floats join_low(Floats a, Floats b) {
  return QUIRE_SHUFFLE(a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29);
}
inline Floats join_high(Floats a, Floats b) {
  return QUIRE_SHUFFLE(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
}
inline Floats even_fours(Floats a, Floats b) {
  return QUIRE_SHUFFLE(a, b, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27);
}
inline Floats odd_fours(Floats a, Floats b) {
  return QUIRE_SHUFFLE(a, b, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
}

template <class V>
inline V first_of_pairs(V a, V b) {
  return QUIRE_SHUFFLE(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
}
template <class V>
inline V last_of_pairs(V a, V b) {
  return QUIRE_SHUFFLE(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
}

inline float sum(Floats x) {
  x += QUIRE_SHUFFLE(x, x, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
  x += QUIRE_SHUFFLE(x, x, 4, 5, 6, 7, 0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3);
  return (x[0] + x[1]) + (x[2] + x[3]);
}

inline float largest(Floats x) {
  x = larger(x, QUIRE_SHUFFLE(x, x, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7));
  x = larger(x, QUIRE_SHUFFLE(x, x, 4, 5, 6, 7, 0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3));
  x = larger(x, QUIRE_SHUFFLE(x, x, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3, 0, 1));
  return x[0] > x[1] ? x[0] : x[1];
}

}  // namespace quire
