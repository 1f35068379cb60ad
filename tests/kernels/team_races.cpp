// Operations one after the other by callers that contend for the team, each of which reads what all
// threads wrote in the one before; to be compiled with ThreadSanitizer.
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#include "parallel.h"

extern "C" int omp_get_max_threads(void) { return 4; }

namespace {

constexpr int64_t COUNT = 257;

bool run(int64_t seed) {
  std::vector<int64_t> values(COUNT), reversed(COUNT);
  const quire::Watch watch;
  for (int64_t round = 0; round < 200; ++round) {
    quire::parallel_rows(COUNT, 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) values[i] = seed + round * i;
    });
    quire::parallel_rows(COUNT, 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) reversed[i] = values[COUNT - 1 - i];
    });
    for (int64_t i = 0; i < COUNT; ++i)
      if (reversed[i] != seed + round * (COUNT - 1 - i)) return false;
  }
  return true;
}

}  // namespace

int main() {
  std::vector<std::thread> callers;
  for (int64_t seed = 0; seed < 3; ++seed)
    callers.emplace_back([seed] {
      for (int turn = 0; turn < 10; ++turn) {
        if (!run(seed)) std::_Exit(1);
        std::this_thread::sleep_for(std::chrono::milliseconds(1));  // helpers fall asleep
      }
    });
  for (auto& caller : callers) caller.join();
  std::puts("right");
  std::fflush(stdout);
  std::_Exit(0);  // helpers do not end
}
