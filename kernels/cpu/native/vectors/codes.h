// Codes as levels in registers; see panels/groups.h. A panel is always unpacked.
#pragma once

#include "dense.h"
#include "panels/weights.h"

namespace quire {

constexpr int64_t IN_REGISTER = 0;  // rows that are multiplied by codes as they lie

// The levels of two neighbouring inputs, of WIDTH outputs.
struct LevelPair {
  Vector even, odd;
};

// Four bits: 16 levels, common to all weights. A word holds eight inputs of one output: input
// 2 i + h lies at bits 16 h + 4 i.
class Nibbles {
 public:
  static constexpr int64_t STEP = 8;  // inputs of a word

  explicit Nibbles(const bf16* levels) : table_(Widened(levels).values) {}

  // A pair's levels; pairs are asked for in order.
  LevelPair take(Bits& words) const {
    const LevelPair pair{table_[words & 15], table_[words >> 16 & 15]};
    words >>= 4;
    return pair;
  }

 private:
  struct Widened {
    explicit Widened(const bf16* levels) {
      for (int i = 0; i < 16; ++i) values[i] = to_float(levels[i]);
    }
    float values[16];
  };

  const Table table_;
};

// Signed integers.
struct Bytes {
  static constexpr int64_t STEP = 4;

  explicit Bytes(const bf16*) {}

  LevelPair take(Bits& words) const {
    const auto widened = [](Bits shifted) {
      return __builtin_convertvector((Whole)shifted >> 24, Vector);
    };
    const LevelPair pair{widened(words << 24), widened(words << 16)};
    words >>= 16;
    return pair;
  }
};

// Floats of a sign, four bits of exponent (less 7) and three of mantissa; none is infinite.
struct Float8 {
  static constexpr int64_t STEP = 4;

  explicit Float8(const bf16*) {}

  LevelPair take(Bits& words) const {
    const LevelPair pair{level(words), level(words >> 8)};
    words >>= 16;
    return pair;
  }

 private:
  static Vector level(Bits codes) {
    const Bits size = codes & 0x7F;
    // An exponent of zero: 0 to 7 times 2 ** -9.
    const Vector small = __builtin_convertvector((Whole)size, Vector) * 0x1p-9f;
    const Bits normal = (size << 20) + (120u << 23);
    return (Vector)((size < 8 ? (Bits)small : normal) | (codes & 0x80) << 24);
  }
};

// A pair less a zero, times a scale, rounded to bfloat16.
inline Bits scale_pair(const LevelPair& pair, Vector zero, Vector scale) {
  const Bits even = (Bits)((pair.even - zero) * scale) + 0x8000;  // half of the last place
  const Bits odd = (Bits)((pair.odd - zero) * scale) + 0x8000;
  return even >> 16 | (odd & 0xFFFF0000);
}

// A panel of dense weights, [inputs / 2][32][2], from its codes.
template <class Code>
void unpack(const GroupedWeight& weight, int64_t panel, bf16* dense) {
  const Code code(weight.levels);
  const int64_t groups = weight.inputs / weight.group;
  const uint32_t* words = weight.codes + panel * PANEL * weight.inputs / Code::STEP;
  for (int64_t g = 0; g < groups; ++g) {
    const int64_t place = (panel * groups + g) * PANEL, num_words = weight.group / Code::STEP;
    for (int64_t n = 0; n < PANEL; n += WIDTH) {
      const Vector scale = load_halves(weight.scales + place + n) * weight.factor;
      const Vector zero = weight.zeros ? load_halves(weight.zeros + place + n) : Vector{};
      bf16* to = dense + 2 * n;
      for (int64_t i = 0; i < num_words; ++i) {
        Bits some = load_as<Bits>(words + i * PANEL + n);
#pragma GCC unroll 4
        for (int64_t pair = 0; pair < Code::STEP; pair += 2, to += 2 * PANEL) {
          const Bits rounded = scale_pair(code.take(some), zero, scale);
          std::memcpy(to, &rounded, sizeof rounded);
        }
      }
    }
    words += num_words * PANEL;
    dense += weight.group * PANEL;
  }
}

}  // namespace quire
