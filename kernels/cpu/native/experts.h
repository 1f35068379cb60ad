// A mixture of experts, whatever holds its weights:
//
//     (token, choice) pairs sorted by expert ─► x, row by row ─► gate and up (or up) ─► activation ─► down
//       ─► each token's weighted sum
//
// A product of all experts is one parallel region over their panels of 32 outputs, so each weight of
// an expert that was chosen is read once, and the team divides evenly among what was chosen.
#pragma once

#include <algorithm>
#include <functional>
#include <vector>

#include "activations.h"
#include "gating.h"
#include "parallel.h"
#include "scratch.h"

namespace quire {

constexpr int64_t EXPERT_PANEL = 32;  // outputs
constexpr int64_t EXPERT_GRAIN = 32768;  // values below which a second thread costs more

// What a layer's experts have in common (kernels/cpu/experts.py).
struct Mixture {
  int64_t num_experts, top_k, hidden, inner;
  const void* shared_gate;  // [hidden] in the activations' type, or null: the shared expert's is 1
  Gating gating;
  Activation activation;  // in place of the gating, where experts have no gate
  bool gated;
  bool weighs_input;  // a pair's weight multiplies what its expert reads

  // Outputs of an expert's first product.
  int64_t entered() const { return gated ? 2 * inner : inner; }
};

// One step's tokens, [tokens][hidden] all three.
struct MixtureRows {
  const void* x;
  const int64_t* ids;    // [tokens][top_k], each below num_experts, or that: of none here
  const float* weights;  // [tokens][top_k]
  const void* shared;    // what an expert gave that all tokens go to, or null
  void* out;
  int64_t tokens;
};

// The rows of one expert among all pairs sorted by expert: `count` from place `begin` on.
struct ExpertRun {
  int64_t expert, begin, count;
};

// Pairs of token and choice, numbered token * top_k + choice, each at a place of its own; those of
// experts that are not here have none.
class Routed {
 public:
  Routed(const int64_t* ids, int64_t num_pairs, int64_t num_experts) : places_(num_pairs) {
    std::vector<int64_t> next(num_experts + 2);
    for (int64_t i = 0; i < num_pairs; ++i) ++next[ids[i] + 1];
    const int64_t num_placed = num_pairs - next[num_experts + 1];
    pairs_.resize(num_placed);
    runs_of_.resize(num_placed);
    for (int64_t e = 0; e < num_experts; ++e) {
      const int64_t count = next[e + 1], begin = next[e];
      next[e + 1] += begin;
      if (count == 0) continue;
      std::fill_n(runs_of_.begin() + begin, count, int32_t(runs_.size()));
      runs_.push_back({e, begin, count});
    }
    for (int64_t i = 0; i < num_pairs; ++i) {
      places_[i] = ids[i] < num_experts ? next[ids[i]]++ : -1;
      if (places_[i] >= 0) pairs_[places_[i]] = i;
    }
  }

  int64_t num_pairs() const { return int64_t(pairs_.size()); }
  const std::vector<ExpertRun>& runs() const { return runs_; }
  int64_t pair_at(int64_t place) const { return pairs_[place]; }
  int64_t place_of(int64_t pair) const { return places_[pair]; }  // -1: none
  size_t run_at(int64_t place) const { return runs_of_[place]; }

 private:
  std::vector<int64_t> pairs_, places_;
  std::vector<int32_t> runs_of_;  // by place
  std::vector<ExpertRun> runs_;
};

template <class T>
using FillRow = std::function<void(int64_t place, T* row)>;

// y[places][outputs] = rows * weights^T + bias, each row by its expert's. `Experts` are the weights:
// they have a class Rows that takes in what `fill` writes, and products() of one thread.
template <class Experts, class T>
void project(const Experts& experts, const Routed& routed, const FillRow<T>& fill, float* y) {
  if (routed.num_pairs() == 0) return;
  typename Experts::Rows rows(experts, routed);
  const int64_t num_pairs = routed.num_pairs(), inputs = experts.inputs();
  parallel_rows(num_pairs, std::max<int64_t>(1, EXPERT_GRAIN / inputs), [&](int64_t i, int64_t end) {
    const Scratch<T> row(inputs);
    std::fill_n(row.get(), inputs, T{});  // behind what is filled are zeros
    for (; i < end; ++i) {
      const size_t run = routed.run_at(i);
      fill(i, row.get());
      rows.put(run, i - routed.runs()[run].begin, row.get());
    }
  });

  // The rows of a run are cut into parts that stay in the cache, and a part is read panel by panel.
  struct Items {
    int64_t first, part;
  };
  const int64_t outputs = experts.outputs();
  const int64_t panels = (outputs + EXPERT_PANEL - 1) / EXPERT_PANEL;
  std::vector<Items> items;
  int64_t num_items = 0;
  for (size_t run = 0; run < routed.runs().size(); ++run) {
    const int64_t count = routed.runs()[run].count, max_rows = rows.max_part(run);
    const int64_t parts = (count + max_rows - 1) / max_rows;
    items.push_back({num_items, ((count + parts - 1) / parts + 31) / 32 * 32});
    num_items += parts * panels;
  }
  parallel_runs(num_items, [&] {
    return [&, products = experts.products()](int64_t item) mutable {
      const auto after = std::upper_bound(items.begin(), items.end(), item,
                                          [](int64_t i, const Items& of) { return i < of.first; });
      const size_t index = after - items.begin() - 1;
      const ExpertRun& run = routed.runs()[index];
      const auto [first, part] = items[index];
      const int64_t begin = (item - first) / panels * part;
      if (begin >= run.count) return;
      products.multiply(rows, index, run.expert, begin, std::min(run.count, begin + part),
                        y + run.begin * outputs, (item - first) % panels);
    };
  });
}

// out = sum_j weight_j * made_j (+ gate(x) * shared), summed in the order of the choices.
template <class T>
void combine(const Mixture& mixture, const Routed& routed, const float* made,
             const MixtureRows& rows) {
  const int64_t hidden = mixture.hidden, top_k = mixture.top_k;
  const T* gate = static_cast<const T*>(mixture.shared_gate);
  const int64_t grain = std::max<int64_t>(1, EXPERT_GRAIN / (hidden * top_k));
  parallel_rows(rows.tokens, grain, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const T* x = static_cast<const T*>(rows.x) + t * hidden;
      float share = 1.0f;
      if (rows.shared && gate) {
        Floats products = {};
        for (int64_t h = 0; h < hidden; h += LANES)
          products += load(x + h, hidden - h) * load(gate + h, hidden - h);
        share = 1.0f / (1.0f + exp(-fill(sum(products)))[0]);
      }
      for (int64_t h = 0; h < hidden; h += LANES) {
        Floats total = {};
        for (int64_t j = 0; j < top_k; ++j) {
          const int64_t pair = t * top_k + j, place = routed.place_of(pair);
          if (place < 0) continue;
          const Floats part = load(made + place * hidden + h, hidden - h);
          total += mixture.weighs_input ? part : part * rows.weights[pair];
        }
        if (rows.shared)
          total += share * load(static_cast<const T*>(rows.shared) + t * hidden + h, hidden - h);
        store(static_cast<T*>(rows.out) + t * hidden + h, total, hidden - h);
      }
    }
  });
}

// Calls project(is_down, routed, fill, y) for the two products, and what stands around them.
template <class T, class Project>
void mix(const Mixture& mixture, const MixtureRows& rows, Project project) {
  const int64_t hidden = mixture.hidden, inner = mixture.inner, top_k = mixture.top_k;
  const Routed routed(rows.ids, rows.tokens * top_k, mixture.num_experts);
  const int64_t entered = mixture.entered();
  const Scratch<float> first(routed.num_pairs() * entered);
  const Scratch<float> made(routed.num_pairs() * hidden);
  const FillRow<T> read = [&](int64_t place, T* row) {
    const int64_t pair = routed.pair_at(place);
    const T* x = static_cast<const T*>(rows.x) + pair / top_k * hidden;
    if (!mixture.weighs_input) {
      std::copy_n(x, hidden, row);
      return;
    }
    for (int64_t h = 0; h < hidden; h += LANES)
      store(row + h, load(x + h, hidden - h) * rows.weights[pair], hidden - h);
  };
  const FillRow<T> between = [&](int64_t place, T* row) {
    const float* from = first.get() + place * entered;
    if (mixture.gated) return gate_row(mixture.gating, from, inner, row);
    with_activation(mixture.activation,
                    [&]<Activation KIND>() { activate_row<KIND>(from, inner, row); });
  };
  project(false, routed, read, first.get());
  project(true, routed, between, made.get());
  combine<T>(mixture, routed, made.get(), rows);
}

}  // namespace quire
