// Linear layers whose weights are rounded to 4 bits while they load; see int4.h.
#include "int4.h"

#include "grouped.h"
#include "program.h"

using namespace quire;

namespace {

inline uint16_t to_half(float value) {
  const __m256i halves = _mm512_cvtps_ph(_mm512_set1_ps(value), _MM_FROUND_TO_NEAREST_INT);
  return static_cast<uint16_t>(_mm256_extract_epi16(halves, 0));
}

inline float from_half(uint16_t half) {
  return _mm512_cvtss_f32(_mm512_cvtph_ps(_mm256_set1_epi16(static_cast<short>(half))));
}

void few_rows(const bf16* x, int64_t rows, const Int4Weight& weight, const Wanted& wanted) {
  const Int4Rows rounded(x, rows, weight.inputs);
  for_results(rows, INT4_ROWS, wanted, [&] {
    return [&](int64_t, int64_t, int64_t panel, const auto& to) {
      with_rows<INT4_ROWS>(rows, [&]<int ROWS>() {
        int4_tile<ROWS>(rounded.codes(), rounded.told(), weight, panel, to);
      });
    };
  });
}

void many_rows(const bf16* x, int64_t rows, const Int4Weight& weight, const Wanted& wanted,
               bool amx) {
  const GivenCodes given(x, rows, weight.inputs, amx);
  for_results(rows, given.rows().max_part(), wanted, [&] {
    return [&, codes = Scratch<int8_t>(PANEL * weight.inputs), products = Int8Products()](
               int64_t begin, int64_t end, int64_t panel, const auto& to) mutable {
      widen_panel(weight, panel, codes.get());
      const int64_t first = panel * PANEL;
      const Int8Panel widened{codes.get(), weight.whole_scales + first, weight.totals + first};
      products.multiply(given.rows(), begin, end, widened, weight.bias, to, panel);
    };
  });
}

// What a weight's codes of eight bits are scaled by, and their sums.
void measure_panel(Int4Weight weight, int64_t panel, float* whole_scales, int32_t* totals) {
  const int64_t groups = weight.groups(), first = panel * PANEL;
  const uint16_t* scales = weight.scales + first * groups;
  for (int64_t half = 0; half < PANEL; half += 16) {
    __m512 most = _mm512_setzero_ps();
    for (int64_t g = 0; g < groups; ++g)
      most = _mm512_max_ps(most, _mm512_abs_ps(load_scales(scales + g * PANEL + half)));
    // Level -8 of the largest scale becomes 127 or -127.
    _mm512_storeu_ps(whole_scales + first + half, _mm512_mul_ps(most, _mm512_set1_ps(8.0f / 127)));
  }
  const Scratch<int8_t> codes(PANEL * weight.inputs);
  widen_panel(weight, panel, codes.get());
  std::fill_n(totals + first, PANEL, 0);
  for (int64_t i = 0; i < PANEL * weight.inputs; ++i)
    totals[first + i / 4 % PANEL] += codes.get()[i];
}

}  // namespace

extern "C" {

// y = x * weight^T + bias, or that gated, as quire_dense; inputs is a multiple of 64.
void quire_int4(const bf16* x, int64_t rows, int64_t inputs, const uint32_t* words,
                const uint16_t* scales, const float* whole_scales, const int32_t* totals,
                const float* bias, void* y, int64_t outputs, bool wide, const Gating* gating,
                bool amx) {
  const Int4Weight weight{words, scales, whole_scales, totals, bias, inputs};
  const Wanted wanted{y, outputs, wide, gating};
  if (rows <= INT4_ROWS)
    few_rows(x, rows, weight, wanted);
  else
    many_rows(x, rows, weight, wanted, amx);
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
    pack_nibbles(codes, inputs, packed + panel * PANEL * inputs / Nibbles::STEP);
    const Int4Weight weight{packed, scales, whole_scales, totals, nullptr, inputs};
    measure_panel(weight, panel, whole_scales, totals);
  });
}

}  // extern "C"

QUIRE_RECORDED(quire_int4)
