// One step of decode_wide: a simdgroup reads its columns of a few keys and values and updates the online
// softmax of all rows. Partial scores are summed through threadgroup memory.
#pragma once

#include "decode_rows.h"
#include "../common/columns.h"
#include "../common/scales.h"

namespace fattn {

FATTN_CONSTEXPR bool kValueInKey = FATTN_VALUE_IN_KEY;  // the value is the first columns of the key

// Columns that are read once for both products, and columns of the key alone.
FATTN_CONSTEXPR int kSharedDim = kValueInKey ? kValueDim : 0;
typedef ColumnShare<0, kSharedDim> SharedColumns;
typedef ColumnShare<kSharedDim, kHeadDim> KeyOnlyColumns;
typedef ColumnShare<0, kValueDim> ValueColumns;
typedef RunOf<kSharedDim, kHeadDim, kKvFormat>::type KeyRun;
typedef RunOf<0, kValueDim, kKvFormat>::type ValueRun;
FATTN_CONSTEXPR int kQueryFragments = SharedColumns::kFragments + KeyOnlyColumns::kFragments;
FATTN_CONSTEXPR int kOutFragments = ValueColumns::kFragments;

typedef AttentionState<kRowGroups, kKeyFragments, kOutFragments> ColumnAttention;

// This simdgroup's columns of the query as the right factor: the fragments are transposed.
struct QueryColumns {
  OperandFragment fragments[kRowGroups][kQueryFragments];

  QueryColumns() thread {}

  // Loads the two rows that this lane has in each group.
  void load(thread const Operands& operands, constant DecodeParams& params, RowBlock block, int batch,
            ushort simdgroup, LanePosition at) thread {
    FATTN_UNROLL
    for (int r = 0; r < kRowGroups; r++) {
      const int pair = r * 8 + at.pair * 2;
      const PackedRow first = packed_row(params, block, pair);
      const PackedRow second = packed_row(params, block, pair + 1);
      load_pair(r, first.of_query(operands.query, params, batch),
                second.of_query(operands.query, params, batch), simdgroup, at);
    }
  }

 private:
  // `first`, `second`: null if the row does not exist.
  void load_pair(int r, const device Element* first, const device Element* second, ushort simdgroup,
                 LanePosition at) thread {
    FATTN_UNROLL
    for (int f = 0; f < kQueryFragments; f++) {
      const int i = 2 * f + (at.row & 1);
      const int column = i < SharedColumns::kAll
                             ? SharedColumns::column_of(i, at.row / 2, simdgroup)
                             : KeyOnlyColumns::column_of(i - SharedColumns::kAll, at.row / 2, simdgroup);
      set_elements(fragments[r][f], first && column >= 0 ? Operand(first[column]) : Operand(0.0f),
                   second && column >= 0 ? Operand(second[column]) : Operand(0.0f));
    }
  }
};

// Adds the products of the columns in `run` to key fragment k, from query fragment `first` on.
template <int N>
inline void multiply_keys(thread ColumnAttention& attention, thread const QueryColumns& query, int k,
                          int first, int fragments, thread const Operand (&run)[N]) {
  FATTN_UNROLL
  for (int f = 0; f < fragments; f++) {
    OperandFragment key;
    set_elements(key, run[2 * f], run[2 * f + 1]);
    FATTN_UNROLL
    for (int r = 0; r < kRowGroups; r++) {
      simdgroup_multiply_accumulate(attention.score[r][k], key, query.fragments[r][first + f],
                                    attention.score[r][k]);
    }
  }
}

FATTN_CONSTEXPR int kStepScores = step_scores(kRowGroups, kTileKeys);

// Products and scores that the simdgroups exchange in a step.
struct SharedScores {
  threadgroup float* products;  // [simdgroup][key fragment][row group][key][row], summed over its columns
  threadgroup float* scores;    // [row group][key fragment][row][key]

  void store_products(thread const ColumnAttention& attention, ushort simdgroup, LanePosition at) const
      thread {
    FATTN_UNROLL
    for (int k = 0; k < kKeyFragments; k++) {
      FATTN_UNROLL
      for (int r = 0; r < kRowGroups; r++) {
        threadgroup float* block = products + simdgroup * kStepScores + (k * kRowGroups + r) * 64;
        FATTN_UNROLL
        for (int e = 0; e < 2; e++) {
          block[at.row * 8 + at.pair * 2 + e] = attention.score[r][k].thread_elements()[e];
        }
      }
    }
  }

  void take_scores(thread ColumnAttention& attention, LanePosition at) const thread {
    FATTN_UNROLL
    for (int r = 0; r < kRowGroups; r++) {
      FATTN_UNROLL
      for (int k = 0; k < kKeyFragments; k++) {
        FATTN_UNROLL
        for (int e = 0; e < 2; e++) {
          attention.score[r][k].thread_elements()[e] = scores[index_of(r, k, e, at)];
        }
      }
    }
  }

 private:
  static int index_of(int r, int k, int e, LanePosition at) {
    return (r * kKeyFragments + k) * 64 + at.row * 8 + at.pair * 2 + e;
  }
};

// The packed row of all scores that a thread computes.
inline int score_row(ushort thread_index) { return thread_index / 64 % kRowGroups * 8 + thread_index % 8; }

// The sequence of a chunk, with the visibility of this thread's row.
inline Sequence sequence_of(thread const Operands& operands, constant DecodeParams& params, RowBlock block,
                            thread const WorkItem& item, ushort thread_index) {
  const PackedRow packed = packed_row(params, block, score_row(thread_index));
  Sequence sequence;
  sequence.set(operands, params, block.kv_head, item, packed);
  sequence.set_table(operands, params, item.batch * params.block_table_batch_stride);
  sequence.set_limits(limits_of(item, params.span));
  set_visible(sequence.visible, params, sequence.limits);
  const float slope = fc_alibi ? slope_of(packed, item.batch, operands, params) : 0.0f;
  sequence.modifiers = sequence.modifiers_of(params, sequence.visible.limit[0], slope);
  return sequence;
}

// Computes this thread's scores from the products of all simdgroups.
template <bool kWhole>
inline void finish_scores(thread const SharedScores& shared, thread const SharedScales& scales,
                          thread const Sequence& sequence, int first_key, ushort thread_index) {
  static_assert(kThreads % (64 * kRowGroups) == 0, "a thread has one row");
  FATTN_UNROLL
  for (int n = 0; n < kStepScores; n += kThreads) {
    const int i = n + thread_index;
    if (i >= kStepScores) {
      continue;
    }
    float product = 0.0f;
    FATTN_UNROLL
    for (int s = 0; s < kSimdgroups; s++) {
      product += shared.products[s * kStepScores + i];
    }
    const int k = i / 64 / kRowGroups;
    const int key_in_fragment = i / 8 % 8;
    const int key = first_key + k * 8 + key_in_fragment;
    if (kRowScales && fc_scales) {
      product = scaled_product(product, scales.of_key(k * 8 + key_in_fragment));
    }
    const int to = (i / 64 % kRowGroups * kKeyFragments + k) * 64 + i % 8 * 8 + key_in_fragment;
    float score = modified_score(product, sequence.modifiers, 0, key);
    if (!kWhole) {
      const bool exists = sequence.table.block_of(key) >= 0 && sequence.table.holds(key);
      const bool seen = sees_key(score, sequence.visible, sequence.mask, 0, key, exists);
      score = seen ? score : -INFINITY;
    }
    shared.scores[to] = score;
  }
}

// One step of kTileKeys keys. !kWhole: some key may not exist, or some row may not see it.
template <bool kWhole>
inline void wide_step(thread ColumnAttention& attention, thread const QueryColumns& query,
                      thread const Sequence& sequence, thread const SharedScores& shared,
                      thread const SharedScales& scales, thread const StepKeys& step,
                      constant DecodeParams& params, ushort thread_index, ushort simdgroup, LanePosition at) {
  // The scale of the value of this thread's key.
  float value_scale = 1.0f;
  if (kRowScales && fc_scales && thread_index < kTileKeys) {
    const KeyPlace place = step.find_own(sequence.table, thread_index);
    const bool read = kWhole || place.exists;
    scales.put_key(thread_index, sequence.key.row_scale(place, params.key_scales, read));
    value_scale = sequence.value.row_scale(place, params.value_scales, read);
  }
  ValueRun values[kKeyFragments];
  attention.clear_scores();
  FATTN_UNROLL
  for (int k = 0; k < kKeyFragments; k++) {
    const KeyPlace place = step.find(sequence.table, k, at.row);
    const bool read = kWhole || place.exists;
    KeyRun keys;
    if (read) {
      const StoredRow row = sequence.key.row_at(place, params.key, params.key_scales);
      keys.read(row, simdgroup, at);
      StoredRow value_row = row;
      if (!kValueInKey) {
        value_row = sequence.value.row_at(place, params.value, params.value_scales);
      }
      values[k].read(value_row, simdgroup, at);
    } else {
      keys.clear();
      values[k].clear();
    }
    if (kValueInKey) {
      Operand run[ValueRun::kElements];
      values[k].unpack(run);
      multiply_keys(attention, query, k, 0, SharedColumns::kFragments, run);
    }
    Operand run[KeyRun::kElements];
    keys.unpack(run);
    multiply_keys(attention, query, k, SharedColumns::kFragments, KeyOnlyColumns::kFragments, run);
  }
  shared.store_products(attention, simdgroup, at);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  finish_scores<kWhole>(shared, scales, sequence, step.first_key, thread_index);
  if (kRowScales && fc_scales && thread_index < kTileKeys) {
    scales.put_value(thread_index, value_scale);  // the previous scales have been read
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  shared.take_scores(attention, at);
  const SeenKeys seen = kWhole ? all_seen() : attention.seen_keys(at);
  attention.to_weights();
  FATTN_UNROLL
  for (int k = 0; k < kKeyFragments; k++) {
    scale_weights(attention, scales, k, seen, at);
    if (!kWhole && !seen.value(k)) {
      values[k].clear();
    }
    Operand run[ValueRun::kElements];
    values[k].unpack(run);
    attention.multiply_values(k, run);
  }
}

}  // namespace fattn
