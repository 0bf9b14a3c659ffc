// The gradient of the query on Metal 4's tensor operations. Results are those of backward_query, and the
// steps and what is read where it is are those of prefill_tensor.
//
// The keys are walked twice: for the sums of P and P * dP, then for the gradients. The forward's log-sum-exp
// is the origin of both walks; its error cancels, as that of another origin does (score_gradient.h).
#define FATTN_COLUMN_SHARES (FATTN_SIMDGROUPS / FATTN_ROW_GROUPS)

#include "tensor_gradients.h"
#include "../prefill/tensor_staging.h"

namespace fattn {

static_assert(kOwnRows == kTensorRows, "a simdgroup has the rows of a product");

// The operands of a backward beside those of its forward, and the rows of a simdgroup.
struct QueryRows {
  PrefillTile tile;
  const device float* grad_lse;
  threadgroup float4* states;  // RowState, of each row
  const threadgroup SavedModifiers* modifiers;

  // Reads the origin of this lane's row.
  void begin() const thread {
    if (tile.at.lane < kTensorRows) {
      const bool known = has(own_row());
      const float lse = known ? lse_in_units(tile.operands.lse[place()]) : -INFINITY;
      states[tile.at.lane] = float4(lse, 0.0f, 0.0f, 0.0f);
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);
  }

  // After the first walk, with the sums of this lane's row.
  void put_sums(float weights, float weighted_grads) const thread {
    simdgroup_barrier(mem_flags::mem_threadgroup);  // the origins were read
    if (tile.at.lane < kTensorRows) {
      const QueryRow row = own_row();
      const float lse = states[tile.at.lane][0];
      float sum = weights;
      if (fc_sinks && row.exists) {
        sum += weight_of(sink_score(tile.sink_of(row)) - lse);
      }
      const float inverse = weights == 0.0f ? 0.0f : 1.0f / sum;
      const float delta = weighted_grads * inverse;
      const bool has_grad = fc_grad_lse && has(row);
      states[tile.at.lane] = float4(lse, has_grad ? delta - grad_lse[place()] : delta, inverse, 0.0f);
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);
  }

  // After the second walk, with the sum of this lane's row for the gradient of its slope.
  void store(float slope_grad, device float4* row_states) const thread {
    if (tile.at.lane < kTensorRows && own_row().exists) {
      const float4 state = states[tile.at.lane];
      const float inverse = state[2];
      row_states[place()] =
          float4(inverse == 0.0f ? INFINITY : state[0], state[1], inverse, slope_grad * inverse);
    }
  }

  // Turns the products of a step into gradients of the scaled products, and adds to the sums of rows:
  // weights, and P * dP in the first walk or what is for slopes in the second. Returns the keys that some row
  // sees, by bits.
  template <class Scores>
  uint weigh(thread Scores& scores, thread Scores& weight_grads, thread Scores& weight_sums,
             thread Scores& other_sums, int first_key, bool whole, bool sums_only) const thread {
    uint seen = 0;
    FATTN_EACH_ELEMENT(i, scores) {
      const auto at = scores.get_multidimensional_index(i);
      const int key = first_key + at[0];
      ScoreModifiers of_row;
      set_uniform(of_row, *tile.params);
      if (fc_alibi) {
        of_row.slope[0] = modifiers[at[1]].slope;
        of_row.position[0] = modifiers[at[1]].position;
      }
      const TileState saved = saved_of(tile, at[1]);
      const Visibility visible = saved.visible_row(*tile.params);
      const KeyScore score = key_score(scores[i], of_row, visible, tile.operands.attn_mask, 0, key, !whole);
      const float4 state = states[at[1]];
      const ScoreGradient gradient = score_gradient(score, weight_grads[i], state[0], state[1], of_row);
      seen |= uint(score.seen()) << at[0];
      scores[i] = gradient.product;
      if (sums_only) {
        weight_sums[i] += gradient.weight;
        other_sums[i] += gradient.score;  // delta is 0
      } else if (fc_alibi) {
        other_sums[i] += gradient.score * float(key - of_row.position[0]);
      }
    }
    return fc_hides_any && !whole ? simd_or(seen) : kAllKeys;
  }

 private:
  QueryRow own_row() const thread { return tile.own_row(tile.at.lane); }
  // Whether the row belongs to a sequence.
  bool has(QueryRow row) const thread { return row.exists && (!fc_packed || tile.rows.tile.batch >= 0); }
  long place() const thread { return tile.rows.lse_of(own_row(), 0, *tile.params); }
};

}  // namespace fattn

using namespace fattn;

[[kernel, max_total_threads_per_threadgroup(fattn::kThreads)]] void fattn_backward_query_tensor(
    const device Element* grad_out [[buffer(fattn::kSlotGradOut)]],
    const device float* grad_lse [[buffer(fattn::kSlotGradLse), function_constant(fc_grad_lse)]],
    device float4* row_states [[buffer(fattn::kSlotRowStates)]], FATTN_ATTENTION_ARGUMENTS(BackwardParams)) {
  threadgroup uint4 query_storage[kTileRows * kRowChunks];
  threadgroup uint4 grad_storage[kTileRows * kRowChunks];
  threadgroup uint4 step_storage[kStepChunks];
  threadgroup SavedTile saved;
  threadgroup SavedModifiers saved_modifiers[kTileRows];
  threadgroup float4 saved_states[kSimdgroups * kTensorRows];
  threadgroup uint seen_by[2][kSimdgroups];  // the keys of a step, in two steps
  FATTN_SHARED_BLOCKS(shared)
  FATTN_TENSOR_PRODUCTS
  auto weight_grads = FATTN_TENSOR_SCORES;
  auto weight_sums = FATTN_TENSOR_SCORES;
  auto other_sums = FATTN_TENSOR_SCORES;

  constant PrefillParams& forward = params.forward;
  const ushort thread_index = thread_in_group(simdgroup_index, lane);
  const ushort share = simdgroup_index % kColumnShares;
  const int row = simdgroup_index / kColumnShares * kOwnRows;  // this simdgroup's first row in the tile
  const int column = share * kShareDim;                        // and column of the gradient
  QueryRows rows;
  thread PrefillTile& tile = rows.tile;
  FATTN_TAKE_ARGUMENTS(tile.operands);
  tile.params = &forward;
  tile.at.row = tile.at.pair = 0;  // of fragments, which this kernel has not
  tile.at.lane = lane;
  if (!tile.find(group_in_grid(group_in_dispatch, slice), row, saved, thread_index)) {
    return;
  }
  if (share == 0) {
    save_rows(tile, saved_modifiers + row);
  }
  rows.states = saved_states + simdgroup_index * kTensorRows;
  rows.modifiers = saved_modifiers + row;
  if (fc_grad_lse) {
    rows.grad_lse = grad_lse;
  }
  rows.begin();
  stage_rows(query_storage, query, forward.query, tile, thread_index);
  stage_rows(grad_storage, grad_out, params.grad_out, tile, thread_index);
  SharedTensor queries = staged_tensor(query_storage + row * kRowChunks, 0, kTensorDim, kTensorRows);
  SharedTensor grads = staged_tensor(grad_storage + row * kRowChunks, 0, kTensorDim, kTensorRows);
  FATTN_EACH_ELEMENT(i, output) { output[i] = 0.0f; }
  threadgroup_barrier(mem_flags::mem_threadgroup);  // rows and operands are saved

  ushort turn = 0;
#pragma clang loop unroll(disable)
  for (int walk = 0; walk < 2; walk++) {
    const bool sums_only = walk == 0;
    FATTN_EACH_ELEMENT(i, scores) { weight_sums[i] = other_sums[i] = 0.0f; }
    for (int first_key = tile.first_step(); first_key < tile.ranges.end;
         first_key = tile.step_after(first_key)) {
      StepKeys step;
      const KeyTable table = tile.source.blocks();
      step.look_up(table, first_key, lane);
      const KeyPlace first = step.find(table, 0);
      const uint exist = step.exist(table, lane);
      const StepSight sight = tile.sight_of(first_key, exist);
      const bool active = sight.fragments.any();
      const bool in_place = is_in_place(tile, first_key, exist);
      if (!in_place) {
        threadgroup_barrier(mem_flags::mem_threadgroup);  // the step before was read
        stage_step(step_storage, tile.source.values(), forward.value, tile, step, kAllKeys, thread_index);
        threadgroup_barrier(mem_flags::mem_threadgroup);
      }
      if (active) {
        if (in_place) {
          CacheTensor values = tensor_in_place(tile.source.values(), forward.value, first, 0, kTensorDim);
          score_product.run(grads, values, weight_grads);
        } else {
          SharedTensor values = staged_tensor(step_storage, 0, kTensorDim, kTileKeys);
          score_product.run(grads, values, weight_grads);
        }
      }
      if (!in_place) {
        threadgroup_barrier(mem_flags::mem_threadgroup);  // the values were read
        stage_step(step_storage, tile.source.keys(), forward.key, tile, step, kAllKeys, thread_index);
        threadgroup_barrier(mem_flags::mem_threadgroup);
      }
      uint seen = 0;
      if (active) {
        if (in_place) {
          CacheTensor keys = tensor_in_place(tile.source.keys(), forward.key, first, 0, kTensorDim);
          score_product.run(queries, keys, scores);
        } else {
          SharedTensor keys = staged_tensor(step_storage, 0, kTensorDim, kTileKeys);
          score_product.run(queries, keys, scores);
        }
        seen = rows.weigh(scores, weight_grads, weight_sums, other_sums, first_key, sight.whole, sums_only);
      }
      if (sums_only) {
        continue;
      }
      if (fc_hides_any && !tile.sees_whole(first_key)) {
        seen_by[turn][simdgroup_index] = seen;
        threadgroup_barrier(mem_flags::mem_threadgroup);
        for (int i = 0; i < kSimdgroups; i++) {
          seen |= seen_by[turn][i];
        }
        turn ^= 1;
      } else {
        seen = kAllKeys;
      }
      const bool keys_in_place = in_place && seen == kAllKeys;
      if (seen != kAllKeys) {                             // a key that no row sees may be NaN
        threadgroup_barrier(mem_flags::mem_threadgroup);  // the keys, or a step before, were read
        stage_step(step_storage, tile.source.keys(), forward.key, tile, step, seen, thread_index);
        threadgroup_barrier(mem_flags::mem_threadgroup);
      }
      if (active) {
        if (keys_in_place) {
          CacheTensor keys = tensor_in_place(tile.source.keys(), forward.key, first, column, kShareDim);
          accumulate(output_product, scores, keys, output, shared);
        } else {
          SharedTensor keys = staged_tensor(step_storage, column, kShareDim, kTileKeys);
          accumulate(output_product, scores, keys, output, shared);
        }
      }
    }
    if (sums_only) {
      const float weights = row_sum_of(weight_sums, lane);
      rows.put_sums(weights, row_sum_of(other_sums, lane));
    }
  }

  const float slope_grad = fc_alibi ? row_sum_of(other_sums, lane) : 0.0f;
  if (share == 0) {
    rows.store(slope_grad, row_states);
  }
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
