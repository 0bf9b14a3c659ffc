// What stands aside in threadgroup memory while a simdgroup of decode works on the steps of a chunk, which
// want the registers: what the end of the chunk and the next one want, what only steps with hidden keys do,
// and what a step asks for once.
#pragma once

#include "decode_rows.h"

// Whether steps have so much else to hold that they read back where K and V begin.
constant bool fc_first_aside = fc_has_mask || fc_paged;

namespace fattn {

// Where a threadgroup's results of a chunk go.
struct ResultPlace {
  uint first_row;  // of all results
  int rows;        // as many of the threadgroup's rows as there are
};

struct SetAside {
  volatile threadgroup int* words;   // kSetAsideWords of this simdgroup
  volatile threadgroup long* first;  // kSetAsideLongs of it

  // By one lane, as all that is put here. `column` of the grid: a key-value head and a row block.
  void put_work(int column, int batch, int part, thread const Share& share) const thread {
    words[0] = column;
    words[1] = batch;
    words[2] = part;
    words[3] = share.index;
    words[4] = share.batch;
    words[5] = share.part;
    words[6] = share.left;
    words[7] = share.dealing;
  }
  int column() const thread { return words[0]; }
  int batch() const thread { return words[1]; }
  int part() const thread { return words[2]; }
  Share share() const thread {
    Share share;
    share.index = words[3];
    share.batch = words[4];
    share.part = words[5];
    share.left = words[6];
    share.dealing = words[7];
    return share;
  }

  void put_place(ResultPlace place) const thread {
    words[8] = int(place.first_row);
    words[9] = place.rows;
  }
  ResultPlace place() const thread {
    ResultPlace place;
    place.first_row = uint(words[8]);
    place.rows = words[9];
    return place;
  }

  void put_limits(KeyLimits limits) const thread {
    words[10] = limits.length;
    words[11] = limits.begin;
    words[12] = limits.sink_end;
    words[13] = limits.window_left;
    words[14] = limits.sink_tokens;
    words[15] = limits.first_draft;
  }
  KeyLimits limits() const thread {
    KeyLimits limits;
    limits.length = words[10];
    limits.begin = words[11];
    limits.sink_end = words[12];
    limits.window_left = words[13];
    limits.sink_tokens = words[14];
    limits.first_draft = words[15];
    return limits;
  }

  // Where K and V begin, and the sequence's entries of the block table, for steps to read back before they
  // want it.
  void put_first(thread const Sequence& sequence, long entry) const thread {
    if (fc_first_aside) {
      first[0] = sequence.key.first;
      first[1] = sequence.value.first;
      first[2] = entry;
    }
  }
  long first_entry() const thread { return fc_paged ? first[2] : 0; }
  void take_first_key(thread Sequence& sequence) const thread {
    if (fc_first_aside) {
      sequence.key.first = first[0];
    }
  }
  void take_first_value(thread Sequence& sequence) const thread {
    if (fc_first_aside) {
      sequence.value.first = first[1];
    }
  }

  // By one lane of each row: what belongs to its head, which is the same for all chunks.
  void put_head(PackedRow packed, constant DecodeParams& params, const device float* sinks,
                LanePosition at) const thread {
    if (fc_sinks && packed.exists) {
      row(at)[4] = as_type<int>(sinks[packed.head * params.sinks_stride]);
    }
  }
  float sink(LanePosition at) const thread { return as_type<float>(row(at)[4]); }
  // The sink of row `row` of the threadgroup, from the words of all simdgroups.
  static float sink_of(int row, const volatile threadgroup int* all_words) {
    return as_type<float>(all_words[row / 8 * kSetAsideWords + row_word(row % 8) + 4]);
  }

  // By one lane of each row: what belongs to its head and to the chunk's sequence.
  void put_slope(float slope, LanePosition at) const thread { row(at)[5] = as_type<int>(slope); }

  // By one lane of each row: what it sees of the chunk's sequence.
  void put_row(thread const Sequence& sequence, LanePosition at) const thread {
    row(at)[0] = sequence.visible.limit[0];
    if (fc_tree) {
      row(at)[1] = int(sequence.visible.drafts[0]);
    }
    if (fc_has_mask) {
      put_long(row(at) + 2, sequence.visible.mask_row[0]);
    }
  }
  Visibility visible(constant DecodeParams& params, LanePosition at) const thread {
    Visibility visible;
    visible.limit[0] = row(at)[0];
    if (fc_tree) {
      visible.drafts[0] = uint(row(at)[1]);
    }
    if (fc_has_mask) {
      visible.mask_row[0] = long_at(row(at) + 2);
    }
    set_visible(visible, params, limits());
    return visible;
  }
  ScoreModifiers modifiers(constant DecodeParams& params, LanePosition at) const thread {
    return modifiers_of(params, row(at)[0], fc_alibi ? as_type<float>(row(at)[5]) : 0.0f);
  }

 private:
  static int row_word(int row) { return 16 + row * 6; }
  volatile threadgroup int* row(LanePosition at) const thread { return words + row_word(at.row); }

  static void put_long(volatile threadgroup int* to, long value) {
    to[0] = int(value);
    to[1] = int(value >> 32);
  }
  static long long_at(const volatile threadgroup int* from) { return long(from[1]) << 32 | uint(from[0]); }
};

}  // namespace fattn
