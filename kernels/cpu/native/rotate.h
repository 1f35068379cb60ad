// Rotary position embedding of one head (kernels/reference/layers.py, rope).
#pragma once

#include "simd.h"

namespace quire {

// x[2 * half], rotated, to y, which may be x.
template <class T>
inline void rope(const T* x, const float* cos, const float* sin, int64_t half, T* y) {
  for (int64_t d = 0; d < half; d += LANES) {
    const int64_t left = half - d;
    const Floats c = load(cos + d, left), s = load(sin + d, left);
    const Floats first = load(x + d, left), second = load(x + half + d, left);
    store(y + d, first * c - second * s, left);
    store(y + half + d, second * c + first * s, left);
  }
}

}  // namespace quire
