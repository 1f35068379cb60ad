// What is done to each value by itself (kernels/reference/layers.py).
#include "activations.h"
#include "logits.h"
#include "parallel.h"
#include "program.h"
#include "simd.h"

namespace quire {

namespace {

constexpr int64_t GRAIN = 4096;  // values below which a second thread costs more than it computes

}  // namespace

namespace {

// expm1(x) - x for x <= 0. Near 0 both are almost equal, so that the series is summed instead.
inline Floats expm1_less_linear(Floats x) {
  Floats sum = fill(1.0f / 3628800.0f);
  for (const float factor : {1.0f / 362880.0f, 1.0f / 40320.0f, 1.0f / 5040.0f, 1.0f / 720.0f,
                             1.0f / 120.0f, 1.0f / 24.0f, 1.0f / 6.0f, 0.5f})
    sum = sum * x + factor;
  return select(x > -0.5f, sum * x * x, exp(x) - 1.0f - x);
}

// c[4] are the factors of x^2 above 0 and of the exponential below, the slope, and the edge.
inline Floats xielu(Floats x, const float* c) {
  const Floats edge = fill(c[3]), least = select(x < edge, x, edge);
  const Floats below = c[1] * (expm1_less_linear(least) + (least - x));
  return select(x > 0.0f, c[0] * x * x, below) + c[2] * x;
}

}  // namespace

[[gnu::noinline]] Floats softcapped(Floats x, float cap) { return cap * tanh(x / cap); }

}  // namespace quire

extern "C" {

// x, y[rows][dim], those of x `stride` values from one to the next.
void quire_activate(quire::Activation kind, int32_t dtype, const void* x, int64_t stride,
                    int64_t rows, int64_t dim, void* y) {
  using namespace quire;
  with_type(dtype, [&]<class T>() {
    with_activation(kind, [&]<Activation KIND>() {
      parallel_rows(rows, std::max<int64_t>(1, GRAIN / dim), [=](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; ++r) {
          const T* from = static_cast<const T*>(x) + r * stride;
          activate_row<KIND>(from, dim, static_cast<T*>(y) + r * dim);
        }
      });
    });
  });
}

// x, y[rows][dim] as above, c[4].
void quire_xielu(int32_t dtype, const float* c, const void* x, int64_t stride, int64_t rows,
                 int64_t dim, void* y) {
  using namespace quire;
  with_type(dtype, [&]<class T>() {
    parallel_rows(rows, std::max<int64_t>(1, GRAIN / dim), [=](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) {
        const T* from = static_cast<const T*>(x) + r * stride;
        T* to = static_cast<T*>(y) + r * dim;
        for (int64_t d = 0; d < dim; d += LANES)
          store(to + d, xielu(load(from + d, dim - d), c), dim - d);
      }
    });
  });
}

// x[count] = cap * tanh(x / cap).
void quire_softcap(float* x, int64_t count, float cap) {
  using namespace quire;
  const int64_t vectors = (count + LANES - 1) / LANES;
  parallel_rows(vectors, GRAIN / LANES, [=](int64_t begin, int64_t end) {
    for (int64_t at = begin * LANES; at < end * LANES; at += LANES)
      store(x + at, softcapped(load(x + at, count - at), cap), count - at);
  });
}

}  // extern "C"

QUIRE_RECORDED(quire_activate)
QUIRE_RECORDED(quire_softcap)
QUIRE_RECORDED(quire_xielu)
