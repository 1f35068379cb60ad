// The int4 product, of any number of rows; see panels/four_bits.h.
#pragma once

#include "panels/four_bits.h"
#include "registers.h"

namespace quire {

constexpr int64_t INT4_ROWS = 4;      // rows of a tile
constexpr int64_t INT4_SUMS = 8;      // of a group, that stay in registers
constexpr int64_t INT4_PIECE = 1024;  // inputs of a panel in half of the first-level cache

// sums[ROWS][VECTORS * WIDTH of 32] += the groups at `codes` and `told` by part of a panel. `words`
// and `scales` are its own; `inputs` is the stride of the rows.
template <int ROWS, int64_t VECTORS>
inline void int4_tile(const int8_t* codes, const RoundedGroup* told, int64_t inputs,
                      const uint32_t* words, const uint16_t* scales, int64_t num_groups,
                      float* sums) {
  Vector totals[ROWS][VECTORS];
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
    for (int64_t v = 0; v < VECTORS; ++v)
      totals[r][v] = load_as<Vector>(sums + r * PANEL + v * WIDTH);
  for (int64_t g = 0; g < num_groups; ++g, scales += PANEL) {
    GroupSum parts[ROWS][VECTORS];
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
      for (int64_t v = 0; v < VECTORS; ++v)
        parts[r][v].begin(told[r * (inputs / INT4_GROUP) + g].start);
#pragma GCC unroll 4
    for (int64_t k = 0; k < INT4_GROUP; k += WORD_INPUTS, words += PANEL) {
      if constexpr (VECTORS * WIDTH < PANEL) fetch_ahead(words, INT4_PIECE * PANEL / 2);
      const int8_t* own = codes + g * INT4_GROUP + k;
      // What `pick` makes of words, by four codes of each row.
      const auto add = [&](int64_t at, auto pick) __attribute__((always_inline)) {
        Whole levels[VECTORS];
#pragma GCC unroll 8
        for (int64_t v = 0; v < VECTORS; ++v)
          levels[v] = (Whole)(pick(load_as<Bits>(words + v * WIDTH)) & 0x0F0F0F0F);
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; ++r) {
          const auto four = broadcast_four(own + r * inputs + at);
#pragma GCC unroll 8
          for (int64_t v = 0; v < VECTORS; ++v) parts[r][v].add(levels[v], four);
        }
      };
      add(0, [](Bits word) { return word; });
      add(4, [](Bits word) { return word >> 4; });
    }
#pragma GCC unroll 8
    for (int64_t v = 0; v < VECTORS; ++v) {
      const Vector scale = load_halves(scales + v * WIDTH);
#pragma GCC unroll 8
      for (int r = 0; r < ROWS; ++r) {
        const float step = told[r * (inputs / INT4_GROUP) + g].step;
        totals[r][v] += __builtin_convertvector(parts[r][v].total(), Vector) * (scale * step);
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
    for (int64_t v = 0; v < VECTORS; ++v)
      std::memcpy(sums + r * PANEL + v * WIDTH, &totals[r][v], REGISTER_BYTES);
}

// The results of rows at a panel.
template <class T>
void multiply_panel(const Int4Rows& rows, int64_t begin, int64_t end, const Int4Weight& weight,
                    int64_t panel, const Results<T>& to) {
  const int64_t inputs = weight.inputs, groups = weight.groups();
  const uint32_t* words = weight.words + panel * PANEL * inputs / WORD_INPUTS;
  const uint16_t* scales = weight.scales + panel * PANEL * groups;
  for_tiles(begin, end, INT4_ROWS, [&](int64_t row, int64_t count) {
    alignas(64) float sums[INT4_ROWS * PANEL] = {};
    with_rows<INT4_ROWS>(count, [&]<int ROWS>() {
      constexpr int64_t VECTORS = std::min(PANEL / WIDTH, INT4_SUMS / ROWS);
      for_pieces<VECTORS * WIDTH>(inputs, INT4_PIECE, [&](int64_t k, int64_t some, int64_t n) {
        int4_tile<ROWS, VECTORS>(rows.codes() + row * inputs + k,
                                 rows.told() + row * groups + k / INT4_GROUP, inputs,
                                 words + k / WORD_INPUTS * PANEL + n,
                                 scales + k / INT4_GROUP * PANEL + n, some / INT4_GROUP, sums + n);
      });
    });
    for (int64_t r = 0; r < count; ++r)
      for (int64_t half = 0; half < PANEL; half += LANES)
        store(load(sums + r * PANEL + half), weight.bias, to.row(row + r), to.outputs,
              panel * PANEL + half);
  });
}

// All results of a caller's rows.
inline void multiply_int4(const bf16* x, int64_t rows, const Int4Weight& weight,
                          const Wanted& wanted, bool amx) {
  const Int4Rows rounded(x, rows, weight.inputs);
  for_results(rows, rows_in(cached_bytes(amx), weight.inputs), wanted, [&] {
    return [&](int64_t begin, int64_t end, int64_t panel, const auto& to) {
      multiply_panel(rounded, begin, end, weight, panel, to);
    };
  });
}

// Codes of eight bits are not made here.
inline void measure_panel(const Int4Weight&, int64_t panel, float* whole_scales,
                          int32_t* totals) {
  std::fill_n(whole_scales + panel * PANEL, PANEL, 0.0f);
  std::fill_n(totals + panel * PANEL, PANEL, 0);
}

}  // namespace quire
