// The keys to visit: the ranges of keys that are visible by position, cut into units (chunks of a sequence,
// steps of a chunk or of a tile).
//
// A query row sees its window and the first `sink_tokens` keys of its sequence. Together, the rows of a call
// see two ranges, [0, sink_end) and [begin, end); keys between them are never loaded. Ranges are cut at
// multiples of a unit, counted from key 0, so the cuts do not depend on the rest of the batch.
#pragma once

#include "constants.h"

namespace fattn {

struct KeyRanges {
  int sink_end;  // some row sees keys [0, sink_end) and [begin, end)
  int begin;
  int end;
  int all_begin;  // every row sees keys [all_begin, all_end) and [0, all_sink_end)
  int all_end;
  int all_sink_end;

  // Whether some row may see a key of [from, to). Requires from < end.
  bool meet(int from, int to) const thread { return !fc_window || to > begin || from < sink_end; }
  // Whether every row sees all keys of [from, to).
  bool all_see(int from, int to) const thread {
    return (to <= all_end && (!fc_window || from >= all_begin)) || (fc_window && to <= all_sink_end);
  }
};

// The number of keys of a sequence, clamped to the capacity.
inline int length_of(const device int* seq_lens, constant CausalSpan& span, int batch) {
  return fc_has_seq_lens ? clamp(seq_lens[batch * span.seq_lens_stride], 0, span.capacity) : span.capacity;
}

// The ranges of the newest `q_len` rows of a sequence of `length` keys.
inline KeyRanges newest_rows(constant CausalSpan& span, int length) {
  const int first_position = length - span.q_len;
  KeyRanges ranges;
  ranges.end = length;
  // A tree mask may hide the token of the first row from the row itself.
  ranges.all_end = max(first_position + (fc_tree ? 0 : 1), 0);
  ranges.begin = 0;
  ranges.sink_end = 0;
  ranges.all_begin = 0;
  ranges.all_sink_end = 0;
  if (fc_window) {
    ranges.begin = clamp(first_position - span.window_left, 0, length);
    ranges.sink_end = min(span.sink_tokens, ranges.begin);
    ranges.all_begin = max(length - 1 - span.window_left, 0);
    ranges.all_sink_end = min(span.sink_tokens, ranges.all_end);
  }
  return ranges;
}

// The keys that a prefill row sees by its position: its window [begin, end) and the sink tokens [0,
// sink_end).
struct RowKeys {
  int begin;
  int end;
  int sink_end;
};

// The key at this distance from a position, clamped to [0, length].
inline int key_at(int position, long distance, int length) {
  return int(clamp(position + distance, 0L, long(length)));
}

inline RowKeys keys_of_row(constant PrefillParams& params, int position, int length) {
  RowKeys row;
  row.begin = 0;
  row.end = fc_causal ? clamp(position, -1, length - 1) + 1 : length;
  row.sink_end = 0;
  if (fc_window) {
    row.sink_end = min(params.sink_tokens, row.end);
    row.begin = key_at(position, -long(params.window_left), length);
    row.end = min(row.end, key_at(position, long(params.window_right) + 1, length));
  }
  return row;
}

// The ranges of neighbouring rows, from the first and the last row.
inline KeyRanges rows_between(RowKeys first, RowKeys last) {
  KeyRanges ranges;
  ranges.end = last.end;
  ranges.all_end = first.end;
  ranges.begin = 0;
  ranges.sink_end = 0;
  ranges.all_begin = 0;
  ranges.all_sink_end = 0;
  if (fc_window) {
    // Sink tokens that reach the window form one range with it.
    const bool apart = last.sink_end < first.begin;
    ranges.begin = apart ? first.begin : 0;
    ranges.sink_end = apart ? last.sink_end : 0;
    // The window of rows past the last key is empty: skip the step in which it would begin.
    const int end = max(last.end, last.sink_end);
    ranges.end = ranges.begin < end ? end : ranges.sink_end;
    ranges.all_begin = last.begin;
    ranges.all_sink_end = first.sink_end;
  }
  return ranges;
}

// The whole units in `keys`, which is not negative, so that the division is a shift.
inline int units_in(int keys, int unit) { return int(uint(keys) / uint(unit)); }

// Rounds the ranges that every row sees to whole steps of `unit` keys: a step is then seen whole if its first
// key is. With a mask but no map, no step is known to be whole.
inline KeyRanges in_whole_steps(KeyRanges ranges, int unit) {
  const bool unknown = fc_has_mask && !fc_mask_map;
  ranges.all_end = unknown ? 0 : units_in(ranges.all_end, unit) * unit;
  ranges.all_sink_end = unknown ? 0 : units_in(ranges.all_sink_end, unit) * unit;
  return ranges;
}

// The units between the two ranges, hidden from every row.
struct Gap {
  int begin;
  int end;
};

inline Gap gap_of(KeyRanges ranges, int unit) {
  Gap gap;
  gap.begin = 0;
  gap.end = 0;
  if (fc_window) {
    gap.begin = units_in(ranges.sink_end + unit - 1, unit);
    gap.end = units_in(ranges.begin, unit);
  }
  return gap;
}

// The first key of the step after the one at `key`, which may be -unit.
inline int next_step(KeyRanges ranges, int key, int unit) {
  if (!fc_window) {
    return key + unit;
  }
  const Gap gap = gap_of(ranges, unit);
  const int next = units_in(key + unit, unit);
  return (next >= gap.begin ? max(next, gap.end) : next) * unit;
}

// The units that hold a key of the ranges, in order.
struct Visits {
  int first;
  Gap gap;
  int count;

  int operator[](int visit) const thread { return past_gap(first + visit); }
  // The index of the unit that would have index `unit` without the gap.
  int past_gap(int unit) const thread { return unit + (unit < gap.begin ? 0 : gap.end - gap.begin); }
};

// The units of keys [from, to); `from` is a multiple of the unit.
inline Visits visits_of(KeyRanges ranges, int from, int to, int unit) {
  const int end = (to + unit - 1) / unit;
  Visits visits;
  visits.first = from / unit;
  visits.gap = gap_of(ranges, unit);
  if (fc_window) {
    visits.gap.begin = clamp(visits.gap.begin, visits.first, end);
    visits.gap.end = clamp(visits.gap.end, visits.gap.begin, end);
  }
  visits.count = end - visits.first - (visits.gap.end - visits.gap.begin);
  return visits;
}

// Cuts the steps of a prefill tile into parts of equal size, one per threadgroup, and restricts the ranges to
// part `part`. Returns the first key of its first step; ranges.end if there are fewer parts. The size depends
// neither on params.parts nor on the capacity of a cache. The last part takes the rest, since a packed
// sequence may have more keys than max_seqlen_k.
inline int take_part(thread KeyRanges& ranges, constant PrefillParams& params, int part, int unit) {
  const Visits steps = visits_of(ranges, 0, ranges.end, unit);
  const int equal = (steps.count + params.max_parts - 1) / params.max_parts;
  const int size = clamp(equal, params.min_part, params.largest_part);
  const int first = part * size;
  if (first >= steps.count) {
    return ranges.end;
  }
  if (part + 1 < params.parts && first + size < steps.count) {
    ranges.end = steps[first + size] * unit;
    ranges.all_end = min(ranges.all_end, ranges.end);
  }
  return steps[first] * unit;
}

}  // namespace fattn
