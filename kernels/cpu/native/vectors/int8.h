// One tile of the int8 product; see panels/eight_bits.h.
#pragma once

#include <vector>

#include "panels/eight_bits.h"
#include "registers.h"

namespace quire {

constexpr int64_t INT8_ROWS = 4;       // rows of a tile: eight sums stay in registers
constexpr int64_t INT8_WIDE_ROWS = 1;  // of which all of a panel's sums do
constexpr int64_t INT8_PIECE = 512;    // inputs of a panel in half of the first-level cache

// sums[ROWS][OUTPUTS of 32] += codes[ROWS][count] * part of a panel. `stride` is that of the rows, which
// lie as `Four` reads them.
template <int ROWS, int64_t OUTPUTS>
inline void int8_tile(const uint8_t* codes, int64_t stride, const int8_t* panel, int64_t count,
                      int32_t* sums) {
  constexpr int64_t VECTORS = OUTPUTS / WIDTH;
  Whole totals[ROWS][VECTORS];
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
    for (int64_t v = 0; v < VECTORS; ++v)
      totals[r][v] = load_as<Whole>(sums + r * PANEL + v * WIDTH);
  for (int64_t k = 0; k < count; k += 4, panel += 4 * PANEL) {
    if constexpr (OUTPUTS < PANEL) fetch_ahead(panel, INT8_PIECE * PANEL);
    Whole weights[VECTORS];
#pragma GCC unroll 8
    for (int64_t v = 0; v < VECTORS; ++v) weights[v] = load_as<Whole>(panel + v * REGISTER_BYTES);
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r) {
      const Four four(codes + r * stride + k * LAID_CODE_BYTES);
#pragma GCC unroll 8
      for (int64_t v = 0; v < VECTORS; ++v) totals[r][v] = four.add(totals[r][v], weights[v]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
    for (int64_t v = 0; v < VECTORS; ++v)
      std::memcpy(sums + r * PANEL + v * WIDTH, &totals[r][v], REGISTER_BYTES);
}

// As avx2.h has it. Where codes are read as they lie, it is named below but never called.
int32_t lay_fours(const uint8_t* codes, int64_t count, uint8_t* laid);

// Rows of codes as `Four` reads them. A thread lays out those of a part for all its panels.
class RowsOfFours {
 public:
  void take(const Int8Rows& rows, int64_t begin, int64_t end) {
    if constexpr (LAID_CODE_BYTES == 1) {
      codes_ = rows.codes;
    } else {
      if (codes_ == rows.codes && begin_ == begin && end_ == end) return;
      codes_ = rows.codes;
      begin_ = begin;
      end_ = end;
      laid_.resize((end - begin) * rows.inputs * LAID_CODE_BYTES);
      missing_.resize(end - begin);
      for (int64_t r = begin; r < end; ++r)
        missing_[r - begin] = lay_fours(rows.codes + r * rows.inputs, rows.inputs,
                                        laid_.data() + (r - begin) * rows.inputs * LAID_CODE_BYTES);
    }
  }

  const uint8_t* row(int64_t r, int64_t inputs) const {
    if constexpr (LAID_CODE_BYTES == 1)
      return codes_ + r * inputs;
    else
      return laid_.data() + (r - begin_) * inputs * LAID_CODE_BYTES;
  }

  // What sums of row r begin with.
  int32_t missing(int64_t r) const {
    if constexpr (LAID_CODE_BYTES == 1)
      return 0;
    else
      return missing_[r - begin_];
  }

 private:
  const uint8_t* codes_ = nullptr;
  int64_t begin_ = 0, end_ = 0;
  std::vector<uint8_t> laid_;
  std::vector<int32_t> missing_;
};

// One thread's products of rows, which stay as they are, by panels.
class Int8Products {
 public:
  // The results of rows at a panel; `bias`, of all outputs, may be null.
  template <class T>
  void multiply(const Int8Rows& rows, int64_t begin, int64_t end, const Int8Panel& weights,
                const float* bias, const Results<T>& to, int64_t panel) {
    const Int8Outputs<T> outputs(weights, bias, to, panel);
    fours_.take(rows, begin, end);
    const int64_t stride = rows.inputs * LAID_CODE_BYTES;
    for_tiles(begin, end, INT8_ROWS, [&](int64_t row, int64_t count) {
      alignas(64) int32_t sums[INT8_ROWS * PANEL];
      for (int64_t r = 0; r < count; ++r)
        std::fill_n(sums + r * PANEL, PANEL, fours_.missing(row + r));
      const uint8_t* codes = fours_.row(row, rows.inputs);
      with_rows<INT8_ROWS>(count, [&]<int ROWS>() {
        constexpr int64_t OUTPUTS = ROWS <= INT8_WIDE_ROWS ? PANEL : HALF_PANEL;
        for_pieces<OUTPUTS>(rows.inputs, INT8_PIECE, [&](int64_t k, int64_t inputs, int64_t n) {
          const int8_t* part = weights.codes + k * PANEL + 4 * n;
          int8_tile<ROWS, OUTPUTS>(codes + k * LAID_CODE_BYTES, stride, part, inputs, sums + n);
        });
      });
      outputs.store(sums, rows.told, row, count);
    });
  }

 private:
  RowsOfFours fours_;
};

}  // namespace quire
