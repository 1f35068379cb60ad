// Memory of one call.
#pragma once

#include <cstdint>
#include <cstdlib>

namespace quire {

// Memory for one call, not initialised, on the boundary of a cache line.
template <class T>
class Scratch {
 public:
  explicit Scratch(int64_t count)
      : data_(static_cast<T*>(std::aligned_alloc(64, (count * sizeof(T) + 63) / 64 * 64))) {}
  ~Scratch() { std::free(data_); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  T* get() const { return data_; }

 private:
  T* data_;
};

}  // namespace quire
