// Linear layers with 4-bit weights in groups along the inputs:
//
//     weight[n][k] = scale[n][group of k] * level[code]    levels: 16 values, common to all weights
//
// Activations stay in bfloat16. A word of 32 bits holds the codes of eight inputs of one output:
// input 2 i + h lies at bits 16 h + 4 i. A shift by 4 i brings a pair to the low ends of the two
// halves, where one permutation turns both into the bfloat16 pair that vdpbf16ps multiplies.
#include "dense.h"
#include "program.h"

using namespace quire;

namespace {

constexpr int64_t WORD = 8;         // inputs of a word
constexpr int64_t IN_REGISTER = 4;  // up to so many rows, weights never leave the registers

struct Weight {
  const uint32_t* codes;  // [panels][inputs / 8][32]
  const uint16_t* scales;  // [panels][inputs / group][32] float16
  const bf16* levels;     // [32]: the 16 values twice, as five bits choose
  int64_t inputs, group;
};

inline uint16_t to_half(float value) {
  const __m256i halves = _mm512_cvtps_ph(_mm512_set1_ps(value), _MM_FROUND_TO_NEAREST_INT);
  return static_cast<uint16_t>(_mm256_extract_epi16(halves, 0));
}

inline float from_half(uint16_t half) {
  return _mm512_cvtss_f32(_mm512_cvtph_ps(_mm256_set1_epi16(static_cast<short>(half))));
}

inline __m512 load_scales(const uint16_t* scales) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(scales)));
}

// y[rows][outputs] at a panel, the codes unpacked in registers; 1 to IN_REGISTER rows.
template <int ROWS, class T>
void few_rows(const bf16* x, const Weight& weight, int64_t panel, const float* bias, T* y,
              int64_t outputs) {
  const __m512i levels = _mm512_loadu_si512(weight.levels);
  const uint32_t* codes = weight.codes + panel * PANEL * weight.inputs / WORD;
  const uint16_t* scales = weight.scales + panel * PANEL * weight.inputs / weight.group;
  __m512 sums[ROWS][2];
  for (auto& row : sums) row[0] = row[1] = _mm512_setzero_ps();
  for (int64_t begin = 0; begin < weight.inputs; begin += weight.group, scales += PANEL) {
    __m512 parts[ROWS][2];
    for (auto& row : parts) row[0] = row[1] = _mm512_setzero_ps();
    for (int64_t k = begin; k < begin + weight.group; k += WORD, codes += PANEL) {
      __m512i words[2] = {_mm512_loadu_si512(codes), _mm512_loadu_si512(codes + 16)};
      for (int64_t pair = 0; pair < WORD; pair += 2) {
        for (int half = 0; half < 2; ++half) {
          const __m512i values = _mm512_permutexvar_epi16(words[half], levels);
          words[half] = _mm512_srli_epi16(words[half], 4);
          for (int r = 0; r < ROWS; ++r) {
            int32_t two;
            __builtin_memcpy(&two, x + r * weight.inputs + k + pair, sizeof two);
            parts[r][half] = _mm512_dpbf16_ps(
                parts[r][half], reinterpret_cast<__m512bh>(_mm512_set1_epi32(two)),
                reinterpret_cast<__m512bh>(values));
          }
        }
      }
    }
    for (int half = 0; half < 2; ++half) {
      const __m512 scale = load_scales(scales + 16 * half);
      for (int r = 0; r < ROWS; ++r)
        sums[r][half] = _mm512_fmadd_ps(parts[r][half], scale, sums[r][half]);
    }
  }
  for (int r = 0; r < ROWS; ++r)
    for (int half = 0; half < 2; ++half)
      store(sums[r][half], bias, y + r * outputs, outputs, panel * PANEL + 16 * half);
}

// A pair of bfloat16 in each lane, times a float32 scale, rounded to bfloat16 again.
inline __m512i scale_pairs(__m512i pairs, __m512 scale) {
  const __m512i high = _mm512_set1_epi32(static_cast<int>(0xffff0000));
  const __m512 even = _mm512_mul_ps(_mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16)), scale);
  const __m512 odd = _mm512_mul_ps(_mm512_castsi512_ps(_mm512_and_si512(pairs, high)), scale);
  const __m512i half = _mm512_set1_epi32(0x8000);  // of the last place that is kept
  const __m512i low = _mm512_srli_epi32(_mm512_add_epi32(_mm512_castps_si512(even), half), 16);
  const __m512i up = _mm512_add_epi32(_mm512_castps_si512(odd), half);
  return _mm512_mask_blend_epi16(0xaaaaaaaa, low, up);
}

// A panel of dense weights, [inputs / 2][32][2], from its codes.
void unpack(const Weight& weight, int64_t panel, bf16* dense) {
  const __m512i levels = _mm512_loadu_si512(weight.levels);
  const uint32_t* codes = weight.codes + panel * PANEL * weight.inputs / WORD;
  const uint16_t* scales = weight.scales + panel * PANEL * weight.inputs / weight.group;
  for (int64_t begin = 0; begin < weight.inputs; begin += weight.group, scales += PANEL) {
    const __m512 scale[2] = {load_scales(scales), load_scales(scales + 16)};
    for (int64_t k = begin; k < begin + weight.group; k += WORD, codes += PANEL) {
      __m512i words[2] = {_mm512_loadu_si512(codes), _mm512_loadu_si512(codes + 16)};
      for (int64_t pair = 0; pair < WORD; pair += 2)
        for (int half = 0; half < 2; ++half, dense += PANEL) {
          const __m512i values = _mm512_permutexvar_epi16(words[half], levels);
          words[half] = _mm512_srli_epi16(words[half], 4);
          _mm512_storeu_si512(dense, scale_pairs(values, scale[half]));
        }
    }
  }
}

template <class T>
void multiply(const bf16* x, int64_t rows, const Weight& weight, const float* bias, T* y,
              int64_t outputs, bool amx) {
  if (rows <= IN_REGISTER) {
    for_panels(rows, outputs, IN_REGISTER, [&] {
      return [&](int64_t, int64_t, int64_t panel) {
        with_rows<IN_REGISTER>(
            rows, [&]<int ROWS>() { few_rows<ROWS>(x, weight, panel, bias, y, outputs); });
      };
    });
    return;
  }
  const DenseRows all(x, rows, weight.inputs, amx);
  for_panels(rows, outputs, all.max_part(), [&] {
    return [&, products = DenseProducts(all), dense = Scratch<bf16>(PANEL * weight.inputs)](
               int64_t begin, int64_t end, int64_t panel) mutable {
      unpack(weight, panel, dense.get());
      products.multiply(begin, end, dense.get(), bias, y, outputs, panel);
    };
  });
}

}  // namespace

extern "C" {

// y = x * weight^T + bias, as quire_dense; inputs is a multiple of the group, and that one of 32.
void quire_int4(const bf16* x, int64_t rows, int64_t inputs, const uint32_t* codes,
                const uint16_t* scales, const bf16* levels, int64_t group, const float* bias,
                void* y, int64_t outputs, bool wide, bool amx) {
  with_results(y, wide, [&](auto* y) {
    multiply(x, rows, Weight{codes, scales, levels, inputs, group}, bias, y, outputs, amx);
  });
}

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
    uint32_t* out = packed + panel * PANEL * inputs / WORD;
    for (int64_t k = 0; k < inputs; k += WORD)
      for (int64_t n = 0; n < PANEL; ++n) {
        uint32_t word = 0;
        for (int64_t i = 0; i < WORD; ++i)
          word |= uint32_t{codes[n * inputs + k + i]} << (16 * (i % 2) + 4 * (i / 2));
        *out++ = word;
      }
  });
}

}  // extern "C"

QUIRE_RECORDED(quire_int4)
