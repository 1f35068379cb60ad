// Sixteen float32 lanes by the vector extensions of GCC and clang: one source for AVX2, AVX-512 and
// NEON. Values in memory are float32 or bfloat16; everything is computed in float32.
#pragma once

#ifdef __AVX512F__
#include <immintrin.h>
#endif

#include <cstdint>
#include <cstring>
#include <limits>

namespace quire {

using Floats = float __attribute__((vector_size(64)));
using Ints = int32_t __attribute__((vector_size(64)));
using Words = uint32_t __attribute__((vector_size(64)));
using Halves = uint16_t __attribute__((vector_size(32)));

struct bfloat16 {
  uint16_t bits;
};

constexpr int64_t LANES = 16;
constexpr float INFINITE = std::numeric_limits<float>::infinity();

constexpr Ints LANE = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

inline Floats fill(float x) { return x - Floats{}; }

inline Floats load(const float* p) {
  Floats x;
  std::memcpy(&x, p, sizeof x);
  return x;
}

inline Floats load(const bfloat16* p) {
#ifdef __AVX512F__
  // GCC widens a half vector at a time, and joins the two: four shuffles for one.
  const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return (Floats)_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16);
#else
  Halves x;
  std::memcpy(&x, p, sizeof x);
  return (Floats)(__builtin_convertvector(x, Words) << 16);
#endif
}

inline void store(float* p, Floats x) { std::memcpy(p, &x, sizeof x); }

// To the nearest, ties to even, as torch rounds; nan stays nan.
inline void store(bfloat16* p, Floats x) {
  const Words bits = (Words)x;
  const Words rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
  const Halves halves = __builtin_convertvector(x == x ? rounded : Words{} + 0x7FC0, Halves);
  std::memcpy(p, &halves, sizeof halves);
}

// The first `count` lanes where fewer than sixteen values are left; the others are zero.
template <class T>
inline Floats load(const T* p, int64_t count) {
  if (count >= LANES) return load(p);
  T some[LANES] = {};
  std::memcpy(some, p, count * sizeof(T));
  return load(some);
}

template <class T>
inline void store(T* p, Floats x, int64_t count) {
  if (count >= LANES) return store(p, x);
  T some[LANES];
  store(some, x);
  std::memcpy(p, some, count * sizeof(T));
}

inline Floats larger(Floats a, Floats b) { return a > b ? a : b; }

#define QUIRE_SHUFFLE __builtin_shufflevector

// Of sixteen pairs (a[i], b[i]) the first eight, and the last.
inline Floats first_of_pairs(Floats a, Floats b) {
  return QUIRE_SHUFFLE(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
}
inline Floats last_of_pairs(Floats a, Floats b) {
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

// Whether any lane of a is not less than b's: is as large, or either is nan.
inline bool any_not_less(Floats a, Floats b) {
#ifdef __AVX512F__
  return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_NLT_UQ) != 0;
#else
  Ints less = a < b;
  less &= QUIRE_SHUFFLE(less, less, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
  less &= QUIRE_SHUFFLE(less, less, 4, 5, 6, 7, 0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3);
  return !(less[0] & less[1] & less[2] & less[3]);
#endif
}

// The nearest integers of values below 2^22 in magnitude, of two that are as near the even one.
inline Ints nearest(Floats x) {
#ifdef __AVX512F__
  return (Ints)_mm512_cvtps_epi32((__m512)x);
#else
  // Adding 1.5 * 2^23 leaves the integer in the last bits of the sum.
  return (Ints)(x + 12582912.0f) - (Ints)fill(12582912.0f);
#endif
}

// The lowest eight bits of each lane.
using Bytes16 = uint8_t __attribute__((vector_size(16)));

inline Bytes16 to_bytes(Ints x) {
#ifdef __AVX512F__
  return (Bytes16)_mm512_cvtepi32_epi8((__m512i)x);
#else
  return __builtin_convertvector((Words)x, Bytes16);
#endif
}

// Lane i of the result is the sum of x[i]: four rounds in each of which two vectors become one.
inline Floats sum_each(const Floats (&x)[LANES]) {
  Floats pairs[8], quads[4];
  for (int i = 0; i < 8; ++i) {
    const Floats a = x[2 * i], b = x[2 * i + 1];
    pairs[i] = QUIRE_SHUFFLE(a, b, 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29) +
               QUIRE_SHUFFLE(a, b, 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31);
  }
  for (int i = 0; i < 4; ++i) {
    const Floats a = pairs[2 * i], b = pairs[2 * i + 1];
    quads[i] = QUIRE_SHUFFLE(a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) +
               QUIRE_SHUFFLE(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
  }
  const auto fold = [](Floats a, Floats b) {
    return QUIRE_SHUFFLE(a, b, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
           QUIRE_SHUFFLE(a, b, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
  };
  return fold(fold(quads[0], quads[1]), fold(quads[2], quads[3]));
}

// Rows become columns: out[j][i] = x[i][j].
inline void transpose(Floats (&x)[LANES]) {
  Floats y[LANES];
  for (int i = 0; i < 16; i += 2) {
    y[i] = QUIRE_SHUFFLE(x[i], x[i + 1], 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30);
    y[i + 1] =
        QUIRE_SHUFFLE(x[i], x[i + 1], 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31);
  }
  for (int i = 0; i < 16; ++i)
    if (!(i & 2)) {
      const Floats a = y[i], b = y[i + 2];
      x[i] = QUIRE_SHUFFLE(a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29);
      x[i + 2] = QUIRE_SHUFFLE(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
    }
  for (int i = 0; i < 16; ++i)
    if (!(i & 4)) {
      const Floats a = x[i], b = x[i + 4];
      y[i] = QUIRE_SHUFFLE(a, b, 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27);
      y[i + 4] = QUIRE_SHUFFLE(a, b, 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31);
    }
  for (int i = 0; i < 8; ++i) {
    const Floats a = y[i], b = y[i + 8];
    x[i] = QUIRE_SHUFFLE(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23);
    x[i + 8] = QUIRE_SHUFFLE(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
  }
}

// e^x within 2 units in the last place; 0 below the smallest normal number's logarithm.
// x = n log 2 + r with |r| <= log(2) / 2, and e^r by Taylor's series to the seventh power.
inline Floats exp(Floats x) {
  const Floats bounded = x < -87.3f ? fill(-87.3f) : x > 88.7f ? fill(88.7f) : x;
  // Adding 1.5 * 2^23 leaves the nearest integer in the last bits of the sum.
  const Floats shifted = bounded * 1.44269504f + 12582912.0f;
  const Floats n = shifted - 12582912.0f;
  const Floats r = (bounded - n * 0.693359375f) - n * -2.12194440e-4f;
  Floats y = fill(1.0f / 5040);
  y = y * r + 1.0f / 720;
  y = y * r + 1.0f / 120;
  y = y * r + 1.0f / 24;
  y = y * r + 1.0f / 6;
  y = y * r + 0.5f;
  y = y * r + 1.0f;
  y = y * r + 1.0f;
  // 2^n in two factors, since n = 128 has no float32 of its own.
  const Ints power = (Ints)shifted - 0x4B400000;
  const Ints half = power >> 1;
  const Floats result = y * (Floats)((half + 127) << 23) * (Floats)((power - half + 127) << 23);
  return x < -87.3f ? Floats{} : result;
}

// log x of positive normal numbers, within 2 units in the last place.
// x = 2^n m with m in [sqrt(1/2), sqrt(2)); log m = 2 atanh(s) = 2 (s + s^3 / 3 + ...), with
// s = (m - 1) / (m + 1), |s| < 0.172.
inline Floats log(Floats x) {
  const Ints bits = (Ints)x;
  const Ints n = (bits - 0x3F3504F3) >> 23;
  const Floats m = (Floats)(bits - (n << 23));
  const Floats s = (m - 1.0f) / (m + 1.0f), square = s * s;
  Floats y = fill(2.0f / 9);
  y = y * square + 2.0f / 7;
  y = y * square + 2.0f / 5;
  y = y * square + 2.0f / 3;
  const Floats exponent = __builtin_convertvector(n, Floats);
  // m - 1 is exact; what s lacks against it is added as s (m - 1), to keep log x of x near 1.
  const Floats f = m - 1.0f;
  const Floats rest = s * (y * square - f);
  return exponent * 0.693359375f + (exponent * -2.12194440e-4f + rest + f);
}

inline Floats tanh(Floats x) { return 1.0f - 2.0f / (exp(x + x) + 1.0f); }

// The error function to 2e-7 (Abramowitz & Stegun 1964, 7.1.26).
inline Floats erf(Floats x) {
  const Floats size = x < 0.0f ? -x : x, t = 1.0f / (1.0f + 0.3275911f * size);
  Floats y = fill(1.061405429f);
  y = y * t - 1.453152027f;
  y = y * t + 1.421413741f;
  y = y * t - 0.284496736f;
  y = y * t + 0.254829592f;
  y = 1.0f - y * t * exp(-size * size);
  return x < 0.0f ? -y : y;
}

// Calls body<T>() for the element type of a tensor; the code is `Library.dtype_code`'s in Python.
template <class Body>
inline void with_type(int32_t code, Body body) {
  if (code == 0)
    body.template operator()<float>();
  else
    body.template operator()<bfloat16>();
}

}  // namespace quire
