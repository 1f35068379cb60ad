// Recurrences of linear attention and state spaces (kernels/reference/recurrent.py).
#include <cmath>

#include "program.h"
#include "recurrence.h"
#include "scratch.h"

namespace quire {
namespace {

constexpr float L2_EPS = 1e-6f;
constexpr int64_t SMALL = 1 << 16;  // of multiplications: no work for a second thread
constexpr int64_t GRAIN = 1024;     // factors

// Of a step's rows; see kernels/inputs.py.
struct Rows {
  int64_t count;
  const int32_t *slots, *query_start, *starts;

  int64_t tokens() const { return query_start[count]; }
};

inline int64_t padded(int64_t count) { return (count + LANES - 1) / LANES * LANES; }

// Calls body(row, head, first column of a strip, memory[floats]) for all of them.
template <class Body>
void each_strip(const Rows& rows, int64_t heads, int64_t keys, int64_t columns, int64_t floats,
                Body body) {
  const int64_t strips = (columns + STRIP - 1) / STRIP;
  const bool is_small = rows.tokens() * heads * keys * columns < SMALL;
  const auto make = [&] {
    return [&, memory = Scratch<float>(floats)](int64_t item) {
      const int64_t row = item / strips / heads, head = item / strips % heads;
      body(row, head, item % strips * STRIP, memory.get());
    };
  };
  parallel_runs(rows.count * heads * strips, make, is_small ? 1 : MOST_THREADS);
}

struct Delta {
  int64_t key_heads, value_heads, key_dim, value_dim;
  bool allows_negative, decays_channels;
  float least_log_decay;  // 0: decays have no bound

  int64_t decays() const { return decays_channels ? key_dim : 1; }  // of a head
  int64_t keys() const { return key_heads * key_dim; }
  int64_t channels() const { return 2 * keys() + value_heads * value_dim; }
};

// To length 1, times `scale`; y is padded by zeros to whole vectors.
template <class T>
inline void to_unit(const T* x, int64_t dim, float scale, float* y) {
  Floats squares = {};
  for (int64_t d = 0; d < dim; d += LANES) {
    const Floats part = load(x + d, dim - d);
    squares += part * part;
    store(y + d, part);
  }
  const float factor = scale / std::sqrt(sum(squares) + L2_EPS);
  for (int64_t d = 0; d < dim; d += LANES) store(y + d, load(y + d) * factor);
}

inline float dot(const float* x, const float* y, int64_t dim) {
  Floats products = {};
  for (int64_t d = 0; d < dim; d += LANES) products += load(x + d) * load(y + d);
  return sum(products);
}

// Of each token its heads' decays, then their betas: out[n][heads * (decays + 1)].
template <class T>
void delta_factors(const T* gates, int64_t stride, const float* log_a, const float* dt_bias,
                   int64_t tokens, const Delta& shape, float* out) {
  const int64_t heads = shape.value_heads, decays = shape.decays(), all = heads * decays;
  const float most = shape.allows_negative ? 2.0f : 1.0f, least = shape.least_log_decay;
  parallel_rows(tokens, std::max<int64_t>(1, GRAIN / all), [=](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const T* gate = gates + t * stride;
      float* factors = out + t * (all + heads);
      const auto decay = [&](int64_t at, int64_t rest, Floats log_rate) {
        const Floats raw = load(gate + heads + at, rest) + load(dt_bias + at, rest);
        const Floats rate = exp(log_rate);
        const Floats log_decay =
            least != 0.0f ? least * sigmoid(rate * raw) : -rate * softplus(raw);
        store(factors + at, exp(log_decay), rest);
      };
      for (int64_t h = 0; h < heads; ++h)
        for (int64_t i = 0; decays > 1 && i < decays; i += LANES)
          decay(h * decays + i, decays - i, fill(log_a[h]));
      for (int64_t h = 0; h < heads; h += LANES) {
        const int64_t rest = heads - h;
        if (decays == 1) decay(h, rest, load(log_a + h, rest));
        store(factors + all + h, most * sigmoid(load(gate + h, rest)), rest);
      }
    }
  });
}

// One strip of a row's head. The update of a token is done by the next one's pass: with S that of
// the token before, r = S^T k and p = S^T q,
//   add = beta (v - decay r);  y = decay p + (k q) add;  S <- decay S + k add^T.
// With a decay for each line, these are part of k and q instead.
template <bool BY_LINE, class T>
void delta_strip(const T* mixed, const float* factors, float* state, int64_t begin, int64_t end,
                 int32_t start, const Delta& shape, int64_t head, int64_t first, float* memory,
                 T* y) {
  const int64_t dim = shape.key_dim, room = padded(dim), heads = shape.value_heads;
  const int64_t key_head = head / (heads / shape.key_heads), all = heads * shape.decays();
  float *key = memory, *last_key = key + room, *query = last_key + room, *zeros = query + room;
  float *read_by = zeros + room, *recall_by = read_by + room, *ones = recall_by + room;
  std::fill_n(zeros, room, 0.0f);
  std::fill_n(ones, room, 1.0f);
  StateStrip strip(state, dim, shape.value_dim, first, start, ones + room);
  const float scale = 1.0f / std::sqrt(float(dim));
  Update update{1.0f, zeros, {}, ones};
  for (int64_t t = begin; t < end; ++t) {
    const T* token = mixed + t * shape.channels();
    to_unit(token + key_head * dim, dim, scale, query);
    to_unit(token + shape.keys() + key_head * dim, dim, 1.0f, key);
    const float* factor = factors + t * (all + heads);
    const float* decays = factor + head * shape.decays();
    const float beta = factor[all + head];
    const int64_t at = head * shape.value_dim + first;
    const Strip value = load_strip(token + 2 * shape.keys() + at, strip.count());
    Strip recalled, read;
    float decay = decays[0];
    if constexpr (BY_LINE) {
      for (int64_t i = 0; i < dim; i += LANES) {
        const Floats by = load(decays + i, dim - i);
        store(read_by + i, load(query + i) * by);
        store(recall_by + i, load(key + i) * by);
      }
      read = strip.template pass<true, true>(update, read_by, recall_by, &recalled, false);
      decay = 1.0f;
    } else {
      read = strip.template pass<true>(update, query, key, &recalled, false);
    }
    update = {decay, key, (value - recalled * decay) * beta, decays};
    const Strip result = read * decay + update.add * dot(key, query, dim);
    store_strip(y + t * heads * shape.value_dim + at, result, strip.count());
    std::swap(key, last_key);
  }
  if (!strip.is_kept()) return;
  Strip nothing;
  strip.template pass<true, BY_LINE>(update, zeros, zeros, &nothing, true);
}

template <class T>
void gated_delta(const T* mixed, const T* gates, int64_t gates_stride, const float* log_a,
                 const float* dt_bias, float* state, const Rows& rows, const Delta& shape, T* y) {
  const int64_t heads = shape.value_heads, dim = shape.key_dim;
  const Scratch<float> factors(rows.tokens() * heads * (shape.decays() + 1));
  delta_factors(gates, gates_stride, log_a, dt_bias, rows.tokens(), shape, factors.get());
  const auto run = [&]<bool BY_LINE>() {
    const auto body = [&](int64_t row, int64_t head, int64_t first, float* memory) {
      float* line = state + (rows.slots[row] * heads + head) * dim * shape.value_dim;
      delta_strip<BY_LINE>(mixed, factors.get(), line, rows.query_start[row],
                           rows.query_start[row + 1], rows.starts[row], shape, head, first, memory,
                           y);
    };
    each_strip(rows, heads, dim, shape.value_dim, 7 * padded(dim) + dim * STRIP, body);
  };
  if (shape.decays() > 1)
    run.template operator()<true>();
  else
    run.template operator()<false>();
}

struct Scan {
  int64_t heads, groups, head_dim, state_size;
  float least, most;  // of a time step

  int64_t inner() const { return heads * head_dim; }
  int64_t channels() const { return inner() + 2 * groups * state_size; }
};

// Of each token and head its decay, then its time step: out[n][2][heads].
template <class T>
void scan_factors(const T* steps, int64_t stride, const float* log_a, const float* dt_bias,
                  int64_t tokens, const Scan& shape, float* out) {
  const int64_t heads = shape.heads;
  const Floats least = fill(shape.least), most = fill(shape.most);
  parallel_rows(tokens, std::max<int64_t>(1, GRAIN / heads), [=](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      float* factors = out + t * 2 * heads;
      for (int64_t h = 0; h < heads; h += LANES) {
        const int64_t rest = heads - h;
        const Floats raw = load(steps + t * stride + h, rest) + load(dt_bias + h, rest);
        Floats dt = softplus(raw);
        dt = select(dt < least, least, select(dt > most, most, dt));
        store(factors + h, exp(-exp(load(log_a + h, rest)) * dt), rest);
        store(factors + heads + h, dt, rest);
      }
    }
  });
}

template <class T>
void scan_strip(const T* mixed, const float* factors, float skip, float* state, int64_t begin,
                int64_t end, int32_t start, const Scan& shape, int64_t head, int64_t first,
                float* memory, T* y) {
  const int64_t size = shape.state_size, room = padded(size), heads = shape.heads;
  const int64_t group = head / (heads / shape.groups), at = head * shape.head_dim + first;
  float *write = memory, *read = write + room;
  StateStrip strip(state, size, shape.head_dim, first, start, read + room);
  for (int64_t t = begin; t < end; ++t) {
    const T* token = mixed + t * shape.channels();
    const T* shared = token + shape.inner() + group * size;
    for (int64_t i = 0; i < size; i += LANES) {
      store(write + i, load(shared + i, size - i));
      store(read + i, load(shared + shape.groups * size + i, size - i));
    }
    const Strip x = load_strip(token + at, strip.count());
    const float* factor = factors + t * 2 * heads + head;
    const Update update{factor[0], write, x * factor[heads]};
    const Strip found = strip.pass<false>(update, read, nullptr, nullptr, t + 1 == end);
    store_strip(y + t * shape.inner() + at, found + x * skip, strip.count());
  }
}

template <class T>
void selective_scan(const T* mixed, const T* steps, int64_t steps_stride, const float* log_a,
                    const float* dt_bias, const float* skip, float* state, const Rows& rows,
                    const Scan& shape, T* y) {
  const int64_t heads = shape.heads, size = shape.state_size;
  const Scratch<float> factors(rows.tokens() * 2 * heads);
  scan_factors(steps, steps_stride, log_a, dt_bias, rows.tokens(), shape, factors.get());
  const auto body = [&](int64_t row, int64_t head, int64_t first, float* memory) {
    float* line = state + (rows.slots[row] * heads + head) * size * shape.head_dim;
    scan_strip(mixed, factors.get(), skip[head], line, rows.query_start[row],
               rows.query_start[row + 1], rows.starts[row], shape, head, first, memory, y);
  };
  each_strip(rows, heads, size, shape.head_dim, 2 * padded(size) + size * STRIP, body);
}

// Mamba-1's: a channel has a rate for each of its states.
struct Channels {
  int64_t state_size, channels;
  const float *rates, *skip;  // [state_size][channels] and [channels]
};

// What a step's tokens bring, and how far the rows of each lie apart.
template <class T>
struct Brought {
  const T *x, *steps, *write, *read;
  int64_t steps_stride, write_stride, read_stride;
};

// One strip of a row's channels: S[state_size][STRIP] from the first token to the last.
template <class T>
void channel_strip(const Brought<T>& brought, float* state, int64_t begin, int64_t end,
                   int32_t start, const Channels& shape, int64_t first, float* memory, T* y) {
  const int64_t size = shape.state_size, room = padded(size), channels = shape.channels;
  const int64_t count = std::min(STRIP, channels - first);
  float *write = memory, *read = write + room, *tile = read + room;
  const bool has_state = begins_with_state(start);
  for (int64_t s = 0; s < size; ++s)
    for (int64_t c = 0; c < count; c += LANES)
      store(tile + s * STRIP + c,
            has_state ? load(state + s * channels + first + c, count - c) : Floats{});
  for (int64_t t = begin; t < end; ++t) {
    for (int64_t i = 0; i < size; i += LANES) {
      store(write + i, load(brought.write + t * brought.write_stride + i, size - i));
      store(read + i, load(brought.read + t * brought.read_stride + i, size - i));
    }
    for (int64_t c = 0; c < count; c += LANES) {
      const int64_t at = first + c, rest = count - c;
      const Floats x = load(brought.x + t * channels + at, rest);
      const Floats dt = softplus(load(brought.steps + t * brought.steps_stride + at, rest));
      const Floats added = dt * x;
      Floats result = x * load(shape.skip + at, rest);
      for (int64_t s = 0; s < size; ++s) {
        float* place = tile + s * STRIP + c;
        const Floats decay = exp(load(shape.rates + s * channels + at, rest) * dt);
        const Floats next = load(place) * decay + added * write[s];
        store(place, next);
        result += next * read[s];
      }
      store(y + t * channels + at, result, rest);
    }
  }
  if (!keeps_state(start)) return;
  for (int64_t s = 0; s < size; ++s)
    for (int64_t c = 0; c < count; c += LANES)
      store(state + s * channels + first + c, load(tile + s * STRIP + c), count - c);
}

template <class T>
void channel_scan(const Brought<T>& brought, float* state, const Rows& rows, const Channels& shape,
                  T* y) {
  const int64_t size = shape.state_size;
  const auto body = [&](int64_t row, int64_t, int64_t first, float* memory) {
    channel_strip(brought, state + rows.slots[row] * size * shape.channels, rows.query_start[row],
                  rows.query_start[row + 1], rows.starts[row], shape, first, memory, y);
  };
  each_strip(rows, 1, size, shape.channels, 2 * padded(size) + size * STRIP, body);
}

}  // namespace
}  // namespace quire

extern "C" {

// Arrays as in the twin; the rows of gates lie gates_stride values apart.
void quire_gated_delta(int32_t dtype, const void* mixed, const void* gates, int64_t gates_stride,
                       const float* log_a, const float* dt_bias, float* state, int64_t rows,
                       const int32_t* slots, const int32_t* query_start, const int32_t* starts,
                       int64_t key_heads, int64_t value_heads, int64_t key_dim, int64_t value_dim,
                       bool allows_negative, bool decays_channels, float least_log_decay,
                       void* y) {
  const quire::Delta shape{key_heads,       value_heads,     key_dim,        value_dim,
                           allows_negative, decays_channels, least_log_decay};
  quire::with_type(dtype, [&]<class T>() {
    quire::gated_delta(static_cast<const T*>(mixed), static_cast<const T*>(gates), gates_stride,
                       log_a, dt_bias, state, {rows, slots, query_start, starts}, shape,
                       static_cast<T*>(y));
  });
}

// Arrays as in the twin; the rows of steps lie steps_stride values apart.
void quire_selective_scan(int32_t dtype, const void* mixed, const void* steps, int64_t steps_stride,
                          const float* log_a, const float* dt_bias, const float* skip, float* state,
                          int64_t rows, const int32_t* slots, const int32_t* query_start,
                          const int32_t* starts, int64_t heads, int64_t groups, int64_t head_dim,
                          int64_t state_size, float least, float most, void* y) {
  const quire::Scan shape{heads, groups, head_dim, state_size, least, most};
  quire::with_type(dtype, [&]<class T>() {
    quire::selective_scan(static_cast<const T*>(mixed), static_cast<const T*>(steps), steps_stride,
                          log_a, dt_bias, skip, state, {rows, slots, query_start, starts}, shape,
                          static_cast<T*>(y));
  });
}

// Arrays as in the twin; rows of steps, write and read lie as many values apart.
void quire_channel_scan(int32_t dtype, const void* x, const void* steps, int64_t steps_stride,
                        const void* write, int64_t write_stride, const void* read,
                        int64_t read_stride, const float* rates, const float* skip, float* state,
                        int64_t rows, const int32_t* slots, const int32_t* query_start,
                        const int32_t* starts, int64_t state_size, int64_t channels, void* y) {
  quire::with_type(dtype, [&]<class T>() {
    const quire::Brought<T> brought{
        static_cast<const T*>(x), static_cast<const T*>(steps), static_cast<const T*>(write),
        static_cast<const T*>(read), steps_stride, write_stride, read_stride};
    quire::channel_scan(brought, state, {rows, slots, query_start, starts},
                        {state_size, channels, rates, skip}, static_cast<T*>(y));
  });
}

}  // extern "C"

QUIRE_RECORDED(quire_gated_delta)
QUIRE_RECORDED(quire_selective_scan)
QUIRE_RECORDED(quire_channel_scan)
