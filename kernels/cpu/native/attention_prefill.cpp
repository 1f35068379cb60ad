// Attention of prompt chunks: a tile of queries against tiles of keys, as products of matrices
// (FlashAttention, Dao et al. 2022). A query's result depends on where the tiles of keys begin,
// which is fixed, and not on how its prompt was cut into chunks.
//
// The operands of the products are float32, or bfloat16 where the processor multiplies that; sums
// and softmax are float32.
#include "attention.h"
#include "pairs.h"

namespace quire {
namespace {

// A product's sums that stay in registers: with 32 registers of 16 lanes, or 16 of 8 and fewer.
#ifdef __AVX512F__
constexpr int ROWS = 6, VECTORS = 4;
#else
constexpr int ROWS = 6, VECTORS = 1;
#endif

// c[R][V * 16] += a[R][depth] * b[depth][V * 16].
template <int R, int V>
inline void multiply_tile(const float* a, int64_t a_stride, const float* b, int64_t b_stride,
                          int64_t depth, float* c, int64_t c_stride) {
  Floats sums[R][V];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) sums[r][v] = load(c + r * c_stride + v * LANES);
  for (int64_t k = 0; k < depth; ++k) {
    Floats right[V];
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) right[v] = load(b + k * b_stride + v * LANES);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) sums[r][v] += a[r * a_stride + k] * right[v];
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) store(c + r * c_stride + v * LANES, sums[r][v]);
}

template <int V>
inline void multiply_columns(const float* a, int64_t a_stride, const float* b, int64_t b_stride,
                             int64_t rows, int64_t depth, float* c, int64_t c_stride) {
  int64_t r = 0;
  for (; r + ROWS <= rows; r += ROWS)
    multiply_tile<ROWS, V>(a + r * a_stride, a_stride, b, b_stride, depth, c + r * c_stride,
                           c_stride);
  for (; r < rows; ++r)
    multiply_tile<1, V>(a + r * a_stride, a_stride, b, b_stride, depth, c + r * c_stride,
                        c_stride);
}

// c[rows][columns] += a[rows][depth] * b[depth][columns]; columns are a multiple of 16.
void multiply(const float* a, int64_t a_stride, const float* b, int64_t rows, int64_t columns,
              int64_t depth, float* c) {
  int64_t n = 0;
  for (; n + VECTORS * LANES <= columns; n += VECTORS * LANES)
    multiply_columns<VECTORS>(a, a_stride, b + n, columns, rows, depth, c + n, columns);
  for (; n < columns; n += LANES)
    multiply_columns<1>(a, a_stride, b + n, columns, rows, depth, c + n, columns);
}

// What the products of a tensor's type are made of; a query's length is a multiple of DEPTH.
template <class T>
struct Operands {
  using Type = float;
  static constexpr int64_t DEPTH = LANES;

  // keys[depth][TILE] and values[TILE][padded value_dim]; zeros where there is no token.
  void unpack(const TileRows<T>& rows, int64_t dim, int64_t value_dim, float* keys,
              float* values) const {
    for (int64_t base = 0; base < TILE; base += LANES)
      for (int64_t d = 0; d < padded(dim); d += LANES) {
        Floats square[LANES];
        for (int64_t i = 0; i < LANES; ++i)
          square[i] = base + i < rows.count ? load(rows.keys[base + i] + d, dim - d) : Floats{};
        transpose(square);
        for (int64_t i = 0; i < LANES; ++i) store(keys + (d + i) * TILE + base, square[i]);
      }
    const int64_t width = padded(value_dim);
    for (int64_t i = 0; i < TILE; ++i)
      for (int64_t d = 0; d < width; d += LANES)
        store(values + i * width + d,
              i < rows.count ? load(rows.values[i] + d, value_dim - d) : Floats{});
  }

  void multiply(const float* a, int64_t a_stride, const float* b, int64_t rows, int64_t columns,
                int64_t depth, float* c) const {
    quire::multiply(a, a_stride, b, rows, columns, depth, c);
  }
};

#ifdef __AVX512BF16__
template <>
struct Operands<bfloat16> : PairProducts {
  using Type = bfloat16;
  static constexpr int64_t DEPTH = 2 * LANES;

  // keys[depth / 2][TILE][2] and values[TILE / 2][padded value_dim][2]; zeros where there is no
  // token.
  void unpack(const TileRows<bfloat16>& rows, int64_t dim, int64_t value_dim, bfloat16* keys,
              bfloat16* values) const {
    // A pair of neighbours in a key is moved as one word.
    const auto words = [&](int64_t token, int64_t d) {
      if (token >= rows.count) return Floats{};
      return load(reinterpret_cast<const float*>(rows.keys[token] + d), (dim - d) / 2);
    };
    for (int64_t base = 0; base < TILE; base += LANES)
      for (int64_t d = 0; d < dim; d += DEPTH) {
        Floats square[LANES];
        for (int64_t i = 0; i < LANES; ++i) square[i] = words(base + i, d);
        transpose(square);
        for (int64_t i = 0; i < LANES; ++i)
          store(reinterpret_cast<float*>(keys + ((d / 2 + i) * TILE + base) * 2), square[i]);
      }
    const int64_t width = padded(value_dim);
    const auto part = [&](int64_t token, int64_t d) {
      return token < rows.count ? (Words)load(rows.values[token] + d, value_dim - d) : Words{};
    };
    for (int64_t i = 0; i < TILE; i += 2)
      for (int64_t d = 0; d < width; d += LANES) {
        const Words both = part(i, d) >> 16 | part(i + 1, d);
        store(reinterpret_cast<float*>(values + (i / 2 * width + d) * 2), (Floats)both);
      }
  }
};
#endif

// One query's scores of a tile become weights; it sees tokens [low, high) of the tile.
// Returns what the query's earlier sums are to keep.
template <class T, class Operand>
inline float weigh(const Layer& layer, const float* scores, int64_t low, int64_t high, float& top,
                   float& weight, const TileRows<T>& tokens, Operand* weights) {
  constexpr int64_t COUNT = TILE / LANES;
  Floats values[COUNT], tops = fill(top);
  for (int64_t v = 0; v < COUNT; ++v) {
    const Ints at = LANE + int32_t(v * LANES);
    const Ints seen = (at >= int32_t(low)) & (at < int32_t(high));
    const Floats scaled = load(scores + v * LANES) * layer.scale;
    values[v] = select(seen, capped(scaled, layer.softcap), fill(-INFINITE));
    tops = larger(values[v], tops);
  }
  const float now = largest(tops), kept = exp_of(top - now);
  Floats total = {};
  for (int64_t v = 0; v < COUNT; ++v) {
    const Floats each = exp(values[v] - now);
    store(weights + v * LANES,
          tokens.is_coded ? each * load(tokens.value_scales + v * LANES) : each);
    total += each;
  }
  top = now;
  weight = weight * kept + sum(total);
  return kept;
}

inline int64_t round_up(int64_t count, int64_t step) { return (count + step - 1) / step * step; }

}  // namespace

template <class T>
void attend_chunk(const Batch& batch, const Layer& layer, const Tensors<T>& tensors, int64_t row,
                  int64_t kv_head, int64_t first, int64_t count) {
  using Operand = typename Operands<T>::Type;
  const int64_t dim = batch.head_dim, value_dim = batch.value_dim, width = padded(value_dim);
  const int64_t group = batch.heads / batch.kv_heads;
  const int64_t depth = round_up(dim, Operands<T>::DEPTH);
  const int64_t rows = count * group;  // row r: head r % group of query r / group
  const int64_t all_rows = round_up(rows, LANES);
  const int64_t coded = TileRows<T>::memory_size(batch, tensors);
  Cutter cutter(scratch<Batch>(all_rows * (depth + width + 2 * TILE) + TILE * (depth + width) +
                               2 * all_rows + coded + 8 * LANES));
  auto* query = cutter.zeros<Operand>(all_rows * depth);
  auto* keys = cutter.take<Operand>(depth * TILE);
  auto* values = cutter.take<Operand>(TILE * width);
  auto* weights = cutter.zeros<Operand>(all_rows * TILE);
  auto* scores = cutter.take<float>(all_rows * TILE);
  auto* sums = cutter.zeros<float>(all_rows * width);
  auto* totals = cutter.zeros<float>(all_rows);
  auto* tops = cutter.take<float>(all_rows);
  auto* widened = cutter.take<T>(coded);
  std::fill(tops, tops + rows, -INFINITE);

  const int64_t begin = batch.query_start[row], end = batch.query_start[row + 1];
  const int64_t position = batch.seq_lens[row] - (end - begin) + first;  // of the first query
  const auto place = [&](int64_t r) {
    const int64_t token = begin + first + r / group;
    return token * batch.heads + kv_head * group + r % group;
  };
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t d = 0; d < dim; d += LANES)
      store(query + r * depth + d, load(tensors.query + place(r) * dim + d, dim - d));

  const Operands<T> products;
  // One past the last position that the query of row r sees, and that any of them does.
  const auto end_of = [&](int64_t r) -> int64_t {
    return layer.ends ? layer.ends[begin + first + r / group] : position + r / group + 1;
  };
  int64_t last = position + count;
  for (int64_t r = 0; r < rows; r += group) last = std::max(last, end_of(r));
  for (int64_t tile = first_seen(layer, position) / TILE * TILE; tile < last; tile += TILE) {
    const TilePlaces places(batch, tensors.heads_apart,
                            {row, kv_head, tile, std::min(last, tile + TILE)});
    const TileRows<T> tokens(batch, tensors, places, widened);
    products.unpack(tokens, dim, value_dim, keys, values);
    std::fill(scores, scores + all_rows * TILE, 0.0f);
    products.multiply(query, depth, keys, rows, TILE, depth, scores);
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t at = position + r / group;
      const int64_t low = first_seen(layer, at) - tile, high = end_of(r) - tile;
      Operand* const weighed = weights + r * TILE;
      if (high <= 0 || low >= TILE) {  // nothing seen here: the sums stay as they are
        std::fill(weighed, weighed + TILE, Operand{});
        continue;
      }
      if (tokens.is_coded) scale_tile(tokens.key_scales, scores + r * TILE);
      if (layer.slopes)  // of scores before they are scaled
        add_distances(scores + r * TILE, layer.slopes[kv_head * group + r % group] / layer.scale,
                      tile, at);
      const float kept =
          weigh(layer, scores + r * TILE, low, high, tops[r], totals[r], tokens, weighed);
      if (kept == 1.0f) continue;
      for (int64_t d = 0; d < width; d += LANES)
        store(sums + r * width + d, load(sums + r * width + d) * kept);
    }
    const int64_t used = round_up(tokens.count, Operands<T>::DEPTH);
    products.multiply(weights, TILE, values, rows, width, used, sums);
  }
  for (int64_t r = 0; r < rows; ++r) {
    const float total = totals[r] + sink_weight(layer, kv_head * group + r % group, tops[r]);
    T* const output = tensors.output + place(r) * value_dim;
    for (int64_t d = 0; d < value_dim; d += LANES)
      store(output + d, load(sums + r * width + d) / total, value_dim - d);
  }
}

template void attend_chunk(const Batch&, const Layer&, const Tensors<float>&, int64_t, int64_t,
                           int64_t, int64_t);
template void attend_chunk(const Batch&, const Layer&, const Tensors<bfloat16>&, int64_t, int64_t,
                           int64_t, int64_t);

}  // namespace quire
