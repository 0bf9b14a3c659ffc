// Prefill on Metal 4's tensor operations, for GPUs with tensor units.
//
// Inputs, outputs and the packing of rows are as in prefill.metal. A simdgroup has 16 rows: scores and output
// are cooperative tensors (tensor_products.h). With wide heads, the simdgroups of a row group divide the
// columns of the output and compute the same scores. A step:
//
//   all          keys, and below values, -> threadgroup memory, if they cannot be read in place
//   each         query x keys -> scores -> weights; weights x values of its columns
//
// Every step reads the query from threadgroup memory: in xwen's published ablations on an M5 Max this made
// the largest difference.
#define FATTN_COLUMN_SHARES (FATTN_SIMDGROUPS / FATTN_ROW_GROUPS)
#define FATTN_EARLY_LOADS false

#include "tensor_rows.h"
#include "tensor_step.h"
// The embedder expands an include in a branch only there, so these two files include nothing.
#if FATTN_REGISTERS
#include "tensor_registers.h"
#else
#include "tensor_threadgroup.h"
#endif

namespace fattn {

static_assert(kOwnRows == kTensorRows, "a simdgroup has the rows of a product");

// Turns the products of a step into scores: -inf for hidden keys. Returns a bit for each key that some row
// sees. `saved_rows`: of this simdgroup.
template <class Scores>
inline uint modify_products(thread Scores& scores, thread const PrefillTile& tile,
                            const threadgroup SavedTensorRow* saved_rows, thread const TensorStep& step) {
  FATTN_EACH_ELEMENT(i, scores) {
    const auto at = scores.get_multidimensional_index(i);
    const ScoreModifiers of_row = modifiers_of(saved_rows[at[1]], *tile.params);
    scores[i] = modified_score(scores[i], of_row, 0, step.first_key + at[0]);
  }
  if (step.whole) {
    return kAllKeys;
  }
  uint seen = 0;
  FATTN_EACH_ELEMENT(i, scores) {
    const auto at = scores.get_multidimensional_index(i);
    const TileState saved = saved_of(tile, at[1]);
    Visibility visible = saved.visible_row(*tile.params);
    if (fc_tree) {
      visible.first_draft = tile.rows.first_position;
      visible.drafts[0] = uint(saved_rows[at[1]].drafts);
    }
    const bool exists = (step.exist >> at[0]) & 1;
    float score = scores[i];
    const bool sees = sees_key(score, visible, tile.operands.attn_mask, 0, step.first_key + at[0], exists);
    scores[i] = sees ? score : -INFINITY;
    seen |= uint(scores[i] != -INFINITY) << at[0];
  }
  return fc_hides_any ? simd_or(seen) : kAllKeys;
}

}  // namespace fattn

using namespace fattn;

[[kernel, max_total_threads_per_threadgroup(fattn::kThreads)]] void fattn_prefill_tensor(
    FATTN_ATTENTION_ARGUMENTS(PrefillParams)) {
  threadgroup uint4 query_storage[kTileRows * kRowChunks];
  threadgroup uint4 step_storage[kStepChunks];
  threadgroup SavedTile saved;
  threadgroup SavedTensorRow saved_rows[kTileRows];
  threadgroup uint seen_by[2][kSimdgroups];  // the keys of a step, in two steps
#if !FATTN_REGISTERS
  threadgroup float shared_scores[kSimdgroups * kTensorRows * kScorePitch];
  threadgroup float shared_factors[kSimdgroups * kTensorRows];
#endif
  FATTN_TENSOR_PRODUCTS
  auto reduced = FATTN_TENSOR_REDUCED;

  const ushort thread_index = thread_in_group(simdgroup_index, lane);
  const ushort share = simdgroup_index % kColumnShares;
  const int row = simdgroup_index / kColumnShares * kOwnRows;  // this simdgroup's first row in the tile
  const int column = share * kShareDim;                        // and column of the output
  PrefillTile tile;
  FATTN_TAKE_ARGUMENTS(tile.operands);
  tile.params = &params;
  tile.at.row = tile.at.pair = 0;  // this kernel has no fragments
  tile.at.lane = lane;
  if (!tile.find(group_in_grid(group_in_dispatch, slice), row, saved, thread_index)) {
    return;
  }
  if (share == 0) {
    save_rows(tile, saved_rows + row);
  }
  stage_rows(query_storage, query, params.query, tile, thread_index);
  TensorRows rows;
#if !FATTN_REGISTERS
  rows.scores_of_rows = shared_scores + simdgroup_index * (kTensorRows * kScorePitch);
  rows.factors = shared_factors + simdgroup_index * kTensorRows;
#endif
  rows.begin(scores, reduced, output, tile);
  FATTN_EACH_ELEMENT(i, output) { output[i] = 0.0f; }
  SharedTensor query_rows = staged_tensor(query_storage + row * kRowChunks, 0, kTensorDim, kTensorRows);
  threadgroup_barrier(mem_flags::mem_threadgroup);  // rows and query have been saved

  TensorStep step;
  ushort turn = 0;
  for (int key = tile.first_step(); key < tile.ranges.end; key = tile.step_after(key)) {
    step.find(tile, key);
    step.multiply(score_product, query_rows, tile.source.keys(), params.key, tile, step_storage, thread_index,
                  scores);
    uint seen = step.active ? modify_products(scores, tile, saved_rows + row, step) : 0;
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
    const bool values_in_place = step.in_place && seen == kAllKeys;
    if (!values_in_place) {
      step.stage(tile.source.values(), params.value, tile, seen, step_storage, thread_index);
    }
    if (step.active) {
      rows.to_weights(scores, reduced, output);
#if FATTN_REGISTERS
      auto weights = output_product.template get_left_input_cooperative_tensor<float, Element, float>(scores);
#else
      SharedWeights weights = rows.weights();
#endif
      if (values_in_place) {
        CacheTensor values =
            tensor_in_place(tile.source.values(), params.value, step.first, column, kShareDim);
        output_product.run(weights, values, output);
      } else {
        SharedTensor values = staged_tensor(step_storage, column, kShareDim, kTileKeys);
        output_product.run(weights, values, output);
      }
    }
  }
  if (share == 0) {
    rows.store_sums(scores, tile);
  }
  rows.finish();
  FATTN_EACH_ELEMENT(i, output) {
    const auto at = output.get_multidimensional_index(i);
    const TileState of_row = saved_of(tile, at[1]);
    const long place = of_row.out(0);
    if (place >= 0 && column + at[0] < kValueDim) {
      store_result(tile.operands, place + column + at[0],
                   scaled_result(float(output[i]), rows.factor(i, at[1])));
    }
  }
}
