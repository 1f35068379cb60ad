// One tile of the int8 product: weights in int8, activations rounded to eight bits row by row:
//
//     x[k] ~ step * (code[k] - zero)    codes 0 to 255 span the row's values, zero among them
//     y[n] = step * scale[n] * (sum(code * weight[n]) - zero * sum(weight[n])) + bias[n]
#pragma once

#include <limits>

#include "amx.h"
#include "results.h"

namespace quire {

// How a row was rounded.
struct RoundedRow {
  float step;
  int32_t zero;
};

// 16 values from bfloat16.
inline __m512 widen(const bf16* x) {
  const __m256i raw = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(raw), 16));
}

// Rounds a row to codes, of which 64 lie together and the next 64 `stride` behind them; `inputs` is
// a multiple of 64. A row that is not finite has such a step, so that its results are not finite
// either.
inline RoundedRow quantise(const bf16* x, int64_t inputs, uint8_t* codes, int64_t stride) {
  __m512 least = _mm512_setzero_ps(), most = least;  // zero has a code of its own
  __m512 taint = least;  // the sum of 0 * value, not a number where a value is not finite
  for (int64_t k = 0; k < inputs; k += 16) {
    const __m512 values = widen(x + k);
    least = _mm512_min_ps(least, values);
    most = _mm512_max_ps(most, values);
    taint = _mm512_fmadd_ps(_mm512_setzero_ps(), values, taint);
  }
  if (_mm512_cmp_ps_mask(taint, taint, _CMP_UNORD_Q)) {
    for (int64_t k = 0; k < inputs; k += 64, codes += stride) std::fill_n(codes, 64, uint8_t{0});
    return {std::numeric_limits<float>::quiet_NaN(), 0};
  }
  const float low = _mm512_reduce_min_ps(least), high = _mm512_reduce_max_ps(most);
  const float step = high > low ? (high - low) / 255.0f : 1.0f;
  const int32_t zero = static_cast<int32_t>(-low / step + 0.5f);
  const __m512 inverse = _mm512_set1_ps(1.0f / step);
  const __m512i shift = _mm512_set1_epi32(zero);
  for (int64_t k = 0; k < inputs; k += 16) {
    const __m512i steps = _mm512_cvtps_epi32(_mm512_mul_ps(widen(x + k), inverse));
    const __m512i whole = _mm512_max_epi32(_mm512_add_epi32(steps, shift), _mm512_setzero_si512());
    const __m128i bytes = _mm512_cvtusepi32_epi8(whole);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(codes + k / 64 * stride + k % 64), bytes);
  }
  return {step, zero};
}

// sums[rows][32] = codes[rows][inputs] * panel, by vectors; 1 to 12 rows. Where it is left to choose
// when it unrolls, GCC 12 writes all sums to memory in every turn: 2.2 times the time.
template <int ROWS>
inline void int8_tile(const uint8_t* codes, int64_t inputs, const int8_t* panel, Ahead& ahead,
                      int32_t* sums) {
  __m512i totals[ROWS][2];
#pragma GCC unroll 12
  for (auto& row : totals) row[0] = row[1] = _mm512_setzero_si512();
  for (int64_t begin = 0; begin < inputs; begin += 4 * TURNS) {
    ahead.fetch();
    for (int64_t k = begin; k < begin + 4 * TURNS; k += 4, panel += 4 * PANEL) {
      const __m512i left = _mm512_loadu_si512(panel), right = _mm512_loadu_si512(panel + 64);
#pragma GCC unroll 12
      for (int r = 0; r < ROWS; ++r) {
        int32_t four;
        __builtin_memcpy(&four, codes + r * inputs + k, sizeof four);
        const __m512i all = _mm512_set1_epi32(four);
        totals[r][0] = _mm512_dpbusd_epi32(totals[r][0], all, left);
        totals[r][1] = _mm512_dpbusd_epi32(totals[r][1], all, right);
      }
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < ROWS; ++r)
    for (int half = 0; half < 2; ++half)
      _mm512_store_si512(sums + r * PANEL + 16 * half, totals[r][half]);
}

// Weights of 32 outputs: one scale an output, and the sum of its codes. Of the last panel scales and
// sums may end with the outputs.
struct Int8Panel {
  const int8_t* codes;
  const float* scales;
  const int32_t* totals;
};

// What turns a panel's sums into results.
template <class T>
class Int8Outputs {
 public:
  Int8Outputs(const Int8Panel& weights, const float* bias, const Results<T>& to, int64_t panel)
      : bias_(bias), to_(to), first_(panel * PANEL) {
    for (int half = 0; half < 2; ++half) {
      const __mmask16 mask = lanes(to.outputs, first_ + 16 * half);
      scales_[half] = _mm512_maskz_loadu_ps(mask, weights.scales + 16 * half);
      totals_[half] = _mm512_maskz_loadu_epi32(mask, weights.totals + 16 * half);
    }
  }

  // Of `count` rows from `row` on, which were rounded so, from sums[count][32].
  void store(const int32_t* sums, const RoundedRow* rows, int64_t row, int64_t count) const {
    for (int64_t r = row; r < row + count; ++r) {
      const __m512i zero = _mm512_set1_epi32(rows[r].zero);
      const __m512 step = _mm512_set1_ps(rows[r].step);
      for (int half = 0; half < 2; ++half, sums += 16) {
        const __m512i excess = _mm512_mullo_epi32(totals_[half], zero);
        const __m512 exact = _mm512_cvtepi32_ps(_mm512_sub_epi32(_mm512_load_si512(sums), excess));
        quire::store(_mm512_mul_ps(exact, _mm512_mul_ps(scales_[half], step)), bias_, to_.row(r),
                     to_.outputs, first_ + 16 * half);
      }
    }
  }

 private:
  __m512 scales_[2];
  __m512i totals_[2];
  const float* bias_;
  const Results<T> to_;
  const int64_t first_;
};

// A weight in int8, of all its outputs.
struct Int8Weight {
  const int8_t* packed;
  const float* scales;
  const int32_t* totals;

  Int8Panel panel(int64_t index, int64_t inputs) const {
    const int64_t first = index * PANEL;
    return {packed + first * inputs, scales + first, totals + first};
  }
};

// Rows of activations as codes, where AMX or vectors read them.
struct Int8Rows {
  const uint8_t* codes;
  const RoundedRow* told;  // of each row
  int64_t inputs;
  bool amx;
  BlockLayout layout;

  static BlockLayout layout_of(int64_t rows, int64_t inputs, bool amx) {
    return amx ? BlockLayout::of(rows, inputs) : BlockLayout::as_given(inputs);
  }

  // How many are multiplied before the next panel.
  int64_t max_part() const { return rows_in(amx ? CACHED_BLOCK_BYTES : CACHED_BYTES, inputs); }
};

// A caller's rows, rounded.
class GivenCodes {
 public:
  GivenCodes(const bf16* x, int64_t rows, int64_t inputs, bool amx)
      : codes_((rows + 31) / 32 * 32 * inputs),
        told_(rows),
        rows_{codes_.get(), told_.get(), inputs, amx, Int8Rows::layout_of(rows, inputs, amx)} {
    const BlockLayout layout = rows_.layout;
    parallel_rows(rows, 4, [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r)
        told_.get()[r] =
            quantise(x + r * inputs, inputs, codes_.get() + layout.offset(r, 0), layout.step);
    });
  }

  const Int8Rows& rows() const { return rows_; }

 private:
  const Scratch<uint8_t> codes_;
  const Scratch<RoundedRow> told_;
  const Int8Rows rows_;
};

// One thread's products of rows by panels.
class Int8Products {
 public:
  // The results of rows at a panel; `bias`, of all outputs, may be null.
  template <class T>
  void multiply(const Int8Rows& rows, int64_t begin, int64_t end, const Int8Panel& weights,
                const float* bias, const Results<T>& to, int64_t panel) {
    const int8_t* codes = weights.codes;
    const Int8Outputs<T> outputs(weights, bias, to, panel);
    if (rows.amx) {
      const auto keep = [&](int64_t row, int64_t count, const int32_t* sums) {
        outputs.store(sums, rows.told, row, count);
      };
      return blocks_.multiply(rows.layout, rows.codes, begin, end, codes, keep);
    }
    alignas(64) int32_t sums[VECTOR_ROWS * PANEL];
    Ahead ahead(codes, PANEL * rows.inputs, end - begin, rows.inputs / 4);
    for_tiles(begin, end, VECTOR_ROWS, [&](int64_t row, int64_t count) {
      with_rows<VECTOR_ROWS>(count, [&]<int ROWS>() {
        int8_tile<ROWS>(rows.codes + row * rows.inputs, rows.inputs, codes, ahead, sums);
      });
      outputs.store(sums, rows.told, row, count);
    });
  }

 private:
  BlockProducts<StepInt8> blocks_;
};

}  // namespace quire
