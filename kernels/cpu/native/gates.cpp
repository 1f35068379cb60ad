// Gates that multiply what a layer makes (kernels/reference/recurrent.py).
#include <cmath>

#include "parallel.h"
#include "program.h"
#include "recurrence.h"
#include "scratch.h"

namespace quire {
namespace {

constexpr int64_t GRAIN = 4096;  // values below which a second thread costs more than it computes

inline Floats silu(Floats x) { return x * sigmoid(x); }

enum Gate { SIGMOID, SILU, SOFTPLUS };  // GATE_CODES in kernels/cpu/bindings.py

inline Floats gate_value(int32_t kind, Floats x) {
  return kind == SIGMOID ? sigmoid(x) : kind == SILU ? silu(x) : softplus(x);
}

template <class T>
struct GatedNorm {
  const T *x, *gate;
  int64_t gate_stride;
  const T* weight;
  int64_t weights, rows, heads, dim;
  float eps;
  bool gates_first;
  T* y;
};

// One head; wide[dim] holds it between the passes.
template <class T>
void norm_head(const GatedNorm<T>& norm, int64_t row, int64_t head, float* wide) {
  const int64_t dim = norm.dim, at = (row * norm.heads + head) * dim;
  const T* gate = norm.gate + row * norm.gate_stride + head * dim;
  const T* weight = norm.weight + head % norm.weights * dim;
  Floats squares = {};
  for (int64_t d = 0; d < dim; d += LANES) {
    Floats part = load(norm.x + at + d, dim - d);
    if (norm.gates_first) part *= silu(load(gate + d, dim - d));
    squares += part * part;
    store(wide + d, part);
  }
  const float scale = 1.0f / std::sqrt(sum(squares) / dim + norm.eps);
  for (int64_t d = 0; d < dim; d += LANES) {
    Floats part = load(wide + d) * scale * load(weight + d, dim - d);
    if (!norm.gates_first) part *= silu(load(gate + d, dim - d));
    store(norm.y + at + d, part, dim - d);
  }
}

template <class T>
void gated_rms_norm(const GatedNorm<T>& norm) {
  const int64_t grain = std::max<int64_t>(1, GRAIN / norm.dim);
  parallel_rows(norm.rows * norm.heads, grain, [&](int64_t begin, int64_t end) {
    const Scratch<float> wide((norm.dim + LANES - 1) / LANES * LANES);
    for (int64_t i = begin; i < end; ++i)
      norm_head(norm, i / norm.heads, i % norm.heads, wide.get());
  });
}

// gate_dim is dim, or 1 for a gate of all of a row's values.
template <class T>
void apply_gate(const T* x, const T* gate, int64_t stride, int32_t kind, int64_t rows,
                int64_t dim, int64_t gate_dim, T* y) {
  const auto factor = [=](Floats raw) { return gate_value(kind, raw); };
  parallel_rows(rows, std::max<int64_t>(1, GRAIN / dim), [=](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const T* row = gate + r * stride;
      const Floats one = fill(factor(load(row, 1))[0]);
      for (int64_t d = 0; d < dim; d += LANES) {
        const Floats by = gate_dim == 1 ? one : factor(load(row + d, dim - d));
        store(y + r * dim + d, load(x + r * dim + d, dim - d) * by, dim - d);
      }
    }
  });
}

}  // namespace
}  // namespace quire

extern "C" {

// x, y[rows][heads][dim]; gate[rows][heads * dim], its rows gate_stride values apart;
// weight[weights][dim], of which head h has h % weights.
void quire_gated_rms_norm(int32_t dtype, const void* x, const void* gate, int64_t gate_stride,
                          const void* weight, int64_t weights, int64_t rows, int64_t heads,
                          int64_t dim, float eps, bool gates_first, void* y) {
  quire::with_type(dtype, [&]<class T>() {
    quire::gated_rms_norm(quire::GatedNorm<T>{
        static_cast<const T*>(x), static_cast<const T*>(gate), gate_stride,
        static_cast<const T*>(weight), weights, rows, heads, dim, eps, gates_first,
        static_cast<T*>(y)});
  });
}

// x, y[rows][dim]; gate[rows][gate_dim], its rows gate_stride values apart.
void quire_apply_gate(int32_t dtype, const void* x, const void* gate, int64_t gate_stride,
                      int32_t kind, int64_t rows, int64_t dim, int64_t gate_dim, void* y) {
  quire::with_type(dtype, [&]<class T>() {
    quire::apply_gate(static_cast<const T*>(x), static_cast<const T*>(gate), gate_stride,
                      kind, rows, dim, gate_dim, static_cast<T*>(y));
  });
}

}  // extern "C"

QUIRE_RECORDED(quire_gated_rms_norm)
QUIRE_RECORDED(quire_apply_gate)
