// The gradient of the query. A simdgroup owns rows of the query and walks the keys that they see, with the
// tile, steps and staging of prefill.
//
// Each row needs delta (score_gradient.h) before its first gradient of a score. With the forward's result in
// float32, or in 16 bits with its remainder, delta is the dot product of this result and its gradient.
// Otherwise the keys are walked twice: first for the sums of P and P * dP by online softmax, from unrounded
// numbers, then for the gradients.
#define FATTN_PAIRED_KEYS false
#define FATTN_COLUMN_SHARES (FATTN_SIMDGROUPS / FATTN_ROW_GROUPS)

#include "gradients.h"
#include "saved_out.h"
#include "../prefill/staging.h"

namespace fattn {

typedef ProductBlocks<kRowFragments> RowBlocks;
typedef SharedBlocks<kRowFragments, kKeyFragments> SharedRowBlocks;

// Operands that only the backward has.
struct RowGradients {
  const device Element* grad_out;
  const device float* grad_lse;
  const device uchar* saved_out;
  device float4* row_states;
};

struct QueryGradient {
  simdgroup_float8x8 sums[kRowFragments][KeyShare::kFragments];
  float lse[kRowFragments];  // the origin of weights; in the first walk, the largest score of this lane
  float delta[kRowFragments];
  // Sums over this lane's columns.
  float weight_sum[kRowFragments];
  float other_sum[kRowFragments];  // first walk: P * dP; second walk: the gradient of the slope

  QueryGradient() thread {}

  void clear_row_sums() thread {
    FATTN_UNROLL
    for (int r = 0; r < kRowFragments; r++) {
      weight_sum[r] = 0.0f;
      other_sum[r] = 0.0f;
    }
  }

  // Adds two keys to the sums of the first walk (softmax.h).
  void add_keys(int r, thread const KeyScore (&keys)[2], float2 weight_grads) thread {
    const float largest = fmax(lse[r], fmax(keys[0].score, keys[1].score));
    const float origin = largest == -INFINITY ? 0.0f : largest;
    const float shrink = lse[r] == largest ? 1.0f : weight_of(lse[r] - origin);
    lse[r] = largest;
    weight_sum[r] *= shrink;
    other_sum[r] *= shrink;
    FATTN_UNROLL
    for (int e = 0; e < 2; e++) {
      const float weight = weight_of(keys[e].score - origin);
      weight_sum[r] += weight;
      other_sum[r] += keys[e].seen() ? weight * weight_grads[e] : 0.0f;
    }
  }

  // Turns the blocks of a key fragment into gradients of products, or in the first walk adds its keys to the
  // sums. Bit i of the result: some row of this simdgroup sees key i of the fragment.
  uint to_weights(thread RowBlocks& blocks, thread const ScoreModifiers& modifiers,
                  thread const Visibility& visible, const device uchar* mask, int first_key, bool edge,
                  bool sums_only, LanePosition at) thread {
    uint seen = 0;
    FATTN_UNROLL
    for (int r = 0; r < kRowFragments; r++) {
      KeyScore keys[2];
      FATTN_UNROLL
      for (int e = 0; e < 2; e++) {
        keys[e] = key_score(blocks.products[r].thread_elements()[e], modifiers, visible, mask, r,
                            first_key + at.pair * 2 + e, edge);
        seen |= uint(keys[e].seen()) << e;
      }
      const float2 weight_grads =
          float2(blocks.weight_grads[r].thread_elements()[0], blocks.weight_grads[r].thread_elements()[1]);
      if (sums_only) {
        add_keys(r, keys, weight_grads);
        continue;
      }
      FATTN_UNROLL
      for (int e = 0; e < 2; e++) {
        const ScoreGradient gradient = score_gradient(keys[e], weight_grads[e], lse[r], delta[r], modifiers);
        weight_sum[r] += gradient.weight;
        if (fc_alibi) {
          const int key = first_key + at.pair * 2 + e;
          other_sum[r] += gradient.score * float(key - modifiers.position[r]);
        }
        blocks.products[r].thread_elements()[e] = gradient.product;
      }
    }
    return fc_hides_any && edge ? simd_or(seen << (2 * at.pair)) : 0xffu;
  }
};

// The rows of a simdgroup, and its tile.
struct QueryRows {
  PrefillTile tile;
  ushort share;

  // This lane's row of fragment r.
  QueryRow row(int r) const thread { return tile.own_row(r * 8 + tile.at.row); }
  // Whether the row belongs to a sequence.
  bool has(QueryRow row) const thread { return row.exists && (!fc_packed || tile.rows.tile.batch >= 0); }

  // dO of row r; null if the row does not exist.
  const device Element* grad_row(int r, constant BackwardParams& params, const device Element* grad_out) const
      thread {
    const QueryRow own = row(r);
    return own.exists ? grad_out + tile.rows.row_offset(own, params.grad_out) : nullptr;
  }

  // Reads the state of the rows before the first step. The tile must be saved.
  void begin(thread QueryGradient& state, thread const RowGradients& gradients,
             constant BackwardParams& params) const thread {
    FATTN_UNROLL
    for (int r = 0; r < kRowFragments; r++) {
      const QueryRow own = row(r);
      state.lse[r] = -INFINITY;
      float sum = 0.0f;
      if (fc_saved_out && has(own)) {
        state.lse[r] = lse_in_units(tile.operands.lse[tile.state.lse(r)]);
        sum = saved_product(own, tile.at.pair, 4, tile, params, gradients.grad_out, gradients.saved_out);
      }
      if (fc_saved_out) {
        state.delta[r] = delta_of(row_sum_of(sum), r, gradients);
      }
    }
  }

  // After the first walk: the row's maximum score becomes the origin of weights. If the sink's weight is then
  // infinite, the weights of all keys are 0.
  void finish_sums(thread QueryGradient& state, thread const RowGradients& gradients) const thread {
    FATTN_UNROLL
    for (int r = 0; r < kRowFragments; r++) {
      const float of_lane = state.lse[r];
      const float largest = row_max_of(of_lane);
      const float shrink = of_lane == largest ? 1.0f : weight_of(of_lane - largest);
      state.lse[r] = largest;
      state.weight_sum[r] *= shrink;
      const float sum = row_sum_of(state.other_sum[r] * shrink);
      state.delta[r] = delta_of(sum * inverse(state, r), r, gradients);
    }
  }

  // 1 / sum of the weights of row r, with its sink's; 0 if no key has a weight.
  float inverse(thread const QueryGradient& state, int r) const thread {
    const float keys = row_sum_of(state.weight_sum[r]);
    float sum = keys;
    if (fc_sinks && row(r).exists) {
      sum += weight_of(sink_score(tile.sink(r)) - state.lse[r]);
    }
    return keys == 0.0f ? 0.0f : 1.0f / sum;
  }

  // delta of row r, from the sum of P * dP.
  float delta_of(float sum, int r, thread const RowGradients& gradients) const thread {
    return fc_grad_lse && has(row(r)) ? sum - gradients.grad_lse[tile.state.lse(r)] : sum;
  }
};

// The staged keys of a step, at this simdgroup's columns.
struct OwnTiles {
  const threadgroup TileElement* keys;
  const threadgroup TileElement* values;

  void multiply(int n, thread const OwnedRows<kHeadDim, kRowFragments>& query,
                thread const OwnedRows<kValueDim, kRowFragments>& grad_out, thread RowBlocks& blocks,
                LanePosition at) const thread {
    blocks.multiply(query, grad_out, keys + n * 8 * kKeyPitch, kKeyPitch, values + n * 8 * kValuePitch,
                    kValuePitch, at);
  }

  // Adds the products of gradients with the keys of fragment n. A hidden key may be NaN, so a visible one is
  // read instead.
  void accumulate_keys(int n, uint seen, thread const RowBlocks& blocks, thread QueryGradient& state,
                       LanePosition at) const thread {
    const int key = (seen >> at.row) & 1 ? int(at.row) : int(ctz(seen));
    accumulate<kHeadDim>(state.sums, blocks.products, keys + (n * 8 + key) * kKeyPitch, at);
  }
};

// One step of a walk: the fragments that this simdgroup's rows may see.
struct QueryStep {
  int first_key;
  StepView view;
  KeyRanges ranges;  // of the simdgroup's rows
  bool sums_only;

  bool has(int n) const thread {
    const int key = first_key + n * 8;
    return view.fragments.has(n) && ranges.meet(key, key + 8);
  }
};

// The gradients of fragment n from its blocks.
inline void finish_fragment(int n, thread const QueryStep& step, thread RowBlocks& blocks,
                            thread QueryGradient& state, thread const QueryRows& rows,
                            thread const ScoreModifiers& modifiers, thread const OwnTiles& tiles) {
  thread const PrefillTile& tile = rows.tile;
  const Visibility visible = tile.state.visible(*tile.params);
  const uint seen = state.to_weights(blocks, modifiers, visible, tile.operands.attn_mask,
                                     step.first_key + n * 8, !step.view.whole, step.sums_only, tile.at);
  if (!step.sums_only && seen != 0) {
    tiles.accumulate_keys(n, seen, blocks, state, tile.at);
  }
}

}  // namespace fattn

using namespace fattn;

[[kernel, max_total_threads_per_threadgroup(fattn::kThreads)]] void fattn_backward_query(
    const device Element* grad_out [[buffer(fattn::kSlotGradOut)]],
    const device float* grad_lse [[buffer(fattn::kSlotGradLse), function_constant(fc_grad_lse)]],
    const device uchar* saved_out [[buffer(fattn::kSlotSavedOut), function_constant(fc_saved_out)]],
    device float4* row_states [[buffer(fattn::kSlotRowStates)]], FATTN_ATTENTION_ARGUMENTS(BackwardParams)) {
  threadgroup uint4 key_storage[kTileKeys * kKeyPitch / kTileChunk];
  threadgroup uint4 value_storage[kTileKeys * kValuePitch / kTileChunk];
  threadgroup float2 shared_blocks[SharedRowBlocks::kPairs];
  threadgroup SavedTile saved;
  StepTiles tiles;
  tiles.keys = reinterpret_cast<threadgroup TileElement*>(key_storage);
  tiles.values = reinterpret_cast<threadgroup TileElement*>(value_storage);

  const LanePosition at = lane_position(lane);
  const ushort thread_index = thread_in_group(simdgroup_index, lane);
  QueryRows rows;
  rows.share = simdgroup_index % kColumnShares;
  const int first_row = simdgroup_index / kColumnShares * kOwnRows;  // of this simdgroup, in the tile
  RowGradients gradients;
  gradients.grad_out = grad_out;
  gradients.row_states = row_states;
  if (fc_grad_lse) {
    gradients.grad_lse = grad_lse;
  }
  if (fc_saved_out) {
    gradients.saved_out = saved_out;
  }
  FATTN_TAKE_ARGUMENTS(rows.tile.operands);
  rows.tile.params = &params.forward;
  rows.tile.at = at;
  if (!rows.tile.find(group_in_grid(group_in_dispatch, slice), first_row, saved, thread_index)) {
    return;
  }
  clear_padding<kHeadDim>(tiles.keys, kKeyPitch, kTileKeys, thread_index);
  clear_padding<kValueDim>(tiles.values, kValuePitch, kTileKeys, thread_index);
  ScoreModifiers modifiers;
  OwnedRows<kHeadDim, kRowFragments> query_rows;
  OwnedRows<kValueDim, kRowFragments> grad_rows;
  FATTN_UNROLL
  for (int r = 0; r < kRowFragments; r++) {
    query_rows.load(r, rows.tile.query_row(r * 8 + at.row), rows.share, at);
    grad_rows.load(r, rows.grad_row(r, params, grad_out), rows.share, at);
    rows.tile.prepare_row(r, modifiers, at.pair == 0 && rows.share == 0);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);  // the rows are saved

  QueryGradient state;
  clear_sums(state.sums);
  rows.begin(state, gradients, params);
  OwnTiles own;
  own.keys = tiles.keys + rows.share * KeyShare::kColumns;
  own.values = tiles.values + rows.share * ValueShare::kColumns;
  SharedRowBlocks shared;
  shared.pairs = shared_blocks;
  shared.group = simdgroup_index / kColumnShares;
  shared.share = rows.share;

  StepLoads staged;
#pragma clang loop unroll(disable)
  for (int walk = fc_saved_out ? 1 : 0; walk < 2; walk++) {
    QueryStep step;
    step.sums_only = walk == 0;
    step.ranges = rows.tile.state.own_ranges();
    state.clear_row_sums();
    for (step.first_key = rows.tile.first_step(); step.first_key < rows.tile.ranges.end;
         step.first_key = rows.tile.step_after(step.first_key)) {
      staged.stage<false>(step.first_key, tiles, rows.tile, thread_index);
      step.view = rows.tile.view_of(step.first_key, kAllKeys);
      RowBlocks blocks;
#pragma clang loop unroll(disable)
      for (int n = 0; n < step.view.fragments.end(); n++) {
        if (!step.has(n)) {
          continue;
        }
        own.multiply(n, query_rows, grad_rows, blocks, at);
        if (kColumnShares > 1) {
          shared.write(n, blocks, at);
        } else {
          finish_fragment(n, step, blocks, state, rows, modifiers, own);
        }
      }
      if (kColumnShares > 1) {
        threadgroup_barrier(mem_flags::mem_threadgroup);
#pragma clang loop unroll(disable)
        for (int n = 0; n < step.view.fragments.end(); n++) {
          if (step.has(n)) {
            shared.read(n, blocks, at);
            finish_fragment(n, step, blocks, state, rows, modifiers, own);
          }
        }
      }
    }
    if (step.sums_only) {
      rows.finish_sums(state, gradients);
    }
  }

  FATTN_UNROLL
  for (int r = 0; r < kRowFragments; r++) {
    const float inverse = rows.inverse(state, r);
    const float slope_grad = row_sum_of(state.other_sum[r]) * inverse;
    if (rows.tile.place(r) < 0) {
      continue;
    }
    store_gradient<kHeadDim>(state.sums, r, rows.tile.operands.out + rows.tile.place(r),
                             params.grad_scale * inverse, rows.share, at);
    if (rows.share == 0 && at.pair == 0) {
      const bool sees = inverse != 0.0f;
      const float lse = sees ? state.lse[r] : INFINITY;
      const float delta = sees ? state.delta[r] : rows.delta_of(0.0f, r, gradients);
      gradients.row_states[rows.tile.sum_place(r)] = float4(lse, delta, inverse, slope_grad);
    }
  }
}
