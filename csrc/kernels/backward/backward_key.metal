// The gradients of key and value. A simdgroup owns keys, and the threadgroup walks the query rows that see
// them, of all query heads that share the key-value head.
//
// Scores are computed transposed, S^T = K Q^T and dP^T = V dO^T. The blocks of P^T and dS^T are then left
// factors of dV = P^T dO and dK = dS^T Q without a transposition.
//
// backward_query has written the RowState of each row. A row without visible keys is staged as zeros: its
// operands may hold NaN.
#define FATTN_COLUMN_SHARES (FATTN_SIMDGROUPS / FATTN_ROW_GROUPS)

#include "gradients.h"
#include "step_rows.h"
#include "../prefill/staging.h"

// Whether there may be rows without visible keys.
constant bool fc_blind_rows = fc_causal || fc_window || fc_has_mask || fc_mask_map || fc_packed;

namespace fattn {

typedef ProductBlocks<kKeyFragments> KeyBlocks;
typedef SharedBlocks<kKeyFragments, kStepRows / 8> SharedKeyBlocks;
static_assert(kStepRows <= kThreads, "a thread has one row of a step");

// Stages the rows of an operand: zeros for rows that do not exist or have no visible key.
template <int kDim>
inline void stage_rows(threadgroup TileElement* tile, int pitch, const device Element* from, long stride,
                       const device float4* states, int rows, ushort thread_index) {
  constexpr int kRowChunks = kDim / kWideChunk;
  for (int i = thread_index; i < kStepRows * kRowChunks; i += kThreads) {
    const int row = i / kRowChunks;
    const int column = i % kRowChunks * kWideChunk;
    uint4 words = uint4(0);
    if (row < rows && (!fc_blind_rows || states[row][0] != INFINITY)) {
      words = wide_chunk(from + (row * stride + column));
    }
    *reinterpret_cast<threadgroup uint4*>(tile + (row * pitch + column)) = words;
  }
}

struct KeyGradients {
  simdgroup_float8x8 keys[kKeyFragments][KeyShare::kFragments];
  simdgroup_float8x8 values[kKeyFragments][ValueShare::kFragments];
  float weight_sum[kKeyFragments];  // of this lane's rows

  KeyGradients() thread {}

  void clear() thread {
    clear_sums(keys);
    clear_sums(values);
    FATTN_UNROLL
    for (int k = 0; k < kKeyFragments; k++) {
      weight_sum[k] = 0.0f;
    }
  }
};

// A step: rows of one head, staged, for the keys of one group of simdgroups.
struct KeyStep {
  int first_key;  // this lane's first one; the others are in the next fragments
  int first_row;
  RowRange fragments;  // with rows that may see a key of the group
  bool all_seen;       // by position, each key by each row
  StepCells cells;
  int group_key;                           // the group's first key, in the tile
  const threadgroup TileElement* queries;  // at the first column of the share
  const threadgroup TileElement* grads;
  const threadgroup SavedStepRow* rows;
  const device uchar* mask;
  const device uchar* map;
  long mask_head;
  float slope;

  // The cell of row fragment n.
  uint cell(int n) const thread { return fc_mask_map ? cells.cell(n, group_key) : uint(kCellWhole); }

  // Turns the blocks of row fragment n into weights and gradients, and adds their products.
  void finish(int n, uint cell, thread KeyBlocks& blocks, thread KeyGradients& sums,
              constant PrefillParams& params, int first_position, LanePosition at) const thread {
    const bool unknown = fc_mask_map ? cell != kCellWhole : fc_has_mask;
    simdgroup_float8x8 weights[kKeyFragments];
    FATTN_UNROLL
    for (int e = 0; e < 2; e++) {
      const int row = n * 8 + at.pair * 2 + e;
      const threadgroup SavedStepRow& saved = rows[row];
      const ScoreModifiers modifiers = modifiers_of_row(first_position + first_row + row, slope, params);
      const Visibility visible =
          visibility_of(saved, mask_head + (first_row + row) * params.mask.row, params);
      FATTN_UNROLL
      for (int k = 0; k < kKeyFragments; k++) {
        const KeyScore score = key_score(blocks.products[k].thread_elements()[e], modifiers, visible, mask, 0,
                                         first_key + k * 8, !all_seen || unknown);
        const ScoreGradient gradient = score_gradient(score, blocks.weight_grads[k].thread_elements()[e],
                                                      saved.state.lse, saved.state.delta, modifiers);
        weights[k].thread_elements()[e] = gradient.weight * saved.state.inverse;
        blocks.products[k].thread_elements()[e] = gradient.product * saved.state.inverse;
        sums.weight_sum[k] += gradient.weight;
      }
    }
    accumulate<kValueDim>(sums.values, weights, grads + (n * 8 + at.row) * kValuePitch, at);
    accumulate<kHeadDim>(sums.keys, blocks.products, queries + (n * 8 + at.row) * kKeyPitch, at);
  }
};

}  // namespace fattn

using namespace fattn;

[[kernel, max_total_threads_per_threadgroup(fattn::kThreads)]] void fattn_backward_key(
    FATTN_INPUTS(FATTN_ARGUMENT, FATTN_OPTIONAL_ARGUMENT) const device Element* grad_out
    [[buffer(fattn::kSlotGradOut)]],
    const device float4* row_states [[buffer(fattn::kSlotRowStates)]],
    device Element* grad_key [[buffer(fattn::kSlotGradKey)]],
    device Element* grad_value [[buffer(fattn::kSlotGradValue)]], FATTN_GRID_ARGUMENTS(BackwardParams)) {
  threadgroup uint4 query_storage[kStepRows * kKeyPitch / kTileChunk];
  threadgroup uint4 grad_storage[kStepRows * kValuePitch / kTileChunk];
  threadgroup float2 shared_blocks[SharedKeyBlocks::kPairs];
  threadgroup SavedStepRow saved_rows[kStepRows];
  threadgroup TileElement* query_tile = reinterpret_cast<threadgroup TileElement*>(query_storage);
  threadgroup TileElement* grad_tile = reinterpret_cast<threadgroup TileElement*>(grad_storage);

  constant PrefillParams& forward = params.forward;
  const LanePosition at = lane_position(lane);
  const ushort thread_index = thread_in_group(simdgroup_index, lane);
  const ushort own_group = simdgroup_index / kColumnShares;
  const ushort share = simdgroup_index % kColumnShares;
  const uint3 group = group_in_grid(group_in_dispatch, slice);
  KeyTile tile = dense_keys(seq_lens, forward, group);
  if (fc_packed) {
    tile = packed_key_tile(cu_seqlens_q, cu_seqlens_k, forward, group, lane);
    if (tile.stored == 0) {
      return;
    }
  }
  clear_padding<kHeadDim>(query_tile, kKeyPitch, kStepRows, thread_index);
  clear_padding<kValueDim>(grad_tile, kValuePitch, kStepRows, thread_index);

  KeyStep step;
  step.group_key = own_group * kGroupKeys;
  step.first_key = tile.first_key + step.group_key + at.row;
  step.queries = query_tile + share * KeyShare::kColumns;
  step.grads = grad_tile + share * ValueShare::kColumns;
  step.rows = saved_rows;
  if (fc_has_mask) {
    step.mask = attn_mask;
  }
  if (fc_mask_map) {
    step.map = mask_map;
  }

  OwnedRows<kHeadDim, kKeyFragments> keys;
  OwnedRows<kValueDim, kKeyFragments> values;
  FATTN_UNROLL
  for (int k = 0; k < kKeyFragments; k++) {
    const int own = step.first_key + k * 8;
    const bool exists = own < tile.stored;
    const device Element* of_key = key + tile.key_offset(own, forward.key);
    const device Element* of_value = value + tile.key_offset(own, forward.value);
    keys.load(k, exists ? of_key : nullptr, share, at);
    values.load(k, exists ? of_value : nullptr, share, at);
  }

  KeyGradients sums;
  sums.clear();
  SharedKeyBlocks shared;
  shared.pairs = shared_blocks;
  shared.group = own_group;
  shared.share = share;
  const int group_key = tile.first_key + step.group_key;
  const RowRange walked = tile.rows_of(tile.first_key, tile.first_key + kOwnedKeys - 1, forward);
  const RowRange own_rows = tile.rows_of(group_key, group_key + kGroupKeys - 1, forward);

  for (int h = 0; h < forward.group_size; h++) {
    const WalkedHead head = walked_head(tile, long(tile.kv_head) * forward.group_size + h, params);
    step.mask_head = head.mask;
    if (fc_alibi && tile.batch >= 0) {
      step.slope = slope_of_head(alibi_slopes, tile, head.head, forward);
    }
    for (int row = walked.begin / kStepRows * kStepRows; row < walked.end; row += kStepRows) {
      step.cells.look_up(step.map, tile, head.head, row, forward, lane);
      if (step.cells.hide_all()) {
        continue;
      }
      const int left = tile.q_len - row;
      const device float4* states = row_states + (head.state + row);
      threadgroup_barrier(mem_flags::mem_threadgroup);  // the previous step has been read
      stage_rows<kHeadDim>(query_tile, kKeyPitch, query + (head.query + row * forward.query.row),
                           forward.query.row, states, left, thread_index);
      stage_rows<kValueDim>(grad_tile, kValuePitch, grad_out + (head.grad_out + row * params.grad_out.row),
                            params.grad_out.row, states, left, thread_index);
      if (thread_index < kStepRows) {
        save_row(saved_rows[thread_index], states, thread_index, left, tile.first_position + row, tile.length,
                 forward);
      }
      threadgroup_barrier(mem_flags::mem_threadgroup);

      step.first_row = row;
      step.fragments.begin = max(own_rows.begin - row, 0) / 8;
      step.fragments.end = min((own_rows.end - row + 7) / 8, kStepRows / 8);
      step.all_seen = tile.all_seen(group_key, group_key + kGroupKeys - 1, row, row + kStepRows - 1, forward);
      KeyBlocks blocks;
#pragma clang loop unroll(disable)
      for (int n = step.fragments.begin; n < step.fragments.end; n++) {
        const uint cell = step.cell(n);
        if (fc_mask_map && hides_group(cell, group_key)) {
          continue;
        }
        blocks.multiply(keys, values, step.queries + n * 8 * kKeyPitch, kKeyPitch,
                        step.grads + n * 8 * kValuePitch, kValuePitch, at);
        if (kColumnShares > 1) {
          shared.write(n, blocks, at);
        } else {
          step.finish(n, cell, blocks, sums, forward, tile.first_position, at);
        }
      }
      if (kColumnShares > 1) {
        threadgroup_barrier(mem_flags::mem_threadgroup);
#pragma clang loop unroll(disable)
        for (int n = step.fragments.begin; n < step.fragments.end; n++) {
          const uint cell = step.cell(n);
          if (fc_mask_map && hides_group(cell, group_key)) {
            continue;
          }
          shared.read(n, blocks, at);
          step.finish(n, cell, blocks, sums, forward, tile.first_position, at);
        }
      }
    }
  }

  FATTN_UNROLL
  for (int k = 0; k < kKeyFragments; k++) {
    const int own = step.first_key + k * 8;
    const bool seen = row_sum_of(sums.weight_sum[k]) != 0.0f;
    if (own < tile.stored) {
      const long of_key = tile.key_offset(own, params.grad_key);
      const long of_value = tile.key_offset(own, params.grad_value);
      store_gradient<kHeadDim>(sums.keys, k, grad_key + of_key, seen ? params.grad_scale : 0.0f, share, at);
      store_gradient<kValueDim>(sums.values, k, grad_value + of_value, seen ? 1.0f : 0.0f, share, at);
    }
  }
}
