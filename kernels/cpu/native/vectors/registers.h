// Registers of a processor that multiplies in float32, and its instructions for codes of eight bits.
//
// Everything else of this folder is written once for all of them, by the vector extensions of GCC. A
// processor that is not here yet needs its own of what avx2.h and neon.h hold, and a target of
// build.py that has this folder.
#pragma once

#include <algorithm>
#include <cstring>

#include "panels/tiles.h"
#include "simd.h"

namespace quire {

constexpr int64_t HALF_PANEL = PANEL / 2;

template <class V>
inline V load_as(const void* from) {
  V values;
  std::memcpy(&values, from, sizeof values);
  return values;
}

// Of rows that stay in a core's second-level cache.
constexpr int64_t cached_bytes(bool) { return 1 << 18; }

// Writes those of 16 sums that are outputs, the bias (or null) added, as float32 or bfloat16.
template <class T>
inline void store(Floats sums, const float* bias, T* y, int64_t outputs, int64_t first) {
  using Value = std::conditional_t<std::is_same_v<T, bf16>, bfloat16, T>;
  const int64_t count = outputs - first;
  if (count <= 0) return;
  if (bias) sums += load(bias + first, count);
  store(reinterpret_cast<Value*>(y + first), sums, count);
}

// Asks for what tiles of half a panel read next, while they multiply: the line of the piece behind
// this one that corresponds to the line at `codes`. Each half asks for its own lines, so memory is
// read evenly throughout. They go to the second-level cache, since the first is full of this piece.
inline void fetch_ahead(const void* codes, int64_t piece_bytes) {
  __builtin_prefetch(static_cast<const char*>(codes) + piece_bytes, 0, 2);
}

// Calls tile(input, count, output) for all outputs of a panel, or half of them twice, and `piece`
// inputs at a time: the second half is then read from the first-level cache.
template <int64_t OUTPUTS, class Tile>
inline void for_pieces(int64_t inputs, int64_t piece, Tile tile) {
  for (int64_t k = 0; k < inputs; k += piece)
    for (int64_t n = 0; n < PANEL; n += OUTPUTS) tile(k, std::min(piece, inputs - k), n);
}

}  // namespace quire
