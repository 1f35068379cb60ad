// AMX: products of 16 x 64-byte tiles. Compiled in always, used where has_amx() says so.
//
// A block is up to 32 rows of activations by one panel of weights. Many rows are laid out in blocks
// first, so that a tile is one unbroken kilobyte, as the panel's are nearly; where rows lie apart,
// as a caller has them, each of a tile's 16 lines comes from another page. With tiles in the
// second-level cache the unit is then busy most of the time, half of it otherwise.
#pragma once

#include "panels/layout.h"
#include "registers.h"

#define QUIRE_AMX __attribute__((target("amx-tile,amx-bf16,amx-int8")))

namespace quire {

constexpr int64_t PANEL_STEP_BYTES = PANEL * STEP_BYTES;
constexpr int64_t AHEAD_BYTES = 4096;  // of a panel that is on its way: two steps
constexpr int64_t FEW_BLOCKS = 3;      // which take less time than the next panel's way from memory

// The layout of the tile registers: see the manual of ldtilecfg.
struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

// The matrix unit in the hands of one thread, for blocks of activations by panels.
//
// Registers: 0-3 hold the sums (upper left, upper right, lower left, lower right), 4-5 rows of
// activations, 6-7 the halves of the panel. `Step` multiplies two tiles into one.
template <class Step>
class BlockProducts {
 public:
  BlockProducts() = default;
  ~BlockProducts() {
    if (configured_) release();
  }
  BlockProducts(const BlockProducts&) = delete;
  BlockProducts& operator=(const BlockProducts&) = delete;

  // Calls body(row, count, sums) with sums[32][32] for each block of rows[begin to end] * a panel.
  // `blocks` are all rows, which lie as `layout` says.
  template <class Body>
  void multiply(const BlockLayout& layout, const void* blocks, int64_t begin, int64_t end,
                const void* weight, Body body) {
    const char* x = static_cast<const char*>(blocks);
    const char* panel = static_cast<const char*>(weight);
    // The next panel follows this one. Many blocks together fetch it, each its share.
    const int64_t count = (end - begin + BLOCK_ROWS - 1) / BLOCK_ROWS;
    const int64_t steps = layout.row_bytes / STEP_BYTES;
    const int64_t lines = (PANEL_STEP_BYTES / 64 + count - 1) / count;
    const char* next = panel + steps * PANEL_STEP_BYTES;
    for (int64_t row = begin; row < end; row += BLOCK_ROWS) {
      const int64_t rows = std::min(BLOCK_ROWS, end - row);
      if (rows != configured_) configure(rows);
      multiply_block(layout, x + layout.offset(row, 0), rows, panel,
                     count <= FEW_BLOCKS ? nullptr : next, lines);
      next += steps * lines * 64;
      body(row, rows, sums_);
    }
  }

 private:
  // Sums of a block of `rows` by a panel. Meanwhile `num_lines` a step of what lies at `ahead` are
  // fetched into the second-level cache, or, where it is null, the panel's own next lines into the
  // first-level one: with few rows the weights' way from memory is all that takes time. The processor
  // alone then fetches ahead better than it follows such hints, but for tile loads it needs some.
  QUIRE_AMX void multiply_block(const BlockLayout& layout, const char* x, int64_t rows,
                                const char* panel, const char* ahead, int64_t num_lines) {
    const char* below = x + 16 * layout.row;
    // GCC's tile intrinsics do not say what memory they read: let nothing be held back from it.
    __asm__ volatile("" ::: "memory");
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t byte = 0; byte < layout.row_bytes; byte += STEP_BYTES) {
      if (ahead) {
        for (int64_t i = 0; i < num_lines; ++i, ahead += 64) _mm_prefetch(ahead, _MM_HINT_T1);
      } else {
        for (int64_t line = 0; line < PANEL_STEP_BYTES; line += 64)
          _mm_prefetch(panel + AHEAD_BYTES + line, _MM_HINT_T0);
      }
      _tile_loadd(6, panel, 128);
      _tile_loadd(7, panel + 64, 128);
      _tile_loadd(4, x, layout.row);
      if (rows > 16) {
        _tile_loadd(5, below, layout.row);
        Step::upper();
        Step::lower();
      } else {
        Step::upper();
      }
      panel += PANEL_STEP_BYTES, x += layout.step, below += layout.step;
    }
    char* out = reinterpret_cast<char*>(sums_);
    _tile_stored(0, out, 128);
    _tile_stored(1, out + 64, 128);
    if (rows > 16) {
      _tile_stored(2, out + 16 * 128, 128);
      _tile_stored(3, out + 16 * 128 + 64, 128);
    }
    __asm__ volatile("" ::: "memory");
  }

  QUIRE_AMX void configure(int64_t rows) {
    configured_ = rows;
    const int64_t upper = std::min<int64_t>(rows, 16), lower = std::max<int64_t>(rows - upper, 1);
    TileConfig config;
    for (int i = 0; i < 8; ++i) {
      config.row_bytes[i] = STEP_BYTES;
      config.rows[i] = 16;
    }
    config.rows[0] = config.rows[1] = config.rows[4] = upper;
    config.rows[2] = config.rows[3] = config.rows[5] = lower;
    __asm__ volatile("" ::"r"(&config) : "memory");
    _tile_loadconfig(&config);
  }

  QUIRE_AMX static void release() { _tile_release(); }

  int64_t configured_ = 0;                          // rows; 0: the unit is not held
  alignas(64) int32_t sums_[BLOCK_ROWS * PANEL];  // or as many floats
};

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
