// One tile of the int8 product; see panels/eight_bits.h.
#pragma once

#include "amx.h"
#include "panels/eight_bits.h"

namespace quire {

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
