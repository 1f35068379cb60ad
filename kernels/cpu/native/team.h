// The threads that compute an operation: whoever calls it, and helpers.
//
// A helper is never waited for unless it has begun. An operation is cut into pieces that lie open;
// the caller works on them, each helper that is awake and has a core takes some, and when none is
// left the caller waits for those who still compute. So a helper that sleeps, or whose core does
// something else, costs nothing but its help, and a small model may have all cores beside the
// process that speaks HTTP. OpenMP's team, which has to be complete at the end of every operation,
// loses there more than it gains; and it spins for milliseconds when there is nothing to do.
//
// One that has begun and then loses its core keeps the caller waiting; for some time after that the
// caller computes alone, twice as long each time that it happens again soon, so that a busy machine
// costs a small part of the time at worst and one that is busy now and then keeps its helpers.
//
// Helpers look for work without sleeping while operations follow one another, and sleep soon after
// the last. There is one team in a process. While a thread uses it, the operations of other threads
// are computed by these alone, as are operations within operations.
#pragma once

#include <cstdint>

namespace quire {

constexpr int64_t MOST_THREADS = 64;

// Threads of an operation at most: what torch.set_num_threads says, the cores that this process may
// use, and MOST_THREADS.
int64_t num_threads();

// Calls body(data, self) on this thread as 0 and on helpers as other numbers below `threads`, as
// many as come before it has returned here; returns when all that were called have returned.
void on_team(int64_t threads, void (*body)(void* data, int64_t self), void* data);

template <class Body>
inline void on_team(int64_t threads, Body& body) {
  if (threads <= 1) return body(int64_t{0});
  on_team(threads, [](void* data, int64_t self) { (*static_cast<Body*>(data))(self); }, &body);
}

// The operations of one step: helpers are awake from the first to the last, and then sleep at once.
class Watch {
 public:
  Watch();
  ~Watch();
  Watch(const Watch&) = delete;
  Watch& operator=(const Watch&) = delete;
};

}  // namespace quire
