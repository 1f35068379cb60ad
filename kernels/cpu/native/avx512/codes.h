// Codes as levels in registers, and what multiplies by them; see panels/groups.h.
#pragma once

#include "dense.h"
#include "panels/weights.h"

namespace quire {

constexpr int64_t IN_REGISTER = 4;  // up to so many rows, weights never leave the registers

// Four bits: 16 levels, common to all weights. A word holds eight inputs of one output: input
// 2 i + h lies at bits 16 h + 4 i. A shift by 4 i brings a pair to the low ends of the two halves,
// where one permutation turns both into the bfloat16 pair that vdpbf16ps multiplies.
struct Nibbles {
  static constexpr int64_t STEP = 8;  // inputs of a word

  explicit Nibbles(const bf16* levels) : levels_(_mm512_loadu_si512(levels)) {}

  // The pair's levels, of 16 outputs; pairs are asked for in order.
  __m512i take(__m512i& words, int64_t) const {
    const __m512i values = _mm512_permutexvar_epi16(words, levels_);
    words = _mm512_srli_epi16(words, 4);
    return values;
  }

 private:
  const __m512i levels_;  // the 16 values twice, as five bits choose
};

// Signed integers, of which bfloat16 has all.
struct Bytes {
  static constexpr int64_t STEP = 4;

  explicit Bytes(const bf16*) {}

  __m512i take(__m512i& words, int64_t) const {
    const __m512i high = _mm512_set1_epi32(static_cast<int>(0xffff0000));
    const __m512i even = _mm512_srai_epi32(_mm512_slli_epi32(words, 24), 24);
    const __m512i odd = _mm512_srai_epi32(_mm512_slli_epi32(words, 16), 24);
    words = _mm512_srli_epi32(words, 16);
    const __m512i low = _mm512_srli_epi32(_mm512_castps_si512(_mm512_cvtepi32_ps(even)), 16);
    return _mm512_or_si512(low, _mm512_and_si512(
                                    _mm512_castps_si512(_mm512_cvtepi32_ps(odd)), high));
  }
};

// Floats of a sign, four bits of exponent (less 7) and three of mantissa; none is infinite.
struct Float8 {
  static constexpr int64_t STEP = 4;

  explicit Float8(const bf16*) {}

  __m512i take(__m512i& words, int64_t) const {
    // Each of a pair's two bytes into a half of its own.
    const __m512i halves = _mm512_set1_epi32(static_cast<int>(0x80018000));
    const __m512i bytes = _mm512_shuffle_epi8(words, _mm512_add_epi8(halves, lane_begins()));
    words = _mm512_srli_epi32(words, 16);
    const __m512i sign = _mm512_slli_epi16(_mm512_and_si512(bytes, _mm512_set1_epi16(0x80)), 8);
    const __m512i size = _mm512_slli_epi16(_mm512_and_si512(bytes, _mm512_set1_epi16(0x7f)), 4);
    const __m512i normal = _mm512_add_epi16(size, _mm512_set1_epi16(120 << 7));
    // An exponent of zero: 0 to 7 times 2 ** -9, by a table.
    const __mmask32 is_small = _mm512_testn_epi16_mask(bytes, _mm512_set1_epi16(0x78));
    const __m512i index = _mm512_and_si512(bytes, _mm512_set1_epi16(7));
    return _mm512_or_si512(sign, _mm512_mask_permutexvar_epi16(normal, is_small, index, small()));
  }

 private:
  // For each byte of a vector the first of its word, within its quarter, where it is not masked.
  static __m512i lane_begins() {
    return _mm512_broadcast_i32x4(_mm_set_epi8(0, 12, 0, 12, 0, 8, 0, 8, 0, 4, 0, 4, 0, 0, 0, 0));
  }
  static __m512i small() {
    return _mm512_broadcast_i32x4(
        _mm_set_epi16(0x3c60, 0x3c40, 0x3c20, 0x3c00, 0x3bc0, 0x3b80, 0x3b00, 0));
  }
};

inline __m512 load_half(const uint16_t* values) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(values)));
}

// The results of all rows at a panel; 1 to IN_REGISTER rows, whose sums by group are `totals`.
template <int ROWS, class Code, class T>
void few_rows(const bf16* x, const float* totals, const GroupedWeight& weight, int64_t panel,
              const float* bias, const Results<T>& to) {
  const Code code(weight.levels);
  const int64_t groups = weight.inputs / weight.group;
  const uint32_t* codes = weight.codes + panel * PANEL * weight.inputs / Code::STEP;
  __m512 sums[ROWS][2];
  for (auto& row : sums) row[0] = row[1] = _mm512_setzero_ps();
  for (int64_t g = 0; g < groups; ++g) {
    const int64_t begin = g * weight.group, place = (panel * groups + g) * PANEL;
    __m512 parts[ROWS][2];
    for (auto& row : parts) row[0] = row[1] = _mm512_setzero_ps();
    for (int64_t k = begin; k < begin + weight.group; k += Code::STEP, codes += PANEL) {
      __m512i words[2] = {_mm512_loadu_si512(codes), _mm512_loadu_si512(codes + 16)};
      for (int64_t pair = 0; pair < Code::STEP; pair += 2) {
        for (int half = 0; half < 2; ++half) {
          const __m512i values = code.take(words[half], pair);
          for (int r = 0; r < ROWS; ++r) {
            int32_t two;
            __builtin_memcpy(&two, x + r * weight.inputs + k + pair, sizeof two);
            parts[r][half] = _mm512_dpbf16_ps(
                parts[r][half], reinterpret_cast<__m512bh>(_mm512_set1_epi32(two)),
                reinterpret_cast<__m512bh>(values));
          }
        }
      }
    }
    for (int half = 0; half < 2; ++half) {
      const __m512 scale = load_half(weight.scales + place + 16 * half);
      for (int r = 0; r < ROWS; ++r) {
        __m512 part = parts[r][half];
        if (weight.zeros)
          part = _mm512_fnmadd_ps(load_half(weight.zeros + place + 16 * half),
                                  _mm512_set1_ps(totals[r * groups + g]), part);
        sums[r][half] = _mm512_fmadd_ps(part, scale, sums[r][half]);
      }
    }
  }
  const __m512 factor = _mm512_set1_ps(weight.factor);
  for (int r = 0; r < ROWS; ++r)
    for (int half = 0; half < 2; ++half)
      store(_mm512_mul_ps(sums[r][half], factor), bias, to.row(r), to.outputs,
            panel * PANEL + 16 * half);
}

// A pair of bfloat16 in each lane, less a zero, times a scale, rounded to bfloat16 again.
inline __m512i scale_pairs(__m512i pairs, __m512 zero, __m512 scale) {
  const __m512i high = _mm512_set1_epi32(static_cast<int>(0xffff0000));
  const __m512 low = _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16));
  const __m512 up = _mm512_castsi512_ps(_mm512_and_si512(pairs, high));
  const __m512 even = _mm512_mul_ps(_mm512_sub_ps(low, zero), scale);
  const __m512 odd = _mm512_mul_ps(_mm512_sub_ps(up, zero), scale);
  const __m512i half = _mm512_set1_epi32(0x8000);  // of the last place that is kept
  const __m512i first = _mm512_srli_epi32(_mm512_add_epi32(_mm512_castps_si512(even), half), 16);
  const __m512i second = _mm512_add_epi32(_mm512_castps_si512(odd), half);
  return _mm512_mask_blend_epi16(0xaaaaaaaa, first, second);
}

// A panel of dense weights, [inputs / 2][32][2], from its codes.
template <class Code>
void unpack(const GroupedWeight& weight, int64_t panel, bf16* dense) {
  const Code code(weight.levels);
  const int64_t groups = weight.inputs / weight.group;
  const uint32_t* codes = weight.codes + panel * PANEL * weight.inputs / Code::STEP;
  const __m512 factor = _mm512_set1_ps(weight.factor);
  for (int64_t g = 0; g < groups; ++g) {
    const int64_t place = (panel * groups + g) * PANEL;
    __m512 scale[2], zero[2];
    for (int half = 0; half < 2; ++half) {
      scale[half] = _mm512_mul_ps(load_half(weight.scales + place + 16 * half), factor);
      zero[half] = weight.zeros ? load_half(weight.zeros + place + 16 * half) : _mm512_setzero_ps();
    }
    for (int64_t k = 0; k < weight.group; k += Code::STEP, codes += PANEL) {
      __m512i words[2] = {_mm512_loadu_si512(codes), _mm512_loadu_si512(codes + 16)};
      for (int64_t pair = 0; pair < Code::STEP; pair += 2)
        for (int half = 0; half < 2; ++half, dense += PANEL)
          _mm512_storeu_si512(
              dense, scale_pairs(code.take(words[half], pair), zero[half], scale[half]));
    }
  }
}

}  // namespace quire
