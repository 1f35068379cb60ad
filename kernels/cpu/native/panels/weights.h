// Weights as their layers hold them, in panels; kernels/cpu/linear.py and grouped.py make them.
#pragma once

#include "tiles.h"

namespace quire {

// Weights of 32 outputs: one scale an output, and the sum of its codes. Of the last panel scales and
// sums may end with the outputs.
struct Int8Panel {
  const int8_t* codes;
  const float* scales;
  const int32_t* totals;
  bool in_memory = true;  // before and behind others, rather than made for a moment
};

// A weight in int8, of all its outputs.
struct Int8Weight {
  const int8_t* packed;
  const float* scales;
  const int32_t* totals;

  Int8Panel panel(int64_t index, int64_t inputs) const {
    const int64_t first = index * PANEL;
    return {packed + first * inputs, scales + first, totals + first};
  }
};

constexpr int64_t INT4_GROUP = 32;  // inputs that share a scale
constexpr int64_t WORD_INPUTS = 8;  // of the codes of 4 bits in a word

// A weight [outputs][inputs] in int4.
struct Int4Weight {
  const uint32_t* words;      // [panels][inputs / 8][32]
  const uint16_t* scales;     // [panels][inputs / 32][32] float16
  const float* whole_scales;  // [panels][32], of outputs whose codes have eight bits
  const int32_t* totals;      // [panels][32], the sums of these codes
  const float* bias;          // or null
  int64_t inputs;             // a multiple of 64

  int64_t groups() const { return inputs / INT4_GROUP; }
};

// A weight in codes of 4 or 8 bits as checkpoints have them; see groups.h.
struct GroupedWeight {
  const uint32_t* codes;   // [panels][inputs / STEP][32]
  const uint16_t* scales;  // [panels][inputs / group][32] float16, times `factor`
  const uint16_t* zeros;   // [panels][inputs / group][32] float16, or null: all are 0
  const bf16* levels;      // of 4-bit codes
  int64_t inputs, group;   // the former a multiple of the latter and of 32, that one of STEP
  float factor;            // a power of two that brings scales into the range of float16
};

}  // namespace quire
