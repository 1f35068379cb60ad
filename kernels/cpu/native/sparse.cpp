// Which positions a token attends to (kernels/reference/sparse.py): index keys and queries, their
// scores, and the slots of the highest ones.
#include <algorithm>
#include <functional>
#include <vector>

#include "dots.h"
#include "parallel.h"
#include "program.h"
#include "rotate.h"
#include "scratch.h"

namespace quire {
namespace {

constexpr int64_t GRAIN = 8192;    // values below which a second thread costs more than it computes
constexpr int64_t PRODUCTS = 1 << 16;  // the same, of multiplications
constexpr int64_t RUN = 256;       // positions that a thread scores at a time

// Tokens, each with `seq_lens[token]` positions, in blocks that a line of the tables lists.
struct Tokens {
  const int32_t *seq_lens, *lines, *tables;
  int64_t count, table_width, block_size;

  int64_t slot(int64_t token, int64_t position) const {
    const int32_t* table = tables + lines[token] * table_width;
    return table[position / block_size] * block_size + position % block_size;
  }
};

// As unsigned integers, numbers in their order; both zeros are one number, and what is no number is
// below all others.
inline uint32_t ordered(float x) {
  x = x == x ? x + 0.0f : -INFINITE;
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// Heads whose products with a tile of keys are summed at a time, in registers.
#ifdef __AVX512F__
constexpr int HEADS = 8;
#else
constexpr int HEADS = 4;
#endif

// Index keys of a tile, a position in each lane: columns[dim][LANES].
template <class T>
void load_tile(const Tokens& tokens, int64_t token, int64_t begin, int64_t held, const T* keys,
               int64_t dim, float* columns) {
  const T* rows[LANES];  // those that are missing repeat the last one
  for (int64_t i = 0; i < LANES; ++i)
    rows[i] = keys + tokens.slot(token, begin + std::min(i, held - 1)) * dim;
  for (int64_t d = 0; d < dim; d += LANES) {
    Floats block[LANES];
    for (int64_t i = 0; i < LANES; ++i) block[i] = load(rows[i] + d, dim - d);
    transpose(block);
    const int64_t count = std::min(LANES, dim - d);
    for (int64_t i = 0; i < count; ++i) store(columns + (d + i) * LANES, block[i]);
  }
}

// What some heads say of a tile's positions, added to `total`. A product is summed dimension by
// dimension, and heads one after the other, whatever else is computed.
template <int COUNT>
inline Floats add_heads(const float* columns, const float* query, const float* weights, int64_t dim,
                        Floats total) {
  Floats products[COUNT] = {};
  for (int64_t d = 0; d < dim; ++d) {
    const Floats keys = load(columns + d * LANES);
#pragma GCC unroll 8
    for (int h = 0; h < COUNT; ++h) products[h] += keys * query[h * dim + d];
  }
#pragma GCC unroll 8
  for (int h = 0; h < COUNT; ++h)  // what is no number stays none
    total += select(products[h] < 0.0f, Floats{}, products[h]) * weights[h];
  return total;
}

// scores[end - begin] of a token's positions.
template <class T>
void score_run(const Tokens& tokens, int64_t token, int64_t begin, int64_t end, const T* query,
               const float* weights, int64_t heads, int64_t dim, const T* keys, float* scores) {
  thread_local std::vector<float> wide, columns;
  wide.resize(heads * dim);
  columns.resize(dim * LANES);
  for (int64_t i = 0; i < heads * dim; i += LANES)
    store(wide.data() + i, load(query + i, heads * dim - i), heads * dim - i);
  for (int64_t at = begin; at < end; at += LANES) {
    const int64_t count = std::min(LANES, end - at);
    load_tile(tokens, token, at, count, keys, dim, columns.data());
    Floats total = {};
    int64_t h = 0;
    for (; h + HEADS <= heads; h += HEADS)
      total = add_heads<HEADS>(columns.data(), wide.data() + h * dim, weights + h, dim, total);
    for (; h < heads; ++h)
      total = add_heads<1>(columns.data(), wide.data() + h * dim, weights + h, dim, total);
    store(scores + at - begin, total, count);
  }
}

// Slots of the `top_k` positions with the highest scores, in their order; the first of equals.
void choose(const Tokens& tokens, int64_t token, const float* scores, int64_t top_k,
            int32_t* slots) {
  const int64_t length = tokens.seq_lens[token];
  thread_local std::vector<uint32_t> keys, some;
  keys.resize(length);
  for (int64_t p = 0; p < length; ++p) keys[p] = ordered(scores[p]);
  some.assign(keys.begin(), keys.end());
  const auto last = some.begin() + top_k - 1;
  std::nth_element(some.begin(), last, some.end(), std::greater<>());
  const uint32_t least = *last;
  int64_t equals = top_k - std::count_if(some.begin(), last, [=](auto key) { return key > least; });
  for (int64_t p = 0; p < length; ++p)
    if (keys[p] > least || (keys[p] == least && equals-- > 0))
      *slots++ = static_cast<int32_t>(tokens.slot(token, p));
}

struct Item {
  int64_t token, begin, end;
  float* scores;
};

template <class T>
void select(const Tokens& tokens, const T* query, const float* weights, int64_t heads, int64_t dim,
            const T* keys, int64_t top_k, int32_t* slots) {
  int64_t total = 0;
  for (int64_t t = 0; t < tokens.count; ++t)
    if (tokens.seq_lens[t] > top_k) total += tokens.seq_lens[t];
  const Scratch<float> scores(total);
  std::vector<Item> items;
  std::vector<const float*> of_token(tokens.count);
  float* next = scores.get();
  for (int64_t t = 0; t < tokens.count; ++t) {
    const int64_t length = tokens.seq_lens[t];
    of_token[t] = next;
    if (length <= top_k) continue;
    for (int64_t begin = 0; begin < length; begin += RUN)
      items.push_back({t, begin, std::min(length, begin + RUN), next + begin});
    next += length;
  }
  parallel_items(items.size(), total * heads * dim < PRODUCTS, [&](int64_t index) {
    const Item& item = items[index];
    score_run(tokens, item.token, item.begin, item.end, query + item.token * heads * dim,
              weights + item.token * heads, heads, dim, keys, item.scores);
  });
  parallel_items(tokens.count, total < GRAIN, [&](int64_t t) {
    const int64_t length = tokens.seq_lens[t];
    int32_t* const own = slots + t * top_k;
    if (length > top_k) return choose(tokens, t, of_token[t], top_k, own);
    for (int64_t p = 0; p < length; ++p) own[p] = static_cast<int32_t>(tokens.slot(t, p));
  });
}

}  // namespace
}  // namespace quire

extern "C" {

// query[tokens][heads][dim] or null, its first 2 * half rotated in place; normed[tokens][dim] ->
// keys[slots][dim], the first 2 * half rotated.
void quire_index_rope_store(int32_t dtype, void* query, const void* normed, const float* cos,
                            const float* sin, const int64_t* slots, int64_t tokens, int64_t heads,
                            int64_t dim, int64_t half, void* keys) {
  using namespace quire;
  with_type(dtype, [&]<class T>() {
    const int64_t grain = std::max<int64_t>(1, GRAIN / (dim + 2 * half * heads));
    parallel_rows(tokens, grain, [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; ++t) {
        const float *c = cos + t * half, *s = sin + t * half;
        for (int64_t head = 0; query && head < heads; ++head) {
          T* turned = static_cast<T*>(query) + (t * heads + head) * dim;
          rope(turned, c, s, half, turned);
        }
        if (slots[t] < 0) continue;
        const T* from = static_cast<const T*>(normed) + t * dim;
        T* key = static_cast<T*>(keys) + slots[t] * dim;
        rope(from, c, s, half, key);
        std::copy(from + 2 * half, from + dim, key + 2 * half);
      }
    });
  });
}

// y[tokens][heads] = x[tokens][hidden] * weight[heads][hidden]^T.
void quire_index_weights(int32_t dtype, const void* x, int64_t tokens, int64_t hidden,
                         const float* weight, int64_t heads, float* y) {
  using namespace quire;
  with_type(dtype, [&]<class T>() {
    const T* const from = static_cast<const T*>(x);
    const int64_t grain = std::max<int64_t>(1, PRODUCTS / (hidden * heads));
    parallel_rows(tokens, grain, [=](int64_t begin, int64_t end) {
      dot_rows(from + begin * hidden, end - begin, hidden, weight, heads,
               static_cast<const float*>(nullptr), y + begin * heads, heads);
    });
  });
}

void quire_selected_lengths(const int32_t* seq_lens, int64_t count, int64_t top_k, int32_t* out) {
  for (int64_t i = 0; i < count; ++i) out[i] = std::min<int64_t>(seq_lens[i], top_k);
}

// query[tokens][heads][dim], weights[tokens][heads], keys[slots][dim] -> slots[tokens][top_k].
void quire_select_slots(int32_t dtype, const void* query, const float* weights, int64_t heads,
                        int64_t dim, const void* keys, const int32_t* seq_lens,
                        const int32_t* lines, const int32_t* tables, int64_t tokens,
                        int64_t table_width, int64_t block_size, int64_t top_k, int32_t* slots) {
  using namespace quire;
  with_type(dtype, [&]<class T>() {
    select({seq_lens, lines, tables, tokens, table_width, block_size},
           static_cast<const T*>(query), weights, heads, dim, static_cast<const T*>(keys), top_k,
           slots);
  });
}

}  // extern "C"

QUIRE_RECORDED(quire_index_rope_store)
QUIRE_RECORDED(quire_index_weights)
QUIRE_RECORDED(quire_selected_lengths)
QUIRE_RECORDED(quire_select_slots)
