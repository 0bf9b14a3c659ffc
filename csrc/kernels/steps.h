// Which keys are visited: the ranges that position alone leaves open, cut into units (chunks of a sequence,
// steps of a chunk).
//
// A query row sees the keys of its window and the first `sink_tokens` keys of its sequence. The rows of a
// call together see two ranges, [0, sink_end) and [begin, end); what lies between them is never loaded.
// Ranges are cut at multiples of a unit, counted from key 0, so that the cuts do not depend on the rest of
// the batch.
#pragma once

#include "constants.h"

namespace fattn {

struct KeyRanges {
  int sink_end;  // keys [0, sink_end) and [begin, end) are seen by some row
  int begin;
  int end;
  int all_begin;  // keys [all_begin, all_end) are in the window of every row
  int all_end;
  int sink_tokens;

  // Whether some row sees a key of the sequence by its position.
  bool hold(int key) const thread { return key >= begin || key < sink_end; }
  // Whether every row sees all keys of [from, to).
  bool all_see(int from, int to) const thread {
    return to <= all_end && (from >= all_begin || to <= sink_tokens);
  }
};

// How many keys a sequence has. Lengths out of range are cut to what there is.
inline int length_of(const device int* seq_lens, constant CausalSpan& span, int batch) {
  return fc_has_seq_lens ? clamp(seq_lens[batch * span.seq_lens_stride], 0, span.capacity) : span.capacity;
}

// The ranges of the newest `q_len` rows of a sequence of `length` keys.
inline KeyRanges newest_rows(constant CausalSpan& span, int length) {
  const int first_position = length - span.q_len;
  KeyRanges ranges;
  ranges.end = length;
  // Under a tree mask the first row's own token may be hidden from it.
  ranges.all_end = max(first_position + (fc_tree ? 0 : 1), 0);
  ranges.begin = 0;
  ranges.sink_end = 0;
  ranges.all_begin = 0;
  ranges.sink_tokens = 0;
  if (fc_window) {
    ranges.begin = clamp(first_position - span.window_left, 0, length);
    ranges.sink_end = min(span.sink_tokens, ranges.begin);
    ranges.all_begin = max(length - 1 - span.window_left, 0);
    ranges.sink_tokens = span.sink_tokens;
  }
  return ranges;
}

// The units (chunks of a sequence, steps of a chunk) that hold a key of the ranges, in order.
struct Visits {
  int first;
  int before_gap;  // how many there are until the gap
  int gap;
  int count;

  int operator[](int visit) const thread { return first + visit + (visit < before_gap ? 0 : gap); }
};

// Of the keys [from, to); `from` is a multiple of the unit.
inline Visits visits_of(KeyRanges ranges, int from, int to, int unit) {
  const int units = (to - from + unit - 1) / unit;
  Visits visits;
  visits.first = from / unit;
  visits.before_gap = 0;
  visits.gap = 0;
  if (fc_window) {
    visits.before_gap = clamp((ranges.sink_end - from + unit - 1) / unit, 0, units);
    visits.gap = clamp(ranges.begin / unit - visits.first, visits.before_gap, units) - visits.before_gap;
  }
  visits.count = units - visits.gap;
  return visits;
}

}  // namespace fattn
