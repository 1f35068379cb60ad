// The likeliest token of each row, of which most of the head's weight is never read.
//
// The weight lies twice: in bfloat16, and rounded to eight bits, one scale an output, in half as
// many bytes. The codes tell every score within a slack, by the inequality of Cauchy and Schwarz:
//
//     |x . w[n] - scale[n] * (x . code[n])|  <=  |x| * |w[n] - scale[n] * code[n]|
//
// With few rows the weight's bytes are what a product costs, and the activations are taken in two
// digits of eight bits, which lose next to nothing. With more rows it is the multiplications, of
// which bytes need half as many as bfloat16: there activations have one digit, and what it loses,
// e = x - step * digit, adds |e| * |scale[n] * code[n]| to the slack.
//
// Only the few panels with an output that can be the largest, within that slack, are multiplied as
// quire_dense does, and of those scores the largest is taken: the same token to the last bit, a tie
// between equal scores included. Scores that are scaled or capped become equal where they were
// not: then panels are looked at that could come as near as that.
#include <algorithm>
#include <cmath>

#include "dense.h"
#include "int8.h"
#include "likeliest.h"
#include "program.h"
#include "simd.h"

using namespace quire;

extern "C" void quire_dense_likeliest(const bf16* x, int64_t rows, int64_t inputs,
                                      const bf16* packed, const float* bias, int64_t outputs,
                                      float scale, float cap, bool amx, int64_t* token_ids,
                                      bool* is_finite);

namespace {

constexpr int32_t DIGIT = 256;           // steps of the lower digit in one of the upper
constexpr int32_t MOST = 127 * DIGIT;    // of a value in two signed digits
constexpr int32_t ZERO = 128;            // the code of a digit of zero
constexpr int64_t FEW_ROWS = 8;          // up to which the activations have two digits
constexpr float LEAST_PEAK = 1e-15f;     // below it squares are lost
constexpr int32_t MOST_PATIENCE = 256;  // calls
// Panels that are multiplied for one row each take longer than all rows by all panels where they
// are more than this share of these, and with many rows, of as many panels for each of this many.
constexpr int64_t PANELS_A_PICK = 4;
constexpr int64_t ROWS_A_PICK = 32;

// Panels that are held of anything that is told of each, in whole vectors.
int64_t stride_of(int64_t outputs) {
  return (outputs + PANEL * LANES - 1) / (PANEL * LANES) * LANES;
}

// By how much the codes of an output may be off.
struct Slack {
  float of_norm;  // times the norm of an activation
  float of_loss;  // times the norm of what its rounding to one digit has lost
};

// Beside the weight's own rounding there are, with u = 2^-24: the activation's rounding to two
// digits, at most half a step of max|x| / MOST in each place; and the sums in float32 here and in
// the exact product, each off by less than (columns + 16) * u * |x| * |w|.
Slack slack_of(const bf16* weight, int64_t columns, float scale) {
  double squares = 0, lost = 0;
  for (int64_t k = 0; k < columns; ++k) {
    const float value = to_float(weight[k]);
    const double rest = double{value} - double{scale} * __builtin_nearbyintf(value / scale);
    squares += double{value} * value;
    lost += rest * rest;
  }
  const double residual = std::sqrt(lost), norm = std::sqrt(squares) + residual;
  const double sums = static_cast<double>(2 * columns + 32) * 0x1p-24;
  const double digits = 0.51 * std::sqrt(static_cast<double>(columns)) / MOST;
  const auto of_norm = static_cast<float>(1.00001 * (residual + norm * (sums + digits)));
  if (!std::isfinite(of_norm)) return {INFINITE, 0};
  return {of_norm, static_cast<float>(1.00001 * norm)};
}

// Rows of activations in one digit of eight bits, or in two, which lie as two rows of codes.
class Digits {
 public:
  Digits(const bf16* x, int64_t rows, int64_t inputs, bool amx)
      : a_row_(rows > FEW_ROWS ? 1 : 2),
        width_((inputs + 63) / 64 * 64),
        codes_((a_row_ * rows + 31) / 32 * 32 * width_),
        told_(a_row_ * rows),
        norms_(rows),
        losses_(rows),
        rows_{codes_.get(), told_.get(), width_, amx,
              Int8Rows::layout_of(a_row_ * rows, width_, amx)} {
    for (int64_t r = 0; r < rows; ++r) {
      losses_.get()[r] = 0;
      const bf16* row = x + r * inputs;
      norms_.get()[r] = a_row_ == 1 ? round(row, r, inputs) : split(row, r, inputs);
    }
  }

  const Int8Rows& rows() const { return rows_; }
  // Rows of codes for each of activations.
  int64_t a_row() const { return a_row_; }
  // Infinite where the codes say nothing: the row is not finite, or next to nothing.
  float norm(int64_t r) const { return norms_.get()[r]; }
  // The norm of what the row's rounding has lost, beside what each Slack knows.
  float loss(int64_t r) const { return losses_.get()[r]; }

 private:
  struct Size {
    float peak, norm;  // the norm is infinite where codes would say nothing
  };

  static Size size_of(const bf16* x, int64_t inputs) {
    Floats most = {}, squares = {};
    for (int64_t k = 0; k < inputs; k += LANES) {
      const Floats values = load(reinterpret_cast<const bfloat16*>(x + k));
      most = larger(most, magnitude(values));
      squares += values * values;
    }
    const float peak = largest(most);
    const float norm = 1.00001f * std::sqrt(sum(squares));
    return {peak, peak > LEAST_PEAK && std::isfinite(norm) ? norm : INFINITE};
  }

  float split(const bf16* x, int64_t r, int64_t inputs) {
    const auto [peak, norm] = size_of(x, inputs);
    const bool is_told = norm < INFINITE;
    const float step = is_told ? peak / MOST : 1;
    told_.get()[2 * r] = {step * DIGIT, ZERO + FIRST_CODE};
    told_.get()[2 * r + 1] = {step, ZERO + FIRST_CODE};
    write(x, 2 * r, inputs, is_told ? 1 / step : 0);
    return norm;
  }

  float round(const bf16* x, int64_t r, int64_t inputs) {
    const auto [peak, norm] = size_of(x, inputs);
    const bool is_told = norm < INFINITE;
    const float step = is_told ? peak / 127 : 1, inverse = is_told ? 1 / step : 0;
    told_.get()[r] = {step, ZERO + FIRST_CODE};
    uint8_t* codes = codes_.get() + rows_.layout.offset(r, 0);
    Floats lost = {};
    for (int64_t k = 0; k < width_; k += LANES) {
      const Floats values =
          k < inputs ? load(reinterpret_cast<const bfloat16*>(x + k)) : Floats{};
      const Ints steps = nearest(values * inverse);
      const Floats rest = values - to_floats(steps) * step;
      lost += rest * rest;
      const Bytes16 bytes = to_bytes(steps + (ZERO + FIRST_CODE));
      std::memcpy(codes + k / 64 * rows_.layout.step + k % 64, &bytes, sizeof bytes);
    }
    // The products above are rounded, by 2^-24 of a value each.
    losses_.get()[r] = is_told ? 1.00001f * std::sqrt(sum(lost)) + norm * 0x1p-22f : 0;
    return norm;
  }

  // The upper digits as a row of codes, the lower ones as the next.
  void write(const bf16* x, int64_t row, int64_t inputs, float inverse) {
    const BlockLayout& layout = rows_.layout;
    uint8_t* upper = codes_.get() + layout.offset(row, 0);
    uint8_t* lower = codes_.get() + layout.offset(row + 1, 0);
    const auto put = [](uint8_t* to, Ints digits) {
      const Bytes16 bytes = to_bytes(digits + (ZERO + FIRST_CODE));
      std::memcpy(to, &bytes, sizeof bytes);
    };
    for (int64_t k = 0; k < width_; k += LANES) {
      const int64_t at = k / 64 * layout.step + k % 64;
      const Floats values =
          k < inputs ? load(reinterpret_cast<const bfloat16*>(x + k)) : Floats{};
      const Ints steps = nearest(values * inverse);
      const Ints high = (steps + ZERO) >> 8;
      put(upper + at, high);
      put(lower + at, steps - (high << 8));
    }
  }

  const int64_t a_row_, width_;
  const Scratch<uint8_t> codes_;
  const Scratch<RoundedRow> told_;
  const Scratch<float> norms_, losses_;
  const Int8Rows rows_;
};

// What the slacks of an output's panel are, [panels in whole vectors] each.
struct Slacks {
  const float *of_norm, *of_loss;

  // Of the panels from p on, for a row.
  Floats at(int64_t p, float norm, float loss) const {
    return load(of_norm + p) * norm + load(of_loss + p) * loss;
  }
};

// How much less than the largest score, which lies between `least` and `most`, another must be to
// stay less once both are finished.
//
// A product with the scale rounds by 2^-24 of it. The cap is off by less than 4e-7 of itself, and
// rises by its slope, which is the least where scores are largest.
float nearness(const Finish& finish, float least, float most) {
  if (finish.scale == 1 && !finish.cap) return 0;
  const float size = std::max(std::fabs(least), std::fabs(most));
  const float rounded = size * 0x1p-22f;
  if (!finish.cap) return rounded;
  const double flat = std::tanh(double{finish.scale} * (size + 1) / finish.cap);
  const double slope = finish.scale * (1 - flat * flat);
  const auto apart = static_cast<float>(rounded + 1e-6 * finish.cap / slope);
  return apart < 1 ? apart : INFINITE;  // the slope was taken one beyond the largest
}

// The largest score of each row in each panel, as the codes tell it.
class PanelBests {
 public:
  PanelBests(const Digits& digits, int64_t rows, const Int8Weight& weight, int64_t outputs)
      : panels_((outputs + PANEL - 1) / PANEL),
        stride_(stride_of(outputs)),
        bests_(rows * stride_) {
    const Int8Rows& codes = digits.rows();
    const int64_t a_row = digits.a_row(), count = a_row * rows;
    std::fill_n(bests_.get(), rows * stride_, -INFINITE);
    for_panels(count, outputs, codes.max_part(), [&] {
      return [&, products = Int8Products(),
              scores = Scratch<float>(std::min(count, codes.max_part()) * PANEL)](
                 int64_t begin, int64_t end, int64_t panel) mutable {
        const int64_t first = panel * PANEL, count = std::min(PANEL, outputs - first);
        const Results<float> to{scores.get() - begin * PANEL - first, PANEL, outputs};
        products.multiply(codes, begin, end, weight.panel(panel, codes.inputs), nullptr, to, panel);
        for (int64_t r = begin; r < end; r += a_row)
          bests_.get()[r / a_row * stride_ + panel] = largest(to.row(r) + first, count, a_row);
      };
    });
  }

  // Calls pick(panel) for those with an output that can be the row's largest, as it is finished.
  template <class Pick>
  void find(int64_t row, float norm, float loss, const Slacks& slacks, const Finish& finish,
            Pick pick) const {
    const float* bests = bests_.get() + row * stride_;
    // The largest is as large at least, and at most.
    Floats sure = fill(-INFINITE), most = fill(-INFINITE);
    for (int64_t p = 0; p < stride_; p += LANES) {
      sure = larger(load(bests + p) - slacks.at(p, norm, loss), sure);
      most = larger(load(bests + p) + slacks.at(p, norm, loss), most);
    }
    const float surely = quire::largest(sure);
    const float least = surely - nearness(finish, surely, quire::largest(most));
    for (int64_t p = 0; p < stride_; p += LANES) {
      const Floats possible = load(bests + p) + slacks.at(p, norm, loss);
      if (!any_not_less(possible, fill(least))) continue;
      // What is not a number is looked at.
      for (int64_t panel = p; panel < std::min(p + LANES, panels_); ++panel)
        if (!(possible[panel - p] < least)) pick(panel);
    }
  }

 private:
  // Of one row, the scores of whose digits, one or two, lie one after the other.
  static float largest(const float* digits, int64_t count, int64_t a_row) {
    Floats most = fill(-INFINITE);
    for (int64_t n = 0; n < count; n += LANES) {
      Floats scores = load(digits + n, count - n);
      if (a_row > 1) scores += load(digits + PANEL + n, count - n);
      most = larger(select(LANE < static_cast<int32_t>(count - n), scores, most), most);
    }
    return quire::largest(most);
  }

  const int64_t panels_, stride_;
  const Scratch<float> bests_;
};

// A row and a panel to multiply it by.
struct Pick {
  int32_t row, panel;
};

// All that can hold a row's largest score, those of a panel side by side: rows share its weights
// in cache.
std::vector<Pick> find_picks(const bf16* x, int64_t rows, int64_t inputs, const Int8Weight& weight,
                             const Slacks& slacks, int64_t outputs, const Finish& finish,
                             bool amx) {
  const Digits digits(x, rows, inputs, amx);
  const PanelBests bests(digits, rows, weight, outputs);
  std::vector<Pick> picks;
  for (int64_t r = 0; r < rows; ++r)
    bests.find(r, digits.norm(r), digits.loss(r), slacks, finish, [&](int64_t panel) {
      picks.push_back({static_cast<int32_t>(r), static_cast<int32_t>(panel)});
    });
  std::sort(picks.begin(), picks.end(), [](const Pick& a, const Pick& b) {
    return a.panel < b.panel || (a.panel == b.panel && a.row < b.row);
  });
  return picks;
}

// How many picks take no longer than the whole product.
int64_t most_picks(int64_t rows, int64_t panels) {
  return rows > FEW_ROWS ? panels * rows / ROWS_A_PICK : (panels + rows) / PANELS_A_PICK;
}

}  // namespace

extern "C" {

// As quire_dense_likeliest, where the weight's codes are those of quire_int8_pack, and the slacks and
// norms those of quire_screen_slacks. `patience`[2] is kept between calls: how many more go without codes,
// and how many will after the next in which too many panels stay possible.
void quire_screened_likeliest(const bf16* x, int64_t rows, int64_t inputs, const bf16* packed,
                              const int8_t* codes, const float* scales, const int32_t* totals,
                              const float* slacks, const float* norms, int32_t* patience,
                              int64_t outputs, float scale, float cap, bool amx,
                              int64_t* token_ids, bool* is_finite) {
  const auto choose_plainly = [&] {
    quire_dense_likeliest(x, rows, inputs, packed, nullptr, outputs, scale, cap, amx, token_ids,
                          is_finite);
  };
  if (patience[0] > 0) {
    --patience[0];
    return choose_plainly();
  }
  const Int8Weight weight{codes, scales, totals};
  const Finish finish{scale, cap};
  const std::vector<Pick> picks =
      find_picks(x, rows, inputs, weight, {slacks, norms}, outputs, finish, amx);
  const int64_t panels = (outputs + PANEL - 1) / PANEL;
  if (static_cast<int64_t>(picks.size()) > most_picks(rows, panels)) {
    patience[0] = patience[1];
    patience[1] = std::min(2 * patience[1], MOST_PATIENCE);
    return choose_plainly();
  }
  patience[1] = 1;
  const GivenRows given(x, rows, inputs, amx);
  Likeliest all(rows, finish);
  parallel_runs(picks.size(), [&] {
    return [&, products = DenseProducts(), share = Likeliest::Share(all)](int64_t i) mutable {
      const auto [row, panel] = picks[i];
      const int64_t first = panel * PANEL;
      products.sum(given.rows(), row, row + 1, packed + first * inputs,
                   [&](int64_t r, int64_t, const float* scores) {
                     share.look(r, scores, nullptr, std::min(PANEL, outputs - first), first);
                   });
    };
  });
  all.tell(token_ids, is_finite);
}

// How far the codes of a weight [outputs][columns] may be off, the most of each panel's outputs by an
// activation's norm and by that of what it has lost: slacks and norms[panels in whole vectors], zero
// behind the last. `scales` are those of quire_int8_pack.
void quire_screen_slacks(const bf16* weight, int64_t outputs, int64_t columns, const float* scales,
                         float* slacks, float* norms) {
  parallel_rows(stride_of(outputs), 16, [=](int64_t begin, int64_t end) {
    for (int64_t panel = begin; panel < end; ++panel) {
      slacks[panel] = norms[panel] = 0;
      for (int64_t n = panel * PANEL; n < std::min(outputs, (panel + 1) * PANEL); ++n) {
        const Slack slack = slack_of(weight + n * columns, columns, scales[n]);
        slacks[panel] = std::max(slacks[panel], slack.of_norm);
        norms[panel] = std::max(norms[panel], slack.of_loss);
      }
    }
  });
}

}  // extern "C"

QUIRE_RECORDED(quire_screened_likeliest)
