// What a step leaves for the next (kernels/reference/feedback.py).
#include "program.h"

// Arrays as in the twin; output[lines][vocab] or null.
extern "C" void quire_feed_back(int64_t* newest, const int32_t* slots, const int64_t* token_ids,
                                int64_t rows, const int32_t* count_line, int32_t* output,
                                int64_t vocab) {
  for (int64_t row = 0; row < rows; ++row) {
    newest[slots[row]] = token_ids[row];
    const int64_t line = count_line[slots[row]];
    if (output && line >= 0) ++output[line * vocab + token_ids[row]];
  }
}
QUIRE_RECORDED(quire_feed_back)
