// Short causal convolutions over each row's tokens (kernels/reference/recurrent.py).
#include "parallel.h"
#include "program.h"
#include "recurrence.h"
#include "scratch.h"

namespace quire {
namespace {

constexpr int64_t BLOCK = 512;      // channels that a thread takes at a time
constexpr int64_t AHEAD = 3;        // tokens whose inputs are fetched while one is computed
constexpr int64_t SMALL = 1 << 14;  // values: no work for a second thread

enum class ConvKind : int32_t { PLAIN, SILU, GATED };

template <class T>
struct Conv {
  ConvKind kind;
  const T* x;
  int64_t stride;  // from one row of x to the next
  const T *weight, *bias;
  T* state;
  int64_t channels, width;
  T* y;
};

// One token in channels [c, c + count), count <= LANES; taps, gate and next, which some later token
// reads, begin at the first channel.
template <class T>
inline void convolve(const Conv<T>& conv, const T* const* taps, const T* next, const T* gate,
                     int64_t c, int64_t count, T* y) {
  __builtin_prefetch(next + c);
  Floats total = conv.bias ? load(conv.bias + c, count) : Floats{};
  for (int64_t tap = 0; tap < conv.width; ++tap)
    total += load(taps[tap] + c, count) * load(conv.weight + tap * conv.channels + c, count);
  if (conv.kind == ConvKind::SILU) total *= sigmoid(total);
  if (gate) total *= load(gate + c, count);
  store(y + c, total, count);
}

// A row's tokens, in channels [first, last) of which the state is `state`.
template <class T>
void conv_block(const Conv<T>& conv, T* state, int64_t begin, int64_t end, int32_t start,
                int64_t first, int64_t last, T* tail, const T** taps) {
  const int64_t channels = conv.channels, kept = conv.width - 1, count = end - begin;
  const bool is_gated = conv.kind == ConvKind::GATED;
  // What is convolved: x, or products that lie meanwhile where the results will.
  const T* in = is_gated ? conv.y + begin * channels : conv.x + begin * conv.stride;
  const int64_t stride = is_gated ? channels : conv.stride;
  if (is_gated)
    for (int64_t t = begin; t < end; ++t)
      for (int64_t c = first; c < last; c += LANES) {
        const T* token = conv.x + t * conv.stride + c;
        store(conv.y + t * channels + c,
              load(token, last - c) * load(token + 2 * channels, last - c), last - c);
      }
  static constexpr T ZEROS[BLOCK] = {};
  // The channels as they were at token t of this step, or before it.
  const auto input = [&](int64_t t) {
    if (t >= 0) return in + t * stride + first;
    return begins_with_state(start) ? state + (kept + t) * channels + first : ZEROS;
  };
  for (int64_t i = 0; i < kept; ++i)
    std::copy_n(input(count - kept + i), last - first, tail + i * BLOCK);
  // From the last token on: results overwrite products that later tokens have read.
  for (int64_t t = count - 1; t >= 0; --t) {
    for (int64_t tap = 0; tap <= kept; ++tap) taps[tap] = input(t - kept + tap) - first;
    const T* gate = is_gated ? conv.x + (begin + t) * conv.stride + channels : nullptr;
    T* y = conv.y + (begin + t) * channels;
    const T* next = in + std::max<int64_t>(t - kept - AHEAD, 0) * stride;
    int64_t c = first;
    for (; c + LANES <= last; c += LANES) convolve(conv, taps, next, gate, c, LANES, y);
    if (c < last) convolve(conv, taps, next, gate, c, last - c, y);
  }
  if (keeps_state(start))
    for (int64_t i = 0; i < kept; ++i)
      std::copy_n(tail + i * BLOCK, last - first, state + i * channels + first);
}

template <class T>
void short_conv(const Conv<T>& conv, int64_t rows, const int32_t* slots, const int32_t* query_start,
                const int32_t* starts) {
  const int64_t blocks = (conv.channels + BLOCK - 1) / BLOCK, kept = conv.width - 1;
  const auto make = [&] {
    return [&, tail = Scratch<T>(kept * BLOCK),
            taps = Scratch<const T*>(conv.width)](int64_t item) {
      const int64_t row = item / blocks, first = item % blocks * BLOCK;
      conv_block(conv, conv.state + slots[row] * kept * conv.channels, query_start[row],
                 query_start[row + 1], starts[row], first, std::min(first + BLOCK, conv.channels),
                 tail.get(), taps.get());
    };
  };
  const bool is_small = query_start[rows] * conv.channels < SMALL;
  parallel_runs(rows * blocks, make, is_small ? 1 : MOST_THREADS);
}

}  // namespace
}  // namespace quire

extern "C" {

// Arrays as in the twin; the rows of x lie x_stride values apart; bias may be null.
void quire_short_conv(int32_t dtype, quire::ConvKind kind, const void* x, int64_t x_stride,
                      const void* weight, const void* bias, void* state, int64_t rows,
                      const int32_t* slots, const int32_t* query_start, const int32_t* starts,
                      int64_t channels, int64_t width, void* y) {
  quire::with_type(dtype, [&]<class T>() {
    const quire::Conv<T> conv{kind,
                              static_cast<const T*>(x),
                              x_stride,
                              static_cast<const T*>(weight),
                              static_cast<const T*>(bias),
                              static_cast<T*>(state),
                              channels,
                              width,
                              static_cast<T*>(y)};
    quire::short_conv(conv, rows, slots, query_start, starts);
  });
}

}  // extern "C"

QUIRE_RECORDED(quire_short_conv)
