// Which experts each token goes to (kernels/reference/moe.py, route).
#include <algorithm>
#include <cmath>
#include <vector>

#include "dots.h"
#include "parallel.h"
#include "program.h"

namespace quire {
namespace {

constexpr int64_t ROUTER_GRAIN = 65536;  // products below which a second thread costs more

// How scores become choices (kernels/cpu/experts.py).
struct Rule {
  int64_t top_k, num_groups, top_groups, group_best;
  float scale, margin;
  bool sigmoid, late, sparse_mixer, normalised;  // late: sigmoids of those chosen only
};

// The `count` places of the largest values among those for which is_in(i), the first of equals
// before the others; what is no number is larger than nothing.
template <class IsIn>
void choose(const float* values, int64_t size, int64_t count, IsIn is_in, int64_t* best) {
  int64_t found = 0;
  for (int64_t i = 0; i < size; ++i) {
    if (!is_in(i)) continue;
    if (found == count && !(values[i] > values[best[count - 1]])) continue;
    int64_t at = found < count ? found++ : count - 1;
    for (; at > 0 && values[i] > values[best[at - 1]]; --at) best[at] = best[at - 1];
    best[at] = i;
  }
}

// One thread's tokens.
class Router {
 public:
  Router(const Rule& rule, const float* correction, int64_t experts)
      : rule_(rule),
        correction_(correction),
        experts_(experts),
        group_(experts / rule.num_groups),
        chosen_by_(experts),
        of_groups_(rule.num_groups),
        best_(std::max(rule.group_best, rule.top_groups)),
        is_group_(rule.num_groups) {}

  // scores[experts], of the router's product, are overwritten.
  void choose_for(float* scores, int64_t* ids, float* weights) {
    if (!rule_.sparse_mixer && !rule_.late) rule_.sigmoid ? sigmoid(scores) : softmax(scores);
    const float* values = scores;
    if (correction_) {
      for (int64_t e = 0; e < experts_; ++e) chosen_by_[e] = scores[e] + correction_[e];
      values = chosen_by_.data();
    }
    if (rule_.num_groups > 1) {
      choose_groups(values);
      choose(values, experts_, rule_.top_k, [&](int64_t e) { return is_group_[e / group_]; }, ids);
    } else {
      choose(values, experts_, rule_.top_k, [](int64_t) { return true; }, ids);
    }
    float total = 0.0f;
    for (int64_t j = 0; j < rule_.top_k; ++j)
      total += weights[j] = share(scores, ids, j);
    // Never divided by zero (DeepSeek-V3).
    const float factor = rule_.scale / (rule_.normalised ? total + 1e-20f : 1.0f);
    for (int64_t j = 0; j < rule_.top_k; ++j) weights[j] *= factor;
  }

 private:
  // The weight of choice j, before all are divided by their sum.
  float share(const float* scores, const int64_t* ids, int64_t j) const {
    if (rule_.sparse_mixer) return share_of_rest(scores, ids, j);
    const float score = scores[ids[j]];
    return rule_.late ? 1.0f / (1.0f + std::exp(-score)) : score;
  }

  void sigmoid(float* scores) const {
    for (int64_t e = 0; e < experts_; e += LANES)
      store(scores + e, 1.0f / (1.0f + exp(-load(scores + e, experts_ - e))), experts_ - e);
  }

  void softmax(float* scores) const {
    const float most = *std::max_element(scores, scores + experts_);
    float total = 0.0f;
    for (int64_t e = 0; e < experts_; e += LANES)
      store(scores + e, exp(load(scores + e, experts_ - e) - most), experts_ - e);
    for (int64_t e = 0; e < experts_; ++e) total += scores[e];
    for (int64_t e = 0; e < experts_; ++e) scores[e] /= total;
  }

  // The share of choice j among the experts near it that were not chosen before it.
  float share_of_rest(const float* scores, const int64_t* ids, int64_t j) const {
    const float best = scores[ids[j]];
    float total = 0.0f;
    for (int64_t e = 0; e < experts_; ++e) {
      const bool is_far = best - scores[e] > rule_.margin * std::max(std::fabs(scores[e]), best);
      if (!is_far && std::find(ids, ids + j, e) == ids + j) total += std::exp(scores[e] - best);
    }
    return 1.0f / total;
  }

  // A group is as good as its best experts together.
  void choose_groups(const float* values) {
    const auto all = [](int64_t) { return true; };
    for (int64_t g = 0; g < rule_.num_groups; ++g) {
      const float* own = values + g * group_;
      choose(own, group_, rule_.group_best, all, best_.data());
      of_groups_[g] = 0.0f;
      for (int64_t i = 0; i < rule_.group_best; ++i) of_groups_[g] += own[best_[i]];
    }
    choose(of_groups_.data(), rule_.num_groups, rule_.top_groups, all, best_.data());
    std::fill(is_group_.begin(), is_group_.end(), 0);
    for (int64_t i = 0; i < rule_.top_groups; ++i) is_group_[best_[i]] = 1;
  }

  const Rule& rule_;
  const float* correction_;
  const int64_t experts_, group_;
  std::vector<float> chosen_by_, of_groups_;
  std::vector<int64_t> best_;
  std::vector<uint8_t> is_group_;
};

template <class X, class W>
void route(const Rule& rule, const X* x, int64_t tokens, int64_t hidden, const W* weight,
           const W* bias, const float* correction, int64_t experts, int64_t* ids, float* weights) {
  const int64_t grain = std::max<int64_t>(DOT_ROWS, ROUTER_GRAIN / (experts * hidden));
  parallel_rows(tokens, grain, [&](int64_t begin, int64_t end) {
    Router router(rule, correction, experts);
    std::vector<float> scores(DOT_ROWS * experts);
    for (int64_t t = begin; t < end; t += DOT_ROWS) {
      const int64_t count = std::min(DOT_ROWS, end - t);
      dot_rows(x + t * hidden, count, hidden, weight, experts, bias, scores.data(), experts);
      for (int64_t i = 0; i < count; ++i)
        router.choose_for(scores.data() + i * experts, ids + (t + i) * rule.top_k,
                          weights + (t + i) * rule.top_k);
    }
  });
}

}  // namespace
}  // namespace quire

// x[tokens][hidden]; weight[experts][hidden] and bias[experts] or null of another type than x if
// need be; correction[experts] or null -> ids[tokens][top_k], weights[tokens][top_k].
extern "C" void quire_route(int32_t dtype, int32_t weight_dtype, const quire::Rule* rule,
                            const void* x, int64_t tokens, int64_t hidden, const void* weight,
                            const void* bias, const float* correction, int64_t experts,
                            int64_t* ids, float* weights) {
  using namespace quire;
  with_type(dtype, [&]<class X>() {
    with_type(weight_dtype, [&]<class W>() {
      route(*rule, static_cast<const X*>(x), tokens, hidden, static_cast<const W*>(weight),
            static_cast<const W*>(bias), correction, experts, ids, weights);
    });
  });
}

QUIRE_RECORDED(quire_route)
