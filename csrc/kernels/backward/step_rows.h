// The query rows of a step of the passes over keys: visibility, and the RowState from backward_query.
#pragma once

#include "key_tile.h"
#include "row_state.h"

namespace fattn {

// A row of a step in threadgroup memory.
struct SavedStepRow {
  RowState state;
  SavedLimits limits;
};
static_assert(sizeof(SavedStepRow) == kSavedStepRowBytes, "the planner counts this");

// Saves a row of the step. It exists if its index is below `left`.
inline void save_row(threadgroup SavedStepRow& to, const device float4* states, int row, int left,
                     int position, int length, constant PrefillParams& params) {
  const bool exists = row < left;
  const RowKeys keys = keys_of_row(params, position + row, length);
  const RowState state = row_state_of(exists ? states[row] : float4(INFINITY, 0.0f, 0.0f, 0.0f));
  to.state.lse = state.lse;
  to.state.delta = state.delta;
  to.state.inverse = state.inverse;
  to.limits.limit = exists ? keys.end : 0;
  to.limits.window_begin = keys.begin;
  to.limits.sink_end = exists ? keys.sink_end : 0;
}

// The ALiBi slope of a query head, in score units.
inline float slope_of_head(const device uchar* slopes, thread const KeyTile& tile, long head,
                           constant PrefillParams& params) {
  const float slope =
      float_at(slopes, tile.batch * params.alibi_slopes_batch_stride + head * params.alibi_slopes_stride,
               fc_slopes_kind);
  return finite_score(slope, slope * params.slope_scale);
}

inline ScoreModifiers modifiers_of_row(int position, float slope, constant PrefillParams& params) {
  ScoreModifiers modifiers;
  set_uniform(modifiers, params);
  modifiers.position[0] = position;
  modifiers.slope[0] = slope;
  return modifiers;
}

// `mask_row`: its first element.
inline Visibility visibility_of(const threadgroup SavedStepRow& saved, long mask_row,
                                constant PrefillParams& params) {
  Visibility visible;
  visible.limit[0] = saved.limits.limit;
  visible.window_begin[0] = saved.limits.window_begin;
  visible.sink_end[0] = saved.limits.sink_end;
  visible.mask_row[0] = mask_row;
  visible.mask_key_stride = params.mask.key;
  return visible;
}

}  // namespace fattn
