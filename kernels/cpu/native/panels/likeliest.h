// The likeliest token of each row, found while the head's panels are multiplied: the scores, some
// megabytes for some tens of rows, never leave a core's cache.
#pragma once

#include <cmath>
#include <mutex>
#include <vector>

#include "logits.h"
#include "results.h"

namespace quire {

// A row's largest score in each lane and whose it is: of equal ones the first token's, in whatever
// order they come.
struct BestLanes {
  Floats scores = fill(-INFINITE);
  Ints tokens = {};
  Ints broken = {};  // lanes in which something was nan

  // Whether a look at `others` would change anything: seldom, once some have been looked at.
  bool yields_to(Floats others) const {
    return any_not_less(others, scores);
  }
  void look(Floats others, Ints whose) {
    broken |= others != others;
    const Ints is_better = (others > scores) | ((others == scores) & (whose < tokens));
    scores = select(is_better, others, scores);
    tokens = select(is_better, whose, tokens);
  }
  void join(const BestLanes& other) {
    look(other.scores, other.tokens);
    broken |= other.broken;
  }
};

class Likeliest {
 public:
  Likeliest(int64_t rows, const Finish& finish) : best_(rows), finish_(finish) {}

  // What one thread finds; handed in at its end.
  class Share {
   public:
    explicit Share(Likeliest& all) : all_(all), best_(all.best_.size()) {}
    ~Share() {
      const std::lock_guard lock(all_.mutex_);
      for (size_t row = 0; row < best_.size(); ++row) all_.best_[row].join(best_[row]);
    }
    Share(const Share&) = delete;
    Share& operator=(const Share&) = delete;

    // A panel's scores but for the bias, of all tokens or null; the panel's are `count` from `first`.
    void look(int64_t row, const float* scores, const float* bias, int64_t count, int64_t first) {
      BestLanes& best = best_[row];
      const Finish finish = all_.finish_;
      for (int64_t i = 0; i < count; i += LANES) {
        Floats some = load(scores + i, count - i);
        if (bias) some += load(bias + first + i, count - i);
        some = finish(some);
        if (count - i < LANES)
          some = select(LANE < static_cast<int32_t>(count - i), some, fill(-INFINITE));
        if (best.yields_to(some)) best.look(some, LANE + static_cast<int32_t>(first + i));
      }
    }

   private:
    Likeliest& all_;
    std::vector<BestLanes> best_;
  };

  // As sample_row of sampling.cpp tells it of rows at temperature 0.
  void tell(int64_t* token_ids, bool* is_finite) const {
    for (const BestLanes& row : best_) {
      float score = row.scores[0];
      int32_t token = row.tokens[0];
      bool is_broken = row.broken[0];
      for (int64_t lane = 1; lane < LANES; ++lane) {
        is_broken |= row.broken[lane] != 0;
        if (row.scores[lane] > score || (row.scores[lane] == score && row.tokens[lane] < token))
          score = row.scores[lane], token = row.tokens[lane];
      }
      *token_ids++ = token;
      *is_finite++ = !is_broken && std::isfinite(score);
    }
  }

 private:
  std::vector<BestLanes> best_;
  const Finish finish_;
  std::mutex mutex_;
};

// make() gives each thread what it multiplies with: products(begin, end, panel, tell) calls
// tell(row, count, scores) for blocks of rows, with scores[count][PANEL], to which `bias` is added.
template <class Make>
void find_likeliest(int64_t rows, int64_t outputs, int64_t max_part, const float* bias,
                    const Finish& finish, int64_t* token_ids, bool* is_finite, Make make) {
  Likeliest all(rows, finish);
  for_panels(rows, outputs, max_part, [&] {
    return [&, products = make(), share = Likeliest::Share(all)](int64_t begin, int64_t end,
                                                                 int64_t panel) mutable {
      const int64_t first = panel * PANEL, tokens = std::min(PANEL, outputs - first);
      products(begin, end, panel, [&](int64_t row, int64_t count, const float* scores) {
        for (int64_t r = row; r < row + count; ++r, scores += PANEL)
          share.look(r, scores, bias, tokens, first);
      });
    };
  });
  all.tell(token_ids, is_finite);
}

}  // namespace quire
