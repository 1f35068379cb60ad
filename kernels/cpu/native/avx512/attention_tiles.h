// Weights by values in AMX tiles, for attention of single queries: see attention_amx.cpp.
#pragma once

#include <immintrin.h>

#include <algorithm>

#include "simd.h"

#define QUIRE_AMX __attribute__((target("amx-tile,amx-bf16")))

namespace quire {

constexpr int64_t SIDE = 16;            // rows of a tile, and words of each
constexpr int64_t WORDS = SIDE * SIDE;  // of a tile
constexpr int64_t ROW_BYTES = 64;
constexpr int64_t STEP = 32;  // values of a row

// What the sums of some tiles of values are made of: blocks of sixteen tokens, their rows `stride`
// bytes apart, and the first head's weights of each.
struct WeighedBlocks {
  const bfloat16* const* values;
  const uint32_t* const* weights;
  int64_t count, stride;
};

// The sums of up to four tiles in registers 0-3: SETS sets of heads by 4 / SETS steps of values, of
// which `sets` and `steps` are there. Tile [set][step] lies at sums + (set * stride + step) * WORDS.
template <int SETS>
struct Accumulators {
  float* sums;
  int64_t stride, sets, steps;

  template <int REGISTER>
  bool has() const {
    return REGISTER % SETS < sets && REGISTER / SETS < steps;
  }
  template <int REGISTER>
  float* tile() const {
    return sums + (REGISTER % SETS * stride + REGISTER / SETS) * WORDS;
  }
  QUIRE_AMX void load() const {
    _tile_loadd(0, tile<0>(), ROW_BYTES);
    if (has<1>()) _tile_loadd(1, tile<1>(), ROW_BYTES);
    if (has<2>()) _tile_loadd(2, tile<2>(), ROW_BYTES);
    if (has<3>()) _tile_loadd(3, tile<3>(), ROW_BYTES);
  }
  QUIRE_AMX void store() const {
    _tile_stored(0, tile<0>(), ROW_BYTES);
    if (has<1>()) _tile_stored(1, tile<1>(), ROW_BYTES);
    if (has<2>()) _tile_stored(2, tile<2>(), ROW_BYTES);
    if (has<3>()) _tile_stored(3, tile<3>(), ROW_BYTES);
  }
};

// One set of heads by up to four steps of values: weights in register 4, values in 5-7.
QUIRE_AMX inline void multiply_block(const Accumulators<1>& sums, const uint32_t* weights,
                                     const bfloat16* values, int64_t stride) {
  _tile_loadd(4, weights, ROW_BYTES);
  _tile_loadd(5, values, stride);
  _tile_dpbf16ps(0, 4, 5);
  if (!sums.has<1>()) return;
  _tile_loadd(6, values + STEP, stride);
  _tile_dpbf16ps(1, 4, 6);
  if (!sums.has<2>()) return;
  _tile_loadd(7, values + 2 * STEP, stride);
  _tile_dpbf16ps(2, 4, 7);
  if (!sums.has<3>()) return;
  _tile_loadd(5, values + 3 * STEP, stride);
  _tile_dpbf16ps(3, 4, 5);
}

// Two sets by up to two steps: weights in registers 4 and 5, values in 6 and 7.
QUIRE_AMX inline void multiply_block(const Accumulators<2>& sums, const uint32_t* weights,
                                     const bfloat16* values, int64_t stride) {
  _tile_loadd(4, weights, ROW_BYTES);
  _tile_loadd(5, weights + WORDS, ROW_BYTES);
  _tile_loadd(6, values, stride);
  _tile_dpbf16ps(0, 4, 6);
  _tile_dpbf16ps(1, 5, 6);
  if (!sums.has<2>()) return;
  _tile_loadd(7, values + STEP, stride);
  _tile_dpbf16ps(2, 4, 7);
  _tile_dpbf16ps(3, 5, 7);
}

// Three sets or four by one step: weights in registers 4-6, values in 7.
QUIRE_AMX inline void multiply_block(const Accumulators<4>& sums, const uint32_t* weights,
                                     const bfloat16* values, int64_t stride) {
  _tile_loadd(7, values, stride);
  _tile_loadd(4, weights, ROW_BYTES);
  _tile_dpbf16ps(0, 4, 7);
  _tile_loadd(5, weights + WORDS, ROW_BYTES);
  _tile_dpbf16ps(1, 5, 7);
  _tile_loadd(6, weights + 2 * WORDS, ROW_BYTES);
  _tile_dpbf16ps(2, 6, 7);
  if (!sums.has<3>()) return;
  _tile_loadd(4, weights + 3 * WORDS, ROW_BYTES);
  _tile_dpbf16ps(3, 4, 7);
}

// sums[sets][steps] += weights * values, for a KV head's `sets` sets of heads and all `steps` of its
// values.
template <int SETS>
QUIRE_AMX inline void multiply_values(const WeighedBlocks& blocks, int64_t sets, int64_t steps,
                               float* sums) {
  constexpr int64_t TOGETHER = 4 / SETS;
  // GCC's tile intrinsics do not say what memory they read: let nothing be held back from it.
  __asm__ volatile("" ::: "memory");
  for (int64_t step = 0; step < steps; step += TOGETHER) {
    const Accumulators<SETS> tiles{sums + step * WORDS, steps, sets,
                                   std::min(TOGETHER, steps - step)};
    tiles.load();
    for (int64_t i = 0; i < blocks.count; ++i)
      multiply_block(tiles, blocks.weights[i], blocks.values[i] + step * STEP, blocks.stride);
    tiles.store();
  }
  __asm__ volatile("" ::: "memory");
}

}  // namespace quire
