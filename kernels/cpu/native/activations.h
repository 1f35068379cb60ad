// What stands between the two products of an MLP without a gate (kernels/reference/layers.py).
#pragma once

#include <cstdint>

#include "simd.h"

namespace quire {

// As kernels/cpu/layers.py numbers them.
enum class Activation : int32_t { SILU, GELU, GELU_TANH, RELU, SQUARED_RELU };

template <Activation KIND>
inline Floats activated(Floats x) {
  if constexpr (KIND == Activation::SILU) {
    return x / (1.0f + exp(-x));
  } else if constexpr (KIND == Activation::GELU) {
    return 0.5f * x * (1.0f + erf(x * 0.70710678f));
  } else if constexpr (KIND == Activation::GELU_TANH) {
    return 0.5f * x * (1.0f + tanh(0.79788456f * (x + 0.044715f * x * x * x)));
  } else {
    const Floats kept = select(x < 0.0f, Floats{}, x);
    return KIND == Activation::RELU ? kept : kept * kept;
  }
}

template <class Body>
inline void with_activation(Activation kind, Body body) {
  switch (kind) {
    case Activation::SILU: return body.template operator()<Activation::SILU>();
    case Activation::GELU: return body.template operator()<Activation::GELU>();
    case Activation::GELU_TANH: return body.template operator()<Activation::GELU_TANH>();
    case Activation::RELU: return body.template operator()<Activation::RELU>();
    default: return body.template operator()<Activation::SQUARED_RELU>();
  }
}

// x[dim] -> y[dim].
template <Activation KIND, class From, class To>
inline void activate_row(const From* x, int64_t dim, To* y) {
  for (int64_t d = 0; d < dim; d += LANES) store(y + d, activated<KIND>(load(x + d, dim - d)), dim - d);
}

}  // namespace quire
