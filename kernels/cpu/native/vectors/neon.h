// NEON, and where the target has them the dot products of ARMv8.2. See registers.h.
#pragma once

#include <arm_neon.h>

#include <cstdint>
#include <cstring>

namespace quire {

constexpr int64_t REGISTER_BYTES = 16;

// Of one register each.
using Vector = float __attribute__((vector_size(REGISTER_BYTES)));
using Whole = int32_t __attribute__((vector_size(REGISTER_BYTES)));
using Bits = uint32_t __attribute__((vector_size(REGISTER_BYTES)));

constexpr int64_t WIDTH = REGISTER_BYTES / 4;  // lanes of 32 bits

inline uint8x8_t load_four_bytes(const void* p) {
  uint32_t four;
  std::memcpy(&four, p, sizeof four);
  return vreinterpret_u8_u32(vdup_n_u32(four));
}

// WIDTH values of 16 or 8 bits.
inline Bits widen_piece(const uint16_t* p) { return (Bits)vmovl_u16(vld1_u16(p)); }
inline Bits widen_piece(const uint8_t* p) {
  return (Bits)vmovl_u16(vget_low_u16(vmovl_u8(load_four_bytes(p))));
}
inline Whole widen_piece(const int8_t* p) {
  return (Whole)vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_u8(load_four_bytes(p)))));
}

// The lowest 16 or 8 bits of each lane.
inline void narrow_piece(Bits x, uint16_t* p) { vst1_u16(p, vmovn_u32((uint32x4_t)x)); }
inline void narrow_piece(Bits x, uint8_t* p) {
  const uint16x4_t halves = vmovn_u32((uint32x4_t)x);
  const uint32x2_t four = vreinterpret_u32_u8(vmovn_u16(vcombine_u16(halves, halves)));
  std::memcpy(p, &four, sizeof(uint32_t));
}

// Of float8 (sign, 4 bits of exponent, 3 of mantissa), read as if they were float16.
inline Vector load_float8_bits(const uint8_t* p) {
  const uint16x4_t wide = vget_low_u16(vmovl_u8(load_four_bytes(p)));
  const uint16x4_t size = vand_u16(vshl_n_u16(wide, 7), vdup_n_u16(0x3F80));
  const uint16x4_t sign = vand_u16(vshl_n_u16(wide, 8), vdup_n_u16(0x8000));
  return (Vector)vcvt_f32_f16(vreinterpret_f16_u16(vorr_u16(size, sign)));
}

inline Whole nearest_piece(Vector x) { return (Whole)vcvtnq_s32_f32((float32x4_t)x); }

inline Vector larger_piece(Vector a, Vector b) { return a > b ? a : b; }

inline bool all(Whole mask) { return vminvq_u32((uint32x4_t)mask) != 0; }

inline int8x16_t broadcast_four(const void* codes) {
  int32_t four;
  std::memcpy(&four, codes, sizeof four);
  return vreinterpretq_s8_s32(vdupq_n_s32(four));
}

constexpr int32_t FIRST_CODE = -128;    // of eight bits of an activation: codes are signed
constexpr int64_t LAID_CODE_BYTES = 1;  // of one as it is multiplied

#ifdef __ARM_FEATURE_DOTPROD

constexpr int LEAST_CODE = -128;  // of a weight

// Four neighbouring codes of an activation, by which those of all lanes' weights are multiplied.
class Four {
 public:
  explicit Four(const uint8_t* codes) : codes_(broadcast_four(codes)) {}

  // sums + the products with weights[lane][4], added up.
  Whole add(Whole sums, Whole weights) const {
    return (Whole)vdotq_s32((int32x4_t)sums, (int8x16_t)weights, codes_);
  }

 private:
  const int8x16_t codes_;
};

// Sums over a group of 32 inputs: levels 0 to 15 of the weights by codes -127 to 127.
class GroupSum {
 public:
  void begin(int32_t start) { sums_ = vdupq_n_s32(start); }
  void add(Whole levels, int8x16_t codes) {
    sums_ = vdotq_s32(sums_, (int8x16_t)levels, codes);
  }
  Whole total() const { return (Whole)sums_; }

 private:
  int32x4_t sums_;
};

#else

// Products are made in 16 bits, in which two of -128 * -128 have no room, but two of -128 * -127 have.
constexpr int LEAST_CODE = -127;

class Four {
 public:
  explicit Four(const uint8_t* codes) : codes_(broadcast_four(codes)) {}

  Whole add(Whole sums, Whole weights) const {
    const auto bytes = (int8x16_t)weights;
    const int16x8_t low = vmull_s8(vget_low_s8(bytes), vget_low_s8(codes_));
    const int16x8_t high = vmull_high_s8(bytes, codes_);
    return (Whole)vpadalq_s16((int32x4_t)sums, vpaddq_s16(low, high));
  }

 private:
  const int8x16_t codes_;
};

// Sixteen products of 15 * 127 at most have room in 16 bits.
class GroupSum {
 public:
  void begin(int32_t start) {
    start_ = start;
    low_ = high_ = vdupq_n_s16(0);
  }
  void add(Whole levels, int8x16_t codes) {
    const auto bytes = (int8x16_t)levels;
    low_ = vmlal_s8(low_, vget_low_s8(bytes), vget_low_s8(codes));
    high_ = vmlal_high_s8(high_, bytes, codes);
  }
  Whole total() const { return (Whole)vpaddlq_s16(vpaddq_s16(low_, high_)) + start_; }

 private:
  int32_t start_;
  int16x8_t low_, high_;
};

#endif

// What sums begin with that would be too large by `excess`.
inline int32_t group_start(int32_t excess) { return -excess; }

// WIDTH values from float16.
inline Vector load_halves(const uint16_t* halves) {
  return (Vector)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(halves)));
}

inline uint16_t to_half(float value) {
  const auto half = static_cast<__fp16>(value);
  uint16_t bits;
  std::memcpy(&bits, &half, sizeof bits);
  return bits;
}

inline float from_half(uint16_t bits) {
  __fp16 half;
  std::memcpy(&half, &bits, sizeof half);
  return half;
}

// Sixteen floats, of which each lane picks one by its four lowest bits: by the bytes of all.
class Table {
 public:
  explicit Table(const float* values)
      : bytes_(vld1q_u8_x4(reinterpret_cast<const uint8_t*>(values))) {}

  Vector operator[](Bits index) const {
    const Bits places = (index & 15) * 0x04040404 + 0x03020100;
    return (Vector)vqtbl4q_u8(bytes_, (uint8x16_t)places);
  }

 private:
  const uint8x16x4_t bytes_;
};

}  // namespace quire
