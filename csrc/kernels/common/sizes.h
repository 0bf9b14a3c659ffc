// Types and sizes that host and kernels share: tile arithmetic and common limits.
#pragma once

#ifdef __METAL_VERSION__
#include <metal_stdlib>
typedef long fattn_i64;
typedef int fattn_i32;
typedef float fattn_f32;
#define FATTN_CONSTEXPR constant constexpr
#define FATTN_UNROLL _Pragma("clang loop unroll(full)")
#else
#include <cstdint>
typedef int64_t fattn_i64;
typedef int32_t fattn_i32;
typedef float fattn_f32;
#define FATTN_CONSTEXPR inline constexpr
#endif

namespace fattn {

// Rows and columns of a fragment (simdgroup matrix), and lanes of a simdgroup.
FATTN_CONSTEXPR int kFragment = 8;
FATTN_CONSTEXPR int kSimdWidth = 32;
// A cell of a mask map: the rows of a prefill simdgroup by the keys of a step.
FATTN_CONSTEXPR int kCellRows = 16;
FATTN_CONSTEXPR int kCellKeys = 32;
FATTN_CONSTEXPR int kCellFragments = kCellKeys / kFragment;
FATTN_CONSTEXPR int kAllCellFragments = (1 << kCellFragments) - 1;
FATTN_CONSTEXPR int kCellKindBits = 2;
// Exclusive upper bound of a byte of a map.
FATTN_CONSTEXPR int kCellBytes = 1 << (kCellKindBits + kCellFragments);
// Cells per threadgroup of mask_map, adjacent along the keys: 256 bytes of a row of booleans.
FATTN_CONSTEXPR int kGroupCells = 8;
// window_left without a window: more keys than a sequence can have.
FATTN_CONSTEXPR int kNoWindow = 1 << 30;
// No limit on one side of a prefill window: more than the distance of any two positions.
FATTN_CONSTEXPR int kNoLimit = 0x7fffffff;
// Up to this size of chunks, decode limits their number (schedule.h).
FATTN_CONSTEXPR int kLargeChunk = 512;
// Columns of an int4 row that share a scale and a minimum.
FATTN_CONSTEXPR int kInt4Group = 32;
// Outer dimensions of a tensor of logits, besides the columns of a row.
FATTN_CONSTEXPR int kLogitsDims = 5;
// Columns of logits per load or store.
FATTN_CONSTEXPR int kLogitsVector = 4;
// Floats per row of a partial result: the largest logit in score units and in natural units, the sum of the
// weights, and log2 of the weight per score unit.
FATTN_CONSTEXPR int kSumFloats = 4;
// merge's state of a row: the same without the last, which is equal in all parts.
FATTN_CONSTEXPR int kMergeSumFloats = 3;
// Floats of scratch per query row of a backward: RowState (backward/row_state.h).
FATTN_CONSTEXPR int kRowStateFloats = 4;
// A remainder (out_rows.h) is stored times this: that of a small half would be a subnormal number.
FATTN_CONSTEXPR float kRemainderScale = 1024.0f;
// Columns that merge sums at a time: four per lane.
FATTN_CONSTEXPR int kMergeColumns = 4 * kSimdWidth;
// Simdgroups of merge for a row of up to `parts` parts.
constexpr int merge_simdgroups(fattn_i64 parts) { return parts > 4 ? 8 : 1; }
// Short caches in decode: chunks in flight per threadgroup, and the largest number of rounds.
FATTN_CONSTEXPR int kShortChunks = 4;
FATTN_CONSTEXPR int kShortRounds = 2;
// Columns of the states that decode merges in a round, with this many chunks in flight.
constexpr int state_columns(int chunks) { return chunks == 1 ? 64 : 32; }
// The gated delta rule: tokens of a chunk; floats of scratch per chunk and value head (delta/chunk.h); tokens
// that a thread of causal_conv1d walks over, more than any state holds.
FATTN_CONSTEXPR int kDeltaChunk = 8;
FATTN_CONSTEXPR int kDeltaChunkFloats = 160;
FATTN_CONSTEXPR int kConvTokens = 16;
// Floats of its sums: three per chunk and row, and three per row, in multiples of 16 bytes.
constexpr int chunk_sum_floats(int chunks, int rows) {
  return chunks == 1 ? 0 : (3 * (chunks + 1) * rows + 3) / 4 * 4;
}
// gated_delta_step: tokens of a sequence, and lanes that share a column of a state. A lane holds two columns
// of up to 16 rows in float32, a quarter of the registers of M1 and M2.
FATTN_CONSTEXPR int kMaxStepLength = 16;
constexpr int step_row_lanes(fattn_i64 head_dim) { return head_dim > 128 && head_dim % 16 == 0 ? 16 : 8; }
// Arrays of the decode kernels in threadgroup memory, for kernels and planner. decode: rows of states, not
// needed if simdgroups share no rows, and floats from row to row, padded so that fewer rows begin in the same
// bank.
constexpr int shared_state_rows(int chunks, int simdgroups, int row_groups) {
  return simdgroups == row_groups ? 1 : chunks * simdgroups * kFragment;
}
constexpr int state_pitch(int chunks, int value_dim) {
  return (value_dim < state_columns(chunks) ? value_dim : state_columns(chunks)) + 4;
}
// decode_vector: values of the chunks that wait for the last round.
constexpr int waiting_floats(int chunks, int rounds, int rows, int value_dim) {
  return chunks * (rounds - 1) * rows * value_dim;
}
// decode_wide: scores of a step.
constexpr int step_scores(int row_groups, int tile_keys) { return row_groups * kFragment * tile_keys; }
// Scales of key and value, for each of these rows or not at all.
constexpr int scale_pairs(bool of_rows, int rows) { return of_rows ? rows : 1; }
// The output of tensor_probe: capacities of scores, row reduction and output; whether the rows of scores and
// output map to rows of the reduction, and scores can be a left operand; then {column, row} of each element
// of scores and output, lane by lane, {-1, -1} if it is not valid.
FATTN_CONSTEXPR int kTensorHeadFacts = 8;
// Limits of prefill_tensor, which has a bit per element of a lane.
FATTN_CONSTEXPR int kMaxScoreElements = 32;
FATTN_CONSTEXPR int kMaxOutElements = 64;
FATTN_CONSTEXPR int kMaxReducedRows = 2;
FATTN_CONSTEXPR int kMaxTensorFacts =
    kTensorHeadFacts + 2 * kSimdWidth * (2 * kMaxScoreElements + 2 * kMaxOutElements);
// Rows of a product on tensor operations.
FATTN_CONSTEXPR int kTensorRows = 16;
// Keys of a product of prefill_latent_tensor, the columns over which a product of its keys sums, and the
// simdgroups whose values are staged at once.
FATTN_CONSTEXPR int kLatentProductKeys = 16;
FATTN_CONSTEXPR int kLatentProductDim = 96;
FATTN_CONSTEXPR int kLatentValueShares = 2;
// Padding of the rows of a staged K or V tile against bank conflicts. A simdgroup reads 16 bytes of each of
// eight rows of K together, and 64 bytes of rows of V (tile.h).
FATTN_CONSTEXPR int kKeyPadBytes = 16;
FATTN_CONSTEXPR int kValuePadBytes = 64;
// The elements from row to row: columns that `shares` simdgroups divide evenly, and the padding.
constexpr int padded_columns(int dim, int shares) {
  return (dim / kFragment + shares - 1) / shares * shares * kFragment;
}
constexpr int key_pitch(int dim, int shares, int element_bytes) {
  return padded_columns(dim, shares) + kKeyPadBytes / element_bytes;
}
constexpr int value_pitch(int dim, int shares, int element_bytes) {
  return padded_columns(dim, shares) + kValuePadBytes / element_bytes;
}
// Floats from row to row, padded likewise, of scores that the tensor kernels pass through threadgroup memory.
constexpr int score_pitch(int tile_keys) { return tile_keys + 4; }
// prefill_wide: simdgroups that divide the columns of a key fragment, if they outnumber the fragments; the
// 16-byte pieces of the query that a lane reads for eight rows of a share; the products of a group in a step.
constexpr int sum_shares(int column_shares, int key_fragments) {
  return column_shares < key_fragments ? 1 : column_shares / key_fragments;
}
constexpr int share_pieces(int dim, int shares, int element_bytes) {
  return (padded_columns(dim, shares) / shares / 4 * element_bytes + 15) / 16;
}
constexpr int group_products(int shares, int row_fragments, int tile_keys) {
  return shares * row_fragments * kFragment * tile_keys;
}
// backward_query, backward_key: pairs of elements in the blocks of products and gradients that the simdgroups
// of a group exchange, of `owned` by `walked` fragments.
constexpr int block_pairs(int owned) { return 2 * owned * kSimdWidth; }
constexpr int shared_block_pairs(int shares, int groups, int walked, int owned) {
  return shares == 1 ? 1 : groups * walked * shares * block_pairs(owned);
}
// prefill_latent_tensor: staged elements of the values.
constexpr int latent_staged(int value_dim, int simdgroups) {
  return kLatentProductKeys * kLatentValueShares * value_dim / simdgroups;
}

}  // namespace fattn
