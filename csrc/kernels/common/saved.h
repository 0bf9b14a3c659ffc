// State that kernels keep in threadgroup memory to free registers for their steps. The planner counts it.
#pragma once

#include "params.h"

namespace fattn {

// Offsets of the K, V and block table of a sequence.
struct SavedStarts {
  fattn_i64 key;
  fattn_i64 value;
  fattn_i64 blocks;
};

// A row of a prefill tile: state for steps with hidden keys, and the place of its results.
struct SavedPlaces {
  fattn_i64 mask_row;
  fattn_i64 out;  // first element; -1 if the row does not exist
  fattn_i64 lse;
};
struct SavedLimits {
  fattn_i32 limit;  // see Visibility
  fattn_i32 window_begin;
  fattn_i32 sink_end;
};
// A row of the tensor kernels: its parameters of modified_score(), and its tree mask.
struct SavedTensorRow {
  fattn_f32 slope;
  fattn_i32 position;
  fattn_i32 drafts;  // see Visibility
};
// KeyRanges of the rows of a prefill simdgroup, without the members that follow from its first row.
struct SavedRanges {
  fattn_i32 sink_end;
  fattn_i32 begin;
  fattn_i32 end;
  fattn_i32 all_begin;
};
// Bytes of SavedStepRow (backward/step_rows.h).
FATTN_CONSTEXPR int kSavedStepRowBytes = kRowStateFloats * sizeof(fattn_f32) + sizeof(SavedLimits);
// Bytes of SavedTile (prefill/prefill_rows.h), for simdgroups of `own_rows` rows.
constexpr int saved_tile_bytes(int rows, int own_rows) {
  return int(sizeof(SavedStarts)) + rows * int(sizeof(SavedPlaces) + sizeof(SavedLimits)) +
         (rows + kCellRows - 1) / kCellRows * int(sizeof(fattn_i64)) +
         rows / own_rows * int(sizeof(SavedRanges));
}

// A row of decode: its visibility, and the parameters of its head.
struct SavedDecodeRow {
  fattn_i32 limit;
  fattn_i32 drafts;
  fattn_i64 mask_row;
  fattn_f32 sink;
  fattn_f32 slope;
};

// The work of a simdgroup of decode.
struct SavedWork {
  SavedStarts starts;
  SavedDecodeRow rows[kFragment];
  // RowBlock (decode_rows.h)
  fattn_i32 kv_head;
  fattn_i32 block_row;
  fattn_i32 part;
  // Worker (schedule.h); the chunk is of its sequence
  fattn_i32 worker_index;
  fattn_i32 worker_batch;
  fattn_i32 worker_part;
  fattn_i32 worker_left;
  fattn_i32 worker_dealt;
  fattn_i32 known_length;
  fattn_i32 known_keys;
  fattn_i32 known_count;
  // ChunkResults and KeyLimits (decode_rows.h)
  fattn_i32 first_row;
  fattn_i32 result_rows;
  fattn_i32 length;
  fattn_i32 begin;
  fattn_i32 sink_end;
  fattn_i32 window_left;
  fattn_i32 sink_tokens;
  fattn_i32 first_draft;
};

// Offsets of the scales that a simdgroup of decode_vector reads.
struct SavedScales {
  fattn_i64 key;
  fattn_i64 value;
};

FATTN_CHECK_SIZE(SavedStarts, 24);
FATTN_CHECK_SIZE(SavedPlaces, 24);
FATTN_CHECK_SIZE(SavedLimits, 12);
FATTN_CHECK_SIZE(SavedTensorRow, 12);
FATTN_CHECK_SIZE(SavedRanges, 16);
FATTN_CHECK_SIZE(SavedDecodeRow, 24);
FATTN_CHECK_SIZE(SavedWork, 296);
FATTN_CHECK_SIZE(SavedScales, 16);

}  // namespace fattn
