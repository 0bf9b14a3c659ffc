// Prefill on Metal 4's tensor operations for keys of 576 columns with values of 512: the heads of multi-head
// latent attention (DeepSeek-V2: DeepSeek-AI 2024) with absorbed projections, where many query heads share
// one key-value head.
//
// Inputs, outputs and the packing of rows are as in prefill.metal. A threadgroup has 16 rows, as many as fit
// in threadgroup memory. Simdgroups do not repeat each other's work. A step:
//
//   simdgroups   query x keys -> scores: each has one half of the keys and of the columns
//   threads      the sums of both halves of the columns -> weights: each has four keys of a row
//   simdgroups   weights x values -> output: each has a share of the columns
//
// The query, scores and weights are in threadgroup memory, where scores are addressed by their coordinates.
// This works with every layout of cooperative tensors, so one variant suffices.
#define FATTN_COLUMN_SHARES (FATTN_SIMDGROUPS / FATTN_ROW_GROUPS)
#define FATTN_EARLY_LOADS false

#include "tensor_rows.h"

namespace fattn {

static_assert(kTileRows == kTensorRows, "all simdgroups have the same rows");
static_assert(!FATTN_REGISTERS, "scores pass through threadgroup memory");
FATTN_CONSTEXPR int kStepProducts = kTileKeys / kProductKeys;
FATTN_CONSTEXPR int kSumShares = kSimdgroups / kStepProducts;  // of the columns that scores sum over
static_assert(kTileKeys == kStepProducts * kProductKeys,
              "a step is a whole number of products along the keys");
static_assert(kSimdgroups == kStepProducts * kSumShares, "a simdgroup has keys and columns of a step");

// Operands are staged for one product along the keys at a time: some columns of its keys, then the columns of
// the values for two simdgroups.
FATTN_CONSTEXPR int kKeyColumns = kSumShares * kProductDim;
FATTN_CONSTEXPR int kKeyPieces = kTensorDim / kKeyColumns;
FATTN_CONSTEXPR int kValueColumns = kLatentValueShares * kShareDim;
FATTN_CONSTEXPR int kValuePieces = kValueDim / kValueColumns;
static_assert(kKeyPieces * kKeyColumns == kTensorDim && kValuePieces * kValueColumns == kValueDim,
              "pieces have the same size");
FATTN_CONSTEXPR int kStagedChunks = latent_staged(kValueDim, kSimdgroups) / kChunk;
static_assert(kKeyColumns <= kValueColumns, "the pieces of keys fit, too");
// The scores of a step reuse this memory.
FATTN_CONSTEXPR int kShareScores = kTensorRows * kScorePitch;
static_assert(kSumShares * kShareScores * sizeof(float) <= kStagedChunks * sizeof(uint4), "as do scores");

// A step. Product p has the keys from p * kProductKeys on.
struct LatentStep {
  StepKeys keys;
  uint exist;  // see StepKeys
  StepFragments fragments;
  bool whole;  // every row sees every key

  void find(thread const PrefillTile& tile, int first_key, ushort lane) thread {
    const KeyTable table = tile.source.blocks();
    keys.look_up(table, first_key, lane);
    exist = keys.exist(table, lane);
    const StepView view = tile.view_of(first_key, exist);
    fragments = view.fragments;
    whole = view.whole;
  }
  // Whether some row may see a key of the product.
  bool has(int p) const thread {
    constexpr int kCount = kProductKeys / kFragment;
    return fragments.has_some(p * kCount, kCount);
  }
  static uint of_product(uint bits, int p) { return (bits >> (p * kProductKeys)) & kProductBits; }
  // Whether products can read keys and values in place.
  bool in_place(thread const PrefillTile& tile, int p) const thread {
    return is_in_place(tile, keys.first_key + p * kProductKeys, of_product(exist, p));
  }
  KeyPlace first(thread const PrefillTile& tile, int p) const thread {
    return keys.find(tile.source.table, p * kProductKeys);
  }
};

FATTN_CONSTEXPR int kRowLanes = kThreads / kTensorRows;
FATTN_CONSTEXPR int kLaneScores = kTileKeys / kRowLanes;
static_assert(kRowLanes == 8 && kLaneScores == 4, "the scores of a row are vectors of a simdgroup");

// A lane's part of a row, which turns the products of a step into weights.
struct RowPart {
  RowSoftmax state;  // of the row, equal in its lanes
  ScoreModifiers modifiers;
  uint drafts;  // see Visibility
  ushort row;
  ushort key;  // the first of its keys in a step

  void begin(thread const PrefillTile& tile, ushort thread_index) thread {
    row = thread_index / kRowLanes;
    key = thread_index % kRowLanes * kLaneScores;
    const QueryRow at = tile.own_row(row);
    tile.rows.set_modifiers(0, at, tile.operands, *tile.params, modifiers);
    drafts = fc_tree && at.exists ? tile.drafts_of(at) : 0;
    state = first_state(tile, row);
    if (is_first()) {
      const TileState saved = saved_of(tile, row);
      tile.rows.save(0, at, tile.part, *tile.params, saved);
    }
  }
  // Whether this lane stores values that the lanes of the row share.
  bool is_first() const thread { return key == 0; }

  // Turns products into weights. Returns a bit for each key that some row of this simdgroup sees.
  uint to_weights(const threadgroup float* products, threadgroup float* weights, threadgroup float* factors,
                  thread const PrefillTile& tile, thread const LatentStep& step) thread {
    const int first_key = step.keys.first_key + key;
    const int place = row * kScorePitch + key;
    float4 own = float4(0.0f);
    FATTN_UNROLL
    for (int share = 0; share < kSumShares; share++) {
      own += *reinterpret_cast<const threadgroup float4*>(products + share * kShareScores + place);
    }
    uint seen = kAllKeys;
    FATTN_UNROLL
    for (int e = 0; e < kLaneScores; e++) {
      own[e] = modified_score(own[e], modifiers, 0, first_key + e);
    }
    if (!step.whole) {
      const TileState saved = saved_of(tile, row);
      Visibility visible = saved.visible_row(*tile.params);
      if (fc_tree) {
        visible.first_draft = tile.rows.first_position;
        visible.drafts[0] = drafts;
      }
      seen = 0;
      FATTN_UNROLL
      for (int e = 0; e < kLaneScores; e++) {
        float score = own[e];
        const bool exists = (step.exist >> (key + e)) & 1;
        const bool sees = sees_key(score, visible, tile.operands.attn_mask, 0, first_key + e, exists);
        own[e] = sees ? score : -INFINITY;
        seen |= uint(own[e] != -INFINITY) << (key + e);
      }
      seen = fc_hides_any ? simd_or(seen) : kAllKeys;
    }
    float largest = fmax(fmax(own[0], own[1]), fmax(own[2], own[3]));
    FATTN_UNROLL
    for (ushort distance = 1; distance < kRowLanes; distance *= 2) {
      largest = fmax(largest, simd_shuffle_xor(largest, distance));
    }
    const float factor = state.grow(largest);
    float sum = 0.0f;
    FATTN_UNROLL
    for (int e = 0; e < kLaneScores; e++) {
      own[e] = weight_of(own[e] - state.origin());
      sum += own[e];
    }
    FATTN_UNROLL
    for (ushort distance = 1; distance < kRowLanes; distance *= 2) {
      sum += simd_shuffle_xor(sum, distance);
    }
    state.sum += sum;
    *reinterpret_cast<threadgroup float4*>(weights + place) = own;
    if (is_first()) {
      factors[row] = factor;
    }
    return seen;
  }
};

}  // namespace fattn

using namespace fattn;

[[kernel, max_total_threads_per_threadgroup(fattn::kThreads)]] void fattn_prefill_latent_tensor(
    FATTN_ATTENTION_ARGUMENTS(PrefillParams)) {
  threadgroup uint4 query_storage[kTileRows * kRowChunks];
  threadgroup uint4 step_storage[kStagedChunks];
  threadgroup float4 weight_storage[kShareScores / 4];  // float4 for its alignment
  threadgroup float factors[kTensorRows];
  threadgroup SavedTile saved;
  threadgroup uint seen_by[kSimdgroups];  // the keys of a step
  FATTN_TENSOR_PRODUCTS

  const ushort thread_index = thread_in_group(simdgroup_index, lane);
  const ushort own_product = simdgroup_index / kSumShares;  // along the keys of a step
  const ushort sum_share = simdgroup_index % kSumShares;    // of the columns of a piece
  const int sum_column = sum_share * kProductDim;
  const int out_column = simdgroup_index * kShareDim;
  threadgroup float* products = reinterpret_cast<threadgroup float*>(step_storage);
  threadgroup float* shared_weights = reinterpret_cast<threadgroup float*>(weight_storage);
  PrefillTile tile;
  FATTN_TAKE_ARGUMENTS(tile.operands);
  tile.params = &params;
  tile.at.row = tile.at.pair = 0;  // this kernel has no fragments
  tile.at.lane = lane;
  if (!tile.find(group_in_grid(group_in_dispatch, slice), 0, saved, thread_index)) {
    return;
  }
  if (thread_index == 0) {
    tile.state.put_ranges(tile.rows.ranges_of(tile.first_row, kOwnRows, params));
  }
  stage_rows(query_storage, query, params.query, tile, thread_index);
  RowPart rows;
  rows.begin(tile, thread_index);
  FATTN_EACH_ELEMENT(i, output) { output[i] = 0.0f; }
  threadgroup_barrier(mem_flags::mem_threadgroup);  // rows and query have been saved

  bool staged = false;  // whether some simdgroup may still read staged rows
  for (int first_key = tile.first_step(); first_key < tile.ranges.end;
       first_key = tile.step_after(first_key)) {
    LatentStep step;
    step.find(tile, first_key, lane);
    FATTN_EACH_ELEMENT(i, scores) { scores[i] = 0.0f; }
#pragma clang loop unroll(disable)
    for (int p = 0; p < kStepProducts; p++) {
      if (!step.has(p) || step.in_place(tile, p)) {
        continue;
      }
#pragma clang loop unroll(disable)
      for (int piece = 0; piece < kKeyPieces; piece++) {
        threadgroup_barrier(mem_flags::mem_threadgroup);  // scores, or what was staged before, were read
        stage_piece<kKeyColumns>(step_storage, tile.source.keys(), params.key, tile, step.keys,
                                 p * kProductKeys, piece * kKeyColumns, kAllKeys, thread_index);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        if (p == own_product) {
          SharedTensor queries =
              staged_tensor(query_storage, piece * kKeyColumns + sum_column, kProductDim, kTensorRows);
          SharedTensor keys = staged_piece(step_storage, kKeyColumns, sum_column, kProductDim, kProductKeys);
          score_product.run(queries, keys, scores);
        }
      }
      staged = true;
    }
    if (step.has(own_product) && step.in_place(tile, own_product)) {
      const KeyPlace own_keys = step.first(tile, own_product);
      FATTN_UNROLL
      for (int column = sum_column; column < kTensorDim; column += kKeyColumns) {
        SharedTensor queries = staged_tensor(query_storage, column, kProductDim, kTensorRows);
        CacheTensor keys = tensor_in_place(tile.source.keys(), params.key, own_keys, column, kProductDim);
        score_product.run(queries, keys, scores);
      }
    }
    if (staged) {
      threadgroup_barrier(mem_flags::mem_threadgroup);  // staged rows have been read
    }
    staged = false;
    FATTN_EACH_ELEMENT(i, scores) {
      const auto at = scores.get_multidimensional_index(i);
      products[sum_share * kShareScores + at[1] * kScorePitch + own_product * kProductKeys + at[0]] =
          scores[i];
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);  // scores are written, the previous weights read
    const uint own_seen = rows.to_weights(products, shared_weights, factors, tile, step);
    const bool hides = fc_hides_any && !tile.sees_whole(first_key);
    if (hides) {
      seen_by[simdgroup_index] = own_seen;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);  // weights and factors are written
    uint seen = hides ? 0 : kAllKeys;  // uniform over the threadgroup: there are barriers below
    for (int i = 0; hides && i < kSimdgroups; i++) {
      seen |= seen_by[i];
    }
    FATTN_EACH_ELEMENT(i, output) { output[i] *= factors[output.get_multidimensional_index(i)[1]]; }
    FATTN_UNROLL
    for (int p = 0; p < kStepProducts; p++) {
      if (!step.has(p)) {
        continue;
      }
      SharedWeights weights(shared_weights + p * kProductKeys, dextents<int, 2>(kProductKeys, kTensorRows),
                            array<int, 2>{1, kScorePitch});
      if (LatentStep::of_product(seen, p) == kProductBits && step.in_place(tile, p)) {
        CacheTensor values =
            tensor_in_place(tile.source.values(), params.value, step.first(tile, p), out_column, kShareDim);
        output_product.run(weights, values, output);
        continue;
      }
#pragma clang loop unroll(disable)
      for (int piece = 0; piece < kValuePieces; piece++) {
        threadgroup_barrier(mem_flags::mem_threadgroup);  // scores, or what was staged before, were read
        stage_piece<kValueColumns>(step_storage, tile.source.values(), params.value, tile, step.keys,
                                   p * kProductKeys, piece * kValueColumns, seen, thread_index);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        if (simdgroup_index / kLatentValueShares == piece) {
          SharedTensor values =
              staged_piece(step_storage, kValueColumns, out_column % kValueColumns, kShareDim, kProductKeys);
          output_product.run(weights, values, output);
        }
      }
      staged = true;
    }
  }
  if (rows.is_first()) {
    store_sum(rows.state, rows.row, tile);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);  // the factors of the last step have been read
  if (rows.is_first()) {
    factors[rows.row] = result_scale(rows.state.sum);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  FATTN_EACH_ELEMENT(i, output) {
    const auto at = output.get_multidimensional_index(i);
    const TileState of_row = saved_of(tile, at[1]);
    const long place = of_row.out(0);
    if (place >= 0) {
      store_result(tile.operands, place + out_column + at[0],
                   scaled_result(float(output[i]), factors[at[1]]));
    }
  }
}
