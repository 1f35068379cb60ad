// The walk of vector tiles along a panel. A turn of a tile's loop multiplies 128 bytes of it, whatever
// the weights are.
#pragma once

#include "registers.h"

namespace quire {

constexpr int64_t VECTOR_ROWS = 12;  // rows of a vector tile: 24 sums, 2 weights, 1 activation
constexpr int64_t TURNS = 16;        // of a tile's loop between two fetches; all turns are in whole ones
constexpr int64_t TURN_BYTES = 4 * PANEL;

// As many rows as are multiplied in about the time in which their panel comes from memory. Their
// tiles take turns at a piece of it, which lies in the first-level cache meanwhile: did the first
// walk along all of it before the second, the memory would have nothing to do then.
constexpr int64_t FEW_ROWS = 3 * VECTOR_ROWS;
constexpr int64_t PIECE_TURNS = 128;

// What is multiplied next, on its way from memory to the second-level cache: some lines at each
// fetch. For few rows that is what lies two pieces ahead, for many the panel behind this one, which
// most likely is this thread's next. A single tile leaves it to the processor.
class Ahead {
 public:
  // Of a panel in memory, for so many rows; a tile takes `turns`.
  Ahead(const void* panel, int64_t rows, int64_t turns) : at_(static_cast<const char*>(panel)) {
    if (rows <= VECTOR_ROWS) return;
    const int64_t tiles = (rows + VECTOR_ROWS - 1) / VECTOR_ROWS;
    lines_ = (TURNS * TURN_BYTES / LINE + tiles - 1) / tiles;
    at_ += (rows <= FEW_ROWS ? 2 * PIECE_TURNS : turns) * TURN_BYTES;
  }

  void fetch() {
    for (int64_t i = 0; i < lines_; ++i, at_ += LINE) _mm_prefetch(at_, _MM_HINT_T1);
  }

 private:
  static constexpr int64_t LINE = 64;

  const char* at_;
  int64_t lines_ = 0;
};

// The sums of rows at a panel. tile<rows>(row, turn, turns, sums) adds what so many turns make from
// `turn` on to sums[rows][PANEL], where nothing is before the first turn, 0. Then body(row, count,
// sums) is called for rows whose sums are whole.
template <class Sum, class Tile, class Body>
inline void sum_by_tiles(int64_t begin, int64_t end, int64_t turns, Tile tile, Body body) {
  alignas(64) Sum sums[FEW_ROWS * PANEL];
  const auto add = [&](int64_t row, int64_t count, int64_t turn, int64_t most, Sum* to) {
    with_rows<VECTOR_ROWS>(count, [&]<int ROWS>() {
      tile.template operator()<ROWS>(row, turn, std::min(most, turns - turn), to);
    });
  };
  if (end - begin > FEW_ROWS)
    return for_tiles(begin, end, VECTOR_ROWS, [&](int64_t row, int64_t count) {
      add(row, count, 0, turns, sums);
      body(row, count, sums);
    });
  for (int64_t turn = 0; turn < turns; turn += PIECE_TURNS)
    for_tiles(begin, end, VECTOR_ROWS, [&](int64_t row, int64_t count) {
      add(row, count, turn, PIECE_TURNS, sums + (row - begin) * PANEL);
    });
  body(begin, end - begin, sums);
}

}  // namespace quire
