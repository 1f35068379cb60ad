// What the linear layers of all kinds of processors share: the panel layout and the walk over tiles.
//
// The sources of this folder are compiled for each target that has a folder of its own beside it
// (build.py), avx512 or vectors, whose headers give the tiles that are multiplied:
//
//     registers.h  how sixteen results leave, and what is held of activations
//     dense.h      DenseRows, GivenRows, lay_row, DenseProducts
//     int8.h       Int8Products
//     int4.h       multiply_int4, measure_panel
//     codes.h      Nibbles, Bytes, Float8, and what multiplies by codes in groups
//
// A weight [outputs, inputs] is cut into panels of 32 outputs. Inside a panel the inputs run
// slowest, so one thread reads one unbroken stream whatever the number of rows is:
//
//     dense  [outputs / 32][inputs / 2][32][2]   bfloat16   (what vdpbf16ps and tdpbf16ps multiply)
//     int8   [outputs / 32][inputs / 4][32][4]   int8       (what vpdpbusd and tdpbusd multiply)
//     int4   [outputs / 32][inputs / 8][32]      uint32     (eight codes in a word; see int4.h)
//
// Outputs and inputs that are missing at the end of a weight are zeros. Rows of activations are
// contiguous and padded to `inputs` by the caller.
#pragma once

#include <algorithm>
#include <cstdint>

#include "parallel.h"
#include "scratch.h"

namespace quire {

using bf16 = uint16_t;

constexpr int64_t PANEL = 32;  // outputs

inline float to_float(bf16 value) {
  const uint32_t bits = uint32_t{value} << 16;
  float result;
  __builtin_memcpy(&result, &bits, sizeof result);
  return result;
}

// Calls body(begin, end, panel), made by each thread for itself, for parts of the rows by panels.
// The rows of a part, at most `max_rows`, stay in the cache, so that a panel is read from memory
// once for many rows, and the rows once for many panels.
template <class Make>
void for_panels(int64_t rows, int64_t outputs, int64_t max_rows, Make make) {
  if (rows == 0) return;
  const int64_t panels = (outputs + PANEL - 1) / PANEL;
  const int64_t num_parts = (rows + max_rows - 1) / max_rows;
  const int64_t part = ((rows + num_parts - 1) / num_parts + 31) / 32 * 32;
  parallel_runs(num_parts * panels, [&] {
    return [=, body = make()](int64_t item) mutable {
      const int64_t begin = item / panels * part;
      body(begin, std::min(rows, begin + part), item % panels);
    };
  });
}

// Rows of so many bytes that stay in a cache of so many, a multiple of 32.
inline int64_t rows_in(int64_t cache_bytes, int64_t row_bytes) {
  return std::max<int64_t>(3, cache_bytes / row_bytes / 32) * 32;
}

// Calls body(row, count) for tiles of nearly equal height: 13 rows are 7 + 6, not 12 + 1.
template <class Body>
inline void for_tiles(int64_t begin, int64_t end, int64_t max_rows, Body body) {
  const int64_t tiles = (end - begin + max_rows - 1) / max_rows;
  for (int64_t i = 0; i < tiles; ++i) {
    const int64_t row = begin + (end - begin) * i / tiles;
    body(row, begin + (end - begin) * (i + 1) / tiles - row);
  }
}

// Calls body(panel, rows), each thread on panels of its own, with the panel's 32 rows of `inputs`
// values: what read(n, row) writes, and zeros.
template <class T, class Read, class Body>
void for_panel_rows(int64_t outputs, int64_t inputs, Read read, Body body) {
  const int64_t panels = (outputs + PANEL - 1) / PANEL;
  parallel_rows(panels, 1, [&](int64_t first, int64_t last) {
    const Scratch<T> rows(PANEL * inputs);
    for (int64_t panel = first; panel < last; ++panel) {
      std::fill_n(rows.get(), PANEL * inputs, T{0});
      const int64_t end = std::min(outputs, (panel + 1) * PANEL);
      for (int64_t n = panel * PANEL; n < end; ++n) read(n, rows.get() + n % PANEL * inputs);
      body(panel, rows.get());
    }
  });
}

// The same, laid out as [outputs / 32][inputs / GROUP][32][GROUP].
template <int64_t GROUP, class T, class Read>
void pack_panels(int64_t outputs, int64_t inputs, T* packed, Read read) {
  for_panel_rows<T>(outputs, inputs, read, [=](int64_t panel, const T* rows) {
    T* out = packed + panel * PANEL * inputs;
    for (int64_t k = 0; k < inputs; k += GROUP)
      for (int64_t n = 0; n < PANEL; ++n, out += GROUP)
        std::copy_n(rows + n * inputs + k, GROUP, out);
  });
}

// Calls body<rows>() for a number of rows that is known when the program runs, 1 to MAX.
template <int MAX, class Body>
inline void with_rows(int64_t rows, Body&& body) {
  if constexpr (MAX > 0) {
    if (rows == MAX)
      body.template operator()<MAX>();
    else
      with_rows<MAX - 1>(rows, body);
  }
}

}  // namespace quire
