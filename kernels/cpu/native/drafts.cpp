// Guesses and what becomes of them, row by row (kernels/reference/drafts.py).
#include "program.h"

// Judged tokens lie group by group: sizes[groups] of each, is_kept[i] for the draft behind token i.
extern "C" void quire_accept_drafts(const bool* is_kept, const int64_t* token_ids,
                                    const int32_t* sizes, int64_t groups, const int32_t* slots,
                                    int64_t* newest, int64_t* accepted) {
  int64_t begin = 0;
  for (int64_t group = 0; group < groups; ++group) {
    int64_t count = 0;
    while (count < sizes[group] - 1 && is_kept[begin + count]) ++count;
    accepted[group] = count;
    newest[slots[begin]] = token_ids[begin + count];
    begin += sizes[group];
  }
}

// From one pass of a draft model to the next. rows[chosen] of its `count` rows have chosen a token,
// which is kept; the first `next` of them read it in the next pass, behind where they stood.
// packed: slots, starts, token ids of `count` rows; target: of `next`, and may be the same.
extern "C" void quire_pass_on(const int32_t* packed, int64_t count, const int64_t* token_ids,
                              const int32_t* rows, int64_t chosen, int64_t* guesses, int64_t next,
                              int32_t* target, int64_t* positions) {
  for (int64_t i = 0; i < chosen; ++i) guesses[i] = token_ids[rows[i]];
  for (int64_t i = 0; i < next; ++i) {
    target[i] = packed[rows[i]];
    target[next + i] = packed[count + rows[i]] + 1;
    target[2 * next + i] = static_cast<int32_t>(guesses[i]);
    positions[i] = target[next + i] + 1;
  }
}
QUIRE_RECORDED(quire_pass_on)
