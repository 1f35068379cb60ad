// Linear layers with codes of 4 or 8 bits in groups along the inputs:
//
//     weight[n][k] = scale[n][group of k] * (level(code[n][k]) - zero[n][group of k])
//
// Activations stay as they are; the level of any code is exact in bfloat16 or rounded to what dense
// weights would be. With few rows, where the target has a way, the codes become levels in registers, and scales and zeros are
// applied to the sums of a group: the zero by the sum of the group's activations. With more rows a
// panel is unpacked and multiplied as dense weights are.
//
// Codes lie in panels of 32 outputs, [outputs / 32][inputs / STEP][32] words of 32 bits.
#pragma once

#include <optional>

#include "codes.h"
#include "results.h"

namespace quire {

// totals[rows][groups]: the sums of a row's activations.
inline void add_groups(const bf16* x, int64_t rows, int64_t inputs, int64_t group, float* totals) {
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t begin = 0; begin < inputs; begin += group) {
      float total = 0;
      for (int64_t k = begin; k < begin + group; ++k) total += to_float(x[r * inputs + k]);
      *totals++ = total;
    }
}

// Rows of activations for products with codes.
struct GroupedRows {
  DenseRows rows;
  int64_t count;
  const float* totals;  // [count][groups], or null where weights have no zeros

  bool are_few() const { return count <= IN_REGISTER; }
  int64_t max_part() const { return are_few() ? IN_REGISTER : rows.max_part(); }
};

// One thread's products of rows by panels.
template <class Code>
class GroupedProducts {
 public:
  // The results of rows at a panel; few rows are all multiplied at once.
  template <class T>
  void multiply(const GroupedRows& rows, int64_t begin, int64_t end, const GroupedWeight& weight,
                const float* bias, const Results<T>& to, int64_t panel) {
    if constexpr (IN_REGISTER > 0)
      if (rows.are_few()) return with_rows<IN_REGISTER>(rows.count, [&]<int ROWS>() {
        few_rows<ROWS, Code>(rows.rows.data, rows.totals, weight, panel, bias, to);
      });
    if (!dense_) dense_.emplace(PANEL * weight.inputs);
    unpack<Code>(weight, panel, dense_->get());
    products_.multiply(rows.rows, begin, end, dense_->get(), bias, to, panel);
  }

 private:
  std::optional<Scratch<bf16>> dense_;  // a panel of weights
  DenseProducts products_;
};

// x * weight^T + bias.
template <class Code>
void multiply_grouped(const bf16* x, int64_t rows, const GroupedWeight& weight, const float* bias,
                      const Wanted& wanted, bool amx) {
  const bool has_totals = weight.zeros && rows <= IN_REGISTER;
  const Scratch<float> totals(has_totals ? rows * (weight.inputs / weight.group) : 0);
  if (has_totals) add_groups(x, rows, weight.inputs, weight.group, totals.get());
  const GivenRows given(x, rows, weight.inputs, amx);
  const GroupedRows all{given.rows(), rows, totals.get()};
  for_results(rows, all.max_part(), wanted, [&] {
    return [&, products = GroupedProducts<Code>()](int64_t begin, int64_t end, int64_t panel,
                                                   const auto& to) mutable {
      products.multiply(all, begin, end, weight, bias, to, panel);
    };
  });
}

// One 4-bit code an element, [32][inputs], into the words of a panel.
inline void pack_nibbles(const uint8_t* codes, int64_t inputs, uint32_t* out) {
  for (int64_t k = 0; k < inputs; k += WORD_INPUTS)
    for (int64_t n = 0; n < PANEL; ++n) {
      uint32_t word = 0;
      for (int64_t i = 0; i < WORD_INPUTS; ++i)
        word |= uint32_t{codes[n * inputs + k + i]} << (16 * (i % 2) + 4 * (i / 2));
      *out++ = word;
    }
}

}  // namespace quire
