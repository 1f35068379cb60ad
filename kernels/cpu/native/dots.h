// Products with weights that lie row by row, [outputs][inputs], for any processor.
#pragma once

#include "simd.h"

namespace quire {

// Sums that fit into registers.
#ifdef __AVX512F__
constexpr int64_t DOT_ROWS = 4, DOT_OUTPUTS = 4;
#else
constexpr int64_t DOT_ROWS = 2, DOT_OUTPUTS = 2;
#endif

// y[r][n] = x[r] . w[n], for ROWS rows and as many outputs as there are, at most DOT_OUTPUTS.
template <int ROWS, class X, class W>
inline void dots(const X* x, int64_t inputs, const W* w, int64_t outputs,
                 float (&y)[ROWS][DOT_OUTPUTS]) {
  Floats sums[ROWS][DOT_OUTPUTS] = {};
  const W* rows[DOT_OUTPUTS];  // those that are missing repeat the last one
  for (int64_t n = 0; n < DOT_OUTPUTS; ++n) rows[n] = w + (n < outputs ? n : outputs - 1) * inputs;
  const auto add = [&](int64_t k, auto load_at) {
    Floats weights[DOT_OUTPUTS];
#pragma GCC unroll 4
    for (int n = 0; n < DOT_OUTPUTS; ++n) weights[n] = load_at(rows[n] + k);
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; ++r) {
      const Floats values = load_at(x + r * inputs + k);
#pragma GCC unroll 4
      for (int n = 0; n < DOT_OUTPUTS; ++n) sums[r][n] += values * weights[n];
    }
  };
  int64_t k = 0;
  for (; k + LANES <= inputs; k += LANES) add(k, [](const auto* p) { return load(p); });
  if (k < inputs) add(k, [=](const auto* p) { return load(p, inputs - k); });
  for (int r = 0; r < ROWS; ++r)
    for (int n = 0; n < DOT_OUTPUTS; ++n) y[r][n] = sum(sums[r][n]);
}

// y[rows][y_stride] = x[rows][inputs] * w[outputs][inputs]^T + bias (or null).
template <class X, class W, class B>
void dot_rows(const X* x, int64_t rows, int64_t inputs, const W* w, int64_t outputs, const B* bias,
              float* y, int64_t y_stride) {
  const auto some = [&]<int ROWS>(int64_t r) {
    for (int64_t n = 0; n < outputs; n += DOT_OUTPUTS) {
      const int64_t count = outputs - n < DOT_OUTPUTS ? outputs - n : DOT_OUTPUTS;
      float sums[ROWS][DOT_OUTPUTS];
      dots<ROWS>(x + r * inputs, inputs, w + n * inputs, count, sums);
      for (int i = 0; i < ROWS; ++i)
        for (int64_t j = 0; j < count; ++j)
          y[(r + i) * y_stride + n + j] = sums[i][j] + (bias ? load(bias + n + j, 1)[0] : 0.0f);
    }
  };
  int64_t r = 0;
  for (; r + DOT_ROWS <= rows; r += DOT_ROWS) some.template operator()<DOT_ROWS>(r);
  for (; r < rows; ++r) some.template operator()<1>(r);
}

}  // namespace quire
