// The query rows of decode, packed from all query heads that share a key-value head: their visible keys, and
// the place of their results.
#pragma once

#define FATTN_DRAFTS uint  // at most 16 rows

#include "../common/operands.h"
#include "../common/out_rows.h"
#include "../common/results.h"
#include "../common/schedule.h"
#include "../common/scores.h"

namespace fattn {

FATTN_CONSTEXPR int kPackedRows = kRowGroups * kGroupRows;  // per threadgroup

// The rows of a threadgroup: one column of the grid.
struct RowBlock {
  int kv_head;
  int first_row;  // among the rows of that head
};

inline RowBlock row_block(constant DecodeParams& params, int column) {
  RowBlock block;
  block.kv_head = column / params.row_blocks;
  block.first_row = column % params.row_blocks * kPackedRows;
  return block;
}

struct PackedRow {
  int head;
  int row;  // of the head's query
  bool exists;

  const device Element* of_query(const device Element* query, constant DecodeParams& params, long batch) const
      thread {
    return exists ? query + batch * params.query.batch + head * params.query.head + row * params.query.row
                  : nullptr;
  }
};

// `row`: index in the threadgroup.
inline PackedRow packed_row(constant DecodeParams& params, RowBlock block, int row) {
  const int index = block.first_row + row;
  PackedRow packed;
  packed.head = block.kv_head * params.group_size + index / params.span.q_len;
  packed.row = index % params.span.q_len;
  packed.exists = index < params.group_size * params.span.q_len;
  return packed;
}

// The keys of a sequence that its rows see by position.
struct KeyLimits {
  int length;
  int begin;  // keys [begin, length) and [0, sink_end) are visible to some row
  int sink_end;
  int window_left;
  int sink_tokens;
  int first_draft;
};

inline KeyLimits limits_of(thread const WorkItem& item, constant CausalSpan& span) {
  KeyLimits limits;
  limits.length = item.length;
  limits.begin = item.ranges.begin;
  limits.sink_end = item.ranges.sink_end;
  limits.window_left = span.window_left;
  limits.sink_tokens = span.sink_tokens;
  limits.first_draft = item.length - span.q_len;
  return limits;
}

// The state that the steps of a sequence share: its keys, and their visibility for this lane's row.
struct Sequence {
  StoredOperand key;
  StoredOperand value;
  const device uchar* mask;
  KeyTable table;
  KeyLimits limits;  // decode: set only in steps with hidden keys
  Visibility visible;
  ScoreModifiers modifiers;

  void set(thread const Operands& operands, constant DecodeParams& params, int kv_head,
           thread const WorkItem& item, PackedRow packed) thread {
    const long batch = item.batch;
    key.batch = value.batch = item.batch;
    key.head = value.head = kv_head;
    key.elements = operands.key;
    value.elements = operands.value;
    key.first = kv_head * params.key.head + (fc_paged ? 0 : batch * params.key.batch);
    value.first = kv_head * params.value.head + (fc_paged ? 0 : batch * params.value.batch);
    if (fc_scales) {
      key.scales = operands.key_scales;
      value.scales = operands.value_scales;
    }
    table.length = item.length;
    table.begin = item.ranges.begin;
    table.sink_end = item.ranges.sink_end;
    const int position = item.length - params.span.q_len + packed.row;
    visible.limit[0] = packed.exists ? position + 1 : 0;
    if (fc_tree) {
      visible.drafts[0] = uint(operands.tree_mask[batch * params.tree_mask_batch_stride +
                                                  packed.row * params.tree_mask_row_stride]);
    }
    mask = operands.attn_mask;
    visible.mask_row[0] = packed.exists ? batch * params.mask.batch + packed.head * params.mask.head +
                                              packed.row * params.mask.row
                                        : 0;
  }

  // Sets the table for block look-ups. decode sets it in every step, because keeping it would take registers.
  // `first`: the sequence's first entry.
  void set_table(thread const Operands& operands, constant DecodeParams& params, long first) thread {
    if (fc_paged) {
      table.blocks = operands.block_tables + first;
      table.num_blocks = params.num_blocks;
      table.entry_stride = params.block_table_entry_stride;
    }
  }

  // Sets the limits that only steps with hidden keys need.
  void set_limits(KeyLimits of_sequence) thread {
    limits = of_sequence;
    table.length = limits.length;
    table.begin = limits.begin;
    table.sink_end = limits.sink_end;
  }

  // The score modifiers of a row of this sequence. `limit`: its position + 1, or 0 if it does not exist.
  ScoreModifiers modifiers_of(constant DecodeParams& params, int limit, float slope) const thread {
    ScoreModifiers modifiers;
    set_uniform(modifiers, params);
    modifiers.slope[0] = slope;
    modifiers.position[0] = limit - 1;
    return modifiers;
  }
};

// Whether every row sees all keys of a step. With pages and a window, a branch between the two conditions
// would keep a copy of the output (Mesa's count: 50 half registers, so 384 threads on a core of M1 and M2
// instead of 512).
inline bool is_whole_step(thread const StepKeys& step, thread const KeyRanges& ranges) {
  const bool seen = !fc_has_mask && ranges.all_see(step.first_key, step.first_key + kTileKeys);
  return step.have_blocks() & seen;
}

// Derives the other members from the row's limit, which is its position + 1.
inline void set_visible(thread Visibility& visible, constant DecodeParams& params, KeyLimits limits) {
  visible.window_begin[0] = visible.limit[0] - 1 - limits.window_left;
  visible.sink_end[0] = min(limits.sink_tokens, visible.limit[0]);
  visible.first_draft = limits.first_draft;
  visible.mask_key_stride = params.mask.key;
  visible.mask_keys = params.span.capacity;
}

// The ALiBi slope of a row of sequence `batch`, in score units.
inline float slope_of(PackedRow packed, int batch, thread const Operands& operands,
                      constant DecodeParams& params) {
  const long place = batch * params.alibi_slopes_batch_stride + packed.head * params.alibi_slopes_stride;
  const float slope = packed.exists ? float_at(operands.alibi_slopes, place, fc_slopes_kind) : 0.0f;
  return finite_score(slope, slope * params.slope_scale);
}

// The learned logit of a row's head.
inline float sink_of(PackedRow packed, thread const Operands& operands, constant DecodeParams& params) {
  return float_at(operands.sinks, packed.head * params.sinks_stride, fc_sinks_kind);
}

// The rows of a chunk's results in `out` or in a partial result: indices that fit in 32 bits.
struct ChunkResults {
  uint first_row;  // among all results
  int rows;        // existing rows from there on, perhaps more than the threadgroup has
};

inline ChunkResults chunk_results(constant DecodeParams& params, RowBlock block,
                                  thread const WorkItem& item) {
  const uint sequence = fc_split ? uint(item.part) * params.batch + item.batch : uint(item.batch);
  const uint first = (sequence * params.q_heads + block.kv_head * params.group_size) * params.span.q_len;
  ChunkResults results;
  results.first_row = first + block.first_row;
  results.rows = params.group_size * params.span.q_len - block.first_row;
  return results;
}

// The results of this lane's rows, as store_rows() uses them.
struct ResultRows {
  Operands operands;
  constant DecodeParams* params;
  RowBlock block;
  ChunkResults chunk;
  int own_row;  // this lane's row of fragment 0, in the threadgroup

  bool exists(int r) const thread { return own_row + r * 8 < chunk.rows; }
  long place(int r) const thread {
    if (!exists(r)) {
      return -1;
    }
    const uint rows_per_sequence = params->q_heads * params->span.q_len;
    const uint row = fc_split ? sum_place(r) : out_row(sum_place(r), params->span.q_len, rows_per_sequence);
    return long(row) * kValueDim;
  }
  uint sum_place(int r) const thread { return chunk.first_row + own_row + r * 8; }
  float sink(int r) const thread {
    return sink_of(packed_row(*params, block, own_row + r * 8), operands, *params);
  }
};

// The final results of sequence `batch`. own_row is not set.
inline ResultRows results_of_sequence(thread const Operands& operands, constant DecodeParams& params,
                                      RowBlock block, int batch) {
  WorkItem all;
  all.batch = batch;
  all.part = 0;
  ResultRows results;
  results.operands = operands;
  results.params = &params;
  results.block = block;
  results.chunk = chunk_results(params, block, all);
  return results;
}

}  // namespace fattn
