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

// Bytes of SavedWork (decode/decode_state.h): also 19 numbers, and padding.
FATTN_CONSTEXPR int kSavedWorkBytes =
    sizeof(SavedStarts) + kFragment * sizeof(SavedDecodeRow) + 20 * sizeof(fattn_i32);

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
FATTN_CHECK_SIZE(SavedScales, 16);

}  // namespace fattn
