// One tile of the dense product in bfloat16 operands and float32 sums.
#pragma once

#include "amx.h"
#include "panels/results.h"
#include "walk.h"

namespace quire {

// sums[rows][32] = x[rows][count] * part of a panel, by vectors; 1 to 12 rows, `stride` apart. It is
// added to what is there, unless the part is the `first`.
template <int ROWS>
inline void dense_tile(const bf16* x, int64_t stride, int64_t count, const bf16* panel,
                       Ahead& ahead, bool first, float* sums) {
  __m512 totals[ROWS][2];
#pragma GCC unroll 12
  for (int r = 0; r < ROWS; ++r)
    for (int half = 0; half < 2; ++half)
      totals[r][half] =
          first ? _mm512_setzero_ps() : _mm512_load_ps(sums + r * PANEL + 16 * half);
  for (int64_t begin = 0; begin < count; begin += 2 * TURNS) {
    ahead.fetch();
    for (int64_t k = begin; k < begin + 2 * TURNS; k += 2, panel += 2 * PANEL) {
      const auto left = reinterpret_cast<__m512bh>(_mm512_loadu_si512(panel));
      const auto right = reinterpret_cast<__m512bh>(_mm512_loadu_si512(panel + PANEL));
#pragma GCC unroll 12
      for (int r = 0; r < ROWS; ++r) {
        int32_t pair;
        __builtin_memcpy(&pair, x + r * stride + k, sizeof pair);
        const auto both = reinterpret_cast<__m512bh>(_mm512_set1_epi32(pair));
        totals[r][0] = _mm512_dpbf16_ps(totals[r][0], both, left);
        totals[r][1] = _mm512_dpbf16_ps(totals[r][1], both, right);
      }
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < ROWS; ++r)
    for (int half = 0; half < 2; ++half)
      _mm512_store_ps(sums + r * PANEL + 16 * half, totals[r][half]);
}

// Rows of activations for products with bfloat16 weights, where AMX or vectors read them.
struct DenseRows {
  using Value = bf16;

  const Value* data;
  int64_t inputs;
  bool amx;
  BlockLayout layout;

  // How so many rows lie: vectors read them one after the other.
  static BlockLayout layout_of(int64_t rows, int64_t inputs, bool amx) {
    return amx ? BlockLayout::of(rows, inputs * 2) : BlockLayout::as_given(inputs * 2);
  }

  // How many are multiplied before the next panel.
  int64_t max_part() const { return rows_in(cached_bytes(amx), inputs * 2); }
};

// Writes row `r` to where a layout has it.
inline void lay_row(const bf16* row, int64_t r, const BlockLayout& layout, bf16* rows) {
  const char* from = reinterpret_cast<const char*>(row);
  char* to = reinterpret_cast<char*>(rows) + layout.offset(r, 0);
  for (int64_t byte = 0; byte < layout.row_bytes; byte += STEP_BYTES, to += layout.step)
    _mm512_store_si512(to, _mm512_loadu_si512(from + byte));
}

// A caller's rows, x[rows][inputs], which outlive this: as they are, or laid out in blocks.
class GivenRows {
 public:
  GivenRows(const bf16* x, int64_t rows, int64_t inputs, bool amx)
      : laid_out_(is_laid_out(rows, amx) ? (rows + 31) / 32 * 32 * inputs : 0),
        rows_{is_laid_out(rows, amx) ? laid_out_.get() : x, inputs, amx,
              DenseRows::layout_of(rows, inputs, amx)} {
    if (!is_laid_out(rows, amx)) return;
    parallel_rows(rows, 16, [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r)
        lay_row(x + r * inputs, r, rows_.layout, laid_out_.get());
    });
  }

  const DenseRows& rows() const { return rows_; }

 private:
  static bool is_laid_out(int64_t rows, bool amx) { return amx && rows > BLOCK_ROWS; }

  const Scratch<bf16> laid_out_;
  const DenseRows rows_;
};

// One thread's products of rows by panels.
class DenseProducts {
 public:
  // The results of rows at a panel, whose weights begin at `weight`.
  template <class T>
  void multiply(const DenseRows& rows, int64_t begin, int64_t end, const bf16* weight,
                const float* bias, const Results<T>& to, int64_t panel) {
    const int64_t first = panel * PANEL;
    sum(rows, begin, end, weight, [&](int64_t row, int64_t count, const float* sums) {
      for (int64_t r = row; r < row + count; ++r)
        for (int64_t half = 0; half < PANEL; half += 16, sums += 16)
          store(_mm512_load_ps(sums), bias, to.row(r), to.outputs, first + half);
    });
  }

  // Calls body(row, count, sums) for blocks of the rows, with sums[count][PANEL].
  template <class Body>
  void sum(const DenseRows& rows, int64_t begin, int64_t end, const bf16* weight, Body body) {
    if (rows.amx)
      return blocks_.multiply(rows.layout, rows.data, begin, end, weight,
                              [&](int64_t row, int64_t count, const void* sums) {
                                body(row, count, static_cast<const float*>(sums));
                              });
    const int64_t inputs = rows.inputs;
    Ahead ahead(weight, end - begin, inputs / 2);
    const auto tile = [&]<int ROWS>(int64_t row, int64_t turn, int64_t turns, float* sums) {
      const int64_t k = 2 * turn;
      dense_tile<ROWS>(rows.data + row * inputs + k, inputs, 2 * turns, weight + k * PANEL, ahead,
                       k == 0, sums);
    };
    sum_by_tiles<float>(begin, end, inputs / 2, tile, body);
  }

 private:
  BlockProducts<StepBf16> blocks_;
};

}  // namespace quire
