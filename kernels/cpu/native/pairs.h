// Products of bfloat16 matrices summed in float32, where the processor has instructions for them:
// all of them multiply pairs of neighbours along the depth. See avx512/pairs.cpp.
#pragma once

#include "simd.h"

namespace quire {

#ifdef __AVX512BF16__

// Holds the processor's matrix unit, if it has one, for this thread: eight tiles of 16 rows of 64
// bytes. Within another that costs nothing.
class MatrixUnit {
 public:
  MatrixUnit();
  ~MatrixUnit();
  MatrixUnit(const MatrixUnit&) = delete;
  MatrixUnit& operator=(const MatrixUnit&) = delete;

  static bool exists();
};

// The products of one thread.
class PairProducts {
 public:
  // c[rows][columns] += a[rows][depth] * b, with b[depth / 2][columns][2]; columns are a multiple of
  // 16 and depth is one of 32. Rows of a and c up to the next multiple of 16 are read and written.
  void multiply(const bfloat16* a, int64_t a_stride, const bfloat16* b, int64_t rows,
                int64_t columns, int64_t depth, float* c) const;

 private:
  MatrixUnit unit_;
};

#else

struct MatrixUnit {
  MatrixUnit() {}  // so that no compiler calls it unused
};

#endif

}  // namespace quire
