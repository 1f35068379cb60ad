// What stands between the two products of a gated MLP.
#pragma once

#include <cmath>

#include "simd.h"

namespace quire {

// As kernels/cpu/layers.py numbers them.
enum class GatingKind : int32_t { SILU, GELU, GELU_TANH, CLAMPED_SWIGLU, CLAMPED_SILU };

struct Gating {
  GatingKind kind;
  float alpha, limit;  // of CLAMPED_SWIGLU; CLAMPED_SILU has a limit only
};

template <GatingKind KIND>
inline Floats gated(Floats gate, Floats up, const Gating& gating) {
  if constexpr (KIND == GatingKind::SILU) {
    return gate / (1.0f + exp(-gate)) * up;
  } else if constexpr (KIND == GatingKind::GELU) {
    return 0.5f * gate * (1.0f + erf(gate * 0.70710678f)) * up;
  } else if constexpr (KIND == GatingKind::GELU_TANH) {
    const Floats inner = 0.79788456f * (gate + 0.044715f * gate * gate * gate);
    return 0.5f * gate * (1.0f + tanh(inner)) * up;
  } else if constexpr (KIND == GatingKind::CLAMPED_SILU) {
    const Floats most = fill(gating.limit), least = -most;
    const Floats active = gate / (1.0f + exp(-gate));
    up = select(up > most, most, select(up < least, least, up));
    return select(active > most, most, active) * up;
  } else {
    const Floats most = fill(gating.limit), least = -most;
    gate = select(gate > most, most, gate);
    up = select(up > most, most, select(up < least, least, up));
    return (up + 1.0f) * (gate / (1.0f + exp(-gating.alpha * gate)));
  }
}

// Calls body<kind>().
template <class Body>
inline void with_gating(GatingKind kind, Body body) {
  switch (kind) {
    case GatingKind::SILU: return body.template operator()<GatingKind::SILU>();
    case GatingKind::GELU: return body.template operator()<GatingKind::GELU>();
    case GatingKind::GELU_TANH: return body.template operator()<GatingKind::GELU_TANH>();
    case GatingKind::CLAMPED_SILU: return body.template operator()<GatingKind::CLAMPED_SILU>();
    default: return body.template operator()<GatingKind::CLAMPED_SWIGLU>();
  }
}

// gate_up[2 * dim], the gate first -> y[dim].
template <class From, class To>
inline void gate_row(const Gating& gating, const From* gate_up, int64_t dim, To* y) {
  const From* up = gate_up + dim;
  with_gating(gating.kind, [&]<GatingKind KIND>() {
    for (int64_t d = 0; d < dim; d += LANES)
      store(y + d, gated<KIND>(load(gate_up + d, dim - d), load(up + d, dim - d), gating), dim - d);
  });
}

}  // namespace quire
