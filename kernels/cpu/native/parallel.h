// Work for the team of threads.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "team.h"

namespace quire {

// What a thread has still to do of its run of items: itself from the first, others from the last.
class alignas(64) Run {
 public:
  void set(int64_t first, int64_t last) {
    span_.store(uint64_t(first) << 32 | uint64_t(last), std::memory_order_relaxed);
  }
  int64_t take_first() { return take(true); }
  int64_t take_last() { return take(false); }

 private:
  // An item, or -1 when none is left. Relaxed: an item is a number, and what it stands for was
  // written before the operation began, which the team orders.
  int64_t take(bool first) {
    uint64_t span = span_.load(std::memory_order_relaxed);
    for (;;) {
      const uint64_t begin = span >> 32, end = span & 0xFFFFFFFF;
      if (begin >= end) return -1;
      const uint64_t rest = first ? span + (uint64_t{1} << 32) : span - 1;
      if (span_.compare_exchange_weak(span, rest, std::memory_order_relaxed))
        return int64_t(first ? begin : end - 1);
    }
  }

  std::atomic<uint64_t> span_{0};
};

// Calls body(item), made by each thread for itself, for items that lie one after the other in
// memory: each thread walks along a run of its own, and who is done takes items from the ends of the
// others' runs. Cores are not equally quick, least of all those that are shared with somebody else.
template <class Make>
inline void parallel_runs(int64_t count, Make make, int64_t most_threads = MOST_THREADS) {
  const int64_t threads = std::min({num_threads(), count, most_threads});
  if (threads <= 1) {
    auto body = make();
    for (int64_t item = 0; item < count; ++item) body(item);
    return;
  }
  Run runs[MOST_THREADS];
  for (int64_t i = 0; i < threads; ++i)
    runs[i].set(count * i / threads, count * (i + 1) / threads);
  auto run = [&](int64_t self) {
    auto body = make();
    for (int64_t item; (item = runs[self].take_first()) >= 0;) body(item);
    for (int64_t i = 1; i < threads; ++i)
      for (int64_t item; (item = runs[(self + i) % threads].take_last()) >= 0;) body(item);
  };
  on_team(threads, run);
}

// Calls body(begin, end) on runs of nearly equal length, none shorter than `grain` but one of all.
template <class Body>
inline void parallel_rows(int64_t count, int64_t grain, Body body) {
  constexpr int64_t PIECES = 4;  // for each thread, so that a slow one does not keep all waiting
  const int64_t most = count / std::max<int64_t>(grain, 1), threads = num_threads();
  const int64_t pieces = std::min(threads * PIECES, most);
  if (threads <= 1 || pieces <= 1) return body(int64_t{0}, count);
  parallel_runs(pieces, [=] {
    return [=](int64_t i) { body(count * i / pieces, count * (i + 1) / pieces); };
  });
}

// Calls body(item) for items of unequal cost.
template <class Body>
inline void parallel_items(int64_t count, bool is_small, Body body) {
  parallel_runs(count, [&] { return [&](int64_t item) { body(item); }; },
                is_small ? 1 : MOST_THREADS);
}

}  // namespace quire
