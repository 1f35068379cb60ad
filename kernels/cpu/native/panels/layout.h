// Where rows of activations lie: one after the other, or in blocks for a processor's matrix unit.
#pragma once

#include "tiles.h"

namespace quire {

constexpr int64_t BLOCK_ROWS = 32;  // two tiles of 16
constexpr int64_t STEP_BYTES = 64;  // of a row that one product takes in

// Where the rows of blocks lie: `row` bytes apart in a block, and `step` bytes from one step to the
// next. Blocks follow one another: each has 32 * `row_bytes`.
struct BlockLayout {
  int64_t row, step, row_bytes;

  static BlockLayout as_given(int64_t row_bytes) { return {row_bytes, STEP_BYTES, row_bytes}; }
  static BlockLayout in_tiles(int64_t row_bytes) {
    return {STEP_BYTES, BLOCK_ROWS * STEP_BYTES, row_bytes};
  }
  // Rows of one block are not read often enough to be laid out for it.
  static BlockLayout of(int64_t rows, int64_t row_bytes) {
    return rows <= BLOCK_ROWS ? as_given(row_bytes) : in_tiles(row_bytes);
  }
  // Of a row from its beginning: byte `at` of row `r`.
  int64_t offset(int64_t r, int64_t at) const {
    return r / BLOCK_ROWS * BLOCK_ROWS * row_bytes + r % BLOCK_ROWS * row +
           at / STEP_BYTES * step + at % STEP_BYTES;
  }
};

}  // namespace quire
