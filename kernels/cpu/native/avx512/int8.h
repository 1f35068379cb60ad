// One tile of the int8 product; see panels/eight_bits.h.
#pragma once

#include "amx.h"
#include "panels/eight_bits.h"
#include "walk.h"

namespace quire {

// sums[rows][32] = codes[rows][count] * part of a panel, by vectors; 1 to 12 rows, `stride` apart. It
// is added to what is there, unless the part is the `first`. Where it is left to choose when it
// unrolls or what it inlines, GCC 12 writes sums to memory in every turn: up to 2.2 times the time.
template <int ROWS>
[[gnu::noinline]] void int8_tile(const uint8_t* codes, int64_t stride, int64_t count,
                                 const int8_t* panel, Ahead& ahead, bool first, int32_t* sums) {
  __m512i totals[ROWS][2];
#pragma GCC unroll 12
  for (auto& row : totals) row[0] = row[1] = _mm512_setzero_si512();
  for (int64_t begin = 0; begin < count; begin += 4 * TURNS) {
    ahead.fetch();
    for (int64_t k = begin; k < begin + 4 * TURNS; k += 4, panel += 4 * PANEL) {
      const __m512i left = _mm512_loadu_si512(panel), right = _mm512_loadu_si512(panel + 64);
#pragma GCC unroll 12
      for (int r = 0; r < ROWS; ++r) {
        int32_t four;
        __builtin_memcpy(&four, codes + r * stride + k, sizeof four);
        const __m512i all = _mm512_set1_epi32(four);
        totals[r][0] = _mm512_dpbusd_epi32(totals[r][0], all, left);
        totals[r][1] = _mm512_dpbusd_epi32(totals[r][1], all, right);
      }
    }
  }
  if (first) {
#pragma GCC unroll 12
    for (int r = 0; r < ROWS; ++r)
      for (int half = 0; half < 2; ++half)
        _mm512_store_si512(sums + r * PANEL + 16 * half, totals[r][half]);
  } else {
#pragma GCC unroll 12
    for (int r = 0; r < ROWS; ++r)
      for (int half = 0; half < 2; ++half) {
        int32_t* sum = sums + r * PANEL + 16 * half;
        _mm512_store_si512(sum, _mm512_add_epi32(totals[r][half], _mm512_load_si512(sum)));
      }
  }
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
    const auto keep = [&](int64_t row, int64_t count, const int32_t* sums) {
      outputs.store(sums, rows.told, row, count);
    };
    if (rows.amx) return blocks_.multiply(rows.layout, rows.codes, begin, end, codes, keep);
    const int64_t inputs = rows.inputs;
    Ahead ahead(codes, weights.in_memory ? end - begin : 0, inputs / 4);
    const auto tile = [&]<int ROWS>(int64_t row, int64_t turn, int64_t turns, int32_t* sums) {
      const int64_t k = 4 * turn;
      int8_tile<ROWS>(rows.codes + row * inputs + k, inputs, 4 * turns, codes + k * PANEL, ahead,
                      k == 0, sums);
    };
    sum_by_tiles<int32_t>(begin, end, inputs / 4, tile, keep);
  }

 private:
  BlockProducts<StepInt8> blocks_;
};

}  // namespace quire
