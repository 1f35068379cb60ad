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
struct DenseRows {
  // x[rows][inputs], which outlives this.
  DenseRows(const bf16* x, int64_t rows, int64_t inputs, bool amx)
      : inputs(inputs),
        amx(amx),
        layout(amx ? BlockLayout::of(rows, inputs * 2) : BlockLayout::as_given(inputs * 2)),
        laid_out(is_laid_out(rows) ? (rows + 31) / 32 * 32 * inputs : 0),
        data(is_laid_out(rows) ? laid_out.get() : x) {
    if (!is_laid_out(rows)) return;
    char* blocks = reinterpret_cast<char*>(laid_out.get());
    parallel_rows(rows, 16, [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) {
        const char* from = reinterpret_cast<const char*>(x + r * inputs);
        char* to = blocks + layout.offset(r, 0);
        for (int64_t byte = 0; byte < inputs * 2; byte += STEP_BYTES, to += layout.step)
          _mm512_store_si512(to, _mm512_loadu_si512(from + byte));
      }
    });
  }

  // How many are multiplied before the next panel.
  int64_t max_part() const { return rows_in(amx ? CACHED_BLOCK_BYTES : CACHED_BYTES, inputs * 2); }

  const int64_t inputs;
  const bool amx;
  const BlockLayout layout;
  const Scratch<bf16> laid_out;
  const bf16* const data;  // these, or as given

 private:
  bool is_laid_out(int64_t rows) const { return amx && rows > BLOCK_ROWS; }
};

// One thread's products of them by panels.
class DenseProducts {
 public:
  explicit DenseProducts(const DenseRows& rows) : rows_(rows), blocks_(rows.layout) {}

  // y[begin to end][outputs] at a panel, whose weights begin at `weight`.
  template <class T>
  void multiply(int64_t begin, int64_t end, const bf16* weight, const float* bias, T* y,
                int64_t outputs, int64_t panel) {
    const int64_t first = panel * PANEL, inputs = rows_.inputs;
    if (rows_.amx) {
      const auto keep = [&](int64_t row, int64_t count, const void* sums) {
        const float* sum = static_cast<const float*>(sums);
        for (int64_t r = row; r < row + count; ++r)
          for (int64_t half = 0; half < PANEL; half += 16, sum += 16)
            store(_mm512_load_ps(sum), bias, y + r * outputs, outputs, first + half);
      };
      return blocks_.multiply(rows_.data, begin, end, weight, keep);
    }
    for_tiles(begin, end, VECTOR_ROWS, [&](int64_t row, int64_t count) {
      with_rows<VECTOR_ROWS>(count, [&]<int ROWS>() {
        __m512 sums[ROWS][2];
        dense_tile<ROWS>(rows_.data + row * inputs, inputs, weight, sums);
        for (int r = 0; r < ROWS; ++r)
          for (int half = 0; half < 2; ++half)
            store(sums[r][half], bias, y + (row + r) * outputs, outputs, first + 16 * half);
      });
    });
  }

 private:
  const DenseRows& rows_;
  BlockProducts<StepBf16> blocks_;
};

}  // namespace quire
