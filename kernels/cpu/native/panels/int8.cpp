// Linear layers with int8 weights and activations that are rounded as they come; see eight_bits.h.
#include "int8.h"

#include "likeliest.h"
#include "program.h"
#include "simd.h"

using namespace quire;

extern "C" {

// y = x * weight^T + bias, or that gated, as quire_dense; inputs is a multiple of 64. `totals` is the
// sum of each output's codes.
void quire_int8(const bf16* x, int64_t rows, int64_t inputs, const int8_t* packed,
                const float* scales, const int32_t* totals, const float* bias, void* y,
                int64_t outputs, bool wide, const Gating* gating, bool amx) {
  const GivenCodes given(x, rows, inputs, amx);
  const Int8Weight weight{packed, scales, totals};
  for_results(rows, given.rows().max_part(), {y, outputs, wide, gating}, [&] {
    return [&, products = Int8Products()](int64_t begin, int64_t end, int64_t panel,
                                          const auto& to) mutable {
      products.multiply(given.rows(), begin, end, weight.panel(panel, inputs), bias, to, panel);
    };
  });
}

// As quire_dense_likeliest.
void quire_int8_likeliest(const bf16* x, int64_t rows, int64_t inputs, const int8_t* packed,
                          const float* scales, const int32_t* totals, const float* bias,
                          int64_t outputs, float scale, float cap, bool amx,
                          int64_t* token_ids, bool* is_finite) {
  const GivenCodes given(x, rows, inputs, amx);
  const Int8Weight weight{packed, scales, totals};
  const int64_t max_part = given.rows().max_part();
  find_likeliest(rows, outputs, max_part, nullptr, {scale, cap}, token_ids, is_finite, [&] {
    return [&, products = Int8Products(), scores = Scratch<float>(std::min(rows, max_part) * PANEL)](
               int64_t begin, int64_t end, int64_t panel, auto tell) mutable {
      const Results<float> to{scores.get() - begin * PANEL - panel * PANEL, PANEL, outputs};
      products.multiply(given.rows(), begin, end, weight.panel(panel, inputs), bias, to, panel);
      tell(begin, end - begin, scores.get());
    };
  });
}

// Rounds a weight [outputs][columns] to the nearest and packs it; `inputs` is `columns` rounded up.
// The scale of an output maps its value of largest magnitude to 127 or -127.
void quire_int8_pack(const bf16* weight, int64_t outputs, int64_t columns, int64_t inputs,
                     int8_t* packed, float* scales, int32_t* totals) {
  pack_panels<4>(outputs, inputs, packed, [=](int64_t n, int8_t* codes) {
    const bf16* values = weight + n * columns;
    bf16 peak = 0;  // without their signs, floats are in the order of their bits
    for (int64_t k = 0; k < columns; ++k) peak = std::max<bf16>(peak, values[k] & 0x7fff);
    const float scale = peak ? to_float(peak) / 127.0f : 1.0f;
    int32_t total = 0;
    for (int64_t k = 0; k < columns; ++k) {
      codes[k] = static_cast<int8_t>(__builtin_nearbyintf(to_float(values[k]) / scale));
      total += codes[k];
    }
    scales[n] = scale;
    totals[n] = total;
  });
}

// Rows of a packed weight as quire_dense_rows gives them: codes times the output's scale.
void quire_int8_rows(int32_t dtype, const int8_t* packed, const float* scales, const int64_t* ids,
                     int64_t count, int64_t inputs, int64_t columns, void* out) {
  with_type(dtype, [&]<class T>() {
    T* row = static_cast<T*>(out);
    for (int64_t i = 0; i < count; ++i, row += columns) {
      const int8_t* fours = packed + ids[i] / PANEL * PANEL * inputs + ids[i] % PANEL * 4;
      const float scale = scales[ids[i]];
      for (int64_t begin = 0; begin < columns; begin += LANES) {
        float codes[LANES] = {};
        const int64_t end = std::min(columns, begin + LANES);
        for (int64_t k = begin; k < end; ++k) codes[k - begin] = fours[k / 4 * 4 * PANEL + k % 4];
        store(row + begin, load(codes) * scale, end - begin);
      }
    }
  });
}

}  // extern "C"

QUIRE_RECORDED(quire_int8)
QUIRE_RECORDED(quire_int8_likeliest)
QUIRE_RECORDED(quire_int8_rows)
