// AMX: products of 16 x 64-byte tiles. Compiled in always, used where has_amx() says so.
#pragma once

#include "tiles.h"

#define QUIRE_AMX __attribute__((target("amx-tile,amx-bf16,amx-int8")))

namespace quire {

// The layout of the tile registers: see the manual of ldtilecfg.
struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

constexpr int64_t AHEAD_BYTES = 4096;  // of a panel, two steps

// One block of up to 32 rows by one panel: sums[32][32] = activations * panel.
//
// Registers: 0-3 hold the sums (upper left, upper right, lower left, lower right), 4-5 rows of
// activations, 6-7 the halves of the panel. `step` multiplies two tiles into one.
template <class Step>
QUIRE_AMX inline void amx_block(const void* activations, int64_t row_bytes, int64_t rows,
                                const void* weight, void* sums) {
  const char* x = static_cast<const char*>(activations);
  const char* panel = static_cast<const char*>(weight);
  const int64_t upper = std::min<int64_t>(rows, 16), lower = rows - upper;
  TileConfig config;
  for (int i = 0; i < 8; ++i) {
    config.row_bytes[i] = 64;
    config.rows[i] = 16;
  }
  config.rows[0] = config.rows[1] = config.rows[4] = upper;
  config.rows[2] = config.rows[3] = config.rows[5] = std::max<int64_t>(lower, 1);
  // GCC's tile intrinsics do not say what memory they read: let nothing be held back from it.
  __asm__ volatile("" ::: "memory");
  _tile_loadconfig(&config);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  const char* below = x + 16 * row_bytes;
  for (int64_t byte = 0; byte < row_bytes; byte += 64, panel += 16 * 128) {
    // With few rows the weights' way from memory is all that takes time, and the processor alone
    // fetches ahead of vector loads better than of tile loads: 5 to 8 % slower at one row.
    for (int64_t line = 0; line < 16 * 128; line += 64)
      _mm_prefetch(panel + AHEAD_BYTES + line, _MM_HINT_T0);
    _tile_loadd(6, panel, 128);
    _tile_loadd(7, panel + 64, 128);
    _tile_loadd(4, x + byte, row_bytes);
    Step::upper();
    if (lower > 0) {
      _tile_loadd(5, below + byte, row_bytes);
      Step::lower();
    }
  }
  char* out = static_cast<char*>(sums);
  _tile_stored(0, out, 128);
  _tile_stored(1, out + 64, 128);
  if (lower > 0) {
    _tile_stored(2, out + 16 * 128, 128);
    _tile_stored(3, out + 16 * 128 + 64, 128);
  }
  _tile_release();
}

struct StepBf16 {
  QUIRE_AMX static void upper() {
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
  }
  QUIRE_AMX static void lower() {
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
};

struct StepInt8 {  // unsigned activations, signed weights
  QUIRE_AMX static void upper() {
    _tile_dpbusd(0, 4, 6);
    _tile_dpbusd(1, 4, 7);
  }
  QUIRE_AMX static void lower() {
    _tile_dpbusd(2, 5, 6);
    _tile_dpbusd(3, 5, 7);
  }
};

}  // namespace quire
