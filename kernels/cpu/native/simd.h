// Sixteen float32 lanes: one source for AVX-512, AVX2 and NEON. Values in memory are float32 or
// bfloat16; everything is computed in float32.
//
// lanes.h, of the folder that a target is compiled with (build.py), gives Floats, Ints and Words with
// the operators of GCC's vectors, where a comparison's lanes are 0 or -1 and `select` chooses by them;
// and what moves lanes, where a four is four neighbours:
//
//     widen, narrow         between lanes and 16 or 8 bits in memory
//     zip_low, zip_high     of each four a0 b0 a1 b1, a2 b2 a3 b3
//     join_low, join_high   of each four a0 a1 b0 b1, a2 a3 b2 b3
//     even_fours            the first and third four of a, then of b; odd_fours: second and fourth
//     first_of_pairs        a[i], b[i] of the first eight; last_of_pairs: of the last
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>

#include "lanes.h"

namespace quire {

struct bfloat16 {
  uint16_t bits;
};

constexpr int64_t LANES = 16;
constexpr float INFINITE = std::numeric_limits<float>::infinity();

inline Floats load(const float* p) { return load_lanes<Floats>(p); }

inline Floats load(const bfloat16* p) { return (Floats)(widen(&p->bits) << 16); }

inline void store(float* p, Floats x) { store_lanes(p, x); }

// To the nearest, ties to even, as torch rounds; nan stays nan.
inline void store(bfloat16* p, Floats x) {
  const Words bits = (Words)x;
  const Words rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
  narrow(select(x == x, rounded, Words{} + 0x7FC0), &p->bits);
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

using Bytes16 = uint8_t __attribute__((vector_size(16)));

// The lowest eight bits of each lane.
inline Bytes16 to_bytes(Ints x) {
  Bytes16 bytes;
  narrow((Words)x, reinterpret_cast<uint8_t*>(&bytes));
  return bytes;
}

// Lane i of the result is the sum of x[i]: four rounds in each of which two vectors become one.
inline Floats sum_each(const Floats (&x)[LANES]) {
  Floats pairs[8], quads[4];
  for (int i = 0; i < 8; ++i)
    pairs[i] = zip_low(x[2 * i], x[2 * i + 1]) + zip_high(x[2 * i], x[2 * i + 1]);
  for (int i = 0; i < 4; ++i)
    quads[i] = join_low(pairs[2 * i], pairs[2 * i + 1]) + join_high(pairs[2 * i], pairs[2 * i + 1]);
  const auto fold = [](Floats a, Floats b) { return even_fours(a, b) + odd_fours(a, b); };
  return fold(fold(quads[0], quads[1]), fold(quads[2], quads[3]));
}

// Rows become columns: out[j][i] = x[i][j].
inline void transpose(Floats (&x)[LANES]) {
  // Squares of four: y[4 r + j] has columns j, 4 + j, 8 + j and 12 + j of rows 4 r to 4 r + 3.
  Floats y[LANES];
  for (int r = 0; r < LANES; r += 4) {
    const Floats low = zip_low(x[r], x[r + 2]), high = zip_high(x[r], x[r + 2]);
    const Floats next_low = zip_low(x[r + 1], x[r + 3]), next_high = zip_high(x[r + 1], x[r + 3]);
    y[r] = zip_low(low, next_low);
    y[r + 1] = zip_high(low, next_low);
    y[r + 2] = zip_low(high, next_high);
    y[r + 3] = zip_high(high, next_high);
  }
  for (int j = 0; j < 4; ++j) {
    const Floats even = even_fours(y[j], y[4 + j]), odd = odd_fours(y[j], y[4 + j]);
    const Floats next_even = even_fours(y[8 + j], y[12 + j]);
    const Floats next_odd = odd_fours(y[8 + j], y[12 + j]);
    x[j] = even_fours(even, next_even);
    x[4 + j] = even_fours(odd, next_odd);
    x[8 + j] = odd_fours(even, next_even);
    x[12 + j] = odd_fours(odd, next_odd);
  }
}

inline Floats magnitude(Floats x) { return (Floats)((Words)x & 0x7FFFFFFF); }

// e^x within 2 units in the last place; 0 below the smallest normal number's logarithm.
// x = n log 2 + r with |r| <= log(2) / 2, and e^r by Taylor's series to the seventh power.
inline Floats exp(Floats x) {
  const Floats least = fill(-87.3f), most = fill(88.7f);
  const Floats bounded = select(x < least, least, select(x > most, most, x));
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
  return select(x < least, Floats{}, result);
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
  const Floats exponent = to_floats(n);
  // m - 1 is exact; what s lacks against it is added as s (m - 1), to keep log x of x near 1.
  const Floats f = m - 1.0f;
  const Floats rest = s * (y * square - f);
  return exponent * 0.693359375f + (exponent * -2.12194440e-4f + rest + f);
}

inline Floats tanh(Floats x) { return 1.0f - 2.0f / (exp(x + x) + 1.0f); }

// The error function to 2e-7 (Abramowitz & Stegun 1964, 7.1.26).
inline Floats erf(Floats x) {
  const Floats size = magnitude(x), t = 1.0f / (1.0f + 0.3275911f * size);
  Floats y = fill(1.061405429f);
  y = y * t - 1.453152027f;
  y = y * t + 1.421413741f;
  y = y * t - 0.284496736f;
  y = y * t + 0.254829592f;
  y = 1.0f - y * t * exp(-size * size);
  return select(x < 0.0f, -y, y);
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
