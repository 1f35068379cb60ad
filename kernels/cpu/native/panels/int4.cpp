// Linear layers whose weights are rounded to 4 bits while they load; see four_bits.h.
#include "groups.h"
#include "int4.h"
#include "program.h"

using namespace quire;

extern "C" {

// y = x * weight^T + bias, or that gated, as quire_dense; inputs is a multiple of 64.
void quire_int4(const bf16* x, int64_t rows, int64_t inputs, const uint32_t* words,
                const uint16_t* scales, const float* whole_scales, const int32_t* totals,
                const float* bias, void* y, int64_t outputs, bool wide, const Gating* gating,
                bool amx) {
  const Int4Weight weight{words, scales, whole_scales, totals, bias, inputs};
  multiply_int4(x, rows, weight, {y, outputs, wide, gating}, amx);
}

// Rounds a weight [outputs][columns] to the levels -8 to 7 and packs it; `inputs` is `columns`
// rounded up to a multiple of the group. The scale of a group maps its value of largest magnitude
// to -8 and has the sign for that. See Int4Weight for what else is written.
void quire_int4_pack(const bf16* weight, int64_t outputs, int64_t columns, int64_t inputs,
                     uint32_t* packed, uint16_t* scales, float* whole_scales, int32_t* totals) {
  constexpr int64_t group = INT4_GROUP;
  const auto round = [=](int64_t n, uint8_t* codes) {
    uint16_t* scale = scales + n / PANEL * (inputs / group) * PANEL + n % PANEL;
    for (int64_t begin = 0; begin < inputs; begin += group, codes += group, scale += PANEL) {
      const int64_t count = std::clamp<int64_t>(columns - begin, 0, group);
      const bf16* values = weight + n * columns + begin;
      float least = 0, most = 0;
      for (int64_t k = 0; k < count; ++k) {
        least = std::min(least, to_float(values[k]));
        most = std::max(most, to_float(values[k]));
      }
      *scale = to_half((-least >= most ? least : most) / -8.0f);
      const float step = from_half(*scale) == 0 ? 1.0f : from_half(*scale);
      for (int64_t k = 0; k < group; ++k) {
        const float level = (k < count ? to_float(values[k]) : 0.0f) / step + 8.0f;
        codes[k] = static_cast<uint8_t>(std::clamp(__builtin_nearbyintf(level), 0.0f, 15.0f));
      }
    }
  };
  for_panel_rows<uint8_t>(outputs, inputs, round, [=](int64_t panel, const uint8_t* codes) {
    pack_nibbles(codes, inputs, packed + panel * PANEL * inputs / WORD_INPUTS);
    const Int4Weight weight{packed, scales, whole_scales, totals, nullptr, inputs};
    measure_panel(weight, panel, whole_scales, totals);
  });
}

}  // extern "C"

QUIRE_RECORDED(quire_int4)
