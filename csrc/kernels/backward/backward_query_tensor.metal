// The gradient of the query on Metal 4's tensor operations, with the results of backward_query and the steps
// of prefill_tensor. Keys and values are read in place where possible.
//
// The forward's result is given with its remainder. Weights are relative to the forward's log-sum-exp, and
// its error cancels (score_gradient.h).
#define FATTN_COLUMN_SHARES (FATTN_SIMDGROUPS / FATTN_ROW_GROUPS)

#include "saved_out.h"
#include "tensor_gradients.h"
#include "../prefill/tensor_step.h"

namespace fattn {

static_assert(kOwnRows == kTensorRows, "a simdgroup has the rows of a product");

// Operands that only the backward has, and the rows of a simdgroup.
struct QueryRows {
  PrefillTile tile;
  const device float* grad_lse;
  threadgroup float4* states;  // RowState, of each row
  const threadgroup SavedTensorRow* saved_rows;

  // Reads the origin and delta of this lane's row. A barrier must follow.
  void begin(constant BackwardParams& params, const device Element* grad_out,
             const device uchar* saved_out) const thread {
    if (tile.at.lane < kTensorRows) {
      const QueryRow row = own_row();
      float4 state = float4(-INFINITY, 0.0f, 0.0f, 0.0f);
      if (has(row)) {
        state[0] = lse_in_units(tile.operands.lse[lse_index()]);
        state[1] = delta_of(saved_product(row, 0, 1, tile, params, grad_out, saved_out));
      }
      states[tile.at.lane] = state;
    }
  }

  // After the walk, with the sum of the weights of this lane's row, and that for the gradient of its slope.
  void store(float weights, float slope_grad, bool writes, device float4* row_states) const thread {
    simdgroup_barrier(mem_flags::mem_threadgroup);  // the states were read
    if (tile.at.lane < kTensorRows) {
      const QueryRow row = own_row();
      float4 state = states[tile.at.lane];
      float sum = weights;
      if (fc_sinks && row.exists) {
        sum += weight_of(sink_score(tile.sink_of(row)) - state[0]);
      }
      const float inverse = weights == 0.0f ? 0.0f : 1.0f / sum;
      if (inverse == 0.0f) {
        state = float4(INFINITY, delta_of(0.0f), 0.0f, 0.0f);
      } else {
        state = float4(state[0], state[1], inverse, slope_grad * inverse);
      }
      states[tile.at.lane] = state;
      if (writes && row.exists) {
        row_states[lse_index()] = state;
      }
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);
  }

  // Turns the products of a step into gradients of the scaled products, and adds to the sums of weights and
  // the slope gradients of rows. Returns a bit for each key that some row sees.
  template <class Scores>
  uint to_weights(thread Scores& scores, thread Scores& weight_grads, thread const TensorStep& step,
                  thread Scores& weight_sums, thread Scores& slope_sums) const thread {
    uint seen = 0;
    FATTN_EACH_ELEMENT(i, scores) {
      const auto at = scores.get_multidimensional_index(i);
      const int key = step.first_key + at[0];
      const ScoreModifiers of_row = modifiers_of(saved_rows[at[1]], *tile.params);
      const KeyScore score = score_of(scores[i], of_row, at[1], key, step.whole);
      const ScoreGradient gradient = gradient_of(score, weight_grads[i], at[1], of_row);
      seen |= uint(score.seen()) << at[0];
      scores[i] = gradient.product;
      weight_sums[i] += gradient.weight;
      if (fc_alibi) {
        slope_sums[i] += gradient.score * float(key - of_row.position[0]);
      }
    }
    return fc_hides_any && !step.whole ? simd_or(seen) : kAllKeys;
  }

 private:
  QueryRow own_row() const thread { return tile.own_row(tile.at.lane); }
  // Whether the row belongs to a sequence.
  bool has(QueryRow row) const thread { return row.exists && (!fc_packed || tile.rows.tile.batch >= 0); }
  long lse_index() const thread { return tile.rows.lse_of(own_row(), 0, *tile.params); }

  // delta of this lane's row, from the sum of P * dP.
  float delta_of(float sum) const thread {
    return fc_grad_lse && has(own_row()) ? sum - grad_lse[lse_index()] : sum;
  }

  KeyScore score_of(float product, thread const ScoreModifiers& of_row, int row, int key, bool whole) const
      thread {
    KeyScore score = seen_score(product, of_row, 0, key);
    if (!whole) {
      const TileState saved = saved_of(tile, row);
      const Visibility visible = saved.visible_row(*tile.params);
      hide_unseen(score, visible, tile.operands.attn_mask, 0, key);
    }
    return score;
  }
  ScoreGradient gradient_of(KeyScore score, float weight_grad, int row,
                            thread const ScoreModifiers& of_row) const thread {
    const float4 state = states[row];
    return score_gradient(score, weight_grad, state[0], state[1], of_row);
  }
};

}  // namespace fattn

using namespace fattn;

[[kernel, max_total_threads_per_threadgroup(fattn::kThreads)]] void fattn_backward_query_tensor(
    const device Element* grad_out [[buffer(fattn::kSlotGradOut)]],
    const device float* grad_lse [[buffer(fattn::kSlotGradLse), function_constant(fc_grad_lse)]],
    const device uchar* saved_out [[buffer(fattn::kSlotSavedOut)]],
    device float4* row_states [[buffer(fattn::kSlotRowStates)]], FATTN_ATTENTION_ARGUMENTS(BackwardParams)) {
  threadgroup uint4 query_storage[kTileRows * kRowChunks];
  threadgroup uint4 grad_storage[kTileRows * kRowChunks];
  threadgroup uint4 step_storage[kStepChunks];
  threadgroup SavedTile saved;
  threadgroup SavedTensorRow saved_rows[kTileRows];
  threadgroup float4 saved_states[kSimdgroups * kTensorRows];
  threadgroup uint seen_by[2][kSimdgroups];  // the keys of a step, in two steps
  FATTN_LEFT_BLOCK(block)
  FATTN_TENSOR_PRODUCTS
  auto weight_grads = FATTN_TENSOR_SCORES;

  constant PrefillParams& forward = params.forward;
  const ushort thread_index = thread_in_group(simdgroup_index, lane);
  const ushort share = simdgroup_index % kColumnShares;
  const int row = simdgroup_index / kColumnShares * kOwnRows;  // this simdgroup's first row in the tile
  const int column = share * kShareDim;                        // and column of the gradient
  QueryRows rows;
  thread PrefillTile& tile = rows.tile;
  FATTN_TAKE_ARGUMENTS(tile.operands);
  tile.params = &forward;
  tile.at.row = tile.at.pair = 0;  // this kernel has no fragments
  tile.at.lane = lane;
  if (!tile.find(group_in_grid(group_in_dispatch, slice), row, saved, thread_index)) {
    return;
  }
  if (share == 0) {
    save_rows(tile, saved_rows + row);
  }
  rows.states = saved_states + simdgroup_index * kTensorRows;
  rows.saved_rows = saved_rows + row;
  if (fc_grad_lse) {
    rows.grad_lse = grad_lse;
  }
  rows.begin(params, grad_out, saved_out);
  stage_rows(query_storage, query, forward.query, tile, thread_index);
  stage_rows(grad_storage, grad_out, params.grad_out, tile, thread_index);
  SharedTensor queries = staged_tensor(query_storage + row * kRowChunks, 0, kTensorDim, kTensorRows);
  SharedTensor grads = staged_tensor(grad_storage + row * kRowChunks, 0, kTensorDim, kTensorRows);
  threadgroup_barrier(mem_flags::mem_threadgroup);  // rows and operands are saved

  TensorStep step;
  auto weight_sums = FATTN_TENSOR_SCORES;
  auto slope_sums = FATTN_TENSOR_SCORES;
  FATTN_EACH_ELEMENT(i, scores) { weight_sums[i] = slope_sums[i] = 0.0f; }
  FATTN_EACH_ELEMENT(i, output) { output[i] = 0.0f; }
  ushort turn = 0;
  for (int key = tile.first_step(); key < tile.ranges.end; key = tile.step_after(key)) {
    step.find(tile, key);
    step.multiply(score_product, grads, tile.source.values(), forward.value, tile, step_storage, thread_index,
                  weight_grads);
    step.multiply(score_product, queries, tile.source.keys(), forward.key, tile, step_storage, thread_index,
                  scores);
    uint seen = step.active ? rows.to_weights(scores, weight_grads, step, weight_sums, slope_sums) : 0;
    if (fc_hides_any && !tile.sees_whole(key)) {
      seen_by[turn][simdgroup_index] = seen;
      threadgroup_barrier(mem_flags::mem_threadgroup);
      for (int i = 0; i < kSimdgroups; i++) {
        seen |= seen_by[turn][i];
      }
      turn ^= 1;
    } else {
      seen = kAllKeys;
    }
    if (seen != kAllKeys) {  // a hidden key may be NaN
      step.stage(tile.source.keys(), forward.key, tile, seen, step_storage, thread_index);
    }
    if (step.active && step.in_place && seen == kAllKeys) {
      CacheTensor keys = tensor_in_place(tile.source.keys(), forward.key, step.first, column, kShareDim);
      accumulate(output_product, scores, keys, output, block);
    } else if (step.active) {
      SharedTensor keys = staged_tensor(step_storage, column, kShareDim, kTileKeys);
      accumulate(output_product, scores, keys, output, block);
    }
  }

  const float weights = row_sum_of(weight_sums, lane);
  rows.store(weights, fc_alibi ? row_sum_of(slope_sums, lane) : 0.0f, share == 0, row_states);
  FATTN_EACH_ELEMENT(i, output) {
    const auto at = output.get_multidimensional_index(i);
    const TileState of_row = saved_of(tile, at[1]);
    const long place = of_row.out(0);
    if (place >= 0 && column + at[0] < kHeadDim) {
      const float scale = params.grad_scale * rows.states[at[1]][2];
      tile.operands.out[place + column + at[0]] = Element(scaled_result(float(output[i]), scale));
    }
  }
}
