// What adapters add to a linear layer, for tokens with different ones (kernels/reference/lora.py).
//
// Tokens are sorted by adapter, as in Punica's segmented products (Chen et al. 2023). An item of work
// is up to sixteen tokens of one adapter, through both of its matrices: what lies between these
// never leaves the core, and no thread waits for another.
#include <vector>

#include "parallel.h"
#include "simd.h"

namespace quire {
namespace {

constexpr int64_t TOKENS = 16;  // of an item
constexpr int64_t TILE = 4;     // tokens, ranks and vectors of outputs held in registers
// Multiplications below which a second thread costs more than it computes.
constexpr int64_t SMALL = 1 << 17;

struct Group {  // tokens [begin, end) of the order, with the adapter in `slot`
  int64_t slot, begin, end;
};

struct Span {  // the outputs [begin, end) that a rank reaches
  int32_t begin, end;
};

template <class T>
struct Layer {
  const T *down, *up;  // [slots][rank][inputs], [slots][rank][outputs]
  const Span* spans;   // [slots][rank]
  int64_t rank, inputs, outputs;
};

// sums[4 * t + r] of four tokens with four rows of `down`.
template <class T>
inline Floats products(const T* const (&x)[TILE], const T* const (&down)[TILE], int64_t inputs) {
  Floats sums[TILE * TILE] = {};
  const auto add = [&](int64_t d, int64_t count) {
    Floats parts[TILE];
    for (int r = 0; r < TILE; ++r) parts[r] = load(down[r] + d, count);
    for (int t = 0; t < TILE; ++t) {
      const Floats part = load(x[t] + d, count);
      for (int r = 0; r < TILE; ++r) sums[TILE * t + r] += part * parts[r];
    }
  };
  int64_t d = 0;
  for (; d + LANES <= inputs; d += LANES) add(d, LANES);
  if (d < inputs) add(d, inputs - d);
  return sum_each(sums);
}

// inner[token][rank]; ranks that reach nothing are left as they are.
template <class T>
void go_down(const Layer<T>& layer, int64_t slot, const T* x, const int64_t* tokens, int64_t count,
             float* inner) {
  const Span* spans = layer.spans + slot * layer.rank;
  int64_t ranks[TILE];
  int64_t held = 0;
  const auto flush = [&] {
    const T* rows[TILE];
    for (int64_t r = 0; r < TILE; ++r)
      rows[r] = layer.down + (slot * layer.rank + ranks[std::min(r, held - 1)]) * layer.inputs;
    for (int64_t first = 0; first < count; first += TILE) {
      const T* read[TILE];
      for (int64_t t = 0; t < TILE; ++t)
        read[t] = x + tokens[std::min(first + t, count - 1)] * layer.inputs;
      const Floats sums = products(read, rows, layer.inputs);
      for (int64_t t = first; t < std::min(first + TILE, count); ++t)
        for (int64_t r = 0; r < held; ++r)
          inner[t * layer.rank + ranks[r]] = sums[TILE * (t - first) + r];
    }
    held = 0;
  };
  for (int64_t r = 0; r < layer.rank; ++r) {
    if (spans[r].begin == spans[r].end) continue;
    ranks[held++] = r;
    if (held == TILE) flush();
  }
  if (held) flush();
}

// out[token] += inner[token] * up, for the outputs [begin, end): no more than a tile's width.
template <class T>
void go_up(const Layer<T>& layer, int64_t slot, const float* inner, const int64_t* tokens,
           int64_t count, int64_t begin, int64_t end, T* out) {
  const Span* spans = layer.spans + slot * layer.rank;
  const T* up = layer.up + slot * layer.rank * layer.outputs;
  for (int64_t first = 0; first < count; first += TILE) {
    Floats sums[TILE][TILE] = {};
    for (int64_t r = 0; r < layer.rank; ++r) {
      if (spans[r].begin >= end || spans[r].end <= begin) continue;
      Floats parts[TILE];
      for (int64_t v = 0; v < TILE; ++v) {
        const int64_t o = begin + v * LANES;
        parts[v] = o < end ? load(up + r * layer.outputs + o, end - o) : Floats{};
      }
      for (int64_t t = 0; t < TILE; ++t) {
        const float factor = inner[std::min(first + t, count - 1) * layer.rank + r];
        for (int64_t v = 0; v < TILE; ++v) sums[t][v] += factor * parts[v];
      }
    }
    for (int64_t t = first; t < std::min(first + TILE, count); ++t)
      for (int64_t v = 0; v < TILE; ++v) {
        const int64_t o = begin + v * LANES;
        if (o >= end) break;
        T* place = out + tokens[t] * layer.outputs + o;
        store(place, load(place, end - o) + sums[t - first][v], end - o);
      }
  }
}

template <class T>
void add_adapters(const Layer<T>& layer, const T* x, const int64_t* tokens, const Group* groups,
                  int64_t num_groups, T* out) {
  std::vector<Group> items;
  int64_t num_tokens = 0;
  for (const Group* group = groups; group < groups + num_groups; ++group) {
    num_tokens += group->end - group->begin;
    for (int64_t begin = group->begin; begin < group->end; begin += TOKENS)
      items.push_back({group->slot, begin, std::min(begin + TOKENS, group->end)});
  }
  const int64_t work = num_tokens * layer.rank * (layer.inputs + layer.outputs);
  parallel_items(items.size(), work < SMALL, [&](int64_t i) {
    const Group& item = items[i];
    const int64_t count = item.end - item.begin;
    const int64_t* own = tokens + item.begin;
    std::vector<float> inner(count * layer.rank);
    go_down(layer, item.slot, x, own, count, inner.data());
    for (int64_t o = 0; o < layer.outputs; o += TILE * LANES)
      go_up(layer, item.slot, inner.data(), own, count, o,
            std::min(o + TILE * LANES, layer.outputs), out);
  });
}

}  // namespace
}  // namespace quire

extern "C" {

// out[n][outputs] += what the adapters give for x[n][inputs]; all of one dtype.
void quire_add_adapters(int32_t dtype, const void* down, const void* up, const void* spans,
                        int64_t rank, int64_t inputs, int64_t outputs, const void* x,
                        const int64_t* tokens, const void* groups, int64_t num_groups, void* out) {
  quire::with_type(dtype, [&]<class T>() {
    const quire::Layer<T> layer{static_cast<const T*>(down), static_cast<const T*>(up),
                                static_cast<const quire::Span*>(spans), rank, inputs, outputs};
    quire::add_adapters(layer, static_cast<const T*>(x), tokens,
                        static_cast<const quire::Group*>(groups), num_groups,
                        static_cast<T*>(out));
  });
}

}  // extern "C"
