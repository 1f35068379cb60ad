// A mixture of experts whose weights lie row by row, in the activations' type: for processors without
// the panels' instructions, and for models in float32.
#include "dots.h"
#include "experts.h"
#include "program.h"

namespace quire {
namespace {

constexpr int64_t CACHED_VALUES = 1 << 17;  // of rows that stay in the cache beside a panel

template <class T>
class RowMajor {
 public:
  // weights[experts][outputs][inputs]; biases[experts][outputs] or null.
  RowMajor(const void* weights, const void* biases, int64_t outputs, int64_t inputs)
      : weights_(static_cast<const T*>(weights)),
        biases_(static_cast<const T*>(biases)),
        outputs_(outputs),
        inputs_(inputs) {}

  int64_t outputs() const { return outputs_; }
  int64_t inputs() const { return inputs_; }

  class Rows {
   public:
    Rows(const RowMajor& experts, const Routed& routed)
        : routed_(routed), inputs_(experts.inputs_), rows_(routed.num_pairs() * inputs_) {}

    void put(size_t run, int64_t r, const T* row) { std::copy_n(row, inputs_, at(run, r)); }
    T* at(size_t run, int64_t r) const {
      return rows_.get() + (routed_.runs()[run].begin + r) * inputs_;
    }
    int64_t max_part(size_t) const { return std::max<int64_t>(32, CACHED_VALUES / inputs_); }

   private:
    const Routed& routed_;
    const int64_t inputs_;
    const Scratch<T> rows_;
  };

  struct Products {
    const RowMajor& all;

    void multiply(const Rows& rows, size_t run, int64_t expert, int64_t begin, int64_t end,
                  float* y, int64_t panel) const {
      const int64_t first = panel * EXPERT_PANEL, row = expert * all.outputs_ + first;
      dot_rows(rows.at(run, begin), end - begin, all.inputs_, all.weights_ + row * all.inputs_,
               std::min(EXPERT_PANEL, all.outputs_ - first),
               all.biases_ ? all.biases_ + row : nullptr, y + begin * all.outputs_ + first,
               all.outputs_);
    }
  };

  Products products() const { return {*this}; }

 private:
  const T* weights_;
  const T* biases_;
  const int64_t outputs_, inputs_;
};

}  // namespace
}  // namespace quire

// gate_up[experts][2 * inner][hidden], or [inner] without a gate, down[experts][hidden][inner], and their biases or null.
extern "C" void quire_experts(int32_t dtype, const quire::Mixture* mixture, const void* gate_up,
                              const void* gate_up_bias, const void* down, const void* down_bias,
                              const void* x, const int64_t* ids, const float* weights,
                              const void* shared, void* out, int64_t tokens) {
  using namespace quire;
  const MixtureRows rows{x, ids, weights, shared, out, tokens};
  with_type(dtype, [&]<class T>() {
    const int64_t hidden = mixture->hidden, inner = mixture->inner;
    const RowMajor<T> first(gate_up, gate_up_bias, mixture->entered(), hidden);
    const RowMajor<T> second(down, down_bias, hidden, inner);
    mix<T>(*mixture, rows, [&](bool is_down, const Routed& routed, const FillRow<T>& fill,
                               float* y) {
      project<RowMajor<T>, T>(is_down ? second : first, routed, fill, y);
    });
  });
}

QUIRE_RECORDED(quire_experts)
