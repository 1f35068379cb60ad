// One tile of the dense product: weights in bfloat16, which are floats but for their last 16 bits;
// activations as floats.
#pragma once

#include "panels/layout.h"
#include "panels/results.h"
#include "registers.h"

namespace quire {

// Rows of a tile. Ten sums, two weights, an activation and the mask of the upper weight stay in 16
// registers; GCC keeps some of twelve sums in memory.
constexpr int64_t DENSE_ROWS = 5;
constexpr int64_t DENSE_WIDE_ROWS = 2;  // of which all of a panel's sums stay in registers
constexpr int64_t DENSE_PIECE = 256;    // inputs of a panel in half of the first-level cache

// sums[ROWS][OUTPUTS of 32] += x[ROWS][count] * part of a panel. `x_stride` is that of the rows.
template <int ROWS, int64_t OUTPUTS>
inline void dense_tile(const float* x, int64_t x_stride, const bf16* panel, int64_t count,
                       float* sums) {
  constexpr int64_t VECTORS = OUTPUTS / WIDTH;
  Vector totals[ROWS][VECTORS];
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
    for (int64_t v = 0; v < VECTORS; ++v)
      totals[r][v] = load_as<Vector>(sums + r * PANEL + v * WIDTH);
  // What `widen` makes of pairs of weights, by the activations at k.
  const auto multiply = [&](int64_t k, auto widen) __attribute__((always_inline)) {
    Vector weights[VECTORS];
#pragma GCC unroll 8
    for (int64_t v = 0; v < VECTORS; ++v)
      weights[v] = (Vector)widen(load_as<Bits>(panel + v * 2 * WIDTH));
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
      for (int64_t v = 0; v < VECTORS; ++v) totals[r][v] += x[r * x_stride + k] * weights[v];
  };
  for (int64_t k = 0; k < count; k += 2, panel += 2 * PANEL) {
    if constexpr (OUTPUTS < PANEL) fetch_ahead(panel, DENSE_PIECE * PANEL * 2);
    multiply(k, [](Bits pairs) { return pairs << 16; });
    multiply(k + 1, [](Bits pairs) { return pairs & 0xFFFF0000; });
  }
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
    for (int64_t v = 0; v < VECTORS; ++v)
      std::memcpy(sums + r * PANEL + v * WIDTH, &totals[r][v], REGISTER_BYTES);
}

// Rows of activations for products with bfloat16 weights, as floats, one after the other.
struct DenseRows {
  using Value = float;

  const Value* data;
  int64_t inputs;
  bool amx;  // there is none here
  BlockLayout layout;

  static BlockLayout layout_of(int64_t, int64_t inputs, bool) {
    return BlockLayout::as_given(inputs * 4);
  }

  // How many are multiplied before the next panel.
  int64_t max_part() const { return rows_in(cached_bytes(amx), inputs * 4); }
};

// Writes row `r` to where a layout has it.
inline void lay_row(const bf16* row, int64_t r, const BlockLayout& layout, float* rows) {
  float* to = rows + layout.offset(r, 0) / 4;
  const auto* from = reinterpret_cast<const bfloat16*>(row);
  for (int64_t k = 0; k < layout.row_bytes / 4; k += LANES) store(to + k, load(from + k));
}

// A caller's rows, x[rows][inputs], widened.
class GivenRows {
 public:
  GivenRows(const bf16* x, int64_t rows, int64_t inputs, bool amx)
      : floats_(rows * inputs),
        rows_{floats_.get(), inputs, amx, DenseRows::layout_of(rows, inputs, amx)} {
    parallel_rows(rows, 16, [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r)
        lay_row(x + r * inputs, r, rows_.layout, floats_.get());
    });
  }

  const DenseRows& rows() const { return rows_; }

 private:
  const Scratch<float> floats_;
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
        for (int64_t half = 0; half < PANEL; half += LANES, sums += LANES)
          store(load(sums), bias, to.row(r), to.outputs, first + half);
    });
  }

  // Calls body(row, count, sums) for tiles of the rows, with sums[count][PANEL].
  template <class Body>
  void sum(const DenseRows& rows, int64_t begin, int64_t end, const bf16* weight, Body body) {
    for_tiles(begin, end, DENSE_ROWS, [&](int64_t row, int64_t count) {
      alignas(64) float sums[DENSE_ROWS * PANEL] = {};
      const float* x = rows.data + row * rows.inputs;
      with_rows<DENSE_ROWS>(count, [&]<int ROWS>() {
        constexpr int64_t OUTPUTS = ROWS <= DENSE_WIDE_ROWS ? PANEL : HALF_PANEL;
        for_pieces<OUTPUTS>(rows.inputs, DENSE_PIECE, [&](int64_t k, int64_t inputs, int64_t n) {
          const bf16* part = weight + k * PANEL + 2 * n;
          dense_tile<ROWS, OUTPUTS>(x + k, rows.inputs, part, inputs, sums + n);
        });
      });
      body(row, count, sums);
    });
  }
};

}  // namespace quire
