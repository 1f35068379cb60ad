// What a step's positions are made into (kernels/reference/layers.py): cosines and sines, and the
// factors of queries.
#include <cmath>

#include "parallel.h"
#include "program.h"
#include "simd.h"

namespace quire {
namespace {

constexpr int64_t GRAIN = 2048;  // angles below which a second thread costs more than it computes
constexpr int64_t WIDE = 8;

using Doubles = double __attribute__((vector_size(64)));
using Longs = int64_t __attribute__((vector_size(64)));
using Half = float __attribute__((vector_size(32)));  // eight of them

// Angles are in float32, as the reference has them; the rest is in float64, where two constants
// reduce any angle that a position gives (Cody & Waite 1980), and Taylor's series ends below the
// last place of the float32 result.
inline void turn(Half angles, float scale, Half& cos, Half& sin) {
  constexpr double HIGH = 0x1.921fb544p+0, LOW = 0x1.0b4611a626331p-34;  // their sum is pi / 2
  constexpr double SHIFT = 0x1.8p52;  // leaves the nearest integer in the last bits of a sum
  const Doubles x = __builtin_convertvector(angles, Doubles);
  const Doubles shifted = x * 0x1.45f306dc9c883p-1 + SHIFT;  // 2 / pi
  const Doubles n = shifted - SHIFT;
  const Doubles r = (x - n * HIGH) - n * LOW, square = r * r;
  Doubles s = square * (1.0 / 6227020800) - 1.0 / 39916800;
  s = s * square + 1.0 / 362880;
  s = s * square - 1.0 / 5040;
  s = s * square + 1.0 / 120;
  s = s * square - 1.0 / 6;
  s = s * square * r + r;
  Doubles c = square * (-1.0 / 87178291200) + 1.0 / 479001600;
  c = c * square - 1.0 / 3628800;
  c = c * square + 1.0 / 40320;
  c = c * square - 1.0 / 720;
  c = c * square + 1.0 / 24;
  c = c * square - 0.5;
  c = c * square + 1.0;
  const Longs quadrant = (Longs)shifted & 3;
  const Longs swapped = (quadrant & 1) != 0;
  const Doubles turned_sin = swapped ? c : s, turned_cos = swapped ? s : c;
  const Doubles sines = quadrant >= 2 ? -turned_sin : turned_sin;
  const Doubles cosines = (quadrant == 1) | (quadrant == 2) ? -turned_cos : turned_cos;
  sin = __builtin_convertvector(sines, Half) * scale;
  cos = __builtin_convertvector(cosines, Half) * scale;
}

}  // namespace
}  // namespace quire

// cos, sin[tokens][half] of positions[tokens] times frequencies[half], times `scale`.
extern "C" void quire_rope_tables(const int64_t* positions, const float* frequencies, float scale,
                                  int64_t tokens, int64_t half, float* cos, float* sin) {
  using namespace quire;
  const int64_t grain = std::max<int64_t>(1, GRAIN / std::max<int64_t>(half, 1));
  parallel_rows(tokens, grain, [=](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token)
      for (int64_t d = 0; d < half; d += WIDE) {
        const int64_t count = std::min(WIDE, half - d), at = token * half + d;
        Half angles = {}, cosines, sines;
        std::memcpy(&angles, frequencies + d, count * sizeof(float));
        turn(angles * static_cast<float>(positions[token]), scale, cosines, sines);
        std::memcpy(cos + at, &cosines, count * sizeof(float));
        std::memcpy(sin + at, &sines, count * sizeof(float));
      }
  });
}
QUIRE_RECORDED(quire_rope_tables)

// factors[tokens] of positions[tokens], none below -first.
extern "C" void quire_temperatures(const int64_t* positions, int64_t first, int64_t every,
                                   float scale, int64_t tokens, float* factors) {
  for (int64_t i = 0; i < tokens; ++i)
    factors[i] = 1.0f + scale * std::log1p(static_cast<float>((positions[i] + first) / every));
}
QUIRE_RECORDED(quire_temperatures)
