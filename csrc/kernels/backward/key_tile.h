// The keys of a threadgroup of backward_key, and the rows that see them.
#pragma once

#include "../prefill/mapped_steps.h"

namespace fattn {

FATTN_CONSTEXPR int kStepRows = FATTN_STEP_ROWS;           // query rows per step
FATTN_CONSTEXPR int kGroupKeys = kTileKeys;                // of a group of simdgroups
FATTN_CONSTEXPR int kOwnedKeys = kRowGroups * kGroupKeys;  // per threadgroup

// Rows [begin, end) of a sequence.
struct RowRange {
  int begin;
  int end;
};

// Keys of one sequence, for one key-value head.
struct KeyTile {
  long batch;  // -1: keys outside every sequence, hidden from all rows
  int kv_head;
  int first_key;  // in the sequence
  int stored;     // existing keys of the sequence
  int length;     // keys that rows may see
  long key_row;   // of the sequence's first key
  int q_row;      // of its first query row
  int q_len;
  int first_position;  // of this row

  // The first element of key `key` of the sequence, in an operand or its gradient.
  long key_offset(int key, constant Strides3& strides) const thread {
    return batch * strides.batch + kv_head * strides.head + (key_row + key) * strides.row;
  }

  // The range of rows that see one of keys [first, last] by position. It may contain other rows.
  RowRange rows_of(int first, int last, constant PrefillParams& params) const thread {
    long begin = 0;
    long end = first < length ? q_len : 0;
    if (fc_causal) {
      begin = long(first) - first_position;
    }
    if (fc_window && first >= params.sink_tokens) {
      begin = max(begin, long(first) - params.window_right - first_position);
      end = min(end, long(last) + params.window_left - first_position + 1);
    }
    RowRange rows;
    rows.begin = int(clamp(begin, 0L, long(q_len)));
    rows.end = int(end);
    return rows;
  }

  // Whether each row of [row, other] sees all keys of [first, last] by position.
  bool all_seen(int first, int last, int row, int other, constant PrefillParams& params) const thread {
    const long first_row = long(first_position) + row;
    const long last_row = long(first_position) + other;
    bool all = last < length;
    if (fc_causal) {
      all = all && first_row >= last;
    }
    if (fc_window) {
      const bool in_window =
          last_row - params.window_left <= first && last <= first_row + params.window_right;
      all = all && (in_window || last < params.sink_tokens);
    }
    return all;
  }
};

// Under a causal mask the first keys have the most rows, and their tiles start first (place_in_grid).
inline KeyTile dense_keys(const device int* seq_lens, constant PrefillParams& params, uint3 group) {
  KeyTile tile;
  tile.batch = group.z;
  tile.kv_head = int(params.heads_first ? group.x : group.y);
  tile.first_key = int(params.heads_first ? group.y : group.x) * kOwnedKeys;
  tile.stored = params.kv_len;
  tile.length = params.kv_len;
  tile.key_row = 0;
  tile.q_row = 0;
  tile.q_len = params.q_len;
  tile.first_position = params.q_offset;
  if (fc_has_seq_lens) {
    tile.length = clamp(seq_lens[tile.batch * params.seq_lens_stride], 0, params.kv_len);
    tile.first_position = tile.length - tile.q_len;
  }
  return tile;
}

// `stored` is 0 if there is no such tile.
inline KeyTile packed_key_tile(const device int* cu_seqlens_q, const device int* cu_seqlens_k,
                               constant PrefillParams& params, uint3 group, ushort lane) {
  PackedRows keys;
  keys.cu_seqlens = cu_seqlens_k;
  keys.stride = params.cu_seqlens_k_stride;
  keys.sequences = params.batch;
  keys.rows = params.kv_len;
  keys.row_items = 1;
  keys.tile_items = kOwnedKeys;
  const SequenceTile found = sequence_tile(keys, int(group.x), lane);
  KeyTile tile;
  tile.batch = found.batch;
  tile.kv_head = int(group.y);
  tile.first_key = found.begin;
  tile.stored = found.end;
  tile.length = 0;
  tile.key_row = found.first_row;
  tile.q_row = 0;
  tile.q_len = 0;
  tile.first_position = 0;
  if (found.end > 0 && found.batch >= 0) {
    tile.length = found.end;
    tile.q_row = clamp(cu_seqlens_q[found.batch * params.cu_seqlens_stride], 0, params.q_len);
    const int end =
        clamp(cu_seqlens_q[(found.batch + 1) * params.cu_seqlens_stride], tile.q_row, params.q_len);
    tile.q_len = end - tile.q_row;
    tile.first_position = params.last_rows_meet ? tile.length - tile.q_len : params.q_offset;
  }
  return tile;
}

// Offsets of the rows of one query head, in the operands and in the order of lse.
struct WalkedHead {
  long head;
  long query;     // first element of the first row in the sequence
  long grad_out;  // likewise
  long state;     // index of this row
  long mask;      // its first element
};

inline WalkedHead walked_head(thread const KeyTile& tile, long head, constant BackwardParams& params) {
  constant PrefillParams& forward = params.forward;
  WalkedHead walked;
  walked.head = head;
  walked.query = head * forward.query.head + tile.q_row * forward.query.row;
  walked.grad_out = head * params.grad_out.head + tile.q_row * params.grad_out.row;
  walked.state = head * forward.q_len + tile.q_row;
  walked.mask = 0;
  if (!fc_packed) {
    walked.query += tile.batch * forward.query.batch;
    walked.grad_out += tile.batch * params.grad_out.batch;
    walked.state += tile.batch * forward.q_heads * forward.q_len;
    walked.mask = tile.batch * forward.mask.batch + head * forward.mask.head;
  }
  return walked;
}

// The cells of a mask map that a step meets: row cells by key cells.
FATTN_CONSTEXPR int kStepCells = (kStepRows + kCellRows - 1) / kCellRows;
FATTN_CONSTEXPR int kOwnedCells = (kOwnedKeys + kCellKeys - 1) / kCellKeys;
static_assert(kStepCells * kOwnedCells <= kSimdWidth, "a lane looks up one cell");
static_assert(kCellRows % kStepRows == 0 || kStepRows % kCellRows == 0, "steps begin where cells do");
static_assert(kCellKeys % kOwnedKeys == 0 || kOwnedKeys % kCellKeys == 0, "tiles begin where cells do");

struct StepCells {
  uint looked_up;  // lane row * kOwnedCells + i

  // Looks up the cells of the step at `row`.
  void look_up(const device uchar* map, thread const KeyTile& tile, long head, int row,
               constant PrefillParams& params, ushort lane) thread {
    looked_up = kHiddenCell;
    if (!fc_mask_map || lane >= kStepCells * kOwnedCells) {
      return;
    }
    const int cell_row = row / kCellRows + lane / kOwnedCells;
    const int column = tile.first_key / kCellKeys + lane % kOwnedCells;
    if (cell_row * kCellRows < tile.q_len && column * kCellKeys < tile.length) {
      constant Strides4& strides = params.mask_map;
      looked_up = cell_of(map[tile.batch * strides.batch + head * strides.head +
                              (cell_row >> params.map_row_shift) * strides.row +
                              (column >> params.map_key_shift) * strides.key]);
    }
  }

  // Whether the map hides the whole tile from the rows of the step.
  bool hide_all() const thread { return fc_mask_map && simd_all(looked_up == kHiddenCell); }

  // The cell of row fragment n of the step and of the group's keys, from `key` on in the tile. All lanes must
  // call it.
  uint cell(int n, int key) const thread {
    return simd_shuffle(looked_up, ushort(n * 8 / kCellRows * kOwnedCells + key / kCellKeys));
  }
};

// Whether the cell hides all fragments of the group's keys, which begin at `key`.
inline bool hides_group(uint cell, int key) {
  constexpr uint kGroup = (1u << kKeyFragments) - 1;
  const uint hidden = cell >> (kCellKindBits + key % kCellKeys / 8);
  return cell == kHiddenCell || (hidden & kGroup) == kGroup;
}

}  // namespace fattn
