// The query rows of a decode: those of all query heads that share a key-value head, packed; what they see of
// their sequence, and where their results go.
#pragma once

#include "keys.h"
#include "scores.h"
#include "steps.h"

namespace fattn {

struct PackedRow {
  int head;
  int row;  // of the query
  bool exists;
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
  const device Element* key;  // of this sequence and head
  const device Element* value;
  const device uchar* mask;
  KeyTable table;
  KeyRanges ranges;
  Visibility visible;
  ScoreModifiers modifiers;

  void set_keys(constant DecodeParams& params, const device Element* keys, const device Element* values,
                const device int* block_tables, long batch, int kv_head, int length) thread {
    ranges = newest_rows(params.span, length);
    key = keys + kv_head * params.key.head;
    value = values + kv_head * params.value.head;
    table.length = length;
    table.num_blocks = params.num_blocks;
    table.entry_stride = params.block_table_entry_stride;
    if (fc_paged) {
      table.blocks = block_tables + batch * params.block_table_batch_stride;
    } else {
      key += batch * params.key.batch;
      value += batch * params.value.batch;
    }
  }

  void set_row(constant DecodeParams& params, const device uchar* attn_mask, const device long* tree_mask,
               const device float* alibi_slopes, long batch, PackedRow packed) thread {
    const int position = table.length - params.span.q_len + packed.row;
    visible.limit[0] = packed.exists ? position + 1 : 0;
    visible.window_begin[0] = position - params.span.window_left;
    visible.sink_end = params.span.sink_tokens;
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

// Where the rows of a chunk's result go.
struct ResultRows {
  device Element* out;
  device float* lse;
  device float* partial_out;
  device float* partial_lse;
  long first_partial_row;

  void put(long flat_row, int column, float value) const thread {
    if (fc_split) {
      partial_out[(first_partial_row + flat_row) * kValueDim + column] = value;
    } else {
      out[flat_row * kValueDim + column] = Element(value);
    }
  }
  void put_lse(long flat_row, float value) const thread {
    if (fc_split) {
      partial_lse[first_partial_row + flat_row] = value;
    } else {
      lse[flat_row] = value;
    }
  }
};

}  // namespace fattn
