// Keys and values as codes of eight bits with a scale for each row of a head
// (kernels/reference/cache_quantisation.py), which they are widened from and rounded to.
#pragma once

#include <algorithm>

#include "simd.h"

namespace quire {

// Types of this namespace, where the templates of simd.h look for their loads and stores.
struct int8 {
  int8_t value;
};

struct float8 {  // sign, 4 bits of exponent, 3 of mantissa; no infinities, up to 448
  uint8_t bits;
};

enum class CodeKind : int32_t { NONE = 0, INT8 = 1, FLOAT8 = 2 };

// Calls body<Code>() for the type of codes of a kind.
template <class Body>
inline void with_code(CodeKind kind, Body body) {
  if (kind == CodeKind::INT8)
    body.template operator()<int8>();
  else
    body.template operator()<float8>();
}

// A layer's cache of codes; kind NONE: it holds none.
struct CodedCache {
  CodeKind kind = CodeKind::NONE;
  const void *keys = nullptr, *values = nullptr;  // rows of head_dim codes
  const float *key_scales = nullptr, *value_scales = nullptr;  // one a row

  // Calls body(keys, values) with pointers of their type.
  template <class Body>
  void with_codes(Body body) const {
    with_code(kind, [&]<class Code>() {
      body.template operator()<Code>(static_cast<const Code*>(keys),
                                     static_cast<const Code*>(values));
    });
  }
};

inline Floats load(const int8* p) { return to_floats(widen(&p->value)); }

inline Floats load(const float8* p) { return load_float8(&p->bits); }

// To the nearest, ties to even; |x| is at most 127. What is nan becomes anything.
inline void store(int8* p, Floats x) {
  narrow((Words)nearest(x), reinterpret_cast<uint8_t*>(p));
}

// To the nearest, ties to even; |x| is at most 448. What is nan becomes anything.
inline void store(float8* p, Floats x) {
  const Words bits = (Words)x, size = bits & 0x7FFFFFFF;
  const Words normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120u << 3);
  // Below 2^-6 codes are 2^-9 apart: adding 1.5 * 2^14 leaves how many in the last bits.
  const Words small = (Words)((Floats)size + 24576.0f) - 0x46C00000;
  const Words code = select(size < (121u << 23), small, normal) | ((bits >> 24) & 0x80);
  narrow(code, &p->bits);
}

template <class Code, class T>
inline void widen(const Code* codes, int64_t dim, T* row) {
  for (int64_t d = 0; d < dim; d += LANES) store(row + d, load(codes + d, dim - d), dim - d);
}

// Codes are bfloat16 to the last bit: nothing is rounded.
template <class Code>
inline void widen_some(const Code* codes, int64_t dim, bfloat16* row) {
  for (int64_t d = 0; d < dim; d += LANES) {
    uint16_t halves[LANES];
    narrow((Words)load(codes + d, dim - d) >> 16, halves);
    std::memcpy(row + d, halves, std::min(LANES, dim - d) * sizeof(bfloat16));
  }
}

template <>
inline void widen(const int8* codes, int64_t dim, bfloat16* row) {
  widen_some(codes, dim, row);
}

#ifdef __AVX512BW__
template <>
inline void widen(const float8* codes, int64_t dim, bfloat16* row) {
  // A normal code's exponent counts from 7, a bfloat16's from 127; mantissas begin at one bit. The
  // seven codes without an exponent, eighths of 2^-6, are looked up by their last five bits.
  static constexpr uint16_t SMALL[32] = {0,      0x3B00, 0x3B80, 0x3BC0,
                                         0x3C00, 0x3C20, 0x3C40, 0x3C60};
  const __m512i small = _mm512_loadu_si512(SMALL), offset = _mm512_set1_epi16(120 << 7);
  const __m512i size_bits = _mm512_set1_epi16(0x7F0), sign_bit = _mm512_set1_epi16(-32768);
  const __m512i exponent_bits = _mm512_set1_epi16(0x78);
  int64_t d = 0;
  for (; d + 32 <= dim; d += 32) {
    const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes + d));
    const __m512i code = _mm512_cvtepi8_epi16(bytes);  // the sign in all bits above
    const __m512i bits = _mm512_and_si512(_mm512_slli_epi16(code, 4), size_bits);
    const __m512i size = _mm512_mask_permutexvar_epi16(
        _mm512_add_epi16(bits, offset), _mm512_testn_epi16_mask(code, exponent_bits), code, small);
    // (code & sign_bit) | size
    _mm512_storeu_si512(row + d, _mm512_ternarylogic_epi64(code, sign_bit, size, 0xEA));
  }
  widen_some(codes + d, dim - d, row + d);
}
#else
template <>
inline void widen(const float8* codes, int64_t dim, bfloat16* row) {
  widen_some(codes, dim, row);
}
#endif

inline float peak_of(int8) { return 127.0f; }
inline float peak_of(float8) { return 448.0f; }

// Rounds a row of float32, in memory that goes on for up to LANES of anything; returns its scale.
template <class Code>
inline float encode(const float* row, int64_t dim, Code* codes) {
  constexpr float SMALLEST = 1e-30f;  // as in kernels/reference/cache_quantisation.py
  Floats tops = {}, broken = {};
  for (int64_t d = 0; d < dim; d += LANES) {
    const Floats x = load(row + d, dim - d);
    tops = larger(tops, magnitude(x));
    broken += x - x;  // 0, or nan where x is infinite or nan
  }
  const float top = largest(tops), peak = peak_of(Code{});
  const float inverse = top > SMALLEST ? peak / top : 0.0f;
  for (int64_t d = 0; d < dim; d += LANES)
    store(codes + d, load(row + d, dim - d) * inverse, dim - d);
  return (top + sum(broken)) / peak;
}

}  // namespace quire
