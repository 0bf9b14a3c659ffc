// The query rows of a decode: those of all query heads that share a key-value head, packed; what they see of
// their sequence, and where their results go.
#pragma once

#include "../common/keys.h"
#include "../common/out_rows.h"
#include "../common/schedule.h"
#include "../common/scores.h"

namespace fattn {

struct PackedRow {
  int head;
  int row;  // of the query
  bool exists;

  const device Element* of_query(const device Element* query, constant DecodeParams& params, long batch) const
      thread {
    return exists ? query + batch * params.query.batch + head * params.query.head + row * params.query.row
                  : nullptr;
  }
};

inline PackedRow packed_row(constant DecodeParams& params, int kv_head, int index) {
  PackedRow packed;
  packed.head = kv_head * params.group_size + index / params.span.q_len;
  packed.row = index % params.span.q_len;
  packed.exists = index < params.group_size * params.span.q_len;
  return packed;
}

// What tells by position which keys of a sequence its rows see.
struct KeyLimits {
  int length;
  int begin;  // some row sees keys [begin, length) and [0, sink_end)
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

// What the steps of a sequence share: its keys, and what this lane's row may see of them.
struct Sequence {
  StoredOperand key;
  StoredOperand value;
  const device uchar* mask;
  KeyTable table;
  KeyLimits limits;  // there in steps with hidden keys only
  Visibility visible;
  ScoreModifiers modifiers;

  void set_keys(constant DecodeParams& params, const device Stored* keys, const device Stored* values,
                int kv_head, thread const WorkItem& item) thread {
    const long batch = item.batch;
    key.batch = value.batch = item.batch;
    key.head = value.head = kv_head;
    table.length = item.length;
    key.elements = keys;
    value.elements = values;
    key.first = kv_head * params.key.head + (fc_paged ? 0 : batch * params.key.batch);
    value.first = kv_head * params.value.head + (fc_paged ? 0 : batch * params.value.batch);
  }

  // What a look-up in the block table wants. Steps ask for it again: held, it would take registers. `first`:
  // of this sequence's entries.
  void set_table(constant DecodeParams& params, const device int* block_tables, long first) thread {
    if (fc_paged) {
      table.blocks = block_tables + first;
      table.num_blocks = params.num_blocks;
      table.entry_stride = params.block_table_entry_stride;
    }
  }

  void set_row(constant DecodeParams& params, const device uchar* attn_mask, const device long* tree_mask,
               thread const WorkItem& item, PackedRow packed) thread {
    const long batch = item.batch;
    const int position = item.length - params.span.q_len + packed.row;
    visible.limit[0] = packed.exists ? position + 1 : 0;
    if (fc_tree) {
      visible.drafts[0] =
          uint(tree_mask[batch * params.tree_mask_batch_stride + packed.row * params.tree_mask_row_stride]);
    }
    mask = attn_mask;
    visible.mask_row[0] =
        batch * params.mask.batch + packed.head * params.mask.head + packed.row * params.mask.row;
  }

  // Which keys there are for all rows, which only steps with hidden keys want to know.
  void set_limits(KeyLimits of_sequence) thread {
    limits = of_sequence;
    table.length = limits.length;
    table.begin = limits.begin;
    table.sink_end = limits.sink_end;
  }
};

// The rest of what a row sees, whose limit is known.
inline void set_visible(thread Visibility& visible, constant DecodeParams& params, KeyLimits limits) {
  visible.window_begin[0] = visible.limit[0] - 1 - limits.window_left;
  visible.sink_end[0] = min(limits.sink_tokens, visible.limit[0]);
  visible.first_draft = limits.first_draft;
  visible.mask_key_stride = params.mask.key;
}

// In sequence `batch`.
inline float slope_of(PackedRow packed, int batch, constant DecodeParams& params,
                      const device uchar* alibi_slopes) {
  const long place = batch * params.alibi_slopes_batch_stride + packed.head * params.alibi_slopes_stride;
  const float slope = packed.exists ? float_at(alibi_slopes, place, fc_slopes_kind) : 0.0f;
  return finite_score(slope, slope * params.slope_scale);
}

// `limit` as in Visibility.
inline ScoreModifiers modifiers_of(constant DecodeParams& params, int limit, float slope) {
  ScoreModifiers modifiers;
  set_uniform(modifiers, params);
  modifiers.slope[0] = slope;
  modifiers.position[0] = limit - 1;
  return modifiers;
}

// Of all results, the first that a chunk has of a key-value head. There are fewer than 2^32, since each is a
// row of the output or of a partial one.
inline uint first_result_row(constant DecodeParams& params, int kv_head, thread const WorkItem& item) {
  const uint sequence = fc_split ? uint(item.part) * params.batch + item.batch : uint(item.batch);
  return (sequence * params.q_heads + kv_head * params.group_size) * params.span.q_len;
}

// Where the rows of a chunk's result go, counted from `first_row` of all results.
struct ResultRows {
  device Element* out;
  device float* lse;
  device float* partial_out;
  device float4* partial_sum;
  uint first_row;
  uint rows;  // of a head
  uint rows_per_sequence;

  void set(device Element* outs, device float* lses, device float* partial_outs, device float4* partial_sums,
           uint first, constant DecodeParams& params) thread {
    out = outs;
    lse = lses;
    partial_out = partial_outs;
    partial_sum = partial_sums;
    first_row = first;
    rows = params.span.q_len;
    rows_per_sequence = params.q_heads * params.span.q_len;
  }

  // Of column `column` of a row, in elements.
  long place_of(int row, int column) const thread {
    const uint result = first_row + row;
    const uint at = fc_split ? result : out_row(result, rows, rows_per_sequence);
    return long(at) * kValueDim + column;
  }

  void put(int row, int column, float value) const thread {
    if (fc_split) {
      partial_out[place_of(row, column)] = value;
    } else {
      out[place_of(row, column)] = Element(value);
    }
  }
  void put(int row, int column, float4 values) const thread {
    if (fc_split) {
      *reinterpret_cast<device float4*>(partial_out + place_of(row, column)) = values;
    } else {
      *reinterpret_cast<device vec<Element, 4>*>(out + place_of(row, column)) = vec<Element, 4>(values);
    }
  }
  void put_sum(int row, RowSum sum) const thread {
    if (fc_split) {
      partial_sum[first_row + row] = sum.of_part();
    } else {
      lse[first_row + row] = sum.log_sum_exp();
    }
  }
};

}  // namespace fattn
