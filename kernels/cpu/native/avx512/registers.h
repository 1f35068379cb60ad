// Sixteen floats in a register, and how results leave it.
#pragma once

#include <immintrin.h>

#include "panels/tiles.h"
#include "simd.h"

namespace quire {

constexpr int32_t FIRST_CODE = 0;      // of eight bits of an activation: vpdpbusd's are unsigned
constexpr int64_t LAID_CODE_BYTES = 1;  // of a code as it is multiplied

bool has_amx();  // the processor has AMX, and the kernel lets this process use it

// Of rows that stay in a core's second-level cache, of 2 MiB where there is AMX: then as blocks,
// beside two panels.
constexpr int64_t cached_bytes(bool amx) { return amx ? 5 << 18 : 1 << 20; }

// The lanes of a panel's half that are outputs: the last panel may be narrower.
inline __mmask16 lanes(int64_t outputs, int64_t first) {
  const int64_t left = std::clamp<int64_t>(outputs - first, 0, 16);
  return static_cast<__mmask16>((1u << left) - 1);
}

// Writes those of 16 sums that are outputs, the bias (or null) added, as float32 or bfloat16.
inline void store(__m512 sums, const float* bias, float* y, int64_t outputs, int64_t first) {
  const __mmask16 mask = lanes(outputs, first);
  if (bias) sums = _mm512_add_ps(sums, _mm512_maskz_loadu_ps(mask, bias + first));
  _mm512_mask_storeu_ps(y + first, mask, sums);
}

inline void store(__m512 sums, const float* bias, bf16* y, int64_t outputs, int64_t first) {
  const __mmask16 mask = lanes(outputs, first);
  if (bias) sums = _mm512_add_ps(sums, _mm512_maskz_loadu_ps(mask, bias + first));
  const __m256i rounded = reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(sums));
  _mm256_mask_storeu_epi16(y + first, mask, rounded);
}

inline uint16_t to_half(float value) {
  const __m256i halves = _mm512_cvtps_ph(_mm512_set1_ps(value), _MM_FROUND_TO_NEAREST_INT);
  return static_cast<uint16_t>(_mm256_extract_epi16(halves, 0));
}

inline float from_half(uint16_t half) {
  return _mm512_cvtss_f32(_mm512_cvtph_ps(_mm256_set1_epi16(static_cast<short>(half))));
}

// What sums of a group of int4 begin with that would be too large by `excess`.
inline int32_t group_start(int32_t excess) { return -excess; }

}  // namespace quire
