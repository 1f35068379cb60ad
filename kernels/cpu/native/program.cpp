// A recorded program at work (kernels/cpu/program.py).
#include "program.h"

#include "team.h"

namespace quire {

struct Call {
  void (*function)(const Word* words);
  const Word* words;
};

}  // namespace quire

extern "C" void quire_run(const quire::Call* calls, int64_t count) {
  const quire::Watch watch;
  for (int64_t i = 0; i < count; ++i) calls[i].function(calls[i].words);
}
