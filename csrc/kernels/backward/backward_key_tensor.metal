// The gradients of key and value on Metal 4's tensor operations, with the inputs, results and steps of
// backward_key. The simdgroups of a group own the same 16 keys; half of them sum the gradient of the key and
// half the gradient of the value.
//
// The own keys and values are in threadgroup memory. Products read the rows of a step in place, unless some
// do not exist or have no visible key (their memory may hold NaN), or heads need padding.
#define FATTN_COLUMN_SHARES (FATTN_SIMDGROUPS / FATTN_ROW_GROUPS / 2)

#include "step_rows.h"
#include "tensor_gradients.h"

namespace fattn {

FATTN_CONSTEXPR int kGroupSimdgroups = kSimdgroups / kRowGroups;
static_assert(kGroupKeys == kTensorRows, "a simdgroup has the rows of a product");
static_assert(kStepRows <= kSimdWidth, "a vote of a simdgroup is of every row");

// Copies the keys or values of a tile. `from`: the first of its sequence. Keys that do not exist and padding
// columns become 0.
inline void stage_own(threadgroup uint4* to, const device Element* from, long stride,
                      thread const KeyTile& tile, ushort thread_index) {
  for (int c = thread_index; c < kOwnedKeys * kRowChunks; c += kThreads) {
    const int key = tile.first_key + c / kRowChunks;
    const int column = c % kRowChunks * kChunk;
    const bool exists = key < tile.stored && column < kHeadDim;
    to[c] = exists ? chunk_at(from + key * stride, column) : uint4(0);
  }
}

// Copies the rows of a step. Rows that do not exist or have no visible key, and padding columns, become 0.
// All threads must call it; it ends with a barrier.
inline void stage_step(threadgroup uint4* to, const device Element* from, long stride,
                       const threadgroup SavedStepRow* rows, ushort thread_index) {
  threadgroup_barrier(mem_flags::mem_threadgroup);  // the previous rows have been read
  for (int c = thread_index; c < kStepRows * kRowChunks; c += kThreads) {
    const int row = c / kRowChunks;
    const int column = c % kRowChunks * kChunk;
    const bool counts = rows[row].state.lse != INFINITY && column < kHeadDim;
    to[c] = counts ? chunk_at(from + row * stride, column) : uint4(0);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
}

// A step: rows of one head, for the keys of one group of simdgroups.
struct TensorStep {
  const threadgroup SavedStepRow* rows;
  const device uchar* mask;
  long mask_row;  // of its first row
  float slope;
  int first_key;
  int position;  // of its first row
  bool whole;    // each row sees each key

  // Turns products into P^T, or with `of_keys` into gradients of the scaled products. Returns a bit for each
  // key with a weight.
  template <class Scores>
  uint to_weights(thread Scores& scores, thread Scores& weight_grads, bool of_keys,
                  constant PrefillParams& params) const thread {
    uint used = 0;
    FATTN_EACH_ELEMENT(i, scores) {
      const auto at = scores.get_multidimensional_index(i);
      const int row = at[0];
      const threadgroup SavedStepRow& saved = rows[row];
      const ScoreModifiers modifiers = modifiers_of_row(position + row, slope, params);
      KeyScore score = seen_score(scores[i], modifiers, 0, first_key + at[1]);
      if (!whole) {
        const Visibility visible = visibility_of(saved, mask_row + row * params.mask.row, params);
        hide_unseen(score, visible, mask, 0, first_key + at[1]);
      }
      const ScoreGradient gradient = score_gradient(score, of_keys ? float(weight_grads[i]) : 0.0f,
                                                    saved.state.lse, saved.state.delta, modifiers);
      used |= uint(gradient.weight != 0.0f) << at[1];
      scores[i] = (of_keys ? gradient.product : gradient.weight) * saved.state.inverse;
    }
    return used;
  }
};

}  // namespace fattn

using namespace fattn;

[[kernel, max_total_threads_per_threadgroup(fattn::kThreads)]] void fattn_backward_key_tensor(
    FATTN_INPUTS(FATTN_ARGUMENT, FATTN_OPTIONAL_ARGUMENT) const device Element* grad_out
    [[buffer(fattn::kSlotGradOut)]],
    const device float4* row_states [[buffer(fattn::kSlotRowStates)]],
    device Element* grad_key [[buffer(fattn::kSlotGradKey)]],
    device Element* grad_value [[buffer(fattn::kSlotGradValue)]], FATTN_GRID_ARGUMENTS(BackwardParams)) {
  threadgroup uint4 key_storage[kOwnedKeys * kRowChunks];
  threadgroup uint4 value_storage[kOwnedKeys * kRowChunks];
  threadgroup uint4 step_storage[kStepRows * kRowChunks];
  threadgroup SavedStepRow saved_rows[2][kStepRows];  // of two steps
  FATTN_LEFT_BLOCK(block)
  FATTN_TENSOR_PRODUCTS
  auto weight_grads = FATTN_TENSOR_SCORES;

  constant PrefillParams& forward = params.forward;
  const ushort thread_index = thread_in_group(simdgroup_index, lane);
  const ushort own_group = simdgroup_index / kGroupSimdgroups;
  const bool of_keys = simdgroup_index % 2 == 1;
  const int column = simdgroup_index % kGroupSimdgroups / 2 * kShareDim;  // of the gradient
  const uint3 group = group_in_grid(group_in_dispatch, slice);
  KeyTile tile = dense_keys(seq_lens, forward, group);
  if (fc_packed) {
    tile = packed_key_tile(cu_seqlens_q, cu_seqlens_k, forward, group, lane);
    if (tile.stored == 0) {
      return;
    }
  }
  stage_own(key_storage, key + tile.key_offset(0, forward.key), forward.key.row, tile, thread_index);
  stage_own(value_storage, value + tile.key_offset(0, forward.value), forward.value.row, tile, thread_index);
  const int own = own_group * kGroupKeys * kRowChunks;
  SharedTensor keys = staged_tensor(key_storage + own, 0, kTensorDim, kTensorRows);
  SharedTensor values = staged_tensor(value_storage + own, 0, kTensorDim, kTensorRows);
  FATTN_EACH_ELEMENT(i, output) { output[i] = 0.0f; }

  const int key_in_tile = own_group * kGroupKeys;  // the group's first key
  TensorStep step;
  step.first_key = tile.first_key + key_in_tile;
  const int last_key = step.first_key + kGroupKeys - 1;
  if (fc_has_mask) {
    step.mask = attn_mask;
  }
  StepCells cells;
  const device uchar* map = nullptr;
  if (fc_mask_map) {
    map = mask_map;
  }
  const RowRange walked = tile.rows_of(tile.first_key, tile.first_key + kOwnedKeys - 1, forward);
  const RowRange own_rows = tile.rows_of(step.first_key, last_key, forward);
  uint used = 0;  // a bit for each key with a weight
  ushort turn = 0;

  for (int h = 0; h < forward.group_size; h++) {
    const WalkedHead head = walked_head(tile, long(tile.kv_head) * forward.group_size + h, params);
    if (fc_alibi && tile.batch >= 0) {
      step.slope = slope_of_head(alibi_slopes, tile, head.head, forward);
    }
    for (int row = walked.begin / kStepRows * kStepRows; row < walked.end; row += kStepRows) {
      cells.look_up(map, tile, head.head, row, forward, lane);
      if (cells.hide_all()) {
        continue;
      }
      step.rows = saved_rows[turn];
      if (thread_index < kStepRows) {
        save_row(saved_rows[turn][thread_index], row_states + (head.state + row), thread_index,
                 tile.q_len - row, tile.first_position + row, tile.length, forward);
      }
      turn ^= 1;
      threadgroup_barrier(mem_flags::mem_threadgroup);

      const device Element* queries = query + (head.query + row * forward.query.row);
      const device Element* grads = grad_out + (head.grad_out + row * params.grad_out.row);
      const bool all_count = simd_all(lane >= kStepRows || step.rows[lane].state.lse != INFINITY);
      const uint first_cell = fc_mask_map ? cells.cell(0, key_in_tile) : uint(kCellWhole);
      const uint last_cell = fc_mask_map ? cells.cell(kStepRows / 8 - 1, key_in_tile) : uint(kCellWhole);
      const bool hidden =
          fc_mask_map && hides_group(first_cell, step.first_key) && hides_group(last_cell, step.first_key);
      const bool known = fc_mask_map ? first_cell == kCellWhole && last_cell == kCellWhole : !fc_has_mask;
      const bool active = !hidden && own_rows.begin < row + kStepRows && row < own_rows.end;
      step.whole = known && tile.all_seen(step.first_key, last_key, row, row + kStepRows - 1, forward);
      step.position = tile.first_position + row;
      step.mask_row = head.mask + row * forward.mask.row;

      if (!kPadded && all_count) {
        if (active) {
          CacheTensor query_rows = tensor_of_rows(queries, forward.query.row, 0, kTensorDim);
          score_product.run(keys, query_rows, scores);
          if (of_keys) {
            CacheTensor grad_rows = tensor_of_rows(grads, params.grad_out.row, 0, kTensorDim);
            score_product.run(values, grad_rows, weight_grads);
          }
          used |= step.to_weights(scores, weight_grads, of_keys, forward);
          CacheTensor right =
              tensor_of_rows(of_keys ? queries : grads, of_keys ? forward.query.row : params.grad_out.row,
                             column, kShareDim);
          accumulate(output_product, scores, right, output, block);
        }
        continue;
      }
      SharedTensor whole_rows = staged_tensor(step_storage, 0, kTensorDim, kStepRows);
      SharedTensor right = staged_tensor(step_storage, column, kShareDim, kStepRows);
      stage_step(step_storage, queries, forward.query.row, step.rows, thread_index);
      if (active) {
        score_product.run(keys, whole_rows, scores);
      }
      stage_step(step_storage, grads, params.grad_out.row, step.rows, thread_index);
      if (active) {
        if (of_keys) {
          score_product.run(values, whole_rows, weight_grads);
        }
        used |= step.to_weights(scores, weight_grads, of_keys, forward);
        if (!of_keys) {
          accumulate(output_product, scores, right, output, block);
        }
      }
      stage_step(step_storage, queries, forward.query.row, step.rows, thread_index);
      if (active && of_keys) {
        accumulate(output_product, scores, right, output, block);
      }
    }
  }

  used = simd_or(used);
  constant Strides3* strides = of_keys ? &params.grad_key : &params.grad_value;
  device Element* gradient = (of_keys ? grad_key : grad_value) + tile.key_offset(step.first_key, *strides);
  FATTN_EACH_ELEMENT(i, output) {
    const auto at = output.get_multidimensional_index(i);
    if (step.first_key + at[1] < tile.stored && column + at[0] < kHeadDim) {
      const bool counts = (used >> at[1]) & 1;
      const float scale = !counts ? 0.0f : of_keys ? params.grad_scale : 1.0f;
      gradient[at[1] * strides->row + column + at[0]] = Element(scaled_result(float(output[i]), scale));
    }
  }
}
