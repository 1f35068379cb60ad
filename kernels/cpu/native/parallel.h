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

}  // namespace quire
