// Attention of single queries. The group of heads that share a KV head shares each read of it.
#include <type_traits>

#include "attention.h"
#include "pairs.h"

namespace quire {

// One copy for all groups: the compiler takes twice as long otherwise.
float weigh(float* scores, int64_t count, float softcap, float& top, float& weight) {
  Floats values[TILE / LANES], tops = fill(top);
  const int64_t vectors = (count + LANES - 1) / LANES;
  for (int64_t v = 0; v < vectors; ++v) {
    const Ints is_behind = LANE >= static_cast<int32_t>(count - v * LANES);
    values[v] = select(is_behind, fill(-INFINITE), capped(load(scores + v * LANES), softcap));
    tops = larger(values[v], tops);
  }
  const float now = largest(tops), kept = exp_of(top - now);
  Floats weights = {};
  for (int64_t v = 0; v < vectors; ++v) {
    const Floats each = exp(values[v] - now);
    store(scores + v * LANES, each);
    weights += each;
  }
  top = now;
  weight = weight * kept + sum(weights);
  return kept;
}

namespace {

// Heads at a time, and vectors of their sums: both stay in registers.
#ifdef __AVX512F__
constexpr int MAX_GROUP = 8, MAX_SUMS = 16;
#else
constexpr int MAX_GROUP = 4, MAX_SUMS = 6;
#endif

// Vectors of which the lanes of each add up to query . key; queries[GROUP][padded(dim)].
template <int GROUP, class T>
inline void multiply_each(const float* queries, const T* key, int64_t dim, Floats (&sums)[GROUP]) {
  const int64_t stride = padded(dim);
  for (int64_t d = 0; d < dim; d += LANES) {
    const Floats part = load(key + d, dim - d);
    for (int g = 0; g < GROUP; ++g) sums[g] += load(queries + g * stride + d) * part;
  }
}

// scores[g][i] = query g . key i * scale; what lies behind the last key is 0.
template <int GROUP, class T>
void score(const float* queries, const TileRows<T>& rows, const Ahead<T>& ahead, int64_t dim,
           float scale, float (*scores)[TILE]) {
  int64_t base = 0;
  for (; base < rows.count; base += LANES) {
    Floats partial[GROUP][LANES];
    for (int64_t i = 0; i < LANES; ++i) {
      Floats sums[GROUP] = {};
      for (int64_t d = 0; d < dim; d += LANES) ahead.fetch_key(base + i, d);
      if (base + i < rows.count) multiply_each(queries, rows.keys[base + i], dim, sums);
      for (int g = 0; g < GROUP; ++g) partial[g][i] = sums[g];
    }
#pragma GCC unroll 1
    for (int g = 0; g < GROUP; ++g) store(scores[g] + base, sum_each(partial[g]) * scale);
  }
  ahead.fetch_keys_from(base);
}

// VECTORS vectors of every head's sums: sums[g] = sums[g] * kept[g] + weights[g] . values.
template <int GROUP, int VECTORS, class T>
void add_values(const float (*weights)[TILE], const float* kept, const TileRows<T>& rows,
                const Ahead<T>& ahead, int64_t dim, int64_t first, float* sums) {
  const int64_t stride = padded(dim);
  Floats total[GROUP][VECTORS];
  for (int g = 0; g < GROUP; ++g)
    for (int v = 0; v < VECTORS; ++v)
      total[g][v] = load(sums + g * stride + first + v * LANES) * kept[g];
  for (int64_t i = 0; i < rows.count; ++i)
    for (int v = 0; v < VECTORS; ++v) {
      const int64_t d = first + v * LANES;
      ahead.fetch_value(i, d);
      const Floats part = load(rows.values[i] + d, dim - d);
      for (int g = 0; g < GROUP; ++g) total[g][v] += weights[g][i] * part;
    }
  for (int g = 0; g < GROUP; ++g)
    for (int v = 0; v < VECTORS; ++v) store(sums + g * stride + first + v * LANES, total[g][v]);
}

// GROUP heads of the span's, the first of which is `head`.
template <int GROUP, class T>
void attend_group(const Batch& batch, const Layer& layer, const Tensors<T>& tensors,
                  const Span& span, int64_t head, const Span& next, float* results) {
  // With few heads several vectors at a time, so that no sum waits for itself.
  constexpr int VECTORS = 4 * GROUP <= MAX_SUMS ? 4 : 2 * GROUP <= MAX_SUMS ? 2 : 1;
  const int64_t dim = batch.head_dim, value_dim = batch.value_dim, stride = padded(value_dim);
  Cutter cutter(scratch<Batch>(GROUP * (stride + padded(dim)) +
                               TileRows<T>::memory_size(batch, tensors)));
  auto* sums = cutter.zeros<float>(GROUP * stride);
  auto* queries = cutter.take<float>(GROUP * padded(dim));
  auto* widened = cutter.take<T>(TileRows<T>::memory_size(batch, tensors));
  const T* query = tensors.query + (batch.query_start[span.row] * batch.heads + head) * dim;
  for (int g = 0; g < GROUP; ++g)
    for (int64_t d = 0; d < dim; d += LANES)
      store(queries + g * padded(dim) + d, load(query + g * dim + d, dim - d));
  const int64_t last = batch.seq_lens[span.row] - 1;
  float tops[GROUP], totals[GROUP] = {}, kept[GROUP], scores[GROUP][TILE];
  std::fill(tops, tops + GROUP, -INFINITE);
  for_tiles(batch, tensors, span, next, [&](const TilePlaces& places, const Ahead<T>& ahead) {
    const TileRows<T> rows(batch, tensors, places, widened);
    score<GROUP>(queries, rows, ahead, dim, layer.scale, scores);
    for (int g = 0; g < GROUP; ++g) {
      if (rows.is_coded) scale_tile(rows.key_scales, scores[g]);
      if (layer.slopes) add_distances(scores[g], layer.slopes[head + g], places.begin, last);
      kept[g] = weigh(scores[g], rows.count, layer.softcap, tops[g], totals[g]);
      if (rows.is_coded) scale_tile(rows.value_scales, scores[g]);
    }
    int64_t d = 0;
    for (; d + VECTORS * LANES <= value_dim; d += VECTORS * LANES)
      add_values<GROUP, VECTORS>(scores, kept, rows, ahead, value_dim, d, sums);
    if constexpr (VECTORS > 2)
      for (; d + 2 * LANES <= value_dim; d += 2 * LANES)
        add_values<GROUP, 2>(scores, kept, rows, ahead, value_dim, d, sums);
    for (; d < value_dim; d += LANES)
      add_values<GROUP, 1>(scores, kept, rows, ahead, value_dim, d, sums);
    ahead.fetch_values_from(rows.count);
  });
  for (int g = 0; g < GROUP; ++g, results += stride + 2) {
    std::copy(sums + g * stride, sums + (g + 1) * stride, results);
    results[stride] = tops[g];
    results[stride + 1] = totals[g];
  }
}

#if defined(__AVX512VNNI__) && defined(__AVX512BF16__)
// Scores of tiles are weighed where they are, without what the heads' slopes add.
inline bool takes_tiles(const Layer& layer, const Tensors<bfloat16>& tensors) {
  return !layer.slopes && tensors.codes.kind == CodeKind::NONE && MatrixUnit::exists();
}
#endif

template <class T>
void attend_span(const Batch& batch, const Layer& layer, const Tensors<T>& tensors,
                 const Span& span, const Span& next, float* sums) {
#if defined(__AVX512VNNI__) && defined(__AVX512BF16__)
  if constexpr (std::is_same_v<T, bfloat16>) {
    const bool is_int8 = tensors.codes.kind == CodeKind::INT8;
    const auto attend = is_int8 ? attend_span_int8 : attend_span_pairs;
    return attend(batch, layer, tensors, span, next, sums);
  }
#endif
  for_groups<MAX_GROUP>(batch, span, [&]<int GROUP>(int64_t head, int64_t place) {
    attend_group<GROUP>(batch, layer, tensors, span, head, next, sums + place);
  });
}

}  // namespace

template <class T>
int64_t kv_heads_together(const Batch& batch, const Layer& layer, const Tensors<T>& tensors) {
#if defined(__AVX512VNNI__) && defined(__AVX512BF16__)
  if constexpr (std::is_same_v<T, bfloat16>)
    if (takes_tiles(layer, tensors)) return kv_heads_of_tiles(batch);
#endif
  return 1;
}

template <class T>
void attend_split(const Batch& batch, const Layer& layer, const Tensors<T>& tensors,
                  const Split& split, const Split& next, float* sums) {
#if defined(__AVX512VNNI__) && defined(__AVX512BF16__)
  if constexpr (std::is_same_v<T, bfloat16>)
    if (takes_tiles(layer, tensors))
      return attend_split_tiles(batch, layer, tensors, split, next, sums);
#endif
  const int64_t stride = batch.heads / batch.kv_heads * (padded(batch.value_dim) + 2);
  for (int64_t i = 0; i < split.heads.count; ++i, sums += stride) {
    const int64_t head = split.heads.first + i;
    const bool is_last = i + 1 == split.heads.count;
    attend_span(batch, layer, tensors, split.of_head(head),
                is_last ? next.of_head(next.heads.first) : split.of_head(head + 1), sums);
  }
}

template int64_t kv_heads_together(const Batch&, const Layer&, const Tensors<float>&);
template int64_t kv_heads_together(const Batch&, const Layer&, const Tensors<bfloat16>&);
template void attend_split(const Batch&, const Layer&, const Tensors<float>&, const Split&,
                           const Split&, float*);
template void attend_split(const Batch&, const Layer&, const Tensors<bfloat16>&, const Split&,
                           const Split&, float*);

}  // namespace quire
