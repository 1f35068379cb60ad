// Activations rounded to eight bits in groups of 32, for products with int4 weights, whose groups of
// 32 inputs share a scale:
//
//     x[k] ~ step[g] * code[k]    codes -127 to 127 span the group's values
//     y[n] = sum over g of scale[n][g] * step[g] * sum(code * level[n] in g) + bias[n]
//
// Words are those of groups.h, of eight inputs. Bits that a mask leaves of a word, and of the word
// shifted, are bytes of its inputs in the order 0 4 1 5 2 6 3 7: so lie the activations' codes too.
#pragma once

#include "parallel.h"
#include "registers.h"
#include "results.h"
#include "simd.h"
#include "weights.h"

namespace quire {

// How a group of a row was rounded.
struct RoundedGroup {
  float step;
  int32_t start;  // of its sums: what makes up for levels that count from 0, not from -8
};

// Rounds 32 values to codes. A group that is not finite has such a step, so that the results of its
// row are not finite either.
inline RoundedGroup round_group(const bf16* x, int8_t* codes) {
  const auto* values = reinterpret_cast<const bfloat16*>(x);
  const Floats halves[2] = {load(values), load(values + LANES)};
  const float most = largest(larger(magnitude(halves[0]), magnitude(halves[1])));
  const float taint = sum((halves[0] + halves[1]) * 0.0f);
  const float inverse = most > 0 ? 127.0f / most : 0.0f;
  Ints total = {};
  for (int half = 0; half < 2; ++half, codes += LANES) {
    const Ints rounded = nearest(halves[half] * inverse);
    const Bytes16 in_order = to_bytes(rounded);
    const Bytes16 bytes = QUIRE_SHUFFLE(in_order, in_order, 0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13,
                                        10, 14, 11, 15);
    std::memcpy(codes, &bytes, sizeof bytes);
    total += rounded;
  }
  const auto excess = 8 * static_cast<int32_t>(sum(to_floats(total)));
  return {most / 127.0f + taint, group_start(excess)};
}

// A caller's few rows, x[rows][inputs], rounded in groups.
class Int4Rows {
 public:
  Int4Rows(const bf16* x, int64_t rows, int64_t inputs)
      : codes_(rows * inputs), told_(rows * inputs / INT4_GROUP) {
    parallel_rows(rows * inputs / INT4_GROUP, 512, [&](int64_t begin, int64_t end) {
      for (int64_t g = begin; g < end; ++g)
        told_.get()[g] = round_group(x + g * INT4_GROUP, codes_.get() + g * INT4_GROUP);
    });
  }

  const int8_t* codes() const { return codes_.get(); }
  const RoundedGroup* told() const { return told_.get(); }

 private:
  const Scratch<int8_t> codes_;
  const Scratch<RoundedGroup> told_;
};

}  // namespace quire
