// What lanes.h and simd.h do with sixteen lanes, against loops over sixteen values. Prints what differs.
#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>
#include <string>

#include "cache_codes.h"
#include "simd.h"

using namespace quire;

namespace {

int failures = 0;

template <class A, class B>
void same(const std::string& what, const A& made, const B& wanted, double within = 0) {
  for (int lane = 0; lane < LANES; ++lane) {
    const double apart = double(made[lane]) - double(wanted[lane]);
    if (std::fabs(apart) <= within || (std::isnan(double(made[lane])) && std::isnan(double(wanted[lane]))))
      continue;
    std::printf("%s, lane %d: %g, not %g\n", what.c_str(), lane, double(made[lane]),
                double(wanted[lane]));
    ++failures;
  }
}

template <class Body>
void same_each(const std::string& what, Floats made, Body wanted, double within = 0) {
  float values[LANES];
  for (int lane = 0; lane < LANES; ++lane) values[lane] = wanted(lane);
  same(what, made, values, within);
}

float bits_to_float(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

}  // namespace

int main() {
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  float x[LANES], y[LANES], rows[LANES][LANES];
  for (int round = 0; round < 50; ++round) {
    for (int i = 0; i < LANES; ++i) {
      x[i] = normal(random), y[i] = normal(random);
      for (int j = 0; j < LANES; ++j) rows[i][j] = normal(random);
    }
    const Floats a = load(x), b = load(y);
    same("load", a, x);
    same("lane numbers", LANE, (const int[]){0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15});
    same_each("select", select(a < b, a, b), [&](int i) { return x[i] < y[i] ? x[i] : y[i]; });
    same_each("larger", larger(a, b), [&](int i) { return x[i] > y[i] ? x[i] : y[i]; });
    same_each("scalars", 2.0f - a * 3.0f, [&](int i) { return std::fma(-x[i], 3.0f, 2.0f); }, 1e-6);
    same_each("nearest", to_floats(nearest(a * 9.0f)), [&](int i) { return std::nearbyint(x[i] * 9.0f); });
    same_each("magnitude", magnitude(a), [&](int i) { return std::fabs(x[i]); });
    same_each("exp", exp(a), [&](int i) { return std::exp(x[i]); }, 1e-5);
    same_each("first of pairs", first_of_pairs(a, b), [&](int i) { return i % 2 ? y[i / 2] : x[i / 2]; });
    same_each("last of pairs", last_of_pairs(a, b),
              [&](int i) { return i % 2 ? y[8 + i / 2] : x[8 + i / 2]; });
    float total = 0, top = -INFINITE;
    for (const float each : x) total += each, top = std::fmax(top, each);
    same_each("sum", fill(sum(a)), [&](int) { return total; }, 1e-5);
    same_each("largest", fill(largest(a)), [&](int) { return top; });
    if (any_not_less(a, a + 1.0f) || !any_not_less(a, a)) std::puts("any not less"), ++failures;
    // The bound of a single lane, and one that is no number.
    x[round % LANES] = round % 2 ? y[round % LANES] : NAN;
    const Floats beyond = b + select(LANE == int32_t(round % LANES), Floats{}, fill(1.0f));
    if (!any_not_less(select(LANE == int32_t(round % LANES), load(x), b), beyond))
      std::puts("any not less, one lane"), ++failures;

    Floats square[LANES], sums[LANES];
    for (int i = 0; i < LANES; ++i) square[i] = sums[i] = load(rows[i]);
    transpose(square);
    for (int i = 0; i < LANES; ++i)
      same_each("transpose", square[i], [&](int j) { return rows[j][i]; });
    same_each("sum each", sum_each(sums), [&](int i) {
      float all = 0;
      for (const float each : rows[i]) all += each;
      return all;
    }, 1e-5);

    bfloat16 rounded[LANES];
    store(rounded, a);
    same_each("bfloat16", load(rounded), [&](int i) {
      return bits_to_float(uint32_t(rounded[i].bits) << 16);
    });
    same_each("rounded", load(rounded) - a, [](int) { return 0.0f; }, 0.02);
    uint8_t bytes[LANES];
    narrow((Words)(LANE * 0x01010101 + 0x12345600), bytes);
    same("narrow to bytes", bytes, LANE);
    same("widen bytes", widen(bytes), LANE);
    int8_t digits[LANES];
    for (int i = 0; i < LANES; ++i) digits[i] = int8_t(i * 17 - 128);
    same("widen signed bytes", widen(digits), digits);
    int8 codes[LANES];
    store(codes, a * 20.0f);
    same_each("int8", load(codes), [&](int i) { return codes[i].value; });
    same_each("int8 rounding", load(codes), [&](int i) { return std::nearbyint(a[i] * 20.0f); });
  }
  bfloat16 odd[LANES];
  store(odd, fill(NAN));
  same("nan", load(odd), (const float[]){NAN, NAN, NAN, NAN, NAN, NAN, NAN, NAN, NAN, NAN, NAN, NAN,
                                         NAN, NAN, NAN, NAN});
  // All codes of float8 but the two that are no number.
  for (int first = 0; first < 256; first += LANES) {
    float8 codes[LANES], again[LANES];
    for (int i = 0; i < LANES; ++i) codes[i].bits = uint8_t(first + i);
    const Floats values = load(codes);
    same_each("float8", values, [&](int i) {
      const int code = (first + i) & 0x7F, exponent = code >> 3, mantissa = code & 7;
      const double size = exponent ? std::ldexp(8 + mantissa, exponent - 10) : std::ldexp(mantissa, -9);
      return code == 0x7F ? values[i] : float(first + i > 127 ? -size : size);
    });
    store(again, values);
    for (int i = 0; i < LANES; ++i)
      if ((codes[i].bits & 0x7F) != 0x7F && codes[i].bits != again[i].bits)
        std::printf("float8 %d comes back as %d\n", codes[i].bits, again[i].bits), ++failures;
  }
  return failures != 0;
}
