// Linear layers whose weights are rounded to 4 bits while they load; see grouped.h.
#include "grouped.h"

using namespace quire;

namespace {

inline uint16_t to_half(float value) {
  const __m256i halves = _mm512_cvtps_ph(_mm512_set1_ps(value), _MM_FROUND_TO_NEAREST_INT);
  return static_cast<uint16_t>(_mm256_extract_epi16(halves, 0));
}

inline float from_half(uint16_t half) {
  return _mm512_cvtss_f32(_mm512_cvtph_ps(_mm256_set1_epi16(static_cast<short>(half))));
}

}  // namespace

extern "C" {

// Rounds a weight [outputs][columns] to the levels -8 to 7 and packs it; `inputs` is `columns`
// rounded up to a multiple of the group. The scale of a group maps its value of largest magnitude
// to -8 and has the sign for that.
void quire_int4_pack(const bf16* weight, int64_t outputs, int64_t columns, int64_t inputs,
                     int64_t group, uint32_t* packed, uint16_t* scales) {
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
    pack_nibbles(codes, inputs, packed + panel * PANEL * inputs / Nibbles::STEP);
  });
}

}  // extern "C"
