// Paged attention: what the two kernels share. Keys and values are read where they lie, in blocks
// [kv_heads][block_size][head_dim], a tile of 64 tokens at a time. Blocks of other layers may lie
// between two of a layer's.
#pragma once

#include <algorithm>
#include <vector>

#include "cache_codes.h"
#include "simd.h"

namespace quire {

constexpr int64_t TILE = 64;  // tokens between two corrections of the running softmax
constexpr int64_t MAX_HEAD_DIM = 640;

// A ragged batch (kernels.attention.BatchGeometry) and the model's shape; made once a step.
struct Batch {
  const int32_t* query_start;  // [rows + 1]
  const int32_t* seq_lens;     // [rows]
  const int32_t* slots;        // [rows]
  const int32_t* tables;       // [lines][table_width]
  // value_dim: what is read of a value; in latent attention values are the first part of keys.
  int64_t rows, table_width, heads, kv_heads, head_dim, value_dim, block_size;
  int32_t dtype;
};

struct Layer {
  float scale;
  float softcap;       // 0: none
  int64_t window;      // tokens; 0: all
  int64_t chunk;       // tokens, of which a query sees its own chunk alone; 0: all
  const float* sinks;  // [heads]; null: none
  const int32_t* ends;  // [tokens], one past the last position seen, of chunks; null: the query's
  const float* slopes;  // [heads], of scores over distances; null: none
};

template <class T>
struct Tensors {
  const T* query;  // [tokens][heads][head_dim]
  const T *keys, *values;  // of the cache; null where it holds codes
  T* output;               // [tokens][heads][value_dim]
  int64_t heads_apart;     // from a block of the cache to the next, in KV heads of a block
  CodedCache codes = {};

  const void* stored_keys() const { return is_coded() ? codes.keys : keys; }
  const void* stored_values() const { return is_coded() ? codes.values : values; }
  int64_t row_bytes(int64_t head_dim) const { return head_dim * (is_coded() ? 1 : sizeof(T)); }

 private:
  bool is_coded() const { return codes.kind != CodeKind::NONE; }
};

inline int64_t padded(int64_t head_dim) { return (head_dim + LANES - 1) / LANES * LANES; }

// The first position that a query at `position` sees.
inline int64_t first_seen(const Layer& layer, int64_t position) {
  const int64_t of_chunk = layer.chunk ? position / layer.chunk * layer.chunk : 0;
  return layer.window ? std::max(of_chunk, position + 1 - layer.window) : of_chunk;
}

// KV heads that lie one after the other.
struct KvHeads {
  int64_t first, count;
};

// Some tokens of a sequence, for one head.
struct Span {
  int64_t row, kv_head, begin, end;

  // Calls body(first, count) for the runs in which they lie one after the other, in a cache seen as
  // rows.
  template <class Body>
  void for_runs(const Batch& batch, int64_t heads_apart, Body body) const {
    const int64_t size = batch.block_size;
    const int32_t* block = batch.tables + batch.slots[row] * batch.table_width + begin / size;
    // The first run may begin within its block.
    for (int64_t at = begin, offset = begin % size; at < end; ++block, offset = 0) {
      const int64_t count = std::min(size - offset, end - at);
      body((*block * heads_apart + kv_head) * size + offset, count);
      at += count;
    }
  }
};

// Some tokens of a sequence, for heads that lie one after the other.
struct Split {
  int64_t row;
  KvHeads heads;
  int64_t begin, end;

  Span of_head(int64_t head) const { return {row, head, begin, end}; }
};

// Where the tokens of a span lie, at most a tile of them.
struct TilePlaces {
  int64_t begin;  // the first one's position
  int64_t count = 0;
  int64_t at[TILE];

  TilePlaces(const Batch& batch, int64_t heads_apart, const Span& span) : begin(span.begin) {
    span.for_runs(batch, heads_apart, [this](int64_t first, int64_t run) {
      for (int64_t i = 0; i < run; ++i) at[count + i] = first + i;
      count += run;
    });
  }
};

// The keys and values of a tile's tokens. Codes are widened into memory of the tile's own, all
// but their scales: those multiply a token's scores, and its weights before they multiply values.
template <class T>
struct TileRows {
  int64_t count;
  const T* keys[TILE];
  const T* values[TILE];
  bool is_coded = false;
  float key_scales[TILE], value_scales[TILE];  // where coded; 0 behind the last token

  // `memory` has place for 2 * TILE * head_dim values, and lives as long as this.
  TileRows(const Batch& batch, const Tensors<T>& tensors, const TilePlaces& places, T* memory)
      : count(places.count) {
    const int64_t dim = batch.head_dim;
    if (tensors.codes.kind == CodeKind::NONE) {
      for (int64_t i = 0; i < count; ++i) {
        keys[i] = tensors.keys + places.at[i] * dim;
        values[i] = tensors.values + places.at[i] * dim;
      }
      return;
    }
    is_coded = true;
    tensors.codes.with_codes([&]<class Code>(const Code* key_codes, const Code* value_codes) {
      for (int64_t i = 0; i < count; ++i) {
        T* const key = memory + i * dim;
        T* const value = memory + (TILE + i) * dim;
        widen(key_codes + places.at[i] * dim, dim, key);
        widen(value_codes + places.at[i] * dim, dim, value);
        keys[i] = key, values[i] = value;
      }
    });
    for (int64_t i = 0; i < TILE; ++i) {
      key_scales[i] = i < count ? tensors.codes.key_scales[places.at[i]] : 0.0f;
      value_scales[i] = i < count ? tensors.codes.value_scales[places.at[i]] : 0.0f;
    }
  }

  // How many values of T the memory must hold.
  static int64_t memory_size(const Batch& batch, const Tensors<T>& tensors) {
    return tensors.codes.kind == CodeKind::NONE ? 0 : 2 * TILE * batch.head_dim;
  }
};

// x[TILE] *= scales[TILE], those of tokens.
inline void scale_tile(const float* scales, float* x) {
  for (int64_t i = 0; i < TILE; i += LANES) store(x + i, load(x + i) * load(scales + i));
}

// Memory of one thread that lives as long as the thread; valid until its next call.
template <class Use>
inline float* scratch(int64_t floats) {
  thread_local std::vector<Floats> memory;
  const size_t wanted = (floats + LANES - 1) / LANES;
  if (memory.size() < wanted) memory.resize(wanted);
  return reinterpret_cast<float*>(memory.data());
}

// Arrays cut from one piece of memory, each on the boundary of a cache line.
class Cutter {
 public:
  explicit Cutter(float* memory) : memory_(memory) {}

  template <class Element>
  Element* take(int64_t count) {
    float* const begin = memory_;
    memory_ += (count * sizeof(Element) + 63) / 64 * LANES;
    return reinterpret_cast<Element*>(begin);
  }

  template <class Element>
  Element* zeros(int64_t count) {
    auto* const taken = take<Element>(count);
    std::fill(taken, taken + count, Element{});
    return taken;
  }

 private:
  float* memory_;
};

inline Floats capped(Floats scores, float softcap) {
  return softcap == 0.0f ? scores : tanh(scores * (1.0f / softcap)) * softcap;
}

inline float exp_of(float x) { return exp(fill(x))[0]; }

// What a head's sink adds to the sum of weights relative to `top`.
inline float sink_weight(const Layer& layer, int64_t head, float top) {
  return layer.sinks ? exp_of(layer.sinks[head] - top) : 0.0f;
}

// Blocks lie anywhere, and the processor does not guess where the next one is.
inline void fetch(const void* first, int64_t bytes) {
  // GCC 12 drops calls of a function that does nothing but prefetch: this makes it do something.
  __asm__ volatile("");
  for (int64_t at = 0; at < bytes; at += 64)
    __builtin_prefetch(static_cast<const char*>(first) + at, 0, 3);
}

// `stored`: rows of `bytes` each.
inline void fetch(const Batch& batch, int64_t heads_apart, const Span& span, const void* stored,
                  int64_t bytes) {
  span.for_runs(batch, heads_apart, [=](int64_t first, int64_t count) {
    fetch(static_cast<const char*>(stored) + first * bytes, count * bytes);
  });
}

// The tile with which a span begins; nothing of nothing.
inline Span first_tile(const Span& span) {
  return {span.row, span.kv_head, span.begin, std::min(span.end, (span.begin / TILE + 1) * TILE)};
}

// A query's scores of a tile become weights relative to the largest so far, behind the last token 0
// up to the next vector; returns what earlier sums are to keep. One copy for all: the compiler takes
// twice as long otherwise.
float weigh(float* scores, int64_t count, float softcap, float& top, float& weight);

// scores[TILE] of keys from position `begin` on get what ALiBi adds for their distances from a query.
inline void add_distances(float* scores, float slope, int64_t begin, int64_t query) {
  for (int64_t i = 0; i < TILE; i += LANES) {
    const Ints distances = LANE + int32_t(begin + i - query);
    store(scores + i, load(scores + i) + to_floats(distances) * slope);
  }
}

// Calls body<GROUP>() for a number that is known when the program runs, 1 to MAX.
template <int MAX, class Body>
void with_group(int64_t group, Body body) {
  if constexpr (MAX > 0) {
    if (group == MAX) return body.template operator()<MAX>();
    with_group<MAX - 1>(group, body);
  }
}

// The tile that a thread takes next. Each part of its rows is asked for where the same part of this
// tile's is read, keys beside keys and values beside values: many at once would wait for each other,
// and the work for them.
template <class T>
class Ahead {
 public:
  Ahead(const Batch& batch, const Tensors<T>& tensors, const Span& tile)
      : places_(batch, tensors.heads_apart, tile),
        keys_(static_cast<const char*>(tensors.stored_keys())),
        values_(static_cast<const char*>(tensors.stored_values())),
        row_bytes_(tensors.row_bytes(batch.head_dim)),
        value_bytes_(row_bytes_ / batch.head_dim) {}

  const TilePlaces& places() const { return places_; }

  // The cache line in which value d of token i's key begins, or of its value; nothing where there is
  // no token i.
  void fetch_key(int64_t i, int64_t d) const { fetch_line(keys_, i, d); }
  void fetch_value(int64_t i, int64_t d) const { fetch_line(values_, i, d); }

  // Of all tokens from i on: of those that this tile does not have.
  void fetch_keys_from(int64_t i) const { fetch_from(keys_, i); }
  void fetch_values_from(int64_t i) const { fetch_from(values_, i); }

 private:
  void fetch_line(const char* stored, int64_t i, int64_t d) const {
    if (i < places_.count) fetch(stored + places_.at[i] * row_bytes_ + d * value_bytes_, 1);
  }
  void fetch_from(const char* stored, int64_t i) const {
    for (; i < places_.count; ++i) fetch(stored + places_.at[i] * row_bytes_, row_bytes_);
  }

  TilePlaces places_;
  const char *keys_, *values_;
  int64_t row_bytes_, value_bytes_;
};

// Calls body<GROUP>(head, place) for the heads of a span's KV head, at most MAX of them at a time: the
// first of these, and where their sums begin.
template <int MAX, class Body>
void for_groups(const Batch& batch, const Span& span, Body body) {
  const int64_t group = batch.heads / batch.kv_heads, a_head = padded(batch.value_dim) + 2;
  for (int64_t g = 0; g < group; g += MAX)
    with_group<MAX>(std::min<int64_t>(MAX, group - g), [&]<int GROUP>() {
      body.template operator()<GROUP>(span.kv_head * group + g, g * a_head);
    });
}

// The tiles of a span, each with where the one behind it lies; behind the last one is `next`, with
// which the thread goes on.
template <class T, class Body>
void for_tiles(const Batch& batch, const Tensors<T>& tensors, const Span& span, const Span& next,
               Body body) {
  TilePlaces places(batch, tensors.heads_apart, first_tile(span));
  for (Span rest = span; rest.begin < rest.end;) {
    rest.begin = first_tile(rest).end;
    const Ahead<T> ahead(batch, tensors, first_tile(rest.begin < rest.end ? rest : next));
    body(places, ahead);
    places = ahead.places();
  }
}

// Decode: one query, the tokens of a split that it sees; `next` is what the thread goes on with.
//
// `sums` gets, for each head of the split, padded(value_dim) weighted sums of values, then the largest
// score and the sum of the weights relative to it: padded(value_dim) + 2 floats.
template <class T>
void attend_split(const Batch&, const Layer&, const Tensors<T>&, const Split&, const Split& next,
                  float* sums);

// KV heads that attend_split takes at a time, at most.
template <class T>
int64_t kv_heads_together(const Batch&, const Layer&, const Tensors<T>&);

// The same by tiles, where the processor has a matrix unit; the other two are for one KV head.
void attend_split_tiles(const Batch&, const Layer&, const Tensors<bfloat16>&, const Split&,
                        const Split& next, float* sums);
int64_t kv_heads_of_tiles(const Batch&);

// Where the processor multiplies pairs of bfloat16.
void attend_span_pairs(const Batch&, const Layer&, const Tensors<bfloat16>&, const Span&,
                       const Span& next, float* sums);

// And over int8 codes in products of integers, which takes half the time of widening them.
void attend_span_int8(const Batch&, const Layer&, const Tensors<bfloat16>&, const Span&,
                      const Span& next, float* sums);

// Prefill: queries [first, first + count) of a row's chunk, one KV head; results are written.
template <class T>
void attend_chunk(const Batch&, const Layer&, const Tensors<T>&, int64_t row, int64_t kv_head,
                  int64_t first, int64_t count);

}  // namespace quire
