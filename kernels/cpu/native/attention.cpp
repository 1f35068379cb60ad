// Attention of a step: cut into items that the threads take one by one.
#include "attention.h"

#include "pairs.h"
#include "parallel.h"
#include "program.h"

namespace quire {
namespace {

// Tokens of a split of a long context. Fixed, and so is the order in which splits are summed: a
// row's result does not depend on the rest of the batch, nor on the number of threads.
constexpr int64_t SPLIT = 512;
constexpr int64_t CHUNK_ROWS = 64;       // queries times heads of a group in a prefill item
constexpr int64_t SMALL = 1 << 15;       // multiplications below which a second thread is a loss

struct Item {
  Split split;      // of a chunk one head, and its queries
  int64_t partial;  // place of a split's sums; -1: a whole row, -2: a chunk
};

// The splits of a row that lie apart, and how many are still to come.
struct Joint {
  int64_t row, first, count;
};

struct Items {
  std::vector<Item> items;
  std::vector<Joint> joints;
  int64_t partials = 0, work = 0;
};

// Items of single queries take up to `most` KV heads each.
void add_decode(Items& all, const Batch& batch, const Layer& layer, int64_t row, int64_t most) {
  const int64_t end = batch.seq_lens[row], begin = first_seen(layer, end - 1);
  const int64_t first = begin / SPLIT, last = (end - 1) / SPLIT;
  const bool is_whole = first == last;
  all.work += (end - begin) * batch.heads * batch.head_dim * 2;
  if (!is_whole) all.joints.push_back({row, all.partials, last - first + 1});
  for (int64_t split = first; split <= last; ++split) {
    const int64_t partial = is_whole ? -1 : all.partials++;
    for (int64_t head = 0; head < batch.kv_heads; head += most)
      all.items.push_back({{row, {head, std::min(most, batch.kv_heads - head)},
                            std::max(begin, split * SPLIT), std::min(end, (split + 1) * SPLIT)},
                           partial});
  }
}

void add_chunk(Items& all, const Batch& batch, int64_t row, int64_t queries) {
  const int64_t step = std::max<int64_t>(1, CHUNK_ROWS / (batch.heads / batch.kv_heads));
  all.work += queries * batch.seq_lens[row] * batch.heads * batch.head_dim;
  // The last queries see the most: they begin.
  for (int64_t begin = (queries - 1) / step * step; begin >= 0; begin -= step)
    for (int64_t head = 0; head < batch.kv_heads; ++head)
      all.items.push_back({{row, {head, 1}, begin, std::min(queries, begin + step)}, -2});
}

// Decode items take up to `most` KV heads, but fewer where some threads would have none.
Items items_of(const Batch& batch, const Layer& layer, int64_t most) {
  Items all;
  int64_t singles = 0;
  for (int64_t row = 0; row < batch.rows; ++row) {
    const int64_t queries = batch.query_start[row + 1] - batch.query_start[row];
    if (queries > 1) add_chunk(all, batch, row, queries);
    singles += queries == 1;
  }
  while (most > 1 && singles * ((batch.kv_heads + most - 1) / most) < num_threads()) most /= 2;
  for (int64_t row = 0; row < batch.rows; ++row)
    if (batch.query_start[row + 1] - batch.query_start[row] == 1)
      add_decode(all, batch, layer, row, most);
  return all;
}

// The splits of a row's head: their weighted sums brought to the largest score of all.
template <class T>
void join(const Layer& layer, int64_t head, const float* splits, int64_t count, int64_t stride,
          int64_t dim, T* output) {
  const int64_t width = padded(dim);
  float top = -INFINITE;
  for (int64_t s = 0; s < count; ++s) top = std::max(top, splits[s * stride + width]);
  float total = sink_weight(layer, head, top);
  Floats sums[MAX_HEAD_DIM / LANES] = {};
  for (int64_t s = 0; s < count; ++s) {
    const float* split = splits + s * stride;
    const float share = split[width] == top ? 1.0f : exp_of(split[width] - top);
    total += split[width + 1] * share;
    for (int64_t d = 0; d < width; d += LANES) sums[d / LANES] += load(split + d) * share;
  }
  for (int64_t d = 0; d < dim; d += LANES) store(output + d, sums[d / LANES] / total, dim - d);
}

// What a thread that is at an item most often goes on with; nothing where that is a chunk.
Split behind(const Items& all, int64_t index) {
  const int64_t next = index + 1;
  const bool decodes = next < int64_t(all.items.size()) && all.items[next].partial != -2;
  return decodes ? all.items[next].split : Split{};
}

template <class T>
void attend(const Batch& batch, const Layer& layer, const Tensors<T>& tensors) {
  const Items all = items_of(batch, layer, kv_heads_together(batch, layer, tensors));
  const int64_t kv_heads = batch.kv_heads, dim = batch.value_dim;
  const int64_t group = batch.heads / kv_heads, a_head = padded(dim) + 2;
  const int64_t stride = batch.heads * a_head;  // of the sums of one split
  float* partials = scratch<Items>(all.partials * stride);

  const auto finish = [&](int64_t row, const KvHeads& heads, const float* splits, int64_t count) {
    T* out = tensors.output + batch.query_start[row] * batch.heads * dim;
    const int64_t first = heads.first * group, last = first + heads.count * group;
    for (int64_t head = first; head < last; ++head, splits += a_head)
      join(layer, head, splits, count, stride, dim, out + head * dim);
  };
  const int64_t count = all.items.size();
  const auto attend_item = [&](int64_t index) {
    const auto& [split, partial] = all.items[index];
    if (partial == -2)
      return attend_chunk(batch, layer, tensors, split.row, split.heads.first, split.begin,
                          split.end - split.begin);
    float* sums = partial < 0 ? scratch<Item>(split.heads.count * group * a_head)
                              : partials + partial * stride + split.heads.first * group * a_head;
    attend_split(batch, layer, tensors, split, behind(all, index), sums);
    if (partial < 0) finish(split.row, split.heads, sums, 1);
  };
  // A thread holds the unit from its first item to its last.
  const auto make = [&] {
    return [&, unit = MatrixUnit()](int64_t index) { attend_item(index); };
  };
  parallel_runs(count, make, all.work < SMALL ? 1 : MOST_THREADS);
  parallel_items(all.joints.size() * kv_heads, all.partials * stride < SMALL, [&](int64_t index) {
    const Joint& joint = all.joints[index / kv_heads];
    const int64_t kv_head = index % kv_heads;
    finish(joint.row, {kv_head, 1}, partials + joint.first * stride + kv_head * group * a_head,
           joint.count);
  });
}

}  // namespace
}  // namespace quire

extern "C" {

// Writes [tokens][heads][value_dim]; the step's keys and values are in the cache already.
void quire_attention(const quire::Batch* batch, float scale, float softcap, int64_t window,
                     int64_t chunk, const float* sinks, const int32_t* ends, const float* slopes,
                     int64_t heads_apart, const void* query, const void* keys, const void* values,
                     void* output) {
  using namespace quire;
  with_type(batch->dtype, [&]<class T>() {
    attend(*batch, Layer{scale, softcap, window, chunk, sinks, ends, slopes},
           Tensors<T>{static_cast<const T*>(query), static_cast<const T*>(keys),
                      static_cast<const T*>(values), static_cast<T*>(output), heads_apart});
  });
}

// The same over a cache of codes; `kind` as in cache_codes.h.
void quire_attention_codes(const quire::Batch* batch, float scale, float softcap, int64_t window,
                           int64_t chunk, const float* sinks, const int32_t* ends,
                           const float* slopes, int64_t heads_apart, const void* query,
                           const void* keys, const void* values, void* output, int32_t kind,
                           const float* key_scales, const float* value_scales) {
  using namespace quire;
  with_type(batch->dtype, [&]<class T>() {
    attend(*batch, Layer{scale, softcap, window, chunk, sinks, ends, slopes},
           Tensors<T>{static_cast<const T*>(query), nullptr, nullptr, static_cast<T*>(output),
                      heads_apart,
                      {CodeKind{kind}, keys, values, key_scales, value_scales}});
  });
}

}  // extern "C"

QUIRE_RECORDED(quire_attention)
QUIRE_RECORDED(quire_attention_codes)
