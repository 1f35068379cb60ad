// One tile of the int4 product: weights of 4 bits in groups of 32 inputs that share a scale. With
// few rows activations are rounded to eight bits in the same groups:
//
//     x[k] ~ step[g] * code[k]    codes -127 to 127 span the group's values
//     y[n] = sum over g of scale[n][g] * step[g] * sum(code * level[n] in g) + bias[n]
//
// With more a panel of weights becomes one of int8.h, and is multiplied as those are.
//
// Words are those of grouped.h, of eight inputs. Bits that a mask leaves of a word, and of the word
// shifted, are bytes of its inputs in the order 0 4 1 5 2 6 3 7: so lie the activations' codes too.
#pragma once

#include "int8.h"

namespace quire {

constexpr int64_t INT4_GROUP = 32;  // inputs that share a scale
constexpr int64_t INT4_ROWS = 6;    // few: 12 sums of a group and 12 of all stay in registers
constexpr int64_t WORD_INPUTS = 8;

// How a group of a row was rounded.
struct RoundedGroup {
  float step;
  int32_t excess;  // what the group's sum is too large by where levels count from 0, not from -8
};

// A weight [outputs][inputs] in panels.
struct Int4Weight {
  const uint32_t* words;      // [panels][inputs / 8][32]
  const uint16_t* scales;     // [panels][inputs / 32][32] float16
  const float* whole_scales;  // [panels][32], of outputs whose codes have eight bits
  const int32_t* totals;      // [panels][32], the sums of these codes
  const float* bias;          // or null
  int64_t inputs;             // a multiple of 64

  int64_t groups() const { return inputs / INT4_GROUP; }
};

// Rounds 32 values to codes. A group that is not finite has such a step, so that the results of its
// row are not finite either.
inline RoundedGroup round_group(const bf16* x, int8_t* codes) {
  const __m512 first = widen(x), second = widen(x + 16);
  const float most =
      _mm512_reduce_max_ps(_mm512_max_ps(_mm512_abs_ps(first), _mm512_abs_ps(second)));
  const __m512 taint = _mm512_mul_ps(_mm512_add_ps(first, second), _mm512_setzero_ps());
  const __m512 inverse = _mm512_set1_ps(most > 0 ? 127.0f / most : 0.0f);
  const auto rounded = [&](__m512 values) {
    return _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(_mm512_mul_ps(values, inverse)));
  };
  const __m256i in_order = _mm256_set_m128i(rounded(second), rounded(first));
  const __m256i places = _mm256_broadcastsi128_si256(
      _mm_set_epi8(15, 11, 14, 10, 13, 9, 12, 8, 7, 3, 6, 2, 5, 1, 4, 0));
  const __m256i bytes = _mm256_shuffle_epi8(in_order, places);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(codes), bytes);
  const __m256i eights = _mm256_set1_epi8(8);
  const __m512i excess =
      _mm512_zextsi256_si512(_mm256_dpbusd_epi32(_mm256_setzero_si256(), eights, bytes));
  return {most / 127.0f + _mm512_reduce_add_ps(taint), _mm512_reduce_add_epi32(excess)};
}

inline __m512 load_scales(const uint16_t* scales) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(scales)));
}

// The results of all rows at a panel, by vectors; 1 to INT4_ROWS rows.
template <int ROWS, class T>
void int4_tile(const int8_t* codes, const RoundedGroup* told, const Int4Weight& weight,
               int64_t panel, const Results<T>& to) {
  const int64_t groups = weight.groups();
  const uint32_t* words = weight.words + panel * PANEL * weight.inputs / WORD_INPUTS;
  const uint16_t* scales = weight.scales + panel * PANEL * groups;
  const __m512i nibbles = _mm512_set1_epi8(15);
  __m512 totals[ROWS][2];
  for (auto& row : totals) row[0] = row[1] = _mm512_setzero_ps();
  for (int64_t g = 0; g < groups; ++g, scales += PANEL) {
    __m512i sums[ROWS][2];
    for (int r = 0; r < ROWS; ++r)
      sums[r][0] = sums[r][1] = _mm512_set1_epi32(-told[r * groups + g].excess);
    for (int64_t k = 0; k < INT4_GROUP; k += WORD_INPUTS, words += PANEL) {
      for (int half = 0; half < 2; ++half) {
        const __m512i word = _mm512_loadu_si512(words + 16 * half);
        const __m512i early = _mm512_and_si512(word, nibbles);
        const __m512i late = _mm512_and_si512(_mm512_srli_epi32(word, 4), nibbles);
        for (int r = 0; r < ROWS; ++r) {
          int32_t fours[2];
          __builtin_memcpy(fours, codes + r * weight.inputs + g * INT4_GROUP + k, sizeof fours);
          sums[r][half] = _mm512_dpbusd_epi32(sums[r][half], early, _mm512_set1_epi32(fours[0]));
          sums[r][half] = _mm512_dpbusd_epi32(sums[r][half], late, _mm512_set1_epi32(fours[1]));
        }
      }
    }
    for (int half = 0; half < 2; ++half) {
      const __m512 scale = load_scales(scales + 16 * half);
      for (int r = 0; r < ROWS; ++r) {
        const __m512 step = _mm512_set1_ps(told[r * groups + g].step);
        totals[r][half] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sums[r][half]),
                                          _mm512_mul_ps(scale, step), totals[r][half]);
      }
    }
  }
  for (int r = 0; r < ROWS; ++r)
    for (int half = 0; half < 2; ++half)
      store(totals[r][half], weight.bias, to.row(r), to.outputs, panel * PANEL + 16 * half);
}

// A panel's codes as int8.h multiplies them, [inputs / 4][32][4], one scale an output: what is
// rounded off is a small part of what the 4 bits rounded off before.
inline void widen_panel(const Int4Weight& weight, int64_t panel, int8_t* codes) {
  const int64_t groups = weight.groups();
  // Levels -8 to 7 in sixteenths of 256, twice, as five bits choose, and ...
  const __m512i levels = _mm512_slli_epi16(
      _mm512_broadcast_i64x4(
          _mm256_set_epi16(7, 6, 5, 4, 3, 2, 1, 0, -1, -2, -3, -4, -5, -6, -7, -8)),
      4);
  // Two inputs of four outputs and the next two of the same: those of each output together.
  const __m512i places = _mm512_broadcast_i32x4(
      _mm_set_epi8(15, 14, 7, 6, 13, 12, 5, 4, 11, 10, 3, 2, 9, 8, 1, 0));
  for (int half = 0; half < 2; ++half) {
    const uint32_t* words = weight.words + panel * PANEL * weight.inputs / WORD_INPUTS + 16 * half;
    const uint16_t* scales = weight.scales + panel * PANEL * groups + 16 * half;
    const __m512 whole = _mm512_loadu_ps(weight.whole_scales + panel * PANEL + 16 * half);
    // ... factors in 2048ths make codes in 32768ths, which one instruction rounds.
    const __m512 per_scale = _mm512_maskz_div_ps(
        _mm512_cmp_ps_mask(whole, _mm512_setzero_ps(), _CMP_GT_OQ), _mm512_set1_ps(2048), whole);
    int8_t* to = codes + 64 * half;
    for (int64_t g = 0; g < groups; ++g, scales += PANEL) {
      const __m512i single = _mm512_cvtps_epi32(_mm512_mul_ps(load_scales(scales), per_scale));
      const __m512i factors =
          _mm512_mask_blend_epi16(0xaaaaaaaa, single, _mm512_slli_epi32(single, 16));
      for (int64_t k = 0; k < INT4_GROUP; k += WORD_INPUTS, words += PANEL) {
        __m512i word = _mm512_loadu_si512(words), pairs[4];
        for (__m512i& pair : pairs) {
          pair = _mm512_mulhrs_epi16(_mm512_permutexvar_epi16(word, levels), factors);
          word = _mm512_srli_epi32(word, 4);
        }
        for (int four = 0; four < 2; ++four, to += 4 * PANEL) {
          const __m512i bytes = _mm512_packs_epi16(pairs[2 * four], pairs[2 * four + 1]);
          _mm512_store_si512(to, _mm512_shuffle_epi8(bytes, places));
        }
      }
    }
  }
}

// A caller's few rows, x[rows][inputs], rounded in groups.
class Int4Rows {
 public:
  Int4Rows(const bf16* x, int64_t rows, int64_t inputs)
      : codes_(rows * inputs), told_(rows * inputs / INT4_GROUP) {
    for (int64_t g = 0; g < rows * inputs / INT4_GROUP; ++g)
      told_.get()[g] = round_group(x + g * INT4_GROUP, codes_.get() + g * INT4_GROUP);
  }

  const int8_t* codes() const { return codes_.get(); }
  const RoundedGroup* told() const { return told_.get(); }

 private:
  const Scratch<int8_t> codes_;
  const Scratch<RoundedGroup> told_;
};

}  // namespace quire
