// What adapters add to a linear layer, for tokens with different ones (kernels/reference/lora.py).
//
// Tokens are sorted by adapter, as in Punica's segmented products (Chen et al. 2023). An item of work
// is up to sixteen tokens of one adapter, through both of its matrices: what lies between these
// never leaves the core, and no thread waits for another.
#include <vector>

#include "parallel.h"
#include "program.h"
#include "simd.h"

namespace quire {
namespace {

constexpr int64_t TOKENS = 16;  // of an item
constexpr int64_t TILE = 4;     // tokens, ranks and vectors of outputs held in registers
constexpr int64_t WIDTH = TILE * LANES;
constexpr int64_t AHEAD = 4 * WIDTH;  // outputs of a rank that are on their way from memory
constexpr int64_t LINE_BYTES = 64;
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

// sums[4 * t + r] of four tokens with four rows of `down`, added up from what `load_at(row, d)` gives of
// both by `multiply`, `step` values at a time.
template <class Value, class T, class Load, class Multiply>
inline Floats products(const T* const (&x)[TILE], const T* const (&down)[TILE], int64_t inputs,
                       int64_t step, Load load_at, Multiply multiply) {
  Floats sums[TILE * TILE] = {};
  for (int64_t d = 0; d < inputs; d += step) {
    Value parts[TILE];
#pragma GCC unroll 4
    for (int r = 0; r < TILE; ++r) parts[r] = load_at(down[r], d);
#pragma GCC unroll 4
    for (int t = 0; t < TILE; ++t) {
      const Value part = load_at(x[t], d);
#pragma GCC unroll 4
      for (int r = 0; r < TILE; ++r)
        sums[TILE * t + r] = multiply(sums[TILE * t + r], part, parts[r]);
    }
  }
  return sum_each(sums);
}

template <class T>
inline Floats products(const T* const (&x)[TILE], const T* const (&down)[TILE], int64_t inputs) {
  return products<Floats>(
      x, down, inputs, LANES,
      [=](const T* row, int64_t d) { return load(row + d, inputs - d); },
      [](Floats sum, Floats a, Floats b) { return sum + a * b; });
}

#ifdef __AVX512BF16__
// By products of pairs: nothing has to be widened.
inline Floats products(const bfloat16* const (&x)[TILE], const bfloat16* const (&down)[TILE],
                       int64_t inputs) {
  return products<__m512i>(
      x, down, inputs, 2 * LANES,
      [=](const bfloat16* row, int64_t d) {
        const int64_t left = inputs - d;
        const __mmask32 mask = left >= 2 * LANES ? ~__mmask32{0} : (__mmask32{1} << left) - 1;
        return _mm512_maskz_loadu_epi16(mask, row + d);
      },
      [](Floats sum, __m512i a, __m512i b) {
        return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
      });
}
#endif

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

// A tile's outputs as vectors. Those in bfloat16 are taken apart as they lie, the even ones and the
// odd ones of each 32, which is less work than to widen them in order.
inline void load_tile(const float* p, Floats (&parts)[TILE]) {
  for (int v = 0; v < TILE; ++v) parts[v] = load(p + v * LANES);
}

inline void load_tile(const bfloat16* p, Floats (&parts)[TILE]) {
  for (int v = 0; v < TILE; v += 2) {
    const auto both = load_lanes<Words>(p + v * LANES);
    parts[v] = (Floats)(both << 16);
    parts[v + 1] = (Floats)(both & 0xFFFF0000);
  }
}

inline void store_tile(float* p, const Floats (&parts)[TILE]) {
  for (int v = 0; v < TILE; ++v) store(p + v * LANES, parts[v]);
}

inline void store_tile(bfloat16* p, const Floats (&parts)[TILE]) {
  for (int v = 0; v < TILE; v += 2) {
    store(p + v * LANES, first_of_pairs(parts[v], parts[v + 1]));
    store(p + (v + 1) * LANES, last_of_pairs(parts[v], parts[v + 1]));
  }
}

// out[token] += inner[token] * up, for a whole tile of outputs from `begin` on.
template <class T>
void go_up(const Layer<T>& layer, int64_t slot, const float* inner, const int64_t* tokens,
           int64_t count, int64_t begin, T* out) {
  const Span* spans = layer.spans + slot * layer.rank;
  const T* up = layer.up + slot * layer.rank * layer.outputs + begin;
  for (int64_t first = 0; first < count; first += TILE) {
    const float* factors[TILE];
    for (int64_t t = 0; t < TILE; ++t)
      factors[t] = inner + std::min(first + t, count - 1) * layer.rank;
    Floats sums[TILE][TILE] = {};
    for (int64_t r = 0; r < layer.rank; ++r) {
      if (spans[r].begin >= begin + WIDTH || spans[r].end <= begin) continue;
      const T* row = up + r * layer.outputs;
      // Tiles of a row follow each other, but between two of them come those of all ranks: too many
      // ways to memory for the processor to see where they lead.
      for (int64_t o = 0; o < WIDTH; o += LINE_BYTES / sizeof(T))
        __builtin_prefetch(row + AHEAD + o);
      Floats parts[TILE];
      load_tile(row, parts);
#pragma GCC unroll 4
      for (int t = 0; t < TILE; ++t)
#pragma GCC unroll 4
        for (int v = 0; v < TILE; ++v) sums[t][v] += factors[t][r] * parts[v];
    }
    for (int64_t t = 0; t < std::min(TILE, count - first); ++t) {
      T* place = out + tokens[first + t] * layer.outputs + begin;
      Floats parts[TILE];
      load_tile(place, parts);
      for (int v = 0; v < TILE; ++v) parts[v] += sums[t][v];
      store_tile(place, parts);
    }
  }
}

// The same for the outputs behind the last whole tile, which begin at `begin`.
template <class T>
void go_up_rest(const Layer<T>& layer, int64_t slot, const float* inner, const int64_t* tokens,
                int64_t count, int64_t begin, T* out) {
  const T* up = layer.up + slot * layer.rank * layer.outputs;
  for (int64_t t = 0; t < count; ++t)
    for (int64_t o = begin; o < layer.outputs; o += LANES) {
      const int64_t left = layer.outputs - o;
      T* place = out + tokens[t] * layer.outputs + o;
      Floats sum = load(place, left);
      for (int64_t r = 0; r < layer.rank; ++r)
        sum += inner[t * layer.rank + r] * load(up + r * layer.outputs + o, left);
      store(place, sum, left);
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
    int64_t o = 0;
    for (; o + WIDTH <= layer.outputs; o += WIDTH)
      go_up(layer, item.slot, inner.data(), own, count, o, out);
    if (o < layer.outputs) go_up_rest(layer, item.slot, inner.data(), own, count, o, out);
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

QUIRE_RECORDED(quire_add_adapters)
