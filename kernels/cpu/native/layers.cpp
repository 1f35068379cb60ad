// The element-wise parts of a decoder layer (kernels/reference/layers.py, fused.py).
#include <cmath>

#include "gating.h"
#include "parallel.h"
#include "program.h"
#include "simd.h"

namespace quire {
namespace {

// Values below which a second thread costs more than it computes.
constexpr int64_t GRAIN = 4096;

inline int64_t grain_rows(int64_t dim) { return std::max<int64_t>(1, GRAIN / dim); }

template <class T>
inline float inverse_norm(const T* x, int64_t dim, float eps) {
  Floats squares = {};
  for (int64_t d = 0; d < dim; d += LANES) {
    const Floats part = load(x + d, dim - d);
    squares += part * part;
  }
  return 1.0f / std::sqrt(sum(squares) / dim + eps);
}

template <class T>
inline void scale_row(const T* x, const T* weight, int64_t dim, float factor, T* y) {
  for (int64_t d = 0; d < dim; d += LANES)
    store(y + d, load(x + d, dim - d) * factor * load(weight + d, dim - d), dim - d);
}

template <class T>
void rms_norm(const T* x, int64_t stride, const T* weight, int64_t weights, int64_t rows,
              int64_t dim, float eps, T* y) {
  parallel_rows(rows, grain_rows(dim), [=](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const T* row = x + r * stride;
      scale_row(row, weight + r % weights * dim, dim, inverse_norm(row, dim, eps), y + r * dim);
    }
  });
}

template <class T>
void add_rms_norm(const T* x, T* residual, const T* weight, int64_t rows, int64_t dim, float eps,
                  T* y) {
  parallel_rows(rows, grain_rows(dim), [=](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      T* row = residual + r * dim;
      for (int64_t d = 0; d < dim; d += LANES)
        store(row + d, load(row + d, dim - d) + load(x + r * dim + d, dim - d), dim - d);
      // Read again as it was stored: the norm is of the rounded sum.
      scale_row(row, weight, dim, inverse_norm(row, dim, eps), y + r * dim);
    }
  });
}

template <class T>
void layer_norm_row(const T* x, const T* weight, const T* bias, int64_t dim, float eps, T* y) {
  Floats total = {}, squares = {};
  for (int64_t d = 0; d < dim; d += LANES) total += load(x + d, dim - d);
  const float mean = sum(total) / dim;
  for (int64_t d = 0; d < dim; d += LANES) {
    const Ints is_behind = LANE >= static_cast<int32_t>(std::min(LANES, dim - d));
    const Floats apart = select(is_behind, Floats{}, load(x + d, dim - d) - mean);
    squares += apart * apart;
  }
  const float factor = 1.0f / std::sqrt(sum(squares) / dim + eps);
  for (int64_t d = 0; d < dim; d += LANES) {
    Floats normed = (load(x + d, dim - d) - mean) * factor * load(weight + d, dim - d);
    if (bias) normed += load(bias + d, dim - d);
    store(y + d, normed, dim - d);
  }
}

template <class T>
void layer_norm(const T* x, const T* weight, const T* bias, int64_t rows, int64_t dim, float eps,
                T* y) {
  parallel_rows(rows, grain_rows(dim), [=](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r)
      layer_norm_row(x + r * dim, weight, bias, dim, eps, y + r * dim);
  });
}

template <class T>
void gate_mul(const Gating& gating, const T* gate_up, int64_t rows, int64_t dim, T* y) {
  parallel_rows(rows, grain_rows(dim), [=](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) gate_row(gating, gate_up + 2 * r * dim, dim, y + r * dim);
  });
}

}  // namespace
}  // namespace quire

extern "C" {

// x, y[rows][dim], those of x `stride` values from one to the next; weight[weights][dim], of which
// row r has r % weights.
void quire_rms_norm(int32_t dtype, const void* x, int64_t stride, const void* weight,
                    int64_t weights, int64_t rows, int64_t dim, float eps, void* y) {
  quire::with_type(dtype, [&]<class T>() {
    quire::rms_norm(static_cast<const T*>(x), stride, static_cast<const T*>(weight), weights, rows,
                    dim, eps, static_cast<T*>(y));
  });
}

// residual += x, and y its norm.
void quire_add_rms_norm(int32_t dtype, const void* x, void* residual, const void* weight,
                        int64_t rows, int64_t dim, float eps, void* y) {
  quire::with_type(dtype, [&]<class T>() {
    quire::add_rms_norm(static_cast<const T*>(x), static_cast<T*>(residual),
                        static_cast<const T*>(weight), rows, dim, eps, static_cast<T*>(y));
  });
}

// x, y[rows][dim]; weight, bias[dim], the latter null where there is none.
void quire_layer_norm(int32_t dtype, const void* x, const void* weight, const void* bias,
                      int64_t rows, int64_t dim, float eps, void* y) {
  quire::with_type(dtype, [&]<class T>() {
    quire::layer_norm(static_cast<const T*>(x), static_cast<const T*>(weight),
                      static_cast<const T*>(bias), rows, dim, eps, static_cast<T*>(y));
  });
}

// gate_up[rows][2 * dim] -> y[rows][dim]; see gating.h.
void quire_gate_mul(int32_t dtype, quire::GatingKind kind, float alpha, float limit,
                    const void* gate_up, int64_t rows, int64_t dim, void* y) {
  const quire::Gating gating{kind, alpha, limit};
  quire::with_type(dtype, [&]<class T>() {
    quire::gate_mul(gating, static_cast<const T*>(gate_up), rows, dim, static_cast<T*>(y));
  });
}

}  // extern "C"

QUIRE_RECORDED(quire_rms_norm)
QUIRE_RECORDED(quire_add_rms_norm)
QUIRE_RECORDED(quire_layer_norm)
QUIRE_RECORDED(quire_gate_mul)
