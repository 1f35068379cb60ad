// A step's inputs from the state of its rows (kernels/reference/inputs.py).
#include <algorithm>

#include "program.h"

// Arrays as in kernels/inputs.py; tables[slots][width].
extern "C" void quire_build_inputs(int64_t rows, const int32_t* slots, const int32_t* query_start,
                                   const int32_t* starts, const int32_t* token_ids,
                                   const int64_t* newest, const int32_t* tables, int64_t width,
                                   int64_t block_size, int64_t* input_ids, int64_t* positions,
                                   int64_t* slot_mapping, int32_t* seq_lens,
                                   int64_t* next_positions) {
  for (int64_t row = 0; row < rows; ++row) {
    const int32_t* table = tables + slots[row] * width;
    int64_t position = starts[row];
    for (int64_t i = query_start[row]; i < query_start[row + 1]; ++i, ++position) {
      input_ids[i] = token_ids[i] < 0 ? newest[slots[row]] : token_ids[i];
      positions[i] = position;
      slot_mapping[i] =
          position < 0 ? -1 : table[position / block_size] * block_size + position % block_size;
    }
    seq_lens[row] = static_cast<int32_t>(position);
    next_positions[row] = position;
  }
}

namespace {
template <class T>
void places_behind(const void* x, int64_t begin, int64_t count, void* out) {
  for (int64_t i = 0; i < count; ++i)
    static_cast<T*>(out)[i] =
        static_cast<T>(std::max<int64_t>(static_cast<const T*>(x)[i] - begin, 0));
}
}  // namespace

// x, out[count], integers of `bytes` each: out[i] = max(x[i] - begin, 0).
extern "C" void quire_places_behind(const void* x, int64_t bytes, int64_t begin, int64_t count,
                                    void* out) {
  if (bytes == sizeof(int32_t))
    places_behind<int32_t>(x, begin, count, out);
  else
    places_behind<int64_t>(x, begin, count, out);
}

QUIRE_RECORDED(quire_build_inputs)
QUIRE_RECORDED(quire_places_behind)
