// A sampling step, row by row (kernels/reference/sampling_step.py says what is computed).
#include <cmath>
#include <limits>
#include <vector>

#include "parallel.h"
#include "program.h"
#include "simd.h"

namespace quire {

// Parameters by slot, and what the rows' bias, penalties and grammars read; null: there is none.
struct Sampling {
  const float* temperature;
  const int32_t* top_k;
  const float *top_p, *min_p, *presence, *frequency, *repetition;
  const int64_t* seed;
  const int32_t *count_line, *mask_line, *bias_begin, *bias_end;
  const int32_t* output;  // [lines][vocab]
  const uint8_t* prompt;  // [lines][vocab]
  const int32_t* bias_ids;
  const float* bias_values;
  const int64_t* bias_until;
  const uint32_t* masks;  // [lines][ceil(vocab / 32)]
  int64_t vocab;
};

namespace {

constexpr int64_t SMALL = 1 << 15;  // logits below which a second thread is a loss
constexpr int64_t CHUNK = 64;       // tokens of which one maximum is kept
constexpr float LOWEST = std::numeric_limits<float>::lowest();  // less is forbidden

struct Best {
  int64_t token;
  float score;
};

void add_bias(const Sampling& s, int64_t slot, int64_t position, float* logits) {
  for (int64_t i = s.bias_begin[slot]; i < s.bias_end[slot]; ++i)
    if (position < s.bias_until[i]) logits[s.bias_ids[i]] += s.bias_values[i];
}

void penalise(const Sampling& s, int64_t slot, float* logits) {
  const int32_t* output = s.output + s.count_line[slot] * s.vocab;
  const uint8_t* prompt = s.prompt + s.count_line[slot] * s.vocab;
  const float presence = s.presence[slot], frequency = s.frequency[slot];
  const float repetition = s.repetition[slot];
  for (int64_t i = 0; i < s.vocab; ++i) {
    const float factor = (output[i] > 0) | prompt[i] ? repetition : 1.0f;
    const float changed = logits[i] > 0 ? logits[i] / factor : logits[i] * factor;
    logits[i] = changed - output[i] * frequency - (output[i] > 0 ? presence : 0.0f);
  }
}

void forbid(const Sampling& s, int64_t slot, float* logits) {
  const int64_t count = (s.vocab + 31) / 32;
  const uint32_t* words = s.masks + s.mask_line[slot] * count;
  for (int64_t word = 0; word < count; ++word) {
    const uint32_t bits = words[word];
    if (bits == ~0u) continue;  // most, within a string
    float* x = logits + 32 * word;
    const int64_t size = std::min<int64_t>(32, s.vocab - 32 * word);
    if (!bits)
      std::fill_n(x, size, -INFINITE);
    else
      for (int64_t i = 0; i < size; ++i) x[i] = bits >> i & 1 ? x[i] : -INFINITE;
  }
}

// The one token that a mask allows; -1 where it allows several.
int64_t only_one(const Sampling& s, int64_t slot) {
  const int64_t count = (s.vocab + 31) / 32;
  const uint32_t* words = s.masks + s.mask_line[slot] * count;
  int64_t found = -1;
  for (int64_t word = 0; word < count; ++word) {
    const uint32_t bits = words[word];
    if (!bits) continue;
    if (found >= 0 || (bits & (bits - 1))) return -1;
    found = 32 * word + __builtin_ctz(bits);
  }
  return found;
}

inline Floats load_scores(const float* x, int64_t count) {
  if (count >= LANES) return load(x);
  return select(LANE < int32_t(count), load(x, count), fill(-INFINITE));
}

// The first of the largest; of a row that holds nan, the first nan.
Best arg_max(const float* x, int64_t count) {
  Floats tops = fill(-INFINITE), best = tops;
  Ints places = LANE, broken = {};
  for (int64_t i = 0; i < count; i += LANES) {
    tops = load_scores(x + i, count - i);
    broken |= tops != tops;
    const Ints is_better = tops > best;
    places = select(is_better, LANE + int32_t(i), places);
    best = select(is_better, tops, best);
  }
  for (int lane = 0; lane < LANES; ++lane)
    if (broken[lane]) {
      const float* first = std::find_if(x, x + count, [](float each) { return each != each; });
      return {first - x, *first};
    }
  Best found{places[0], best[0]};
  for (int lane = 1; lane < LANES; ++lane)
    if (best[lane] > found.score || (best[lane] == found.score && places[lane] < found.token))
      found = {places[lane], best[lane]};
  return found;
}

// A row's largest logit as draws compare it: where it overflows, unlike tokens become equal.
inline float over_temperature(const Sampling& s, int64_t slot, float logit) {
  return s.temperature[slot] > 0.0f ? logit / s.temperature[slot] : logit;
}

// logits /= temperature; returns the largest of each chunk.
std::vector<float>& heat(float* logits, int64_t vocab, float temperature) {
  thread_local std::vector<float> tops;
  tops.clear();
  for (int64_t begin = 0; begin < vocab; begin += CHUNK) {
    Floats top = fill(-INFINITE);
    for (int64_t i = begin; i < std::min(vocab, begin + CHUNK); i += LANES) {
      const Floats x = load_scores(logits + i, vocab - i) / temperature;
      store(logits + i, x, vocab - i);
      top = larger(x, top);
    }
    tops.push_back(largest(top));
  }
  return tops;
}

// The count-th largest entry. The count-th largest of the chunks' maxima is no larger: what lies
// below that need not be looked at.
float largest_but(const float* x, int64_t vocab, const std::vector<float>& tops, int64_t count) {
  thread_local std::vector<float> entries;
  const auto nth = [count](std::vector<float>& values) {
    std::nth_element(values.begin(), values.begin() + (count - 1), values.end(),
                     std::greater<float>());
    return values[count - 1];
  };
  const auto chunks = static_cast<int64_t>(tops.size());
  entries = tops;
  const float bound = count <= chunks ? nth(entries) : -INFINITE;
  entries.clear();
  for (int64_t chunk = 0; chunk < chunks; ++chunk)
    if (tops[chunk] >= bound)
      for (int64_t i = chunk * CHUNK; i < std::min(vocab, (chunk + 1) * CHUNK); ++i)
        if (x[i] >= bound) entries.push_back(x[i]);
  return nth(entries);
}

// The smallest of the fewest entries, likeliest first, whose share of exp(x) over all entries at
// or above the floor reaches top_p. The entries' weights are summed in bins of equal width below
// the best; only the bin in which the share is reached is sorted.
float nucleus(const float* x, int64_t vocab, float floor, float best, float top_p) {
  constexpr int BINS = 1024;
  constexpr float BINS_PER_UNIT = 32.0f;
  const auto bin_of = [best](float score) {
    const float below = (best - score) * BINS_PER_UNIT;
    // Never outside the bins, even if it is nan.
    return below < BINS - 1 ? static_cast<int>(std::max(below, 0.0f)) : BINS - 1;
  };
  double masses[BINS] = {}, total = 0.0;
  for (int64_t i = 0; i < vocab; i += LANES) {
    const Floats scores = load_scores(x + i, vocab - i);
    if (largest(scores) < floor) continue;
    const Floats weights = exp(scores - best);
    for (int64_t lane = 0; lane < LANES; ++lane)
      if (scores[lane] >= floor && scores[lane] > -INFINITE)
        masses[bin_of(scores[lane])] += weights[lane];
  }
  for (const double mass : masses) total += mass;
  const double wanted = top_p * total;
  double mass = 0.0;
  int bin = 0;
  while (bin < BINS - 1 && mass + masses[bin] < wanted) mass += masses[bin++];
  thread_local std::vector<float> entries;
  entries.clear();
  for (int64_t i = 0; i < vocab; ++i)
    if (x[i] >= floor && x[i] > -INFINITE && bin_of(x[i]) == bin) entries.push_back(x[i]);
  std::sort(entries.begin(), entries.end(), std::greater<float>());
  float last = best;  // kept in any case
  for (const float entry : entries) {
    if (mass >= wanted) break;
    last = entry;
    mass += std::exp(entry - best);
  }
  return last;
}

// The smallest logit that min_p, then top_k, then top_p keep.
float threshold(const Sampling& s, int64_t slot, const float* x, float best,
                const std::vector<float>& tops) {
  const int64_t top_k = s.top_k[slot];
  float floor = best + std::log(s.min_p[slot]);  // log 0 = -inf: off
  if (top_k > 0 && top_k < s.vocab) floor = std::max(floor, largest_but(x, s.vocab, tops, top_k));
  return s.top_p[slot] >= 1.0f ? floor : nucleus(x, s.vocab, floor, best, s.top_p[slot]);
}

inline Words mix(Words x) {  // MurmurHash3's fmix32
  x = (x ^ (x >> 16)) * 0x85EBCA6B;
  x = (x ^ (x >> 13)) * 0xC2B2AE35;
  return x ^ (x >> 16);
}

inline uint64_t mix(uint64_t z) {  // splitmix64's finaliser
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EB;
  return z ^ (z >> 31);
}

// Standard exponential noise at one place of a text.
struct Noise {
  uint32_t low, high;

  Noise(int64_t seed, int64_t position) {
    constexpr uint64_t GOLDEN = 0x9E3779B97F4A7C15;
    const uint64_t keys = mix(mix(seed + GOLDEN) + position * GOLDEN);
    low = uint32_t(keys), high = uint32_t(keys >> 32);
  }

  // Its logarithm for sixteen tokens.
  Floats log_of(Ints tokens) const;
};

inline Floats Noise::log_of(Ints tokens) const {
  const Words hashed = mix(mix((Words)tokens * 0x9E3779B9 ^ low) + high) & 0x7FFFFFFF;
  Floats u = (to_floats((Ints)hashed) + 0.5f) * 0x1p-31f;
  const float most = 1.0f - 0x1p-24f;
  u = select(u > most, fill(most), u);
  // -log(1 - u) for small u too: what 1 - u loses in rounding, the quotient puts back (Kahan).
  const Floats rest = 1.0f - u;
  const Floats noise = select(rest == 1.0f, u, -log(rest) * (u / (1.0f - rest)));
  return log(noise);
}

// Gumbel-max over the entries at or above the threshold that are not forbidden.
int64_t draw(const float* x, int64_t vocab, float threshold, int64_t seed, int64_t position) {
  const float least = std::max(threshold, LOWEST);
  const Noise noise(seed, position);
  Floats best = fill(-INFINITE);
  Ints places = {};
  for (int64_t i = 0; i < vocab; i += LANES) {
    const Floats logits = load_scores(x + i, vocab - i);
    if (largest(logits) < least) continue;
    const Ints tokens = LANE + int32_t(i);
    const Floats noisy = logits - noise.log_of(tokens);
    const Floats scores = select(logits >= least, noisy, fill(-INFINITE));
    const Ints is_better = scores > best;
    places = select(is_better, tokens, places);
    best = select(is_better, scores, best);
  }
  Best found{places[0], best[0]};
  for (int lane = 1; lane < LANES; ++lane)
    if (best[lane] > found.score || (best[lane] == found.score && places[lane] < found.token))
      found = {places[lane], best[lane]};
  return found.token;
}

// The `count` largest scores of a row, the first of equals first; -1 where fewer are finite. `score`
// gives those of sixteen tokens from the first of them on.
template <class Score>
void rank(int64_t vocab, int64_t count, int64_t* tokens, Score score) {
  thread_local std::vector<float> scores;
  scores.assign(count, -INFINITE);
  std::fill_n(tokens, count, -1);
  for (int64_t i = 0; i < vocab; i += LANES) {
    const Floats some = score(i);
    if (!(largest(some) > scores.back())) continue;
    for (int64_t lane = 0; lane < LANES; ++lane) {
      if (!(some[lane] > scores.back())) continue;
      int64_t at = count - 1;
      for (; at > 0 && some[lane] > scores[at - 1]; --at) {
        scores[at] = scores[at - 1];
        tokens[at] = tokens[at - 1];
      }
      scores[at] = some[lane];
      tokens[at] = i + lane;
    }
  }
}

// What a row without truncation would choose, and what if that were forbidden, and so on.
void candidates_of_row(const Sampling& s, int64_t slot, int64_t position, const float* logits,
                       int64_t count, int64_t* tokens) {
  thread_local std::vector<float> own;
  own.assign(logits, logits + s.vocab);
  float* x = own.data();
  if (s.bias_ids) add_bias(s, slot, position, x);
  if (s.output && s.count_line[slot] >= 0) penalise(s, slot, x);
  if (!std::isfinite(over_temperature(s, slot, arg_max(x, s.vocab).score))) {
    std::fill_n(tokens, count, -1);
    return;
  }
  if (s.temperature[slot] <= 0.0f) {
    rank(s.vocab, count, tokens, [&](int64_t i) { return load_scores(x + i, s.vocab - i); });
    return;
  }
  heat(x, s.vocab, s.temperature[slot]);
  const Noise noise(s.seed[slot], position);
  rank(s.vocab, count, tokens, [&](int64_t i) {
    const Floats heated = load_scores(x + i, s.vocab - i);
    const Floats noisy = heated - noise.log_of(LANE + int32_t(i));
    return select(heated >= LOWEST, noisy, fill(-INFINITE));
  });
}

void sample_row(const Sampling& s, int64_t slot, int64_t position, float* logits, int64_t* token,
                bool* is_finite) {
  if (s.bias_ids) add_bias(s, slot, position, logits);
  if (s.output && s.count_line[slot] >= 0) penalise(s, slot, logits);
  if (s.masks && s.mask_line[slot] >= 0) {
    if (const int64_t only = only_one(s, slot); only >= 0) {
      *token = only;
      *is_finite = std::isfinite(over_temperature(s, slot, logits[only]));
      return;
    }
    forbid(s, slot, logits);
  }
  const Best best = arg_max(logits, s.vocab);
  *token = best.token;
  *is_finite = std::isfinite(over_temperature(s, slot, best.score));
  if (!*is_finite || s.temperature[slot] <= 0.0f) return;
  const auto& tops = heat(logits, s.vocab, s.temperature[slot]);
  const float least = threshold(s, slot, logits, logits[best.token], tops);
  *token = draw(logits, s.vocab, least, s.seed[slot], position);
}

}  // namespace
}  // namespace quire

// logits[rows][vocab], overwritten; slots and positions of the rows.
extern "C" void quire_sample(const quire::Sampling* sampling, float* logits, const int32_t* slots,
                             const int64_t* positions, int64_t rows, int64_t* token_ids,
                             bool* is_finite) {
  const int64_t vocab = sampling->vocab;
  quire::parallel_items(rows, rows * vocab < quire::SMALL, [&](int64_t row) {
    quire::sample_row(*sampling, slots[row], positions[row], logits + row * vocab,
                      token_ids + row, is_finite + row);
  });
}
QUIRE_RECORDED(quire_sample)

// Of some rows of logits[][vocab], which stay as they are: slots, positions and `count` tokens each.
extern "C" void quire_candidates(const quire::Sampling* sampling, const float* logits,
                                 const int64_t* at, const int32_t* slots, const int64_t* positions,
                                 int64_t rows, int64_t count, int64_t* token_ids) {
  const int64_t vocab = sampling->vocab;
  quire::parallel_items(rows, rows * vocab < quire::SMALL, [&](int64_t row) {
    quire::candidates_of_row(*sampling, slots[row], positions[row], logits + at[row] * vocab,
                             count, token_ids + row * count);
  });
}
