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

// The rows of a product, as AMX or vectors read them.
class DenseRows {
 public:
  // x[rows][inputs], which outlives this.
  DenseRows(const bf16* x, int64_t rows, int64_t inputs, bool amx)
      : x_(x),
        inputs_(inputs),
        layout_(amx ? BlockLayout::of(rows, inputs * 2) : BlockLayout::as_given(inputs * 2)),
        blocks_(is_laid_out(rows, amx) ? (rows + 31) / 32 * 32 * inputs : 0),
        amx_(amx) {
    if (!is_laid_out(rows, amx)) return;
    char* blocks = reinterpret_cast<char*>(blocks_.get());
    parallel_rows(rows, 16, [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) {
        const char* from = reinterpret_cast<const char*>(x + r * inputs);
        char* to = blocks + layout_.offset(r, 0);
        for (int64_t byte = 0; byte < inputs * 2; byte += STEP_BYTES, to += layout_.step)
          _mm512_store_si512(to, _mm512_loadu_si512(from + byte));
      }
    });
    x_ = blocks_.get();
  }

  // How many are multiplied before the next panel.
  int64_t max_part() const {
    return rows_in(amx_ ? CACHED_BLOCK_BYTES : CACHED_BYTES, inputs_ * 2);
  }

  // y[begin to end][outputs] at a panel, whose weights begin at `weight`.
  template <class T>
  void multiply(int64_t begin, int64_t end, const bf16* weight, const float* bias, T* y,
                int64_t outputs, int64_t panel) const {
    const int64_t first = panel * PANEL;
    if (amx_) {
      const auto keep = [&](int64_t row, int64_t count, const void* sums) {
        const float* sum = static_cast<const float*>(sums);
        for (int64_t r = row; r < row + count; ++r)
          for (int64_t half = 0; half < PANEL; half += 16, sum += 16)
            store(_mm512_load_ps(sum), bias, y + r * outputs, outputs, first + half);
      };
      return for_block_sums<StepBf16>(x_, layout_, begin, end, weight, keep);
    }
    for_tiles(begin, end, VECTOR_ROWS, [&](int64_t row, int64_t count) {
      with_rows<VECTOR_ROWS>(count, [&]<int ROWS>() {
        __m512 sums[ROWS][2];
        dense_tile<ROWS>(x_ + row * inputs_, inputs_, weight, sums);
        for (int r = 0; r < ROWS; ++r)
          for (int half = 0; half < 2; ++half)
            store(sums[r][half], bias, y + (row + r) * outputs, outputs, first + 16 * half);
      });
    });
  }

 private:
  static bool is_laid_out(int64_t rows, bool amx) { return amx && rows > BLOCK_ROWS; }

  const bf16* x_;
  const int64_t inputs_;
  const BlockLayout layout_;
  const Scratch<bf16> blocks_;
  const bool amx_;
};

}  // namespace quire
