// One tile of the int8 product; see panels/eight_bits.h.
#pragma once

#include "panels/eight_bits.h"
#include "registers.h"

namespace quire {

constexpr int64_t INT8_ROWS = 4;       // rows of a tile: eight sums stay in registers
constexpr int64_t INT8_WIDE_ROWS = 1;  // of which all of a panel's sums do
constexpr int64_t INT8_PIECE = 512;    // inputs of a panel in half of the first-level cache

// sums[ROWS][OUTPUTS of 32] += codes[ROWS][count] * part of a panel. `stride` is that of the rows.
template <int ROWS, int64_t OUTPUTS>
inline void int8_tile(const uint8_t* codes, int64_t stride, const int8_t* panel, int64_t count,
                      int32_t* sums) {
  constexpr int64_t VECTORS = OUTPUTS / WIDTH;
  Whole totals[ROWS][VECTORS];
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
    for (int64_t v = 0; v < VECTORS; ++v)
      totals[r][v] = load_as<Whole>(sums + r * PANEL + v * WIDTH);
  for (int64_t k = 0; k < count; k += 4, panel += 4 * PANEL) {
    if constexpr (OUTPUTS < PANEL) fetch_ahead(panel);
    Whole weights[VECTORS];
#pragma GCC unroll 8
    for (int64_t v = 0; v < VECTORS; ++v) weights[v] = load_as<Whole>(panel + v * REGISTER_BYTES);
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r) {
      const Four four(codes + r * stride + k);
#pragma GCC unroll 8
      for (int64_t v = 0; v < VECTORS; ++v) totals[r][v] = four.add(totals[r][v], weights[v]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
    for (int64_t v = 0; v < VECTORS; ++v)
      std::memcpy(sums + r * PANEL + v * WIDTH, &totals[r][v], REGISTER_BYTES);
}

// One thread's products of rows by panels.
class Int8Products {
 public:
  // The results of rows at a panel; `bias`, of all outputs, may be null.
  template <class T>
  void multiply(const Int8Rows& rows, int64_t begin, int64_t end, const Int8Panel& weights,
                const float* bias, const Results<T>& to, int64_t panel) {
    const Int8Outputs<T> outputs(weights, bias, to, panel);
    for_tiles(begin, end, INT8_ROWS, [&](int64_t row, int64_t count) {
      alignas(64) int32_t sums[INT8_ROWS * PANEL] = {};
      const uint8_t* codes = rows.codes + row * rows.inputs;
      with_rows<INT8_ROWS>(count, [&]<int ROWS>() {
        constexpr int64_t OUTPUTS = ROWS <= INT8_WIDE_ROWS ? PANEL : HALF_PANEL;
        for_pieces<OUTPUTS>(rows.inputs, INT8_PIECE, [&](int64_t k, int64_t inputs, int64_t n) {
          const int8_t* part = weights.codes + k * PANEL + 4 * n;
          int8_tile<ROWS, OUTPUTS>(codes + k, rows.inputs, part, inputs, sums + n);
        });
      });
      outputs.store(sums, rows.told, row, count);
    });
  }
};

}  // namespace quire
