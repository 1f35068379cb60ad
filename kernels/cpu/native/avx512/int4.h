// The int4 product; see panels/four_bits.h. With more than a few rows activations are rounded by row,
// and a panel of weights becomes one of int8.h and is multiplied as those are.
#pragma once

#include "int8.h"
#include "panels/four_bits.h"

namespace quire {

constexpr int64_t INT4_ROWS = 6;  // few: 12 sums of a group and 12 of all stay in registers

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
      sums[r][0] = sums[r][1] = _mm512_set1_epi32(told[r * groups + g].start);
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

inline void multiply_few(const bf16* x, int64_t rows, const Int4Weight& weight,
                         const Wanted& wanted) {
  const Int4Rows rounded(x, rows, weight.inputs);
  for_results(rows, INT4_ROWS, wanted, [&] {
    return [&](int64_t, int64_t, int64_t panel, const auto& to) {
      with_rows<INT4_ROWS>(rows, [&]<int ROWS>() {
        int4_tile<ROWS>(rounded.codes(), rounded.told(), weight, panel, to);
      });
    };
  });
}

inline void multiply_many(const bf16* x, int64_t rows, const Int4Weight& weight,
                          const Wanted& wanted, bool amx) {
  const GivenCodes given(x, rows, weight.inputs, amx);
  for_results(rows, given.rows().max_part(), wanted, [&] {
    return [&, codes = Scratch<int8_t>(PANEL * weight.inputs), products = Int8Products()](
               int64_t begin, int64_t end, int64_t panel, const auto& to) mutable {
      widen_panel(weight, panel, codes.get());
      const int64_t first = panel * PANEL;
      const Int8Panel widened{codes.get(), weight.whole_scales + first, weight.totals + first,
                              false};
      products.multiply(given.rows(), begin, end, widened, weight.bias, to, panel);
    };
  });
}

// All results of a caller's rows.
inline void multiply_int4(const bf16* x, int64_t rows, const Int4Weight& weight,
                          const Wanted& wanted, bool amx) {
  if (rows <= INT4_ROWS)
    multiply_few(x, rows, weight, wanted);
  else
    multiply_many(x, rows, weight, wanted, amx);
}

// What a weight's codes of eight bits are scaled by, and their sums.
inline void measure_panel(Int4Weight weight, int64_t panel, float* whole_scales, int32_t* totals) {
  const int64_t groups = weight.groups(), first = panel * PANEL;
  const uint16_t* scales = weight.scales + first * groups;
  for (int64_t half = 0; half < PANEL; half += 16) {
    __m512 most = _mm512_setzero_ps();
    for (int64_t g = 0; g < groups; ++g)
      most = _mm512_max_ps(most, _mm512_abs_ps(load_scales(scales + g * PANEL + half)));
    // Level -8 of the largest scale becomes 127 or -127.
    _mm512_storeu_ps(whole_scales + first + half, _mm512_mul_ps(most, _mm512_set1_ps(8.0f / 127)));
  }
  const Scratch<int8_t> codes(PANEL * weight.inputs);
  widen_panel(weight, panel, codes.get());
  std::fill_n(totals + first, PANEL, 0);
  for (int64_t i = 0; i < PANEL * weight.inputs; ++i)
    totals[first + i / 4 % PANEL] += codes.get()[i];
}

}  // namespace quire
