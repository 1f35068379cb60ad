// Who helps, and when they sleep; see team.h.
#include "team.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <climits>
#include <csignal>
#include <thread>

extern "C" int omp_get_max_threads(void);

namespace quire {
namespace {

using Clock = std::chrono::steady_clock;

constexpr auto PATIENCE = std::chrono::microseconds(60);  // of a look at others
constexpr int LOOKS = 32;                                 // between two looks at the clock
// Times as long as a helper's core was missed it is not asked for again; the most of it where it is
// missed again and again.
constexpr int CAUTION = 1, MOST_CAUTION = 16;
constexpr int AGAIN = 8;  // times as long as it was missed it has to be there, not to be one of those

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("isb" ::: "memory");
#endif
}

thread_local bool is_in_team = false;  // this thread is computing a piece of an operation

// What one thread writes another reads only by way of `state_`, on processors that reorder stores
// and loads too (aarch64):
// - The caller writes an operation's body and all that it reads, then the state that opens it. A
//   helper joins by an exchange that acquires that, however many have joined before: all changes of
//   an open state are read-modify-writes, and so continue what its store released.
// - A helper's release as it leaves covers its results; the caller acquires the count once it is 0.
// - `is_used_` hands what callers write from one to the next. Everything else relaxed is a hint.
// Who sleeps and who wakes has a comment where it happens. tests/kernels/test_cpu_team.py holds all
// of this under ThreadSanitizer, which knows what C++ promises and not what this processor does.
class Team {
 public:
  // False: somebody else is using it, or its cores.
  bool run(int64_t threads, void (*body)(void*, int64_t), void* data) {
    if (!take()) return false;
    grow(threads - 1);
    body_ = body, data_ = data, threads_ = threads;
    const auto begun = Clock::now();
    const uint32_t opened = (state_.load(std::memory_order_relaxed) & ~LOW) + NEXT + OPEN;
    // In one order with a helper's count among the sleepers: one of both sees the other.
    state_.store(opened, std::memory_order_seq_cst);
    if (sleepers_.load(std::memory_order_seq_cst)) wake();
    is_in_team = true;
    body(data, 0);
    is_in_team = false;
    if (state_.fetch_and(~OPEN, std::memory_order_acquire) & COUNT) await_helpers(begun);
    give_back();
    return true;
  }

  void begin_watch() {
    if (!has_helpers_.load(std::memory_order_relaxed) || !take()) return;
    is_watched_.store(true, std::memory_order_relaxed);
    // No operation, but a state that nobody has seen: whoever sleeps on the last one wakes up.
    state_.store((state_.load(std::memory_order_relaxed) & ~LOW) + NEXT, std::memory_order_seq_cst);
    if (sleepers_.load(std::memory_order_seq_cst)) wake();
    give_back();
  }

  void end_watch() { is_watched_.store(false, std::memory_order_relaxed); }

 private:
  // The state is an operation's number, whether its end is slept for, whether it is open, and how
  // many helpers compute it. It wraps around: a helper that has slept for so long joins the
  // operation that is open now.
  static constexpr uint32_t COUNT = 0xff, OPEN = 0x100, AWAITED = 0x200;
  static constexpr uint32_t LOW = COUNT | OPEN | AWAITED, NEXT = 0x400;

  bool take() {
    if (is_used_.exchange(true, std::memory_order_acquire)) return false;
    if (is_wary_ && Clock::now() < wary_until_) {
      give_back();
      return false;
    }
    is_wary_ = false;
    return true;
  }
  void give_back() { is_used_.store(false, std::memory_order_release); }

  // Until all helpers have done what they had begun, of an operation that began so.
  void await_helpers(Clock::time_point operation_begun) {
    const auto begun = Clock::now();
    // Nobody computes for longer than this thread has: it would have taken some of that over.
    const auto longest = std::max<Clock::duration>(PATIENCE, begun - operation_begun);
    while (state_.load(std::memory_order_acquire) & COUNT) {
      for (int i = 0; i < LOOKS && state_.load(std::memory_order_acquire) & COUNT; ++i) pause();
      if (Clock::now() - begun > longest) return await_core(begun);
    }
  }

  // A helper has lost its core in the middle of a piece. Asleep, this thread leaves it its own; and
  // as others want that core, it is left to them for a while: for no longer than it was missed, if
  // that happens seldom, as a helper earns more than that in between.
  void await_core(Clock::time_point begun) {
    uint32_t state = state_.fetch_or(AWAITED, std::memory_order_acquire) | AWAITED;
    while (state & COUNT) {
      syscall(SYS_futex, &state_, FUTEX_WAIT_PRIVATE, state, nullptr, nullptr, 0);
      state = state_.load(std::memory_order_acquire);
    }
    const auto now = Clock::now();
    const auto missed = now - begun;
    const bool is_again = begun - wary_until_ < AGAIN * missed;
    caution_ = is_again ? std::min(2 * caution_, MOST_CAUTION) : CAUTION;
    is_wary_ = true, wary_until_ = now + caution_ * missed;
    is_watched_.store(false, std::memory_order_relaxed);
  }

  void grow(int64_t helpers) {
    for (; num_helpers_ < helpers; ++num_helpers_) {
      sigset_t all, before;  // signals are for the threads of the program
      sigfillset(&all);
      pthread_sigmask(SIG_SETMASK, &all, &before);
      std::thread([this, self = num_helpers_ + 1] { help(self); }).detach();
      pthread_sigmask(SIG_SETMASK, &before, nullptr);
      has_helpers_.store(true, std::memory_order_relaxed);
    }
  }

  [[noreturn]] void help(int64_t self) {
    is_in_team = true;
    uint32_t seen = 0;
    for (;;) {
      uint32_t state = next_state(seen);
      seen = state & ~LOW;
      while (state & OPEN && (state & ~LOW) == seen)
        if (state_.compare_exchange_weak(state, state + 1, std::memory_order_acquire)) {
          if (self < threads_) body_(data_, self);
          const uint32_t before = state_.fetch_sub(1, std::memory_order_release);
          if ((before & (COUNT | AWAITED)) == (AWAITED | 1)) wake();
          break;
        }
    }
  }

  // The state once it is of another operation than the one seen last.
  uint32_t next_state(uint32_t seen) {
    uint32_t state;
    const auto is_new = [&] {
      state = state_.load(std::memory_order_acquire);
      return (state & ~LOW) != seen;
    };
    for (;;) {
      const auto end = Clock::now() + PATIENCE;
      do {
        for (int i = 0; i < LOOKS; ++i) {
          if (is_new()) return state;
          pause();
        }
      } while (is_watched_.load(std::memory_order_relaxed) ||
               Clock::now() < end);
      sleepers_.fetch_add(1, std::memory_order_seq_cst);
      state = state_.load(std::memory_order_seq_cst);
      if ((state & ~LOW) == seen)
        syscall(SYS_futex, &state_, FUTEX_WAIT_PRIVATE, state, nullptr, nullptr, 0);
      sleepers_.fetch_sub(1, std::memory_order_relaxed);
    }
  }

  void wake() { syscall(SYS_futex, &state_, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0); }

  // What helpers read and write, what only they read, and what the caller alone does.
  alignas(64) std::atomic<uint32_t> state_{0};
  alignas(64) void (*body_)(void*, int64_t) = nullptr;
  void* data_ = nullptr;
  int64_t threads_ = 0;
  std::atomic<bool> is_watched_{false};
  alignas(64) std::atomic<int32_t> sleepers_{0};
  alignas(64) std::atomic<bool> is_used_{false};
  std::atomic<bool> has_helpers_{false};
  int64_t num_helpers_ = 0;
  bool is_wary_ = false;
  int caution_ = CAUTION;
  Clock::time_point wary_until_;
};

// Never destroyed: helpers look at it to the end of the process.
Team& team() {
  static Team& one = *new Team;
  return one;
}

}  // namespace

int64_t num_threads() {
  static const int64_t most = std::min<int64_t>(std::thread::hardware_concurrency(), MOST_THREADS);
  return std::min<int64_t>(omp_get_max_threads(), most);
}

void on_team(int64_t threads, void (*body)(void* data, int64_t self), void* data) {
  if (threads <= 1 || is_in_team || !team().run(threads, body, data)) body(data, 0);
}

Watch::Watch() {
  if (num_threads() > 1) team().begin_watch();
}
Watch::~Watch() { team().end_watch(); }

}  // namespace quire
