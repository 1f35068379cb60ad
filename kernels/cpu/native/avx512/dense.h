// One tile of the dense product in bfloat16 operands and float32 sums.
#pragma once

#include "amx.h"

namespace quire {

// sums[rows][32] = x[rows][inputs] * panel, by vectors; 1 to 12 rows.
template <int ROWS>
inline void dense_tile(const bf16* x, int64_t inputs, const bf16* panel, __m512 (&sums)[ROWS][2]) {
  for (auto& row : sums) row[0] = row[1] = _mm512_setzero_ps();
  for (int64_t k = 0; k < inputs; k += 2, panel += 2 * PANEL) {
    const auto left = reinterpret_cast<__m512bh>(_mm512_loadu_si512(panel));
    const auto right = reinterpret_cast<__m512bh>(_mm512_loadu_si512(panel + PANEL));
    for (int r = 0; r < ROWS; ++r) {
      int32_t pair;
      __builtin_memcpy(&pair, x + r * inputs + k, sizeof pair);
      const auto both = reinterpret_cast<__m512bh>(_mm512_set1_epi32(pair));
      sums[r][0] = _mm512_dpbf16_ps(sums[r][0], both, left);
      sums[r][1] = _mm512_dpbf16_ps(sums[r][1], both, right);
    }
  }
}

// y[begin to end][outputs] at a panel, by AMX or by vectors.
inline void dense_panel(const bf16* x, int64_t begin, int64_t end, int64_t inputs,
                        const bf16* weight, const float* bias, bf16* y, int64_t outputs,
                        int64_t panel, bool amx) {
  const int64_t first = panel * PANEL;
  if (amx) {
    alignas(64) float sums[MATRIX_ROWS][PANEL];
    for_tiles(begin, end, MATRIX_ROWS, [&](int64_t row, int64_t count) {
      amx_block<StepBf16>(x + row * inputs, inputs * 2, count, weight, sums);
      for (int64_t r = 0; r < count; ++r)
        for (int64_t half = 0; half < PANEL; half += 16)
          store(_mm512_load_ps(&sums[r][half]), bias, y + (row + r) * outputs, outputs,
                first + half);
    });
    return;
  }
  for_tiles(begin, end, VECTOR_ROWS, [&](int64_t row, int64_t count) {
    with_rows<VECTOR_ROWS>(count, [&]<int ROWS>() {
      __m512 sums[ROWS][2];
      dense_tile<ROWS>(x + row * inputs, inputs, weight, sums);
      for (int r = 0; r < ROWS; ++r)
        for (int half = 0; half < 2; ++half)
          store(sums[r][half], bias, y + (row + r) * outputs, outputs, first + 16 * half);
    });
  });
}

}  // namespace quire
