// What a model makes of what its head says (engine/models/embeddings.py, finish_logits).
#pragma once

#include "simd.h"

namespace quire {

// cap * tanh(x / cap). Not inlined: a score has the same bits wherever it is capped, which a compiler
// that fuses products with sums here and there in different ways would not keep.
Floats softcapped(Floats x, float cap);

struct Finish {
  float scale;  // above zero; 1: none
  float cap;    // 0: none

  Floats operator()(Floats said) const {
    const Floats scaled = said * scale;
    return cap ? softcapped(scaled, cap) : scaled;
  }
};

}  // namespace quire
