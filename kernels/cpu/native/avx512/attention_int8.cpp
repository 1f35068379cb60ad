// Attention of single queries over keys and values in int8, by products of integers (VNNI).
//
// A widened code would cost as much as a bfloat16 to multiply. Here the other operand becomes an
// integer instead: queries and weights are rounded to 16 bits, which is finer than bfloat16 was, and
// multiplied as two digits of 8. A product takes in 64 codes, and what adds up four neighbours is
// laid out so that sixteen sums end in sixteen lanes: keys by their words, values by four tokens.
#include <immintrin.h>

#include "attention.h"

namespace quire {
namespace {

constexpr int MAX_GROUP = 8;     // heads at a time
constexpr int64_t STEP = 64;     // codes that one product takes in
constexpr int64_t WORDS = STEP / 4;
constexpr int64_t QUADS = TILE / 4;
constexpr float QUERY_PEAK = 127 * 256 + 127, WEIGHT_PEAK = 65535;
constexpr float SMALLEST = 1e-30f;  // below it a factor to 16 bits would be infinite

inline int64_t steps_of(int64_t dim) { return (dim + STEP - 1) / STEP; }

// Codes [d, d + 64) of a row, zeros behind its end.
inline __m512i load_codes(const int8* row, int64_t d, int64_t dim) {
  const int64_t left = dim - d;
  if (left >= STEP) return _mm512_loadu_si512(row + d);
  return _mm512_maskz_loadu_epi8((__mmask64{1} << left) - 1, row + d);
}

inline __m512i four(const int8_t* bytes) {
  int32_t word;
  std::memcpy(&word, bytes, sizeof word);
  return _mm512_set1_epi32(word);
}

inline Floats joined(__m512i high, __m512i low) {
  return (Floats)_mm512_cvtepi32_ps(high) * 256.0f + (Floats)_mm512_cvtepi32_ps(low);
}

// A head's query in steps of `step`: 256 * high + low, zeros behind its end.
struct Query {
  int8_t high[MAX_HEAD_DIM], low[MAX_HEAD_DIM];
  float step;
  int32_t high_offset, low_offset;  // of sums over codes that have 128 added

  void set(const bfloat16* x, int64_t dim) {
    Floats tops = {};
    for (int64_t d = 0; d < dim; d += LANES) {
      const Floats part = load(x + d, dim - d);
      tops = larger(tops, magnitude(part));
    }
    const float top = largest(tops);
    step = top / QUERY_PEAK;
    const float inverse = top > SMALLEST ? QUERY_PEAK / top : 0.0f;
    std::fill(high, high + MAX_HEAD_DIM, 0), std::fill(low, low + MAX_HEAD_DIM, 0);
    int32_t highs = 0, lows = 0;
    for (int64_t d = 0; d < dim; d += LANES) {
      const __m512 scaled = (__m512)(load(x + d, dim - d) * inverse);
      const __m512i whole = _mm512_cvtps_epi32(scaled);
      const __m512i upper = _mm512_srai_epi32(_mm512_add_epi32(whole, _mm512_set1_epi32(128)), 8);
      const __m512i lower = _mm512_sub_epi32(whole, _mm512_slli_epi32(upper, 8));
      highs += _mm512_reduce_add_epi32(upper), lows += _mm512_reduce_add_epi32(lower);
      _mm_storeu_si128(reinterpret_cast<__m128i*>(high + d), _mm512_cvtepi32_epi8(upper));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(low + d), _mm512_cvtepi32_epi8(lower));
    }
    high_offset = -128 * highs, low_offset = -128 * lows;
  }
};

// The scales of a tile's tokens; 0 behind the last.
inline void load_scales(const float* scales, const TilePlaces& places, float* out) {
  for (int64_t base = 0; base < TILE; base += LANES) {
    const int64_t* at = places.at + base;
    bool is_run = base + LANES <= places.count;
    for (int64_t i = 1; i < LANES; ++i) is_run &= at[i] - at[0] == i;
    if (is_run) {
      store(out + base, load(scales + at[0]));
      continue;
    }
    for (int64_t i = 0; i < LANES; ++i)
      out[base + i] = base + i < places.count ? scales[at[i]] : 0.0f;
  }
}

// scores[g][i] = query g . key i, times `scale` and both steps; 0 behind the last key.
template <int GROUP>
void score(const Query* queries, const int8* keys, const TilePlaces& places,
           const Ahead<bfloat16>& ahead, int64_t dim, float scale, const float* key_scales,
           float (*scores)[TILE]) {
  int64_t base = 0;
  for (; base < places.count; base += LANES) {
    __m512i high[GROUP], low[GROUP];
    for (int g = 0; g < GROUP; ++g) {
      high[g] = _mm512_set1_epi32(queries[g].high_offset);
      low[g] = _mm512_set1_epi32(queries[g].low_offset);
    }
    for (int64_t d = 0; d < dim; d += STEP) {
      Floats words[LANES];  // of 16 keys; then of 16 places in a key
      for (int64_t i = 0; i < LANES; ++i) {
        const int64_t token = std::min(base + i, places.count - 1);
        ahead.fetch_key(base + i, d);
        const __m512i codes = load_codes(keys + places.at[token] * dim, d, dim);
        words[i] = (Floats)_mm512_xor_si512(codes, _mm512_set1_epi8(-128));
      }
      transpose(words);
      const int64_t count = std::min(WORDS, (dim - d + 3) / 4);
      for (int64_t j = 0; j < count; ++j)
        for (int g = 0; g < GROUP; ++g) {
          const __m512i key = (__m512i)words[j];
          high[g] = _mm512_dpbusd_epi32(high[g], key, four(queries[g].high + d + 4 * j));
          low[g] = _mm512_dpbusd_epi32(low[g], key, four(queries[g].low + d + 4 * j));
        }
    }
    const Floats by = load(key_scales + base) * scale;
    for (int g = 0; g < GROUP; ++g)
      store(scores[g] + base, joined(high[g], low[g]) * (by * queries[g].step));
  }
  ahead.fetch_keys_from(base);
}

// A head's weights of a tile, times the scales of the values: in steps of `step`, 256 * high + low.
struct Weights {
  uint8_t high[TILE], low[TILE];
  float step;

  void set(const float* weights, const float* value_scales, int64_t count) {
    Floats scaled[TILE / LANES], tops = {}, broken = {};
    for (int64_t v = 0; v < TILE / LANES; ++v) {
      const int64_t at = v * LANES;
      scaled[v] = at < count ? load(weights + at) * load(value_scales + at) : Floats{};
      tops = larger(tops, scaled[v]);
      broken += scaled[v] * 0.0f;  // nan where something is none: integers do not tell
    }
    const float top = largest(tops);
    step = top / WEIGHT_PEAK + sum(broken);
    const float inverse = top > SMALLEST ? WEIGHT_PEAK / top : 0.0f;
    for (int64_t v = 0; v < TILE / LANES; ++v) {
      const __m512i whole = _mm512_cvtps_epi32((__m512)(scaled[v] * inverse));
      const __m512i upper = _mm512_srli_epi32(whole, 8);
      _mm_storeu_si128(reinterpret_cast<__m128i*>(high + v * LANES), _mm512_cvtepi32_epi8(upper));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(low + v * LANES), _mm512_cvtepi32_epi8(whole));
    }
  }
};

// 64 dimensions of a tile's values, four tokens in a word. Vector k of a quad has in lane 4 l + e
// dimension 16 l + 4 k + e.
struct Quads {
  __m512i words[QUADS][4];

  void set(const int8* values, const TilePlaces& places, const Ahead<bfloat16>& ahead, int64_t d,
           int64_t dim) {
    for (int64_t quad = 0; 4 * quad < places.count; ++quad) {
      __m512i row[4];
      for (int64_t i = 0; i < 4; ++i) {
        const int64_t token = std::min(4 * quad + i, places.count - 1);
        ahead.fetch_value(4 * quad + i, d);
        row[i] = load_codes(values + places.at[token] * dim, d, dim);
      }
      const __m512i a = _mm512_unpacklo_epi8(row[0], row[1]);
      const __m512i b = _mm512_unpackhi_epi8(row[0], row[1]);
      const __m512i c = _mm512_unpacklo_epi8(row[2], row[3]);
      const __m512i e = _mm512_unpackhi_epi8(row[2], row[3]);
      words[quad][0] = _mm512_unpacklo_epi16(a, c), words[quad][1] = _mm512_unpackhi_epi16(a, c);
      words[quad][2] = _mm512_unpacklo_epi16(b, e), words[quad][3] = _mm512_unpackhi_epi16(b, e);
    }
  }
};

// sums[4][16] = sums * kept + weights . values, in the order of Quads. Behind the last token
// weights are 0.
void add_values(const Weights& weights, float kept, const Quads& quads, int64_t count,
                float* sums) {
  __m512i high[4] = {}, low[4] = {};
  for (int64_t quad = 0; 4 * quad < count; ++quad) {
    const __m512i upper = four(reinterpret_cast<const int8_t*>(weights.high) + 4 * quad);
    const __m512i lower = four(reinterpret_cast<const int8_t*>(weights.low) + 4 * quad);
#pragma GCC unroll 4
    for (int k = 0; k < 4; ++k) {
      high[k] = _mm512_dpbusd_epi32(high[k], upper, quads.words[quad][k]);
      low[k] = _mm512_dpbusd_epi32(low[k], lower, quads.words[quad][k]);
    }
  }
#pragma GCC unroll 4
  for (int k = 0; k < 4; ++k)
    store(sums + k * LANES,
          load(sums + k * LANES) * kept + joined(high[k], low[k]) * weights.step);
}

// GROUP heads of the span's, the first of which is `head`.
template <int GROUP>
void attend_group(const Batch& batch, const Layer& layer, const Tensors<bfloat16>& tensors,
                  const Span& span, int64_t head, const Span& next, float* results) {
  const int64_t dim = batch.head_dim, steps = steps_of(dim), stride = padded(dim);
  const auto* keys = static_cast<const int8*>(tensors.codes.keys);
  const auto* values = static_cast<const int8*>(tensors.codes.values);
  alignas(64) float sums[GROUP][MAX_HEAD_DIM];
  Query queries[GROUP];
  for (int g = 0; g < GROUP; ++g) {
    queries[g].set(tensors.query + (batch.query_start[span.row] * batch.heads + head + g) * dim,
                   dim);
    std::fill(sums[g], sums[g] + steps * STEP, 0.0f);
  }
  const int64_t last = batch.seq_lens[span.row] - 1;
  float tops[GROUP], totals[GROUP] = {}, kept[GROUP];
  std::fill(tops, tops + GROUP, -INFINITE);
  alignas(64) float scores[GROUP][TILE], key_scales[TILE], value_scales[TILE];
  Weights weights[GROUP];
  Quads quads;
  for_tiles(batch, tensors, span, next, [&](const TilePlaces& places, const auto& ahead) {
    load_scales(tensors.codes.key_scales, places, key_scales);
    load_scales(tensors.codes.value_scales, places, value_scales);
    score<GROUP>(queries, keys, places, ahead, dim, layer.scale, key_scales, scores);
    for (int g = 0; g < GROUP; ++g) {
      if (layer.slopes) add_distances(scores[g], layer.slopes[head + g], places.begin, last);
      kept[g] = weigh(scores[g], places.count, layer.softcap, tops[g], totals[g]);
      weights[g].set(scores[g], value_scales, places.count);
    }
    for (int64_t step = 0; step < steps; ++step) {
      quads.set(values, places, ahead, step * STEP, dim);
      for (int g = 0; g < GROUP; ++g)
        add_values(weights[g], kept[g], quads, places.count, sums[g] + step * STEP);
    }
    ahead.fetch_values_from((places.count + 3) / 4 * 4);
  });
  for (int g = 0; g < GROUP; ++g, results += stride + 2) {
    for (int64_t d = 0; d < stride; ++d) {
      const int64_t in_step = d % STEP, lane = in_step / 16 * 4 + in_step % 4;
      results[d] = sums[g][d - in_step + in_step % 16 / 4 * LANES + lane];
    }
    results[stride] = tops[g];
    results[stride + 1] = totals[g];
  }
}

}  // namespace

void attend_span_int8(const Batch& batch, const Layer& layer, const Tensors<bfloat16>& tensors,
                      const Span& span, const Span& next, float* sums) {
  for_groups<MAX_GROUP>(batch, span, [&]<int GROUP>(int64_t head, int64_t place) {
    attend_group<GROUP>(batch, layer, tensors, span, head, next, sums + place);
  });
}

}  // namespace quire
