// Where the results of a product go: to memory as they are, or through the gating of an MLP first.
#pragma once

#include "gating.h"
#include "tiles.h"

namespace quire {

// Row r's output n is y[r * stride + n], for n below `outputs`.
template <class T>
struct Results {
  T* y;
  int64_t stride, outputs;

  T* row(int64_t r) const { return y + r * stride; }
};

// What a caller wants of all panels' results.
struct Wanted {
  void* y;
  int64_t outputs;
  bool wide;             // in float32, else in bfloat16
  const Gating* gating;  // or null: outputs as they are
};

// y[begin to end][at] of one panel: the gate's results and those that it lets through.
inline void gate_panel(const Gating& gating, const bfloat16* gates, const bfloat16* ups,
                       int64_t begin, int64_t end, const Results<bfloat16>& to, int64_t at) {
  with_gating(gating.kind, [&]<GatingKind KIND>() {
    for (int64_t r = begin; r < end; ++r, gates += PANEL, ups += PANEL)
      for (int64_t n = 0; n < PANEL; n += LANES)
        store(to.row(r) + at + n, gated<KIND>(load(gates + n), load(ups + n), gating));
  });
}

// The outputs of a gate, and behind them as many that it lets through, both whole panels: a panel of
// each is multiplied and gated while its results are in the cache, so that y[rows][outputs / 2] is
// all that goes to memory. Results are rounded to bfloat16 before, as they are in memory.
template <class Make>
void for_gated_panels(int64_t rows, int64_t max_part, const Wanted& wanted, Make make) {
  const int64_t inner = wanted.outputs / 2;
  const Results<bfloat16> to{static_cast<bfloat16*>(wanted.y), inner, inner};
  const int64_t size = std::min(rows, max_part) * PANEL;
  for_panels(rows, inner, max_part, [&] {
    return [&, products = make(), gates = Scratch<bf16>(size), ups = Scratch<bf16>(size)](
               int64_t begin, int64_t end, int64_t panel) mutable {
      const auto multiply = [&](int64_t at, bf16* part) {
        const Results<bf16> beside{part - begin * PANEL - at * PANEL, PANEL, wanted.outputs};
        products(begin, end, at, beside);
      };
      multiply(panel, gates.get());
      multiply(panel + inner / PANEL, ups.get());
      gate_panel(*wanted.gating, reinterpret_cast<const bfloat16*>(gates.get()),
                 reinterpret_cast<const bfloat16*>(ups.get()), begin, end, to, panel * PANEL);
    };
  });
}

// Has all results computed. make() gives each thread what it multiplies with: products(begin, end,
// panel, results) for rows that are parts of at most `max_part`.
template <class Make>
void for_results(int64_t rows, int64_t max_part, const Wanted& wanted, Make make) {
  if (wanted.gating) return for_gated_panels(rows, max_part, wanted, make);
  const auto write = [&](auto* y) {
    const Results<std::decay_t<decltype(*y)>> to{y, wanted.outputs, wanted.outputs};
    for_panels(rows, wanted.outputs, max_part, [&] {
      return [&, products = make()](int64_t begin, int64_t end, int64_t panel) mutable {
        products(begin, end, panel, to);
      };
    });
  };
  if (wanted.wide)
    write(static_cast<float*>(wanted.y));
  else
    write(static_cast<bf16*>(wanted.y));
}

}  // namespace quire
