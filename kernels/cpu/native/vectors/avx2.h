// AVX2, and where the target has it the dot product of AVX-VNNI. See registers.h.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace quire {

constexpr int64_t REGISTER_BYTES = 32;

// Of one register each.
using Vector = float __attribute__((vector_size(REGISTER_BYTES)));
using Whole = int32_t __attribute__((vector_size(REGISTER_BYTES)));
using Bits = uint32_t __attribute__((vector_size(REGISTER_BYTES)));

constexpr int64_t WIDTH = REGISTER_BYTES / 4;  // lanes of 32 bits

inline __m128i load_half_register(const void* p) {
  return _mm_loadu_si128(static_cast<const __m128i*>(p));
}
inline __m128i load_quarter_register(const void* p) {
  return _mm_loadl_epi64(static_cast<const __m128i*>(p));
}

// WIDTH values of 16 or 8 bits.
inline Bits widen_piece(const uint16_t* p) {
  return (Bits)_mm256_cvtepu16_epi32(load_half_register(p));
}
inline Bits widen_piece(const uint8_t* p) {
  return (Bits)_mm256_cvtepu8_epi32(load_quarter_register(p));
}
inline Whole widen_piece(const int8_t* p) {
  return (Whole)_mm256_cvtepi8_epi32(load_quarter_register(p));
}

// The lowest 16 or 8 bits of each lane.
inline void narrow_piece(Bits x, uint16_t* p) {
  const __m256i low = _mm256_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, -1, -1, -1, -1, -1, -1, -1, -1, 0, 1,
                                       4, 5, 8, 9, 12, 13, -1, -1, -1, -1, -1, -1, -1, -1);
  const __m256i fours = _mm256_shuffle_epi8((__m256i)x, low);
  const __m256i eight = _mm256_permute4x64_epi64(fours, 0x08);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(eight));
}
inline void narrow_piece(Bits x, uint8_t* p) {
  const __m256i low = _mm256_setr_epi8(0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, 0,
                                       4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1);
  const __m256i fours = _mm256_shuffle_epi8((__m256i)x, low);
  const __m128i eight =
      _mm_unpacklo_epi32(_mm256_castsi256_si128(fours), _mm256_extracti128_si256(fours, 1));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(p), eight);
}

// Of float8 (sign, 4 bits of exponent, 3 of mantissa), read as if they were float16.
inline Vector load_float8_bits(const uint8_t* p) {
  const __m128i wide = _mm_cvtepu8_epi16(load_quarter_register(p));
  const __m128i size = _mm_and_si128(_mm_slli_epi16(wide, 7), _mm_set1_epi16(0x3F80));
  const __m128i sign = _mm_and_si128(_mm_slli_epi16(wide, 8), _mm_set1_epi16(-0x8000));
  return (Vector)_mm256_cvtph_ps(_mm_or_si128(size, sign));
}

inline Whole nearest_piece(Vector x) { return (Whole)_mm256_cvtps_epi32((__m256)x); }

// a > b ? a : b
inline Vector larger_piece(Vector a, Vector b) {
  return (Vector)_mm256_max_ps((__m256)a, (__m256)b);
}

inline bool all(Whole mask) { return _mm256_movemask_ps((__m256)mask) == 0xFF; }

inline __m256i broadcast_four(const void* codes) {
  int32_t four;
  std::memcpy(&four, codes, sizeof four);
  return _mm256_set1_epi32(four);
}

#if defined(__AVXVNNI__)

constexpr int32_t FIRST_CODE = 0;  // of eight bits of an activation: vpdpbusd's are unsigned
constexpr int LEAST_CODE = -128;   // of a weight
constexpr int64_t LAID_CODE_BYTES = 1;  // of an activation's code as it is multiplied

// Four neighbouring codes of an activation, by which those of all lanes' weights are multiplied.
class Four {
 public:
  explicit Four(const uint8_t* codes) : codes_(broadcast_four(codes)) {}

  // sums + the products with weights[lane][4], added up.
  Whole add(Whole sums, Whole weights) const {
    return (Whole)_mm256_dpbusd_avx_epi32((__m256i)sums, codes_, (__m256i)weights);
  }

 private:
  const __m256i codes_;
};

// Sums over a group of 32 inputs: levels 0 to 15 of the weights by codes -127 to 127.
class GroupSum {
 public:
  void begin(int32_t start) { sums_ = _mm256_set1_epi32(start); }
  void add(Whole levels, __m256i codes) {
    sums_ = _mm256_dpbusd_avx_epi32(sums_, (__m256i)levels, codes);
  }
  Whole total() const { return (Whole)sums_; }

 private:
  __m256i sums_;
};

// What sums begin with that would be too large by `excess`.
inline int32_t group_start(int32_t excess) { return -excess; }

#else

// Codes are signed: vpmaddubsw adds two products of an unsigned and a signed byte in 16 bits, in which
// 2 * 255 * 127 has no room, but 2 * 128 * -128 has. The weight, -127 to 127, takes over the sign, by
// an exclusive or: ~w = -w - 1 in place of -w, so that a negative code's products are too small by
// its size. (vpsignb is exact, but one of two units does it that also multiply.)
constexpr int32_t FIRST_CODE = -128;
constexpr int LEAST_CODE = -127;
constexpr int64_t LAID_CODE_BYTES = 2;

// Of neighbouring codes: their sizes, and behind them bytes of ones where they are negative.
class Four {
 public:
  explicit Four(const uint8_t* laid) : sizes_(broadcast_four(laid)), signs_(broadcast_four(laid + 4)) {}

  Whole add(Whole sums, Whole weights) const {
    const __m256i pairs = _mm256_maddubs_epi16(sizes_, (__m256i)weights ^ signs_);
    return sums + (Whole)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
  }

 private:
  const __m256i sizes_, signs_;
};

// Lays out codes, a multiple of 32, as fours. Returns by how much sums of products are too small.
inline int32_t lay_fours(const uint8_t* codes, int64_t count, uint8_t* laid) {
  __m256i missing = _mm256_setzero_si256();
  for (int64_t k = 0; k < count; k += REGISTER_BYTES, laid += 2 * REGISTER_BYTES) {
    const __m256i some = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes + k));
    const __m256i sizes = _mm256_abs_epi8(some);
    const __m256i signs = _mm256_cmpgt_epi8(_mm256_setzero_si256(), some);
    missing = _mm256_add_epi64(missing, _mm256_sad_epu8(sizes & signs, _mm256_setzero_si256()));
    const __m256i even = _mm256_unpacklo_epi32(sizes, signs);
    const __m256i odd = _mm256_unpackhi_epi32(sizes, signs);
    auto* to = reinterpret_cast<__m256i*>(laid);
    _mm256_storeu_si256(to, _mm256_permute2x128_si256(even, odd, 0x20));
    _mm256_storeu_si256(to + 1, _mm256_permute2x128_si256(even, odd, 0x31));
  }
  const __m128i halves =
      _mm_add_epi64(_mm256_castsi256_si128(missing), _mm256_extracti128_si256(missing, 1));
  return static_cast<int32_t>(_mm_cvtsi128_si64(halves) + _mm_extract_epi64(halves, 1));
}

// Two sums of 16 bits a lane, which begin with -excess and 0. They may wrap around on the way, but in
// the end neither is larger than 2 * 16 * 8 * 127: its products by levels of -8 to 7, and the other's
// part of the excess.
class GroupSum {
 public:
  void begin(int32_t start) { sums_ = _mm256_set1_epi32(start); }
  void add(Whole levels, __m256i codes) {
    sums_ = _mm256_add_epi16(sums_, _mm256_maddubs_epi16((__m256i)levels, codes));
    __asm__("" : "+x"(sums_));  // now: GCC would rather keep products, until registers run out
  }
  Whole total() const { return (Whole)_mm256_madd_epi16(sums_, _mm256_set1_epi16(1)); }

 private:
  __m256i sums_;
};

inline int32_t group_start(int32_t excess) { return static_cast<uint16_t>(-excess); }

#endif

// WIDTH values from float16.
inline Vector load_halves(const uint16_t* halves) {
  return (Vector)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(halves)));
}
inline uint16_t to_half(float value) { return _cvtss_sh(value, _MM_FROUND_TO_NEAREST_INT); }
inline float from_half(uint16_t half) { return _cvtsh_ss(half); }

// Sixteen floats, of which each lane picks one by its four lowest bits.
class Table {
 public:
  explicit Table(const float* values)
      : low_(_mm256_loadu_ps(values)), high_(_mm256_loadu_ps(values + WIDTH)) {}

  Vector operator[](Bits index) const {
    const __m256i places = (__m256i)index;
    const __m256 is_high = (__m256)_mm256_slli_epi32(places, 28);  // the fourth bit as the sign
    return (Vector)_mm256_blendv_ps(_mm256_permutevar8x32_ps(low_, places),
                                    _mm256_permutevar8x32_ps(high_, places), is_high);
  }

 private:
  const __m256 low_, high_;
};

}  // namespace quire
