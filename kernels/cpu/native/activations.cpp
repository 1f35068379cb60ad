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
