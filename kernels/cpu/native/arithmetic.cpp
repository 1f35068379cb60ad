// What programs hold of the tensor library's own operations (kernels/cpu/recordable_ops.py), to the last bit.
#include "parallel.h"
#include "program.h"
#include "simd.h"

namespace quire {

// As kernels/cpu/recordable_ops.py numbers them.
enum class Arithmetic : int32_t { ADD, MULTIPLY, MINIMUM, MAXIMUM };

// x and out [outer][inner][dim], and y of as many values, some of them the same ones: strides of
// outer and inner in values, of y of dim too, which is 1 or 0.
struct Operands {
  int64_t outer, inner, dim;
  int64_t x[2], y[3], out[2];
};

namespace {

constexpr int64_t GRAIN = 4096;  // values below which a second thread costs more than it computes

template <Arithmetic KIND>
inline Floats combine(Floats x, Floats y) {
  if constexpr (KIND == Arithmetic::ADD) return x + y;
  if constexpr (KIND == Arithmetic::MULTIPLY) return x * y;
  if constexpr (KIND == Arithmetic::MINIMUM) return select(x > y, y, x);  // x where it is no number
  if constexpr (KIND == Arithmetic::MAXIMUM) return select(x < y, y, x);
}

// Rounded once, as there: whatever the types, values are combined in float32.
template <Arithmetic KIND, class X, class Y>
void compute(const Operands& of, const X* x, const Y* y, float scalar, X* out) {
  const int64_t rows = of.outer * of.inner;
  parallel_rows(rows, std::max<int64_t>(1, GRAIN / of.dim), [=](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const int64_t i = row / of.inner, j = row % of.inner;
      const X* from = x + i * of.x[0] + j * of.x[1];
      const Y* by = y ? y + i * of.y[0] + j * of.y[1] : nullptr;
      X* to = out + i * of.out[0] + j * of.out[1];
      const Floats one = fill(by ? load(by, 1)[0] : scalar);
      for (int64_t d = 0; d < of.dim; d += LANES) {
        const Floats other = by && of.y[2] ? load(by + d, of.dim - d) : one;
        store(to + d, combine<KIND>(load(from + d, of.dim - d), other), of.dim - d);
      }
    }
  });
}

}  // namespace
}  // namespace quire

extern "C" {

// out = x + y, x * y, or the smaller or larger of both, where y is null with `scalar` in its place.
// out has the type of x, and may be x.
void quire_arithmetic(quire::Arithmetic kind, const quire::Operands* of, int32_t x_dtype,
                      const void* x, int32_t y_dtype, const void* y, float scalar, void* out) {
  using namespace quire;
  with_type(x_dtype, [&]<class X>() {
    with_type(y_dtype, [&]<class Y>() {
      const auto run = [&]<Arithmetic KIND>() {
        compute<KIND>(*of, static_cast<const X*>(x), static_cast<const Y*>(y), scalar,
                      static_cast<X*>(out));
      };
      switch (kind) {
        case Arithmetic::ADD: return run.template operator()<Arithmetic::ADD>();
        case Arithmetic::MULTIPLY: return run.template operator()<Arithmetic::MULTIPLY>();
        case Arithmetic::MINIMUM: return run.template operator()<Arithmetic::MINIMUM>();
        case Arithmetic::MAXIMUM: return run.template operator()<Arithmetic::MAXIMUM>();
      }
    });
  });
}

// Rows of `bytes` each: out[i] = table[ids[i]].
void quire_rows(const char* table, const int64_t* ids, int64_t count, int64_t bytes, char* out) {
  for (int64_t i = 0; i < count; ++i) std::memcpy(out + i * bytes, table + ids[i] * bytes, bytes);
}

// Rows of `bytes` each, which lie `from_stride` and `to_stride` bytes apart; `zeros` bytes of zeros
// are written behind each.
void quire_copy_rows(const char* from, int64_t from_stride, int64_t count, int64_t bytes, char* to,
                     int64_t to_stride, int64_t zeros) {
  for (int64_t i = 0; i < count; ++i) {
    std::memcpy(to + i * to_stride, from + i * from_stride, bytes);
    std::memset(to + i * to_stride + bytes, 0, zeros);
  }
}

void quire_at_least(const int64_t* x, int64_t least, int64_t count, int64_t* out) {
  for (int64_t i = 0; i < count; ++i) out[i] = std::max(x[i], least);
}

}  // extern "C"

QUIRE_RECORDED(quire_arithmetic)
QUIRE_RECORDED(quire_rows)
QUIRE_RECORDED(quire_copy_rows)
QUIRE_RECORDED(quire_at_least)
