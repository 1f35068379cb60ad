// Attention of single queries over keys and values in bfloat16, by AMX tiles.
//
// Sixteen tokens of a KV head are sixteen rows of a tile as they lie in the cache: neither keys nor
// values are turned.
//
//     scores   keys [16 tokens][32 dimensions] by queries [32 dimensions][16 columns]
//     sums     weights [16 rows][16 tokens] by values [16 tokens][32 dimensions]
//
// A column of scores is a head. KV heads add to one tile, each multiplied by queries that are zeros
// in the columns of the others' heads; where these fill half of the columns or less, the next
// sixteen tokens take the rest. So a vector of scores has hardly an idle lane, and softmax needs no
// sum across lanes.
//
// The unit multiplies pairs of neighbours in a row of values, which are two dimensions of a token.
// So a head has rows of weights for its even dimensions, with a zero behind each weight, and for odd
// ones, with a zero before; and since a weight in bfloat16 would lose half of its digits, the upper
// and the lower ones are a row each.
//
// To a head's sums nothing is added but its own products and zeros, in the order of its tokens:
// other heads and rows change no bit of them.
#include "attention.h"
#include "attention_tiles.h"
#include "pairs.h"

namespace quire {
namespace {

constexpr int64_t ROWS = 4;             // of weights for a head
constexpr int64_t SET = SIDE / ROWS;    // heads whose weights fill a tile
constexpr int64_t SCORED = 4;           // tiles of scores at a time
constexpr int64_t WEIGHED = 8;          // of which there are weights at a time: 32 KiB
constexpr float LOG2_E = 1.44269504f, LOG_2 = 0.693147181f;
constexpr float UNSEEN = -1e30f;  // a score that weighs nothing, and differs from others by a number

// 2^x of x <= 0, and of no less than -125, within 4 units in the last place.
// x = n + r with |r| <= 1/2; of all polynomials that are 1 at 0 this has the least relative error.
inline Floats exp2(Floats x) {
  x = (Floats)_mm512_max_ps(_mm512_set1_ps(-125.0f), (__m512)x);  // nan stays nan
  const Floats shifted = x + 12582912.0f;  // 1.5 * 2^23: n is in the last bits
  const Floats r = x - (shifted - 12582912.0f);
  Floats y = fill(1.32764713e-3f);
  y = y * r + 9.67554096e-3f;
  y = y * r + 5.55071309e-2f;
  y = y * r + 2.40221202e-1f;
  y = y * r + 6.93146944e-1f;
  y = y * r + 1.0f;
  return (Floats)((Ints)y + ((Ints)shifted << 23));
}

// Heads that share tiles of scores: `group` of each of some KV heads, one after the other.
struct Columns {
  int64_t kv_head, kv_count, head, group;
};

// Columns that sixteen tokens take: a power of two. The model's, so that sums are added up in the
// same order however many KV heads a call is for.
int64_t width_of(const Batch& batch) {
  const int64_t most = kv_heads_of_tiles(batch) * std::min(SIDE, batch.heads / batch.kv_heads);
  int64_t width = 1;
  while (width < most) width *= 2;
  return width;
}

// One query's heads and the tokens [begin, end) that they see.
class TiledSplit {
 public:
  TiledSplit(const Batch& batch, const Layer& layer, const Tensors<bfloat16>& tensors, int64_t row,
             const Columns& columns, int64_t begin, int64_t end)
      : batch_(batch),
        layer_(layer),
        tensors_(tensors),
        columns_(columns),
        row_(row),
        begin_(begin),
        end_(end),
        width_(width_of(batch)),
        parts_(SIDE / width_),
        parts_bits_(__builtin_ctzll(parts_)),
        blocks_((end - 1) / SIDE - begin / SIDE + 1),
        tiles_((blocks_ + parts_ - 1) >> parts_bits_),
        steps_((batch.head_dim + STEP - 1) / STEP),
        value_steps_((batch.value_dim + STEP - 1) / STEP),
        sets_((columns.group + SET - 1) / SET),
        is_in_place_(batch.block_size % SIDE == 0 && batch.head_dim % STEP == 0) {
    const int64_t queries = parts_ * columns.kv_count * steps_ * WORDS;
    const int64_t weights = WEIGHED * ROWS * WORDS + WORDS;  // a tile may end behind the last head
    const int64_t sums = columns.kv_count * sets_ * value_steps_ * WORDS;
    const int64_t copies =
        std::max(SCORED * columns.kv_count, WEIGHED) * parts_ * steps_ * SIDE * STEP;
    Cutter cutter(scratch<TiledSplit>(queries + tiles_ * WORDS + weights + sums + copies / 2 +
                                      2 * blocks_ + 6 * SIDE));
    queries_ = cutter.zeros<uint32_t>(queries);
    sums_ = cutter.zeros<float>(sums);
    scores_ = cutter.take<float>(tiles_ * WORDS);
    weights_ = cutter.take<uint32_t>(weights);
    copies_ = cutter.take<bfloat16>(copies);
    places_ = cutter.take<int64_t>(blocks_);
    for (int64_t block = 0; block < blocks_; ++block)
      places_[block] = place_of((begin / SIDE + block) * SIDE);
  }

  // `results` as of attend_split.
  void attend(float* results) {
    lay_out_queries();
    for (int64_t tile = 0; tile < tiles_; tile += SCORED)
      score(tile, std::min(tiles_, tile + SCORED));
    join_parts(tops_, [](float a, float b) { return a > b ? a : b; });
    for (int64_t tile = 0; tile < tiles_; tile += WEIGHED) {
      const int64_t last = std::min(tiles_, tile + WEIGHED);
      for (int64_t t = tile; t < last; ++t) weigh(t, weights_ + (t - tile) * ROWS * WORDS);
      add_values(tile * parts_, std::min(blocks_, last * parts_));
    }
    join_parts(totals_, [](float a, float b) { return a + b; });
    tell(results);
  }

 private:
  int64_t column(int64_t part, int64_t kv) const { return part * width_ + kv * columns_.group; }

  // Where a token lies for KV head 0, in a cache seen as rows.
  int64_t place_of(int64_t position) const {
    const int64_t size = batch_.block_size;
    const int32_t* table = batch_.tables + batch_.slots[row_] * batch_.table_width;
    return table[position / size] * tensors_.heads_apart * size + position % size;
  }

  // queries_[part][KV head][step][16 pairs][16 columns]
  void lay_out_queries() {
    const int64_t dim = batch_.head_dim;
    const bfloat16* query =
        tensors_.query + (batch_.query_start[row_] * batch_.heads + columns_.head) * dim;
    for (int64_t kv = 0; kv < columns_.kv_count; ++kv)
      for (int64_t g = 0; g < columns_.group; ++g, query += dim)
        for (int64_t part = 0; part < parts_; ++part) {
          uint32_t* out = queries_ + (part * columns_.kv_count + kv) * steps_ * WORDS;
          out += column(part, kv) + g;
          for (int64_t d = 0; d < dim; d += 2, out += SIDE) std::memcpy(out, query + d, sizeof *out);
        }
  }

  // A KV head's sixteen rows of each of the blocks [first, last), steps_ * STEP values apart: where
  // they lie, if that is how they do; else, and where some are not seen, a copy of their first `dim`
  // values between zeros. What is not seen may be nan, which is nan times zero.
  void find_rows(const bfloat16* stored, int64_t kv, int64_t first, int64_t last, int64_t dim,
                 bfloat16* copies, const bfloat16** rows) const {
    const int64_t apart = (columns_.kv_head + kv) * batch_.block_size;  // from KV head 0
    for (int64_t block = first; block < last; ++block, copies += steps_ * SIDE * STEP) {
      const int64_t position = (begin_ / SIDE + block) * SIDE;
      const int64_t low = std::max(position, begin_), high = std::min(position + SIDE, end_);
      if (is_in_place_ && high - low == SIDE) {
        rows[block - first] = stored + (places_[block] + apart) * batch_.head_dim;
        continue;
      }
      rows[block - first] = copies;
      if (is_in_place_ && dim == batch_.head_dim) {  // they lie as the copies will
        const bfloat16* from = stored + (places_[block] + low - position + apart) * dim;
        bfloat16* to = copies + (low - position) * dim;
        std::fill(copies, to, bfloat16{0});
        std::fill(std::copy_n(from, (high - low) * dim, to), copies + SIDE * dim, bfloat16{0});
        continue;
      }
      std::fill(copies, copies + steps_ * SIDE * STEP, bfloat16{0});
      for (int64_t at = low; at < high; ++at) {
        std::memcpy(copies + (at - position) * steps_ * STEP,
                    stored + (place_of(at) + apart) * batch_.head_dim, dim * sizeof(bfloat16));
      }
    }
  }

  // What a tile's tokens need, on its way while something else is computed. Rows of one step are
  // read in the order in which they lie, which the processor foresees.
  void fetch_tile(const bfloat16* stored, int64_t tile) const {
    if (!is_in_place_ || steps_ == 1) return;
    const int64_t last = std::min(blocks_, (tile + 1) * parts_);
    for (int64_t block = tile * parts_; block < last; ++block)
      for (int64_t kv = columns_.kv_head; kv < columns_.kv_head + columns_.kv_count; ++kv)
        fetch(stored + (places_[block] + kv * batch_.block_size) * batch_.head_dim,
              SIDE * batch_.head_dim * sizeof(bfloat16));
  }

  // Scores of the tiles [first, last), at most SCORED.
  void score(int64_t first, int64_t last) {
    const bfloat16* keys[SIDE * SCORED];  // [KV head][tile][part]
    const int64_t begin = first * parts_, end = std::min(blocks_, last * parts_);
    const int64_t most = SCORED * parts_;
    for (int64_t kv = 0; kv < columns_.kv_count; ++kv)
      find_rows(tensors_.keys, kv, begin, end, batch_.head_dim,
                copies_ + kv * most * steps_ * SIDE * STEP, keys + kv * most);
    multiply_keys(keys, end - begin, scores_ + first * WORDS);
    for (int64_t tile = first; tile < last; ++tile) settle(tile);
  }

  // Products with the keys of `blocks` blocks. Registers: 0-3 tiles of scores, 4 queries, 5-7 keys.
  QUIRE_AMX void multiply_keys(const bfloat16* const* keys, int64_t blocks, float* scores) const {
    __asm__ volatile("" ::: "memory");  // as in multiply_values
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    const int64_t stride = steps_ * STEP * sizeof(bfloat16);
    const uint32_t* query = queries_;
    for (int64_t part = 0; part < std::min(parts_, blocks); ++part)
      for (int64_t kv = 0; kv < columns_.kv_count; ++kv) {
        const bfloat16* const* at = keys + kv * SCORED * parts_ + part;
        const int64_t count = (blocks - part + parts_ - 1) >> parts_bits_;
        for (int64_t d = 0; d < steps_ * STEP; d += STEP, query += WORDS) {
          _tile_loadd(4, query, ROW_BYTES);
          _tile_loadd(5, at[0] + d, stride);
          _tile_dpbf16ps(0, 5, 4);
          if (count == 1) continue;
          _tile_loadd(6, at[parts_] + d, stride);
          _tile_dpbf16ps(1, 6, 4);
          if (count == 2) continue;
          _tile_loadd(7, at[2 * parts_] + d, stride);
          _tile_dpbf16ps(2, 7, 4);
          if (count == 3) continue;
          _tile_loadd(5, at[3 * parts_] + d, stride);
          _tile_dpbf16ps(3, 5, 4);
        }
      }
    const int64_t count = (blocks + parts_ - 1) >> parts_bits_;
    _tile_stored(0, scores, ROW_BYTES);
    if (count > 1) _tile_stored(1, scores + WORDS, ROW_BYTES);
    if (count > 2) _tile_stored(2, scores + 2 * WORDS, ROW_BYTES);
    if (count > 3) _tile_stored(3, scores + 3 * WORDS, ROW_BYTES);
    __asm__ volatile("" ::: "memory");
  }

  // A tile's products become scores in units of log 2; the largest of each column is kept.
  void settle(int64_t tile) {
    fetch_tile(tensors_.keys, tile + SCORED);
    float* scores = scores_ + tile * WORDS;
    const int64_t first = begin_ / SIDE * SIDE + tile * parts_ * SIDE;
    const bool is_all_seen = first >= begin_ && first + parts_ * SIDE <= end_;
    const Ints low = Ints{} + int32_t(begin_ - first), high = Ints{} + int32_t(end_ - first);
    const Ints part = (LANE >> int32_t(4 - parts_bits_)) * int32_t(SIDE);
    const float scale = layer_.scale * (layer_.softcap == 0.0f ? LOG2_E : 1.0f);
    for (int64_t i = 0; i < SIDE; ++i) {
      Floats score = load(scores + i * SIDE) * scale;
      if (layer_.softcap != 0.0f) score = capped(score, layer_.softcap) * LOG2_E;
      if (!is_all_seen) {
        const Ints at = part + int32_t(i);
        score = select((at >= low) & (at < high), score, fill(UNSEEN));
      }
      store(scores + i * SIDE, score);
      tops_ = larger(score, tops_);
    }
  }

  // A head's lanes of all parts become what `join` makes of them.
  template <class Join>
  void join_parts(Floats& lanes, Join join) const {
    for (int64_t part = 1; part < parts_; ++part)
      for (int64_t i = 0; i < width_; ++i) lanes[i] = join(lanes[i], lanes[part * width_ + i]);
    for (int64_t i = width_; i < SIDE; ++i) lanes[i] = lanes[i - width_];
  }

  // weights[16 columns][ROWS][16 tokens] of a tile.
  void weigh(int64_t tile, uint32_t* weights) {
    fetch_tile(tensors_.values, tile);
    Floats each[SIDE];
#pragma GCC unroll 16
    for (int64_t i = 0; i < SIDE; ++i) {
      each[i] = exp2(load(scores_ + tile * WORDS + i * SIDE) - tops_);
      totals_ += each[i];
    }
    transpose(each);
    const Words upper = Words{} + 0xFFFF0000;
#pragma GCC unroll 16
    for (int64_t i = 0; i < SIDE; ++i) {
      const Words high = (Words)each[i] & upper, low = (Words)(each[i] - (Floats)high);
      auto* rows = reinterpret_cast<float*>(weights + i * ROWS * SIDE);
      store(rows, (Floats)(high >> 16));
      store(rows + SIDE, (Floats)high);
      store(rows + 2 * SIDE, (Floats)(low >> 16));
      store(rows + 3 * SIDE, (Floats)(low & upper));
    }
  }

  // Adds the values of the blocks [first, last), whose weights these are now.
  void add_values(int64_t first, int64_t last) {
    const bfloat16* values[WEIGHED * SIDE];
    const uint32_t* weights[WEIGHED * SIDE];
    const WeighedBlocks blocks{values, weights, last - first,
                               steps_ * STEP * int64_t{sizeof(bfloat16)}};
    const auto multiply = sets_ == 1   ? multiply_values<1>
                          : sets_ == 2 ? multiply_values<2>
                                       : multiply_values<4>;
    for (int64_t kv = 0; kv < columns_.kv_count; ++kv) {
      find_rows(tensors_.values, kv, first, last, batch_.value_dim, copies_, values);
      for (int64_t i = 0; i < blocks.count; ++i)
        weights[i] = weights_ + (i >> parts_bits_) * ROWS * WORDS +
                     column(i & (parts_ - 1), kv) * ROWS * SIDE;
      multiply(blocks, sets_, value_steps_, sums_ + kv * sets_ * value_steps_ * WORDS);
    }
  }

  void tell(float* results) const {
    const int64_t stride = padded(batch_.value_dim);
    for (int64_t kv = 0; kv < columns_.kv_count; ++kv)
      for (int64_t g = 0; g < columns_.group; ++g, results += stride + 2) {
        const float* tile = sums_ + ((kv * sets_ + g / SET) * value_steps_) * WORDS;
        tile += g % SET * ROWS * SIDE;
        for (int64_t d = 0; d < stride; d += STEP, tile += WORDS) {
          const Floats even = load(tile) + load(tile + 2 * SIDE);
          const Floats odd = load(tile + SIDE) + load(tile + 3 * SIDE);
          store(results + d, first_of_pairs(even, odd));
          if (d + LANES < stride) store(results + d + LANES, last_of_pairs(even, odd));
        }
        results[stride] = tops_[column(0, kv) + g] * LOG_2;
        results[stride + 1] = totals_[column(0, kv) + g];
      }
  }

  const Batch& batch_;
  const Layer& layer_;
  const Tensors<bfloat16>& tensors_;
  const Columns columns_;
  const int64_t row_, begin_, end_;
  const int64_t width_;                     // columns of sixteen tokens
  const int64_t parts_, parts_bits_;        // how often they fit into a tile of scores, 2^bits
  const int64_t blocks_, tiles_;            // of sixteen tokens; of scores
  const int64_t steps_, value_steps_, sets_;
  const bool is_in_place_;                  // sixteen tokens of a block are a tile as they lie
  uint32_t* queries_;
  float* sums_;  // [KV head][set][step][head of the set][ROWS][16]
  float* scores_;
  uint32_t* weights_;
  bfloat16* copies_;
  int64_t* places_;
  Floats tops_ = fill(-INFINITE), totals_ = {};
};

}  // namespace

int64_t kv_heads_of_tiles(const Batch& batch) {
  return std::clamp<int64_t>(SIDE * batch.kv_heads / batch.heads, 1, batch.kv_heads);
}

void attend_split_tiles(const Batch& batch, const Layer& layer, const Tensors<bfloat16>& tensors,
                        const Split& split, const Split& next, float* results) {
  const auto& [row, heads, begin, end] = split;
  for (int64_t i = 0; i < next.heads.count; ++i)
    fetch(batch, tensors.heads_apart, first_tile(next.of_head(next.heads.first + i)), tensors.keys,
          tensors.row_bytes(batch.head_dim));
  const int64_t group = batch.heads / batch.kv_heads, first = heads.first * group;
  const MatrixUnit unit;
  // More heads than columns: some of them at a time.
  for (int64_t g = 0; g < group; g += SIDE) {
    const Columns columns{heads.first, heads.count, first + g, std::min(SIDE, group - g)};
    TiledSplit(batch, layer, tensors, row, columns, begin, end)
        .attend(results + g * (padded(batch.value_dim) + 2));
  }
}

}  // namespace quire
