// Products of bfloat16 matrices by AMX tiles, or by vectors.
#include "pairs.h"

#include "amx.h"

namespace quire {
namespace {

// Registers 0-3 hold a block of 2 x 2 tiles of c, 4-5 tiles of a, 6-7 tiles of b.
QUIRE_AMX void configure() {
  TileConfig config;
  for (int i = 0; i < 8; ++i) {
    config.row_bytes[i] = 64;
    config.rows[i] = 16;
  }
  // GCC's tile intrinsics do not say what memory they read: let nothing be held back from them.
  __asm__ volatile("" ::"r"(&config) : "memory");
  _tile_loadconfig(&config);
}

QUIRE_AMX void release() { _tile_release(); }

// Of this thread.
int64_t& holders() {
  thread_local int64_t count = 0;
  return count;
}

// 32 (or, without `lower`, 16) rows by 32 (or, without `right`, 16) columns.
template <bool lower, bool right>
QUIRE_AMX void multiply_tiles(const bfloat16* a, int64_t a_stride, const bfloat16* b,
                              int64_t columns, int64_t depth, float* c) {
  const int64_t c_bytes = columns * 4, a_bytes = a_stride * 2;
  __asm__ volatile("" ::: "memory");
  _tile_loadd(0, c, c_bytes);
  if constexpr (right) _tile_loadd(1, c + 16, c_bytes);
  if constexpr (lower) _tile_loadd(2, c + 16 * columns, c_bytes);
  if constexpr (lower && right) _tile_loadd(3, c + 16 * columns + 16, c_bytes);
  for (int64_t k = 0; k < depth; k += 32) {
    const bfloat16* pairs = b + k * columns;
    _tile_loadd(4, a + k, a_bytes);
    _tile_loadd(6, pairs, c_bytes);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (lower) {
      _tile_loadd(5, a + 16 * a_stride + k, a_bytes);
      _tile_dpbf16ps(2, 5, 6);
    }
    if constexpr (right) {
      _tile_loadd(7, pairs + 32, c_bytes);
      _tile_dpbf16ps(1, 4, 7);
      if constexpr (lower) _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, c, c_bytes);
  if constexpr (right) _tile_stored(1, c + 16, c_bytes);
  if constexpr (lower) _tile_stored(2, c + 16 * columns, c_bytes);
  if constexpr (lower && right) _tile_stored(3, c + 16 * columns + 16, c_bytes);
  __asm__ volatile("" ::: "memory");
}

void multiply_by_tiles(const bfloat16* a, int64_t a_stride, const bfloat16* b, int64_t rows,
                       int64_t columns, int64_t depth, float* c) {
  for (int64_t r = 0; r < rows; r += 32)
    for (int64_t n = 0; n < columns; n += 32) {
      const auto multiply =
          r + 16 < rows ? (n + 16 < columns ? multiply_tiles<true, true> : multiply_tiles<true, false>)
                        : (n + 16 < columns ? multiply_tiles<false, true>
                                            : multiply_tiles<false, false>);
      multiply(a + r * a_stride, a_stride, b + 2 * n, columns, depth, c + r * columns + n);
    }
}

// ROWS rows by VECTORS * 16 columns.
template <int ROWS, int VECTORS>
void multiply_vectors(const bfloat16* a, int64_t a_stride, const bfloat16* b, int64_t columns,
                      int64_t depth, float* c) {
  __m512 sums[ROWS][VECTORS];
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < VECTORS; ++v) sums[r][v] = _mm512_loadu_ps(c + r * columns + 16 * v);
  for (int64_t k = 0; k < depth; k += 2) {
    __m512bh pairs[VECTORS];
#pragma GCC unroll 8
    for (int v = 0; v < VECTORS; ++v)
      pairs[v] = reinterpret_cast<__m512bh>(_mm512_loadu_si512(b + k * columns + 32 * v));
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r) {
      int32_t pair;
      std::memcpy(&pair, a + r * a_stride + k, sizeof pair);
      const auto both = reinterpret_cast<__m512bh>(_mm512_set1_epi32(pair));
#pragma GCC unroll 8
      for (int v = 0; v < VECTORS; ++v) sums[r][v] = _mm512_dpbf16_ps(sums[r][v], both, pairs[v]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < VECTORS; ++v) _mm512_storeu_ps(c + r * columns + 16 * v, sums[r][v]);
}

void multiply_by_vectors(const bfloat16* a, int64_t a_stride, const bfloat16* b, int64_t rows,
                         int64_t columns, int64_t depth, float* c) {
  for (int64_t r = 0; r < rows; r += 4) {  // never past the next multiple of 16
    const bfloat16* from = a + r * a_stride;
    int64_t n = 0;
    for (; n + 64 <= columns; n += 64)
      multiply_vectors<4, 4>(from, a_stride, b + 2 * n, columns, depth, c + r * columns + n);
    for (; n < columns; n += 16)
      multiply_vectors<4, 1>(from, a_stride, b + 2 * n, columns, depth, c + r * columns + n);
  }
}

}  // namespace

MatrixUnit::MatrixUnit() {
  if (has_amx() && holders()++ == 0) configure();
}

MatrixUnit::~MatrixUnit() {
  if (has_amx() && --holders() == 0) release();
}

bool MatrixUnit::exists() { return has_amx(); }

void PairProducts::multiply(const bfloat16* a, int64_t a_stride, const bfloat16* b, int64_t rows,
                            int64_t columns, int64_t depth, float* c) const {
  (has_amx() ? multiply_by_tiles : multiply_by_vectors)(a, a_stride, b, rows, columns, depth, c);
}

}  // namespace quire
