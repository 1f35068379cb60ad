// Calls that were recorded: each is a function and its arguments as words of eight bytes, so that a
// list of them can be made in Python and run from here (kernels/cpu/program.py).
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

namespace quire {

using Word = int64_t;

template <class T>
inline T from_word(Word word) {
  if constexpr (std::is_pointer_v<T>) {
    return reinterpret_cast<T>(word);
  } else if constexpr (std::is_same_v<T, float>) {
    float value;  // in the word's first four bytes
    std::memcpy(&value, &word, sizeof value);
    return value;
  } else {
    return static_cast<T>(word);
  }
}

template <class... Arguments, size_t... I>
inline void apply(void (*function)(Arguments...), const Word* words, std::index_sequence<I...>) {
  function(from_word<Arguments>(words[I])...);
}

template <class... Arguments>
inline void apply(void (*function)(Arguments...), const Word* words) {
  apply(function, words, std::index_sequence_for<Arguments...>{});
}

}  // namespace quire

// Lets calls of an exported function be recorded: `name_words` takes its arguments as words.
#define QUIRE_RECORDED(name) \
  extern "C" void name##_words(const quire::Word* words) { quire::apply(name, words); }
