// Work for torch's own team of threads.
//
// GOMP_parallel is what GCC compiles `#pragma omp parallel` into. It is called by name, so that the
// library has no second team beside torch's libgomp whichever compiler built it: two teams that
// spin against each other cost more than any kernel gains.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

extern "C" {
void GOMP_parallel(void (*function)(void*), void* data, unsigned num_threads, unsigned flags);
int omp_get_max_threads(void);  // torch.set_num_threads sets it
int omp_get_thread_num(void);
int omp_get_num_threads(void);
}

namespace quire {

// Calls body() once on each of `threads` threads.
template <class Body>
inline void on_team(int64_t threads, Body& body) {
  if (threads <= 1) return body();
  GOMP_parallel([](void* data) { (*static_cast<Body*>(data))(); }, &body, threads, 0);
}

// Calls body(begin, end) on runs of equal length, one a thread, none shorter than `grain`.
template <class Body>
inline void parallel_rows(int64_t count, int64_t grain, Body body) {
  const int64_t most = (count + grain - 1) / std::max<int64_t>(grain, 1);
  const int64_t threads = std::min<int64_t>(omp_get_max_threads(), most);
  if (threads <= 1) return body(int64_t{0}, count);
  auto run = [&] {
    const int64_t team = omp_get_num_threads(), self = omp_get_thread_num();
    body(count * self / team, count * (self + 1) / team);
  };
  on_team(threads, run);
}

// Calls body(item) for items of unequal cost, each taken by the next thread that is free.
template <class Body>
inline void parallel_items(int64_t count, bool is_small, Body body) {
  std::atomic<int64_t> next{0};
  auto run = [&] {
    for (int64_t item; (item = next.fetch_add(1, std::memory_order_relaxed)) < count;) body(item);
  };
  on_team(is_small ? 1 : std::min<int64_t>(omp_get_max_threads(), count), run);
}

// What a thread has still to do of its run of items: itself from the first, others from the last.
class alignas(64) Run {
 public:
  void set(int64_t first, int64_t last) { span_ = uint64_t(first) << 32 | uint64_t(last); }
  int64_t take_first() { return take(true); }
  int64_t take_last() { return take(false); }

 private:
  // An item, or -1 when none is left.
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
inline void parallel_runs(int64_t count, Make make) {
  constexpr int64_t MOST = 64;  // runs; threads beyond these help
  Run runs[MOST];
  const int64_t threads = std::min<int64_t>(omp_get_max_threads(), count);
  const int64_t num_runs = std::min(threads, MOST);
  for (int64_t i = 0; i < num_runs; ++i)
    runs[i].set(count * i / num_runs, count * (i + 1) / num_runs);
  auto run = [&] {
    const int64_t self = omp_get_thread_num() % num_runs;
    auto body = make();
    for (int64_t item; (item = runs[self].take_first()) >= 0;) body(item);
    for (int64_t i = 1; i < num_runs; ++i)
      for (int64_t item; (item = runs[(self + i) % num_runs].take_last()) >= 0;) body(item);
  };
  on_team(threads, run);
}

}  // namespace quire
