// What is done to each value by itself (kernels/reference/layers.py).
#include "logits.h"
#include "parallel.h"
#include "program.h"
#include "simd.h"

namespace quire {

// As kernels/cpu/layers.py numbers them.
enum class Activation : int32_t { SILU, GELU, GELU_TANH, RELU, SQUARED_RELU };

namespace {

constexpr int64_t GRAIN = 4096;  // values below which a second thread costs more than it computes

template <Activation KIND>
inline Floats activated(Floats x) {
  if constexpr (KIND == Activation::SILU) {
    return x / (1.0f + exp(-x));
  } else if constexpr (KIND == Activation::GELU) {
    return 0.5f * x * (1.0f + erf(x * 0.70710678f));
  } else if constexpr (KIND == Activation::GELU_TANH) {
    return 0.5f * x * (1.0f + tanh(0.79788456f * (x + 0.044715f * x * x * x)));
  } else {
    const Floats kept = x < 0.0f ? Floats{} : x;
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
          T* to = static_cast<T*>(y) + r * dim;
          for (int64_t d = 0; d < dim; d += LANES)
            store(to + d, activated<KIND>(load(from + d, dim - d)), dim - d);
        }
      });
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
