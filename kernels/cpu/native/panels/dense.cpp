// Linear layers with bfloat16 weights.
#include "dense.h"
#include "likeliest.h"
#include "program.h"
#include "simd.h"

using namespace quire;

extern "C" {

// y[rows][outputs] = x[rows][inputs] * weight^T + bias, in float32 where `wide`, else in bfloat16;
// inputs is a multiple of 32. Where `gating` is not null it makes [rows][outputs / 2] of that, in
// bfloat16; half the outputs are then a multiple of 32.
void quire_dense(const bf16* x, int64_t rows, int64_t inputs, const bf16* packed, const float* bias,
                 void* y, int64_t outputs, bool wide, const Gating* gating, bool amx) {
  const GivenRows given(x, rows, inputs, amx);
  for_results(rows, given.rows().max_part(), {y, outputs, wide, gating}, [&] {
    return [&, products = DenseProducts()](int64_t begin, int64_t end, int64_t panel,
                                           const auto& to) mutable {
      const bf16* weight = packed + panel * PANEL * inputs;
      products.multiply(given.rows(), begin, end, weight, bias, to, panel);
    };
  });
}

// For each row the output whose sum, as it is finished, is the largest, and whether that is finite,
// as is all else.
void quire_dense_likeliest(const bf16* x, int64_t rows, int64_t inputs, const bf16* packed,
                           const float* bias, int64_t outputs, float scale, float cap, bool amx,
                           int64_t* token_ids, bool* is_finite) {
  const GivenRows given(x, rows, inputs, amx);
  const int64_t max_part = given.rows().max_part();
  find_likeliest(rows, outputs, max_part, bias, {scale, cap}, token_ids, is_finite, [&] {
    return [&, products = DenseProducts()](int64_t begin, int64_t end, int64_t panel,
                                           auto tell) mutable {
      products.sum(given.rows(), begin, end, packed + panel * PANEL * inputs, tell);
    };
  });
}

// Packs a weight [outputs][columns]; `inputs` is `columns` rounded up.
void quire_dense_pack(const bf16* weight, int64_t outputs, int64_t columns, int64_t inputs,
                      bf16* packed) {
  pack_panels<2>(outputs, inputs, packed, [=](int64_t n, bf16* row) {
    std::copy_n(weight + n * columns, columns, row);
  });
}

// Rows of a packed weight, as a table of embeddings is read: out[i][columns] is weight[ids[i]], in
// the type of `dtype`.
void quire_dense_rows(int32_t dtype, const bf16* packed, const int64_t* ids, int64_t count,
                      int64_t inputs, int64_t columns, void* out) {
  with_type(dtype, [&]<class T>() {
    // Each pair of a row's values comes from a line of its own.
    parallel_rows(count, 4, [=](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        T* row = static_cast<T*>(out) + i * columns;
        const bf16* pairs = packed + ids[i] / PANEL * PANEL * inputs + ids[i] % PANEL * 2;
        for (int64_t k = 0; k < columns; ++k) {
          const bf16 value = pairs[k / 2 * 2 * PANEL + k % 2];
          if constexpr (std::is_same_v<T, float>)
            row[k] = to_float(value);
          else
            row[k].bits = value;
        }
      }
    });
  });
}

}  // extern "C"

QUIRE_RECORDED(quire_dense)
QUIRE_RECORDED(quire_dense_likeliest)
QUIRE_RECORDED(quire_dense_rows)
