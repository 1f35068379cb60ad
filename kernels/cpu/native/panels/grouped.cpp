// Linear layers whose codes come from a checkpoint; see groups.h.
#include "groups.h"
#include "program.h"
#include "simd.h"

using namespace quire;

namespace {

// to[rows][inputs] from[rows][columns], their columns in another order and zeros behind them.
void reorder(const bf16* from, int64_t rows, int64_t columns, const int32_t* order, int64_t inputs,
             bf16* to) {
  parallel_rows(rows, 16, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const bf16* x = from + r * columns;
      bf16* moved = to + r * inputs;
      for (int64_t k = 0; k < columns; ++k) moved[k] = x[order[k]];
      std::fill(moved + columns, moved + inputs, bf16{0});
    }
  });
}

}  // namespace

extern "C" {

// y = x * weight^T + bias, or that gated, as quire_dense. `levels` is null with 8 bits, which are
// then signed integers, or with `is_float` of type e4m3. Where `order` is not null, column k of the
// weight is for activation order[k], k < columns; else x is padded to `inputs` by the caller.
void quire_grouped(const bf16* x, int64_t rows, int64_t inputs, const uint32_t* codes,
                   const uint16_t* scales, const uint16_t* zeros, const bf16* levels,
                   const int32_t* order, int64_t columns, int64_t group, float factor,
                   bool is_float, const float* bias, void* y, int64_t outputs, bool wide,
                   const Gating* gating, bool amx) {
  const GroupedWeight weight{codes, scales, zeros, levels, inputs, group, factor};
  const Scratch<bf16> reordered(order ? rows * inputs : 0);
  if (order) {
    reorder(x, rows, columns, order, inputs, reordered.get());
    x = reordered.get();
  }
  const Wanted wanted{y, outputs, wide, gating};
  if (levels)
    multiply_grouped<Nibbles>(x, rows, weight, bias, wanted, amx);
  else if (is_float)
    multiply_grouped<Float8>(x, rows, weight, bias, wanted, amx);
  else
    multiply_grouped<Bytes>(x, rows, weight, bias, wanted, amx);
}

// Rows of a weight as quire_dense_rows gives them.
void quire_grouped_rows(int32_t dtype, const uint32_t* codes, const uint16_t* scales,
                        const uint16_t* zeros, const bf16* levels, const int32_t* order,
                        int64_t group, float factor, bool is_float, const int64_t* ids,
                        int64_t count, int64_t inputs, int64_t columns, void* out) {
  const GroupedWeight weight{codes, scales, zeros, levels, inputs, group, factor};
  const Scratch<bf16> panel(PANEL * inputs);
  with_type(dtype, [&]<class T>() {
    T* row = static_cast<T*>(out);
    for (int64_t i = 0; i < count; ++i, row += columns) {
      if (levels)
        unpack<Nibbles>(weight, ids[i] / PANEL, panel.get());
      else if (is_float)
        unpack<Float8>(weight, ids[i] / PANEL, panel.get());
      else
        unpack<Bytes>(weight, ids[i] / PANEL, panel.get());
      const bf16* own = panel.get() + ids[i] % PANEL * 2;
      for (int64_t k = 0; k < columns; ++k) {
        T& to = row[order ? order[k] : k];
        const bf16 value = own[k / 2 * 2 * PANEL + k % 2];
        if constexpr (std::is_same_v<T, float>)
          to = to_float(value);
        else
          to.bits = value;
      }
    }
  });
}

// Codes of 4 bits, [outputs][(columns + 1) / 2] bytes of which the low halves come first, into
// panels; `inputs` is `columns` rounded up.
void quire_nibbles_pack(const uint8_t* codes, int64_t outputs, int64_t columns, int64_t inputs,
                        uint32_t* packed) {
  const auto read = [=](int64_t n, uint8_t* row) {
    const uint8_t* bytes = codes + n * ((columns + 1) / 2);
    for (int64_t k = 0; k < columns; ++k) row[k] = bytes[k / 2] >> 4 * (k % 2) & 15;
  };
  for_panel_rows<uint8_t>(outputs, inputs, read, [=](int64_t panel, const uint8_t* rows) {
    pack_nibbles(rows, inputs, packed + panel * PANEL * inputs / Nibbles::STEP);
  });
}

// The same of 8 bits, [outputs][columns].
void quire_bytes_pack(const uint8_t* codes, int64_t outputs, int64_t columns, int64_t inputs,
                      uint8_t* packed) {
  pack_panels<4>(outputs, inputs, packed, [=](int64_t n, uint8_t* row) {
    std::copy_n(codes + n * columns, columns, row);
  });
}

}  // extern "C"

QUIRE_RECORDED(quire_grouped)
QUIRE_RECORDED(quire_grouped_rows)
