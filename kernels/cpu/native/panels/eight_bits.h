// Activations rounded to eight bits row by row, for products with int8 weights:
//
//     x[k] ~ step * (code[k] - zero)    256 codes span the row's values, zero among them
//     y[n] = step * scale[n] * (sum(code * weight[n]) - zero * sum(weight[n])) + bias[n]
//
// Codes begin with FIRST_CODE, 0 or -128: instructions want them unsigned or signed. The zero is
// moved along, so that the sums, which are exact, come out the same.
#pragma once

#include <limits>

#include "layout.h"
#include "registers.h"
#include "results.h"
#include "simd.h"
#include "weights.h"

namespace quire {

// How a row was rounded.
struct RoundedRow {
  float step;
  int32_t zero;
};

// Rounds a row to codes, of which 64 lie together and the next 64 `stride` behind them; `inputs` is
// a multiple of 64. A row that is not finite has such a step, so that its results are not finite
// either.
inline RoundedRow quantise(const bf16* x, int64_t inputs, uint8_t* codes, int64_t stride) {
  const auto values_at = [x](int64_t k) { return load(reinterpret_cast<const bfloat16*>(x + k)); };
  Floats least = {}, most = {};  // zero has a code of its own
  Floats taint = {};  // the sum of 0 * value, not a number where a value is not finite
  for (int64_t k = 0; k < inputs; k += LANES) {
    const Floats values = values_at(k);
    least = select(values < least, values, least);
    most = larger(values, most);
    taint += values * 0.0f;
  }
  if (const float told = sum(taint); told != told) {
    for (int64_t k = 0; k < inputs; k += 64, codes += stride) std::fill_n(codes, 64, uint8_t{0});
    return {std::numeric_limits<float>::quiet_NaN(), 0};
  }
  const float low = -largest(-least), high = largest(most);
  const float step = high > low ? (high - low) / 255.0f : 1.0f;
  const int32_t zero = static_cast<int32_t>(-low / step + 0.5f);
  const float inverse = 1.0f / step;
  for (int64_t k = 0; k < inputs; k += LANES) {
    Ints whole = nearest(values_at(k) * inverse) + zero;
    whole = select(whole < 0, Ints{}, whole);
    whole = select(whole > 255, Ints{} + 255, whole);
    const Bytes16 bytes = to_bytes(whole + FIRST_CODE);
    std::memcpy(codes + k / 64 * stride + k % 64, &bytes, sizeof bytes);
  }
  return {step, zero + FIRST_CODE};
}

// What turns a panel's sums into results.
template <class T>
class Int8Outputs {
 public:
  Int8Outputs(const Int8Panel& weights, const float* bias, const Results<T>& to, int64_t panel)
      : bias_(bias), to_(to), first_(panel * PANEL) {
    for (int64_t half = 0; half < PANEL; half += LANES) {
      const int64_t count = std::clamp<int64_t>(to.outputs - first_ - half, 0, LANES);
      scales_[half / LANES] = load(weights.scales + half, count);
      int32_t totals[LANES] = {};
      std::copy_n(weights.totals + half, count, totals);
      totals_[half / LANES] = load_lanes<Ints>(totals);
    }
  }

  // Of `count` rows from `row` on, which were rounded so, from sums[count][32].
  void store(const int32_t* sums, const RoundedRow* rows, int64_t row, int64_t count) const {
    for (int64_t r = row; r < row + count; ++r) {
      for (int64_t half = 0; half < PANEL; half += LANES, sums += LANES) {
        const auto exact = load_lanes<Ints>(sums) - totals_[half / LANES] * rows[r].zero;
        const Floats by = scales_[half / LANES] * rows[r].step;
        quire::store(to_floats(exact) * by, bias_, to_.row(r), to_.outputs, first_ + half);
      }
    }
  }

 private:
  Floats scales_[2];
  Ints totals_[2];
  const float* bias_;
  const Results<T> to_;
  const int64_t first_;
};

// Rows of activations as codes, where AMX or vectors read them.
struct Int8Rows {
  const uint8_t* codes;
  const RoundedRow* told;  // of each row
  int64_t inputs;
  bool amx;
  BlockLayout layout;

  static BlockLayout layout_of(int64_t rows, int64_t inputs, bool amx) {
    return amx ? BlockLayout::of(rows, inputs) : BlockLayout::as_given(inputs);
  }

  // How many are multiplied before the next panel.
  int64_t max_part() const { return rows_in(cached_bytes(amx), inputs * LAID_CODE_BYTES); }
};

// A caller's rows, rounded.
class GivenCodes {
 public:
  GivenCodes(const bf16* x, int64_t rows, int64_t inputs, bool amx)
      : codes_((rows + 31) / 32 * 32 * inputs),
        told_(rows),
        rows_{codes_.get(), told_.get(), inputs, amx, Int8Rows::layout_of(rows, inputs, amx)} {
    const BlockLayout layout = rows_.layout;
    parallel_rows(rows, 4, [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r)
        told_.get()[r] =
            quantise(x + r * inputs, inputs, codes_.get() + layout.offset(r, 0), layout.step);
    });
  }

  const Int8Rows& rows() const { return rows_; }

 private:
  const Scratch<uint8_t> codes_;
  const Scratch<RoundedRow> told_;
  const Int8Rows rows_;
};

}  // namespace quire
