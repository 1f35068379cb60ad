// Attention of single queries over keys and values in bfloat16.
//
// Sixteen keys are turned so that a vector holds one pair of dimensions of all of them: their scores
// add up in its lanes by products of pairs (vdpbf16ps). Values are widened.
#include <immintrin.h>

#include "attention.h"

namespace quire {
namespace {

constexpr int MAX_GROUP = 8;   // heads at a time: their sums stay in registers
constexpr int64_t STEP = 32;   // values of a row that one product takes in

inline __m512bh pair_of(const bfloat16* two) {
  int32_t word;
  std::memcpy(&word, two, sizeof word);
  return reinterpret_cast<__m512bh>(_mm512_set1_epi32(word));
}

// Values [d, d + 32) of a row, zeros behind its end.
inline __m512i load_step(const bfloat16* row, int64_t d, int64_t dim) {
  const int64_t left = dim - d;
  const __mmask32 mask = left >= STEP ? ~__mmask32{0} : (__mmask32{1} << left) - 1;
  return _mm512_maskz_loadu_epi16(mask, row + d);
}

// scores[g][i] = query g . key i * scale; behind the last key anything up to the next vector. By
// itself: within its caller GCC 12 keeps sums in memory.
template <int GROUP>
[[gnu::noinline]] void score(const bfloat16 (*queries)[MAX_HEAD_DIM], const TileRows<bfloat16>& rows,
           const Ahead<bfloat16>& ahead, int64_t dim, float scale, float (*scores)[TILE]) {
  int64_t base = 0;
  for (; base < rows.count; base += LANES) {
    // Two sums a head: none waits for itself as long.
    __m512 sums[GROUP][2];
    for (auto& sum : sums) sum[0] = sum[1] = _mm512_setzero_ps();
    for (int64_t d = 0; d < dim; d += STEP) {
      Floats words[LANES];  // of 16 keys; then of 16 places in a key
      for (int64_t i = 0; i < LANES; ++i) {
        ahead.fetch_key(base + i, d);
        words[i] = (Floats)load_step(rows.keys[std::min(base + i, rows.count - 1)], d, dim);
      }
      transpose(words);
#pragma GCC unroll 16
      for (int64_t j = 0; j < LANES; ++j)
#pragma GCC unroll 8
        for (int g = 0; g < GROUP; ++g)
          sums[g][j % 2] = _mm512_dpbf16_ps(sums[g][j % 2], (__m512bh)words[j],
                                            pair_of(queries[g] + d + 2 * j));
    }
    for (int g = 0; g < GROUP; ++g)
      store(scores[g] + base, (Floats)(sums[g][0] + sums[g][1]) * scale);
  }
  ahead.fetch_keys_from(base);
}

// sums[g] = sums[g] * kept[g] + weights[g] . values, 32 values at a time: the first vector of these
// has the even ones, the second the odd ones. A product of pairs would take longer than two
// multiplications and additions, and round the weights.
template <int GROUP>
void add_values(const float (*weights)[TILE], const float* kept, const TileRows<bfloat16>& rows,
                const Ahead<bfloat16>& ahead, int64_t dim, float (*sums)[MAX_HEAD_DIM]) {
  const __m512i high = _mm512_set1_epi32(0xFFFF0000);
  for (int64_t d = 0; d < dim; d += STEP) {
    Floats total[GROUP][2];
    for (int g = 0; g < GROUP; ++g)
      for (int half = 0; half < 2; ++half)
        total[g][half] = load(sums[g] + d + half * LANES) * kept[g];
    for (int64_t i = 0; i < rows.count; ++i) {
      ahead.fetch_value(i, d);
      const __m512i both = load_step(rows.values[i], d, dim);
      const Floats even = (Floats)_mm512_slli_epi32(both, 16);
      const Floats odd = (Floats)_mm512_and_si512(both, high);
      for (int g = 0; g < GROUP; ++g) {
        total[g][0] += weights[g][i] * even;
        total[g][1] += weights[g][i] * odd;
      }
    }
    for (int g = 0; g < GROUP; ++g)
      for (int half = 0; half < 2; ++half) store(sums[g] + d + half * LANES, total[g][half]);
  }
  ahead.fetch_values_from(rows.count);
}

// GROUP heads of the span's, the first of which is `head`.
template <int GROUP>
void attend_group(const Batch& batch, const Layer& layer, const Tensors<bfloat16>& tensors,
                  const Span& span, int64_t head, const Span& next, float* results) {
  const int64_t dim = batch.head_dim, value_dim = batch.value_dim, stride = padded(value_dim);
  alignas(64) bfloat16 queries[GROUP][MAX_HEAD_DIM];
  alignas(64) float sums[GROUP][MAX_HEAD_DIM], scores[GROUP][TILE] = {};
  for (int g = 0; g < GROUP; ++g) {
    const bfloat16* query =
        tensors.query + (batch.query_start[span.row] * batch.heads + head + g) * dim;
    for (int64_t d = 0; d < dim; d += STEP)
      _mm512_store_si512(queries[g] + d, load_step(query, d, dim));
    std::fill(sums[g], sums[g] + (value_dim + STEP - 1) / STEP * STEP, 0.0f);
  }
  const int64_t last = batch.seq_lens[span.row] - 1;
  float tops[GROUP], totals[GROUP] = {}, kept[GROUP];
  std::fill(tops, tops + GROUP, -INFINITE);
  bfloat16* widened =
      reinterpret_cast<bfloat16*>(scratch<Batch>(TileRows<bfloat16>::memory_size(batch, tensors)));
  for_tiles(batch, tensors, span, next, [&](const TilePlaces& places, const auto& ahead) {
    const TileRows<bfloat16> rows(batch, tensors, places, widened);
    score<GROUP>(queries, rows, ahead, dim, layer.scale, scores);
    for (int g = 0; g < GROUP; ++g) {
      if (rows.is_coded) scale_tile(rows.key_scales, scores[g]);
      if (layer.slopes) add_distances(scores[g], layer.slopes[head + g], places.begin, last);
      kept[g] = weigh(scores[g], rows.count, layer.softcap, tops[g], totals[g]);
      if (rows.is_coded) scale_tile(rows.value_scales, scores[g]);
    }
    add_values<GROUP>(scores, kept, rows, ahead, value_dim, sums);
  });
  for (int g = 0; g < GROUP; ++g, results += stride + 2) {
    for (int64_t d = 0; d < stride; d += STEP) {
      const Floats a = load(sums[g] + d), b = load(sums[g] + d + LANES);
      store(results + d, first_of_pairs(a, b));
      if (d + LANES < stride) store(results + d + LANES, last_of_pairs(a, b));
    }
    results[stride] = tops[g];
    results[stride + 1] = totals[g];
  }
}

}  // namespace

void attend_span_pairs(const Batch& batch, const Layer& layer, const Tensors<bfloat16>& tensors,
                       const Span& span, const Span& next, float* sums) {
  for_groups<MAX_GROUP>(batch, span, [&]<int GROUP>(int64_t head, int64_t place) {
    attend_group<GROUP>(batch, layer, tensors, span, head, next, sums + place);
  });
}

}  // namespace quire
