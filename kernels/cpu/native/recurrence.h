// States that linear recurrences carry from token to token (kernels/reference/recurrent.py).
//
// A head's state S[keys][columns] is worked on in strips of columns, which do not depend on each
// other. A row's tokens go through one strip after the other: the strip lies side by side in a tile
// of the thread's own, from the first token to the last, and each token makes one pass over it.
#pragma once

#include "parallel.h"
#include "simd.h"

namespace quire {

// So many columns that what a pass sums up stays in registers.
#ifdef __AVX512F__
constexpr int64_t STRIP_VECTORS = 4;
#else
constexpr int64_t STRIP_VECTORS = 2;
#endif
constexpr int64_t STRIP = STRIP_VECTORS * LANES;

// A strip's line.
struct Strip {
  Floats part[STRIP_VECTORS];
};

inline Strip operator*(Strip x, float by) {
  for (Floats& part : x.part) part *= by;
  return x;
}

inline Strip operator+(Strip x, const Strip& y) {
  for (int64_t v = 0; v < STRIP_VECTORS; ++v) x.part[v] += y.part[v];
  return x;
}

inline Strip operator-(Strip x, const Strip& y) {
  for (int64_t v = 0; v < STRIP_VECTORS; ++v) x.part[v] -= y.part[v];
  return x;
}

// The first `count` of a strip's values; the others are zero.
template <class T>
inline Strip load_strip(const T* p, int64_t count) {
  Strip x = {};
  for (int64_t v = 0; v * LANES < std::min(count, STRIP); ++v)
    x.part[v] = load(p + v * LANES, count - v * LANES);
  return x;
}

template <class T>
inline void store_strip(T* p, const Strip& x, int64_t count) {
  for (int64_t v = 0; v * LANES < std::min(count, STRIP); ++v)
    store(p + v * LANES, x.part[v], count - v * LANES);
}

// Lines of a strip, `stride` values from one to the next; no stride: each is the first.
template <class T>
struct Lines {
  T* first;
  int64_t stride;
};

// What the token before leaves to be done to the state: S <- decay S + write add^T.
struct Update {
  float decay;
  const float* write;  // [keys]
  Strip add;
  const float* decays = nullptr;  // [keys], where each line has its own
};

// One pass: `to` becomes what `update` makes of `from`; returns to^T read, and to^T recall where
// that is asked for. Not inlined: a token's result has the same bits wherever in a step it stands,
// which a compiler that fuses products with sums here and there in different ways would not keep.
template <bool RECALLS, bool BY_LINE>
[[gnu::noinline]] void pass_over(Lines<const float> from, Lines<float> to, int64_t keys,
                                 const Update& update, const float* read, const float* recall,
                                 Strip* sum, Strip* recalled) {
  Strip sums = {}, others = {};
  const Strip add = update.add;
  const float decay = update.decay;
  const float *in = from.first, *write = update.write;
  float* out = to.first;
  for (int64_t i = 0; i < keys; ++i, in += from.stride, out += to.stride) {
#pragma GCC unroll 4
    for (int64_t v = 0; v < STRIP_VECTORS; ++v) {
      const Floats old = load(in + v * LANES) * (BY_LINE ? update.decays[i] : decay);
      const Floats s = old + write[i] * add.part[v];
      store(out + v * LANES, s);
      sums.part[v] += s * read[i];
      if constexpr (RECALLS) others.part[v] += s * recall[i];
    }
  }
  *sum = sums;
  if constexpr (RECALLS) *recalled = others;
}

// Whether a row with this start begins with the state that lies there, or with zeros; and whether it
// leaves there what it comes to (kernels/recurrent.py).
inline bool begins_with_state(int32_t start) { return start > 0 || start < -1; }
inline bool keeps_state(int32_t start) { return start >= 0; }

// Where the strip of a head's state lies that a row works on, beginning with what it holds, or with
// zeros, and ending where it is kept, or nowhere. One that is narrower than others is padded.
class StateStrip {
 public:
  // state[keys][columns] of which this is columns [first, first + count), count <= STRIP;
  // tile[keys * STRIP] is the thread's own.
  StateStrip(float* state, int64_t keys, int64_t columns, int64_t first, int32_t start, float* tile)
      : keys_(keys), count_(std::min(columns - first, STRIP)), is_kept_(keeps_state(start)),
        kept_{state + first, columns}, tile_{tile, STRIP} {
    static constexpr float ZEROS[STRIP] = {};
    if (!begins_with_state(start)) {
      from_ = {ZEROS, 0};
    } else if (count_ == STRIP) {
      from_ = {kept_.first, kept_.stride};
    } else {
      for (int64_t i = 0; i < keys; ++i)
        store_strip(tile + i * STRIP, load_strip(kept_.first + i * columns, count_), STRIP);
      from_ = {tile, STRIP};
    }
  }

  int64_t count() const { return count_; }
  bool is_kept() const { return is_kept_; }

  // Each token's pass; the last one's leaves the state where it is kept.
  template <bool RECALLS, bool BY_LINE = false>
  Strip pass(const Update& update, const float* read, const float* recall, Strip* recalled,
             bool is_last) {
    const bool goes_home = is_last && is_kept_ && count_ == STRIP;
    const Lines<float> to = goes_home ? kept_ : tile_;
    Strip sum;
    pass_over<RECALLS, BY_LINE>(from_, to, keys_, update, read, recall, &sum, recalled);
    from_ = {to.first, to.stride};
    if (is_last && is_kept_ && !goes_home)
      for (int64_t i = 0; i < keys_; ++i)
        store_strip(kept_.first + i * kept_.stride, load_strip(tile_.first + i * STRIP, STRIP),
                    count_);
    return sum;
  }

 private:
  int64_t keys_, count_;
  bool is_kept_;
  Lines<float> kept_, tile_;
  Lines<const float> from_;
};

// log(1 + e^x), exact where e^x is far below 1, too.
inline Floats softplus(Floats x) {
  const Floats u = exp(-magnitude(x)), sum = 1.0f + u;
  const Floats rest = select(sum == 1.0f, u, log(sum) * (u / (sum - 1.0f)));
  return select(x > 0.0f, x, Floats{}) + rest;
}

inline Floats sigmoid(Floats x) { return 1.0f / (1.0f + exp(-x)); }

}  // namespace quire
