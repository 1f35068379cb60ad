// Queries made ready to attend, keys and values put in their slots (kernels/reference/fused.py).
#include <cmath>

#include "cache_codes.h"
#include "parallel.h"
#include "program.h"
#include "simd.h"

namespace quire {
namespace {

constexpr int64_t GRAIN = 4096;  // values below which a second thread costs more than it computes
constexpr int64_t MAX_HEAD_DIM = 512;

struct Projection {
  int64_t tokens, heads, kv_heads, heads_apart, head_dim, block_size;
  float eps;
  const float *cos, *sin;  // [tokens][head_dim / 2]; null: no rotation
  const int64_t* slots;    // [tokens]; -1: not stored
};

// One head's query or key: x normalised by `weight` (or not: null), rotated, written to y.
template <class T, class Y>
inline void norm_rope(const Projection& p, const T* x, const T* weight, int64_t token, Y* y) {
  const int64_t dim = p.head_dim, half = dim / 2;
  alignas(64) float row[MAX_HEAD_DIM + LANES];
  Floats squares = {};
  for (int64_t d = 0; d < dim; d += LANES) {
    const Floats part = load(x + d, dim - d);
    squares += part * part;
    store(row + d, part);
  }
  if (weight) {
    const float factor = 1.0f / std::sqrt(sum(squares) / dim + p.eps);
    for (int64_t d = 0; d < dim; d += LANES)
      store(row + d, load(row + d) * factor * load(weight + d, dim - d));
  }
  if (!p.cos) {
    for (int64_t d = 0; d < dim; d += LANES) store(y + d, load(row + d), dim - d);
    return;
  }
  for (int64_t d = 0; d < half; d += LANES) {
    const int64_t left = half - d;
    const Floats cos = load(p.cos + token * half + d, left);
    const Floats sin = load(p.sin + token * half + d, left);
    const Floats first = load(row + d), second = load(row + half + d, left);
    store(y + d, first * cos - second * sin, left);
    store(y + half + d, second * cos + first * sin, left);
  }
}

// A layer's cache, in which rows are stored as they are.
template <class T>
struct PlainStore {
  T *keys, *values;

  void store_key(const Projection& p, const T* x, const T* weight, int64_t token, int64_t row) {
    norm_rope(p, x, weight, token, keys + row * p.head_dim);
  }
  void store_value(const Projection& p, const T* x, int64_t row) {
    std::memcpy(values + row * p.head_dim, x, p.head_dim * sizeof(T));
  }
};

// One in which they become codes, each with a scale; from float32, so that they are rounded once.
template <class T, class Code>
struct CodedStore {
  Code *keys, *values;
  float *key_scales, *value_scales;

  void store_key(const Projection& p, const T* x, const T* weight, int64_t token, int64_t row) {
    alignas(64) float wide[MAX_HEAD_DIM + LANES];
    norm_rope(p, x, weight, token, wide);
    key_scales[row] = encode(wide, p.head_dim, keys + row * p.head_dim);
  }
  void store_value(const Projection& p, const T* x, int64_t row) {
    alignas(64) float wide[MAX_HEAD_DIM + LANES];
    widen(x, p.head_dim, wide);
    value_scales[row] = encode(wide, p.head_dim, values + row * p.head_dim);
  }
};

template <class T, class Store>
void norm_rope_store(const Projection& p, const T* fused, const T* weight, T* query, Store cache) {
  const int64_t dim = p.head_dim, rotated = p.heads + p.kv_heads;
  const int64_t width = (rotated + p.kv_heads) * dim;
  parallel_rows(p.tokens, std::max<int64_t>(1, GRAIN / width), [&](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token) {
      const T* x = fused + token * width;
      for (int64_t head = 0; head < p.heads; ++head)
        norm_rope(p, x + head * dim, weight ? weight + head * dim : nullptr, token,
                  query + (token * p.heads + head) * dim);
      const int64_t slot = p.slots[token];
      if (slot < 0) continue;
      for (int64_t head = 0; head < p.kv_heads; ++head) {
        const int64_t at = p.heads + head;
        const int64_t to = (slot / p.block_size * p.heads_apart + head) * p.block_size;
        const int64_t row = to + slot % p.block_size;
        cache.store_key(p, x + at * dim, weight ? weight + at * dim : nullptr, token, row);
        cache.store_value(p, x + (rotated + head) * dim, row);
      }
    }
  });
}

}  // namespace
}  // namespace quire

extern "C" {

// fused[tokens][heads + 2 kv_heads][head_dim] -> query[tokens][heads][head_dim] and the cache.
void quire_norm_rope_store(int32_t dtype, const void* fused, const void* weight, float eps,
                           const float* cos, const float* sin, const int64_t* slots,
                           int64_t tokens, int64_t heads, int64_t kv_heads, int64_t heads_apart,
                           int64_t head_dim, int64_t block_size, void* query, void* keys,
                           void* values) {
  const quire::Projection projection{tokens, heads, kv_heads, heads_apart, head_dim, block_size,
                                     eps,    cos,   sin,      slots};
  quire::with_type(dtype, [&]<class T>() {
    quire::norm_rope_store(
        projection, static_cast<const T*>(fused), static_cast<const T*>(weight),
        static_cast<T*>(query),
        quire::PlainStore<T>{static_cast<T*>(keys), static_cast<T*>(values)});
  });
}

// The same into a cache of codes; `kind` as in cache_codes.h.
void quire_norm_rope_store_codes(int32_t dtype, const void* fused, const void* weight, float eps,
                                 const float* cos, const float* sin, const int64_t* slots,
                                 int64_t tokens, int64_t heads, int64_t kv_heads,
                                 int64_t heads_apart, int64_t head_dim, int64_t block_size,
                                 void* query, void* keys, void* values, int32_t kind,
                                 float* key_scales, float* value_scales) {
  const quire::Projection projection{tokens, heads, kv_heads, heads_apart, head_dim, block_size,
                                     eps,    cos,   sin,      slots};
  quire::with_type(dtype, [&]<class T>() {
    quire::with_code(quire::CodeKind{kind}, [&]<class Code>() {
      quire::norm_rope_store(
          projection, static_cast<const T*>(fused), static_cast<const T*>(weight),
          static_cast<T*>(query),
          quire::CodedStore<T, Code>{static_cast<Code*>(keys), static_cast<Code*>(values),
                                     key_scales, value_scales});
    });
  });
}

// x, y[tokens][heads][head_dim]; weight[weights][head_dim], of which head h has h % weights, or
// null.
void quire_norm_rope(int32_t dtype, const void* x, const void* weight, int64_t weights, float eps,
                     const float* cos, const float* sin, int64_t tokens, int64_t heads,
                     int64_t head_dim, void* y) {
  using namespace quire;
  const Projection p{tokens, heads, 0, 0, head_dim, 0, eps, cos, sin, nullptr};
  with_type(dtype, [&]<class T>() {
    const T *from = static_cast<const T*>(x), *by = static_cast<const T*>(weight);
    const int64_t grain = std::max<int64_t>(1, GRAIN / (heads * head_dim));
    parallel_rows(tokens, grain, [=](int64_t begin, int64_t end) {
      for (int64_t i = begin * heads; i < end * heads; ++i)
        norm_rope(p, from + i * head_dim, by ? by + i % heads % weights * head_dim : nullptr,
                  i / heads, static_cast<T*>(y) + i * head_dim);
    });
  });
}

// Blocks of `bytes` each, `apart` from one to the next: stored[targets[i]] = stored[sources[i]].
void quire_copy_blocks(char* stored, const int64_t* sources, const int64_t* targets, int64_t count,
                       int64_t bytes, int64_t apart) {
  for (int64_t i = 0; i < count; ++i)
    std::memcpy(stored + targets[i] * apart, stored + sources[i] * apart, bytes);
}

}  // extern "C"

QUIRE_RECORDED(quire_norm_rope_store)
QUIRE_RECORDED(quire_norm_rope_store_codes)
QUIRE_RECORDED(quire_norm_rope)
