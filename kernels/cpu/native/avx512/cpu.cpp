// What this processor lets the kernels use.
#include "registers.h"

#include <sys/syscall.h>
#include <unistd.h>

namespace quire {

static bool request_amx() {
  constexpr long REQUEST = 0x1023, TILE_DATA = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  unsigned a, b, c, d = 0;
  __asm__("cpuid" : "=a"(a), "=b"(b), "=c"(c), "=d"(d) : "a"(7), "c"(0));
  constexpr unsigned BF16 = 1u << 22, TILE = 1u << 24, INT8 = 1u << 25;
  constexpr unsigned ALL = BF16 | TILE | INT8;
  return (d & ALL) == ALL && syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0;
}

bool has_amx() {
  static const bool granted = request_amx();
  return granted;
}

}  // namespace quire

extern "C" int quire_has_amx() { return quire::has_amx(); }

// The least weight of products of eight bits.
extern "C" int quire_least_code() { return -128; }
