// Attention of prompt chunks: a tile of queries against tiles of keys, as products of matrices
// (FlashAttention, Dao et al. 2022). A query's result depends on where the tiles of keys begin,
// which is fixed, and not on how its prompt was cut into chunks.
#include "attention.h"

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

// keys[padded dim][TILE] and values[TILE][padded dim] in float32; zeros where there is no token.
template <class T>
void unpack(const TileRows<T>& rows, int64_t dim, float* keys, float* values) {
  const int64_t stride = padded(dim);
  for (int64_t base = 0; base < TILE; base += LANES)
    for (int64_t d = 0; d < stride; d += LANES) {
      Floats square[LANES];
      for (int64_t i = 0; i < LANES; ++i)
        square[i] = base + i < rows.count ? load(rows.keys[base + i] + d, dim - d) : Floats{};
      transpose(square);
      for (int64_t i = 0; i < LANES; ++i) store(keys + (d + i) * TILE + base, square[i]);
    }
  for (int64_t i = 0; i < rows.count; ++i)
    for (int64_t d = 0; d < stride; d += LANES)
      store(values + i * stride + d, load(rows.values[i] + d, dim - d));
}

// One query's scores of a tile become weights; it sees tokens [low, high) of the tile.
// Returns what the query's earlier sums are to keep.
inline float weigh(float* scores, int64_t low, int64_t high, float softcap, float& top,
                   float& weight) {
  constexpr int64_t COUNT = TILE / LANES;
  const Ints lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  Floats values[COUNT], tops = fill(top);
  for (int64_t v = 0; v < COUNT; ++v) {
    const Ints at = lane + int32_t(v * LANES);
    const Ints seen = (at >= int32_t(low)) & (at < int32_t(high));
    values[v] = seen ? capped(load(scores + v * LANES), softcap) : fill(-INFINITE);
    tops = larger(values[v], tops);
  }
  const float now = largest(tops), kept = exp_of(top - now);
  Floats weights = {};
  for (int64_t v = 0; v < COUNT; ++v) {
    const Floats each = exp(values[v] - now);
    store(scores + v * LANES, each);
    weights += each;
  }
  top = now;
  weight = weight * kept + sum(weights);
  return kept;
}

}  // namespace

template <class T>
void attend_chunk(const Batch& batch, const Layer& layer, const Tensors<T>& tensors, int64_t row,
                  int64_t kv_head, int64_t first, int64_t count) {
  const int64_t dim = batch.head_dim, stride = padded(dim), group = batch.heads / batch.kv_heads;
  const int64_t rows = count * group;  // row r: head r % group of query r / group
  float* query = scratch<Batch>((2 * rows + 2 * TILE) * stride + rows * (TILE + 2));
  float* sums = query + rows * stride;
  float* keys = sums + rows * stride;
  float* values = keys + TILE * stride;
  float* scores = values + TILE * stride;
  float* tops = scores + rows * TILE;
  float* totals = tops + rows;

  const int64_t begin = batch.query_start[row], end = batch.query_start[row + 1];
  const int64_t position = batch.seq_lens[row] - (end - begin) + first;  // of the first query
  const auto place = [&](int64_t r) {
    const int64_t token = begin + first + r / group;
    return (token * batch.heads + kv_head * group + r % group) * dim;
  };
  for (int64_t r = 0; r < rows; ++r) {
    const T* from = tensors.query + place(r);
    for (int64_t d = 0; d < dim; d += LANES)
      store(query + r * stride + d, load(from + d, dim - d) * layer.scale);
  }
  std::fill(sums, sums + rows * stride, 0.0f);
  std::fill(tops, tops + rows, -INFINITE);
  std::fill(totals, totals + rows, 0.0f);

  const int64_t last = position + count;  // one past the last query's position
  for (int64_t tile = first_seen(layer, position) / TILE * TILE; tile < last; tile += TILE) {
    const TileRows<T> tokens(batch, tensors, row, kv_head, tile, std::min(last, tile + TILE));
    unpack(tokens, dim, keys, values);
    std::fill(scores, scores + rows * TILE, 0.0f);
    multiply(query, stride, keys, rows, TILE, dim, scores);
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t at = position + r / group;
      const int64_t low = first_seen(layer, at) - tile, high = at + 1 - tile;
      if (high <= 0 || low >= TILE) {  // nothing seen here: the sums stay as they are
        std::fill(scores + r * TILE, scores + (r + 1) * TILE, 0.0f);
        continue;
      }
      const float kept = weigh(scores + r * TILE, low, high, layer.softcap, tops[r], totals[r]);
      for (int64_t d = 0; d < stride; d += LANES)
        store(sums + r * stride + d, load(sums + r * stride + d) * kept);
    }
    multiply(scores, TILE, values, rows, stride, tokens.count, sums);
  }
  for (int64_t r = 0; r < rows; ++r) {
    const float total = totals[r] + sink_weight(layer, kv_head * group + r % group, tops[r]);
    for (int64_t d = 0; d < dim; d += LANES)
      store(tensors.output + place(r) + d, load(sums + r * stride + d) / total, dim - d);
  }
}

template void attend_chunk(const Batch&, const Layer&, const Tensors<float>&, int64_t, int64_t,
                           int64_t, int64_t);
template void attend_chunk(const Batch&, const Layer&, const Tensors<bfloat16>&, int64_t, int64_t,
                           int64_t, int64_t);

}  // namespace quire
