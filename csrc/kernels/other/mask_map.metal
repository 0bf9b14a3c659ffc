// Classifies the cells of attn_mask as hidden, whole or mixed, and finds the key fragments that a mixed cell
// hides. prefill skips hidden cells and does not read the mask in whole ones.
//
// A simdgroup takes a cell, and a lane one of its keys. The simdgroups of a threadgroup take neighbouring
// cells, so together they read whole cache lines of a mask whose keys are contiguous.
#include "../common/constants.h"
#include "../common/grid.h"
#include "../common/mask.h"

namespace fattn {

FATTN_CONSTEXPR int kThreads = kGroupCells * kSimdWidth;

}  // namespace fattn

using namespace fattn;

[[kernel, max_total_threads_per_threadgroup(fattn::kThreads)]] void fattn_mask_map(
    const device uchar* mask [[buffer(fattn::kSlotMask)]],
    device uchar* mask_map [[buffer(fattn::kSlotMaskMap)]],
    constant MaskMapParams& params [[buffer(fattn::kSlotParams)]],
    constant GridSlice& slice [[buffer(fattn::kSlotSlice), function_constant(fc_sliced)]],
    uint3 group_in_dispatch [[threadgroup_position_in_grid]],
    ushort simdgroup_index [[simdgroup_index_in_threadgroup]], ushort lane [[thread_index_in_simdgroup]]) {
  static_assert(kCellKeys == kSimdWidth, "a lane has a key");
  const int group = int(group_in_grid(group_in_dispatch, slice).x);
  const int key_cell = group % params.row_groups * kGroupCells + simdgroup_index;
  if (key_cell >= params.key_cells) {
    return;
  }
  const int map_row = group / params.row_groups;  // among all heads and sequences
  const int head = map_row / params.row_cells;    // among all sequences
  const int first_row = map_row % params.row_cells * kCellRows;
  const int key = key_cell * kCellKeys + lane;
  const long first = head / params.heads * params.mask.batch + head % params.heads * params.mask.head +
                     first_row * params.mask.row + key * params.mask.key;
  bool hidden = true;
  bool whole = true;
  FATTN_UNROLL
  for (int r = 0; r < kCellRows; r++) {
    if (first_row + r < params.rows && key < params.keys) {
      const float added = mask_value(mask, first + r * params.mask.row);
      hidden = hidden && added == -INFINITY;
      whole = whole && added == 0.0f;
    }
  }
  // Keys past the end hide no fragment: a mask that is broadcast along the keys has one key.
  const uint seen = simd_or(hidden && key < params.keys ? 0u : 1u << (lane / kFragment));
  hidden = simd_all(hidden);
  whole = simd_all(whole);
  if (lane == 0) {
    const uint mixed = kCellMixed | (~seen & kAllCellFragments) << kCellKindBits;
    const uint byte = hidden ? kCellHidden : whole ? kCellWhole : mixed;
    mask_map[long(map_row) * params.key_cells + key_cell] = uchar(byte);
  }
}
