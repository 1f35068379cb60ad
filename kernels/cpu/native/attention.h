// Paged attention: what the two kernels share. Keys and values are read where they lie, in blocks
// [kv_heads][block_size][head_dim], a tile of 64 tokens at a time.
#pragma once

#include <algorithm>
#include <vector>

#include "simd.h"

namespace quire {

constexpr int64_t TILE = 64;  // tokens between two corrections of the running softmax
constexpr int64_t MAX_HEAD_DIM = 512;

// A ragged batch (kernels.attention.BatchGeometry) and the model's shape; made once a step.
struct Batch {
  const int32_t* query_start;  // [rows + 1]
  const int32_t* seq_lens;     // [rows]
  const int32_t* slots;        // [rows]
  const int32_t* tables;       // [lines][table_width]
  int64_t rows, table_width, heads, kv_heads, head_dim, block_size;
  int32_t dtype;
};

struct Layer {
  float scale;
  float softcap;       // 0: none
  int64_t window;      // tokens; 0: all
  const float* sinks;  // [heads]; null: none
};

template <class T>
struct Tensors {
  const T* query;  // [tokens][heads][head_dim]
  const T *keys, *values;
  T* output;  // as query
};

inline int64_t padded(int64_t head_dim) { return (head_dim + LANES - 1) / LANES * LANES; }

// The first position that a query at `position` sees.
inline int64_t first_seen(const Layer& layer, int64_t position) {
  return layer.window ? std::max<int64_t>(0, position + 1 - layer.window) : 0;
}

// Where the keys and values of some tokens of a sequence lie, for one head.
template <class T>
struct TileRows {
  int64_t count;
  const T* keys[TILE];
  const T* values[TILE];

  // Tokens [begin, end), at most a tile of them.
  TileRows(const Batch& batch, const Tensors<T>& tensors, int64_t row, int64_t kv_head,
           int64_t begin, int64_t end)
      : count(end - begin) {
    const int32_t* table = batch.tables + batch.slots[row] * batch.table_width;
    const int64_t size = batch.block_size, dim = batch.head_dim;
    int64_t block = begin / size, offset = begin % size;
    for (int64_t i = 0; i < count; ++block, offset = 0) {
      const int64_t at = (table[block] * batch.kv_heads + kv_head) * size;
      for (; offset < size && i < count; ++offset, ++i) {
        keys[i] = tensors.keys + (at + offset) * dim;
        values[i] = tensors.values + (at + offset) * dim;
      }
    }
  }
};

// Memory of one thread that lives as long as the thread; valid until its next call.
template <class Use>
inline float* scratch(int64_t floats) {
  thread_local std::vector<Floats> memory;
  const size_t wanted = (floats + LANES - 1) / LANES;
  if (memory.size() < wanted) memory.resize(wanted);
  return reinterpret_cast<float*>(memory.data());
}

inline Floats capped(Floats scores, float softcap) {
  return softcap == 0.0f ? scores : tanh(scores * (1.0f / softcap)) * softcap;
}

inline float exp_of(float x) { return exp(fill(x))[0]; }

// What a head's sink adds to the sum of weights relative to `top`.
inline float sink_weight(const Layer& layer, int64_t head, float top) {
  return layer.sinks ? exp_of(layer.sinks[head] - top) : 0.0f;
}

// Decode: one query, one KV head, one split of the tokens [begin, end) that it sees.
//
// `sums` gets, for each head of the group, padded(head_dim) weighted sums of values, then the
// largest score and the sum of the weights relative to it: padded(head_dim) + 2 floats.
template <class T>
void attend_split(const Batch&, const Layer&, const Tensors<T>&, int64_t row, int64_t kv_head,
                  int64_t begin, int64_t end, float* sums);

// Prefill: queries [first, first + count) of a row's chunk, one KV head; results are written.
template <class T>
void attend_chunk(const Batch&, const Layer&, const Tensors<T>&, int64_t row, int64_t kv_head,
                  int64_t first, int64_t count);

}  // namespace quire
