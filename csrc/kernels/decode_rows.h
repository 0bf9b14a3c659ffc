// The query rows of a decode: those of all query heads that share a key-value head, packed; what they see of
// their sequence, and where their results go.
#pragma once

#include "keys.h"
#include "schedule.h"
#include "scores.h"

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

// What the steps of a sequence share: its keys, and what this lane's row may see of them.
struct Sequence {
  StoredOperand key;
  StoredOperand value;
  const device uchar* mask;
  KeyTable table;
  KeyRanges ranges;
  Visibility visible;
  ScoreModifiers modifiers;

  void set_keys(constant DecodeParams& params, const device Stored* keys, const device Stored* values,
                const device int* block_tables, int kv_head, thread const WorkItem& item) thread {
    const long batch = item.batch;
    ranges = item.ranges;
    key.elements = keys + kv_head * params.key.head;
    value.elements = values + kv_head * params.value.head;
    key.batch = value.batch = item.batch;
    key.head = value.head = kv_head;
    table.length = item.length;
    table.num_blocks = params.num_blocks;
    table.entry_stride = params.block_table_entry_stride;
    if (fc_paged) {
      table.blocks = block_tables + batch * params.block_table_batch_stride;
    } else {
      key.elements += batch * params.key.batch;
      value.elements += batch * params.value.batch;
    }
  }

  void set_row(constant DecodeParams& params, const device uchar* attn_mask, const device long* tree_mask,
               const device float* alibi_slopes, long batch, PackedRow packed) thread {
    const int position = table.length - params.span.q_len + packed.row;
    visible.limit[0] = packed.exists ? position + 1 : 0;
    visible.window_begin[0] = position - params.span.window_left;
    visible.sink_end[0] = min(params.span.sink_tokens, visible.limit[0]);
    visible.first_draft = table.length - params.span.q_len;
    if (fc_tree) {
      visible.drafts[0] =
          uint(tree_mask[batch * params.tree_mask_batch_stride + packed.row * params.tree_mask_row_stride]);
    }
    mask = attn_mask;
    visible.mask_row[0] =
        batch * params.mask.batch + packed.head * params.mask.head + packed.row * params.mask.row;
    visible.mask_key_stride = params.mask.key;
    modifiers.scale = params.score_scale;
    modifiers.softcap = params.softcap;
    modifiers.position[0] = position;
    if (fc_alibi) {
      modifiers.slope[0] =
          packed.exists ? alibi_slopes[packed.head * params.alibi_slopes_stride] * params.slope_scale : 0.0f;
    }
  }
};

// Where the rows of a chunk's result go. Rows are counted from the first of the key-value head.
struct ResultRows {
  device Element* out;
  device float* lse;
  device float* partial_out;
  device float* partial_lse;

  void set(constant DecodeParams& params, device Element* outs, device float* lses,
           device float* partial_outs, device float* partial_lses, int kv_head, thread const WorkItem& item)
      thread {
    const long first_row =
        (long(item.batch) * params.q_heads + kv_head * params.group_size) * params.span.q_len;
    if (fc_split) {
      const long row = long(item.part) * params.batch * params.q_heads * params.span.q_len + first_row;
      partial_out = partial_outs + row * kValueDim;
      partial_lse = partial_lses + row;
    } else {
      out = outs + first_row * kValueDim;
      lse = lses + first_row;
    }
  }

  void put(int row, int column, float value) const thread {
    if (fc_split) {
      partial_out[row * kValueDim + column] = value;
    } else {
      out[row * kValueDim + column] = Element(value);
    }
  }
  void put(int row, int column, float4 values) const thread {
    if (fc_split) {
      *reinterpret_cast<device float4*>(partial_out + row * kValueDim + column) = values;
    } else {
      *reinterpret_cast<device vec<Element, 4>*>(out + row * kValueDim + column) = vec<Element, 4>(values);
    }
  }
  void put_lse(int row, float value) const thread {
    if (fc_split) {
      partial_lse[row] = value;
    } else {
      lse[row] = value;
    }
  }
};

}  // namespace fattn
