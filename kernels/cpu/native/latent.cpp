// Latents of attention put in their slots, and queries made ready for them (kernels/reference/
// fused.py, latent_rope_store).
#include <cmath>

#include "parallel.h"
#include "program.h"
#include "rotate.h"

namespace quire {
namespace {

constexpr int64_t GRAIN = 8192;  // values below which a second thread costs more than it computes

template <class T>
inline void rms_norm(const T* x, const T* weight, int64_t dim, float eps, T* y) {
  Floats squares = {};
  for (int64_t d = 0; d < dim; d += LANES) {
    const Floats part = load(x + d, dim - d);
    squares += part * part;
  }
  const float factor = 1.0f / std::sqrt(sum(squares) / dim + eps);
  for (int64_t d = 0; d < dim; d += LANES)
    store(y + d, load(x + d, dim - d) * factor * load(weight + d, dim - d), dim - d);
}

}  // namespace
}  // namespace quire

// query[tokens][heads][rank + 2 * half], rotated in place behind `rank`; latent[tokens][rank + 2 *
// half], `stride` values from one to the next -> keys[slots][rank + 2 * half].
extern "C" void quire_latent_rope_store(int32_t dtype, void* query, const void* latent,
                                        int64_t stride, const void* weight, float eps,
                                        const float* cos, const float* sin, const int64_t* slots,
                                        int64_t tokens, int64_t heads, int64_t rank, int64_t half,
                                        void* keys) {
  using namespace quire;
  const int64_t width = rank + 2 * half;
  with_type(dtype, [&]<class T>() {
    const int64_t grain = std::max<int64_t>(1, GRAIN / (width + 2 * half * heads));
    parallel_rows(tokens, grain, [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; ++t) {
        const float *c = cos + t * half, *s = sin + t * half;
        for (int64_t head = 0; head < heads; ++head) {
          T* turned = static_cast<T*>(query) + (t * heads + head) * width + rank;
          rope(turned, c, s, half, turned);
        }
        if (slots[t] < 0) continue;
        const T* from = static_cast<const T*>(latent) + t * stride;
        T* key = static_cast<T*>(keys) + slots[t] * width;
        rms_norm(from, static_cast<const T*>(weight), rank, eps, key);
        rope(from + rank, c, s, half, key + rank);
      }
    });
  });
}

QUIRE_RECORDED(quire_latent_rope_store)
