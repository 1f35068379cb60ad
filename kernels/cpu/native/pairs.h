// Products of bfloat16 matrices summed in float32, where the processor has instructions for them:
// all of them multiply pairs of neighbours along the depth. See avx512/pairs.cpp.
#pragma once

#include "simd.h"

namespace quire {

// Holds the processor's matrix unit, if it has one, for the products of one thread.
class PairProducts {
 public:
  PairProducts();
  ~PairProducts();
  PairProducts(const PairProducts&) = delete;
  PairProducts& operator=(const PairProducts&) = delete;

  // c[rows][columns] += a[rows][depth] * b, with b[depth / 2][columns][2]; columns are a multiple of
  // 16 and depth is one of 32. Rows of a and c up to the next multiple of 16 are read and written.
  void multiply(const bfloat16* a, int64_t a_stride, const bfloat16* b, int64_t rows,
                int64_t columns, int64_t depth, float* c) const;

 private:
  bool amx_;
};

}  // namespace quire
