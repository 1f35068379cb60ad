// Sixteen lanes in two registers of AVX2, or four of NEON. See simd.h.
//
// GCC takes vectors that are wider than a register, but keeps them in memory: each operation loads its
// pieces and stores what it makes of them, and the next one waits for that. The members of a class are
// variables of their own, which stay in registers.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#ifdef __AVX2__
#include "avx2.h"
#else
#include "neon.h"
#endif

#define QUIRE_INLINE __attribute__((always_inline)) inline

namespace quire {

constexpr size_t NUM_PIECES = 64 / REGISTER_BYTES;

// Calls body(i) for each piece, with a number that is known when this is compiled.
template <class Body>
QUIRE_INLINE constexpr void each_piece(Body body) {
  [&]<size_t... I>(std::index_sequence<I...>) __attribute__((always_inline)) {
    (body(std::integral_constant<size_t, I>{}), ...);
  }(std::make_index_sequence<NUM_PIECES>{});
}

#define QUIRE_PIECEWISE(STATEMENT) \
  each_piece([&](auto i) __attribute__((always_inline)) { STATEMENT; })

#define QUIRE_OPERATOR(OF) \
  friend QUIRE_INLINE Pieces operator OF(Pieces a, Pieces b) {            \
    QUIRE_PIECEWISE(a.piece[i] = a.piece[i] OF b.piece[i]);               \
    return a; \
  } \
  QUIRE_INLINE Pieces& operator OF##=(Pieces b) { return *this = *this OF b; }

#define QUIRE_COMPARISON(OF) \
  friend QUIRE_INLINE Pieces<Whole> operator OF(Pieces a, Pieces b) {   \
    Pieces<Whole> is_so; \
    QUIRE_PIECEWISE(is_so.piece[i] = a.piece[i] OF b.piece[i]);           \
    return is_so; \
  }

// As a vector of GCC's. Piece: Vector, Whole or Bits.
template <class Piece>
class Pieces {
 public:
  using Scalar = std::remove_cvref_t<decltype(Piece{}[0])>;

  Pieces() = default;
  QUIRE_INLINE Pieces(Scalar scalar) { QUIRE_PIECEWISE(piece[i] = scalar - Piece{}); }  // in each lane
  // The same bits.
  template <class U>
  QUIRE_INLINE explicit Pieces(Pieces<U> x) {
    QUIRE_PIECEWISE(piece[i] = (Piece)x.piece[i]);
  }

  // 0, 1, 2, ...
  static constexpr Pieces counted() {
    Pieces x{};
    [&]<size_t... LANE>(std::index_sequence<LANE...>) {
      for (size_t i = 0; i < NUM_PIECES; ++i) x.piece[i] = Piece{Scalar(i * WIDTH + LANE)...};
    }(std::make_index_sequence<WIDTH>{});
    return x;
  }

  QUIRE_INLINE Scalar operator[](int64_t lane) const { return piece[lane / WIDTH][lane % WIDTH]; }

  QUIRE_OPERATOR(+)
  QUIRE_OPERATOR(-)
  QUIRE_OPERATOR(*)
  QUIRE_OPERATOR(/)
  QUIRE_OPERATOR(&)
  QUIRE_OPERATOR(|)
  QUIRE_OPERATOR(^)
  QUIRE_COMPARISON(<)
  QUIRE_COMPARISON(<=)
  QUIRE_COMPARISON(>)
  QUIRE_COMPARISON(>=)
  QUIRE_COMPARISON(==)
  QUIRE_COMPARISON(!=)
  friend QUIRE_INLINE Pieces operator-(Pieces x) {
    QUIRE_PIECEWISE(x.piece[i] = -x.piece[i]);
    return x;
  }
  friend QUIRE_INLINE Pieces operator<<(Pieces x, int bits) {
    QUIRE_PIECEWISE(x.piece[i] = x.piece[i] << bits);
    return x;
  }
  friend QUIRE_INLINE Pieces operator>>(Pieces x, int bits) {
    QUIRE_PIECEWISE(x.piece[i] = x.piece[i] >> bits);
    return x;
  }

  Piece piece[NUM_PIECES];
};

#undef QUIRE_OPERATOR
#undef QUIRE_COMPARISON

using Floats = Pieces<Vector>;
using Ints = Pieces<Whole>;
using Words = Pieces<Bits>;

constexpr Ints LANE = Ints::counted();

QUIRE_INLINE Floats fill(float x) { return x; }

template <class V>
QUIRE_INLINE V load_lanes(const void* p) {
  V x;
  QUIRE_PIECEWISE(
      std::memcpy(&x.piece[i], static_cast<const char*>(p) + i * REGISTER_BYTES, REGISTER_BYTES));
  return x;
}

template <class V>
QUIRE_INLINE void store_lanes(void* p, V x) {
  QUIRE_PIECEWISE(
      std::memcpy(static_cast<char*>(p) + i * REGISTER_BYTES, &x.piece[i], REGISTER_BYTES));
}

QUIRE_INLINE Words widen(const uint16_t* p) {
  Words x;
  QUIRE_PIECEWISE(x.piece[i] = widen_piece(p + i * WIDTH));
  return x;
}
QUIRE_INLINE Words widen(const uint8_t* p) {
  Words x;
  QUIRE_PIECEWISE(x.piece[i] = widen_piece(p + i * WIDTH));
  return x;
}
QUIRE_INLINE Ints widen(const int8_t* p) {
  Ints x;
  QUIRE_PIECEWISE(x.piece[i] = widen_piece(p + i * WIDTH));
  return x;
}

QUIRE_INLINE void narrow(Words x, uint16_t* p) {
  QUIRE_PIECEWISE(narrow_piece(x.piece[i], p + i * WIDTH));
}
QUIRE_INLINE void narrow(Words x, uint8_t* p) {
  QUIRE_PIECEWISE(narrow_piece(x.piece[i], p + i * WIDTH));
}

QUIRE_INLINE Floats load_float8(const uint8_t* p) {
  Floats x;
  // A half's exponent counts from 15, this one's from 7.
  QUIRE_PIECEWISE(x.piece[i] = load_float8_bits(p + i * WIDTH) * 256.0f);
  return x;
}

QUIRE_INLINE Floats to_floats(Ints x) {
  Floats y;
  QUIRE_PIECEWISE(y.piece[i] = __builtin_convertvector(x.piece[i], Vector));
  return y;
}

QUIRE_INLINE Ints nearest(Floats x) {
  Ints y;
  QUIRE_PIECEWISE(y.piece[i] = nearest_piece(x.piece[i]));
  return y;
}

template <class V>
QUIRE_INLINE V select(Ints where, V x, V y) {
  QUIRE_PIECEWISE(x.piece[i] = where.piece[i] ? x.piece[i] : y.piece[i]);
  return x;
}

QUIRE_INLINE Floats larger(Floats a, Floats b) {
  QUIRE_PIECEWISE(a.piece[i] = larger_piece(a.piece[i], b.piece[i]));
  return a;
}

QUIRE_INLINE bool any_not_less(Floats a, Floats b) {
  Whole less = a.piece[0] < b.piece[0];
  QUIRE_PIECEWISE(less &= a.piece[i] < b.piece[i]);
  return !all(less);
}

#define QUIRE_SHUFFLE __builtin_shufflevector

#ifdef __AVX2__

#define QUIRE_PICK(...) \
  QUIRE_PIECEWISE(a.piece[i] = QUIRE_SHUFFLE(a.piece[i], b.piece[i], __VA_ARGS__)); \
  return a

QUIRE_INLINE Floats zip_low(Floats a, Floats b) { QUIRE_PICK(0, 8, 1, 9, 4, 12, 5, 13); }
QUIRE_INLINE Floats zip_high(Floats a, Floats b) { QUIRE_PICK(2, 10, 3, 11, 6, 14, 7, 15); }
QUIRE_INLINE Floats join_low(Floats a, Floats b) { QUIRE_PICK(0, 1, 8, 9, 4, 5, 12, 13); }
QUIRE_INLINE Floats join_high(Floats a, Floats b) { QUIRE_PICK(2, 3, 10, 11, 6, 7, 14, 15); }

#undef QUIRE_PICK

QUIRE_INLINE Vector low_fours(Vector a, Vector b) {
  return QUIRE_SHUFFLE(a, b, 0, 1, 2, 3, 8, 9, 10, 11);
}
QUIRE_INLINE Vector high_fours(Vector a, Vector b) {
  return QUIRE_SHUFFLE(a, b, 4, 5, 6, 7, 12, 13, 14, 15);
}
QUIRE_INLINE Floats even_fours(Floats a, Floats b) {
  a.piece[0] = low_fours(a.piece[0], a.piece[1]);
  a.piece[1] = low_fours(b.piece[0], b.piece[1]);
  return a;
}
QUIRE_INLINE Floats odd_fours(Floats a, Floats b) {
  a.piece[0] = high_fours(a.piece[0], a.piece[1]);
  a.piece[1] = high_fours(b.piece[0], b.piece[1]);
  return a;
}

template <class Piece>
QUIRE_INLINE Pieces<Piece> pairs_of(Piece a, Piece b) {
  Pieces<Piece> x;
  x.piece[0] = QUIRE_SHUFFLE(a, b, 0, 8, 1, 9, 2, 10, 3, 11);
  x.piece[1] = QUIRE_SHUFFLE(a, b, 4, 12, 5, 13, 6, 14, 7, 15);
  return x;
}
template <class V>
QUIRE_INLINE V first_of_pairs(V a, V b) {
  return pairs_of(a.piece[0], b.piece[0]);
}
template <class V>
QUIRE_INLINE V last_of_pairs(V a, V b) {
  return pairs_of(a.piece[1], b.piece[1]);
}

// The lanes of each four, joined by `join`.
template <class Join>
QUIRE_INLINE Vector join_fours(Floats x, Join join) {
  const Vector eight = join(x.piece[0], x.piece[1]);
  return join(eight, high_fours(eight, eight));
}

#else

#define QUIRE_PICK(...) \
  QUIRE_PIECEWISE(a.piece[i] = QUIRE_SHUFFLE(a.piece[i], b.piece[i], __VA_ARGS__)); \
  return a

QUIRE_INLINE Floats zip_low(Floats a, Floats b) { QUIRE_PICK(0, 4, 1, 5); }
QUIRE_INLINE Floats zip_high(Floats a, Floats b) { QUIRE_PICK(2, 6, 3, 7); }
QUIRE_INLINE Floats join_low(Floats a, Floats b) { QUIRE_PICK(0, 1, 4, 5); }
QUIRE_INLINE Floats join_high(Floats a, Floats b) { QUIRE_PICK(2, 3, 6, 7); }

#undef QUIRE_PICK

QUIRE_INLINE Floats even_fours(Floats a, Floats b) {
  Floats x;
  x.piece[0] = a.piece[0], x.piece[1] = a.piece[2];
  x.piece[2] = b.piece[0], x.piece[3] = b.piece[2];
  return x;
}
QUIRE_INLINE Floats odd_fours(Floats a, Floats b) {
  Floats x;
  x.piece[0] = a.piece[1], x.piece[1] = a.piece[3];
  x.piece[2] = b.piece[1], x.piece[3] = b.piece[3];
  return x;
}

template <class V>
QUIRE_INLINE V pairs_of(V a, V b, size_t first) {
  V x;
  for (size_t i = 0; i < 2; ++i) {
    x.piece[2 * i] = QUIRE_SHUFFLE(a.piece[first + i], b.piece[first + i], 0, 4, 1, 5);
    x.piece[2 * i + 1] = QUIRE_SHUFFLE(a.piece[first + i], b.piece[first + i], 2, 6, 3, 7);
  }
  return x;
}
template <class V>
QUIRE_INLINE V first_of_pairs(V a, V b) {
  return pairs_of(a, b, 0);
}
template <class V>
QUIRE_INLINE V last_of_pairs(V a, V b) {
  return pairs_of(a, b, 2);
}

template <class Join>
QUIRE_INLINE Vector join_fours(Floats x, Join join) {
  return join(join(x.piece[0], x.piece[2]), join(x.piece[1], x.piece[3]));
}

#endif

QUIRE_INLINE float sum(Floats x) {
  const Vector four = join_fours(x, [](Vector a, Vector b) { return a + b; });
  return (four[0] + four[1]) + (four[2] + four[3]);
}

QUIRE_INLINE float largest(Floats x) {
  const auto of = [](float a, float b) { return a > b ? a : b; };
  const Vector four = join_fours(x, larger_piece);
  return of(of(four[0], four[2]), of(four[1], four[3]));
}

}  // namespace quire
