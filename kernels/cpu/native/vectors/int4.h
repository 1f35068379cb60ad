// The int4 product, of any number of rows; see panels/four_bits.h.
#pragma once

#include "panels/four_bits.h"
#include "registers.h"

namespace quire {

constexpr int64_t INT4_ROWS = 4;      // rows of a tile
constexpr int64_t INT4_VECTORS = 4;   // whose sums of a group stay in registers, and those of all
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
#pragma GCC unroll 4
    for (int64_t k = 0; k < INT4_GROUP; k += WORD_INPUTS, words += PANEL) {
#pragma GCC unroll 8
      for (int64_t v = 0; v < VECTORS; ++v) {
        const Bits word = load_as<Bits>(words + v * WIDTH);
        const Whole early = (Whole)(word & 0x0F0F0F0F), late = (Whole)(word >> 4 & 0x0F0F0F0F);
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; ++r) {
          const int8_t* own = codes + r * inputs + g * INT4_GROUP + k;
          parts[r][v].add(early, broadcast_four(own));
          parts[r][v].add(late, broadcast_four(own + 4));
        }
      }
    }
#pragma GCC unroll 8
    for (int64_t v = 0; v < VECTORS; ++v) {
      const Vector scale = load_halves(scales + v * WIDTH);
#pragma GCC unroll 8
      for (int r = 0; r < ROWS; ++r) {
        const RoundedGroup& group = told[r * (inputs / INT4_GROUP) + g];
        const Whole exact = parts[r][v].total() - group.excess;
        totals[r][v] += __builtin_convertvector(exact, Vector) * (scale * group.step);
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
      constexpr int64_t VECTORS = std::min(PANEL / WIDTH, std::max<int64_t>(INT4_VECTORS / ROWS, 1));
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
