// The first pass of gated_delta_rule: of every chunk of 8 tokens, all at once, what does not depend on the
// state.
//
// A simdgroup per chunk and key head. Its lanes divide the channels, sum the 28 products of keys and the 36
// of queries and keys, and hold the 8x8 matrices as fragments. (I + A)^-1 is found by forward substitution,
// which is stable for every beta; there are no products of matrices.
#include "delta_params.h"

FATTN_DECLARE_CONSTANT(bool, packed)
FATTN_DECLARE_CONSTANT(bool, sliced)
FATTN_DECLARE_CONSTANT(bool, raw_gates)
FATTN_DECLARE_CONSTANT(bool, qk_norm)

#include "../common/fragment.h"
#include "../common/grid.h"
#include "../common/scatter_sum.h"
#include "chunk.h"
#include "gates.h"
#include "sequences.h"

namespace fattn {

// Channels per lane. Without a whole number of them, the last lanes have fewer.
FATTN_CONSTEXPR int kLaneChannels = (kHeadDim + kSimdWidth - 1) / kSimdWidth;
FATTN_CONSTEXPR bool kEvenLanes = kHeadDim % kSimdWidth == 0;

// A number of a channel; 0 for a lane without one.
inline float at_channel(const device Element* rows, int row_offset, int channel) {
  return kEvenLanes || channel < kHeadDim ? float(rows[row_offset + channel]) : 0.0f;
}

// Sums an 8x8 matrix, row by row, of which each lane has summands. This order of the masks leaves each lane
// its two elements of a fragment.
inline float2 sum_to_fragment(thread float (&summands)[64], ushort lane) {
  const ushort masks[5] = {16, 4, 2, 8, 1};
  FATTN_UNROLL
  for (int stage = 0; stage < 5; stage++) {
    scatter_sum(summands, 32 >> stage, masks[stage], lane);
  }
  return float2(summands[0], summands[1]);
}

// The inverse of I + the strictly lower part of a fragment.
inline float2 inverse_of(float2 system, LanePosition at) {
  float2 inverse = float2(at.row == 2 * at.pair ? 1.0f : 0.0f, at.row == 2 * at.pair + 1 ? 1.0f : 0.0f);
  FATTN_UNROLL
  for (ushort j = 0; j + 1 < kDeltaChunk; j++) {
    const float factor = simd_shuffle(j & 1 ? system.y : system.x, lane_of(at.row, j / 2));
    const ushort solved = lane_of(j, at.pair);
    const float2 row = float2(simd_shuffle(inverse.x, solved), simd_shuffle(inverse.y, solved));
    inverse = at.row > j ? inverse - factor * row : inverse;
  }
  return inverse;
}

}  // namespace fattn

using namespace fattn;

[[kernel, max_total_threads_per_threadgroup(fattn::kThreads)]] void fattn_gated_delta_prepare(
    const device Element* query [[buffer(fattn::kSlotQuery)]],
    const device Element* key [[buffer(fattn::kSlotKey)]],
    const device Decay* decays [[buffer(fattn::kBufferDecay)]],
    const device Beta* betas [[buffer(fattn::kBufferBeta)]],
    const device ALog* a_log [[buffer(fattn::kBufferALog), function_constant(fc_raw_gates)]],
    const device DtBias* dt_bias [[buffer(fattn::kBufferDtBias), function_constant(fc_raw_gates)]],
    const device int* cu_seqlens [[buffer(fattn::kBufferSeqlens), function_constant(fc_packed)]],
    device float* chunks [[buffer(fattn::kBufferChunks)]],
    constant GatedDeltaParams& params [[buffer(fattn::kSlotParams)]],
    constant GridSlice& slice [[buffer(fattn::kSlotSlice), function_constant(fc_sliced)]],
    uint3 dispatched [[threadgroup_position_in_grid]],
    ushort simdgroup_index [[simdgroup_index_in_threadgroup]], ushort lane [[thread_index_in_simdgroup]]) {
  const uint3 group = group_in_grid(dispatched, slice);
  const int piece = group.x * kSimdgroups + simdgroup_index, head = group.y;
  if (piece >= params.chunks) {
    return;
  }
  const Sequence of =
      sequence_at(sequence_of(piece, kDeltaChunk, cu_seqlens, params.sequences, params.length), cu_seqlens,
                  params.length);
  const int first = (piece - first_piece(of, kDeltaChunk, params.length)) * kDeltaChunk;
  if (first >= of.length) {
    return;
  }
  // Rows beyond the end repeat the last token, with a beta of 0.
  const int count = min(kDeltaChunk, of.length - first), last = count - 1;
  const LanePosition at = lane_position(lane);
  const int own = lane % kDeltaChunk;  // the token whose factors this lane has
  const bool is_token = own < count;
  const device Element* keys = tokens_from(key, params.key, of, first, head, 0);
  const device Element* queries = tokens_from(query, params.query, of, first, head, 0);
  const int key_step = params.key.token, query_step = params.query.token;

  float key_norm = 1.0f, query_norm = 1.0f;
  for (int i = 0; fc_qk_norm && i < kDeltaChunk; i++) {
    float2 squares = 0.0f;
    FATTN_UNROLL
    for (int c = 0; c < kLaneChannels; c++) {
      const int channel = c * kSimdWidth + lane;
      const float2 x = float2(at_channel(keys, min(i, last) * key_step, channel),
                              at_channel(queries, min(i, last) * query_step, channel));
      squares = fma(x, x, squares);
    }
    const float key_squares = simd_sum(squares.x), query_squares = simd_sum(squares.y);
    key_norm = own == i ? inverse_length(key_squares) : key_norm;
    query_norm = own == i ? inverse_length(query_squares) : query_norm;
  }

  // products[8 i + j] is k_i . k_j below the diagonal, and q_j . k_i on it and above.
  float products[kDeltaChunk * kDeltaChunk];
  FATTN_UNROLL
  for (int i = 0; i < kDeltaChunk * kDeltaChunk; i++) {
    products[i] = 0.0f;
  }
  const device Decay* channel_decays = tokens_from(decays, params.decay, of, first, head, 0);
  const int decay_step = params.decay.token;
  for (int c = 0; c < kLaneChannels; c++) {
    const int channel = c * kSimdWidth + lane;
    float seen[kDeltaChunk];  // the keys, decayed up to token i
    FATTN_UNROLL
    for (int i = 0; i < kDeltaChunk; i++) {
      const int row = min(i, last);
      const float of_query = at_channel(queries, row * query_step, channel);
      const float of_key = at_channel(keys, row * key_step, channel);
      float decay = 1.0f;
      if (kChannelDecay && (kEvenLanes || channel < kHeadDim)) {
        const float raw = float(channel_decays[row * decay_step + channel]);
        decay = decay_of(raw, a_log, dt_bias, head, head * kHeadDim + channel);
      }
      FATTN_UNROLL
      for (int j = 0; j < i; j++) {
        seen[j] *= decay;
        products[8 * i + j] = fma(of_key, seen[j], products[8 * i + j]);
        products[8 * j + i] = fma(of_query, seen[j], products[8 * j + i]);
      }
      seen[i] = of_key;
      products[9 * i] = fma(of_query, of_key, products[9 * i]);
    }
  }
  float2 dots = sum_to_fragment(products, lane);
  FATTN_UNROLL
  for (ushort e = 0; e < 2; e++) {
    const ushort column = 2 * at.pair + e;
    const float of_key = simd_shuffle(key_norm, column), of_query = simd_shuffle(query_norm, column);
    dots[e] *= simd_shuffle(key_norm, at.row) * (column < at.row ? of_key : of_query);
  }

  for (int member = 0; member < params.group_size; member++) {
    const int value_head = head * params.group_size + member, row = min(own, last);
    const float raw = float(*tokens_from(betas, params.beta, of, first + row, head, member));
    const float beta = is_token ? beta_of(raw) : 0.0f;

    float from_start = 1.0f, to_end = 1.0f, whole = 1.0f;  // of the lane's token
    float2 between = 1.0f;                                 // the tokens of its two elements
    if (!kChannelDecay) {
      const float g = float(*tokens_from(decays, params.decay, of, first + row, head, member));
      const float decay = is_token ? decay_of(g, a_log, dt_bias, value_head, value_head) : 1.0f;
      FATTN_UNROLL
      for (ushort i = 0; i < kDeltaChunk; i++) {
        const float of_token = simd_shuffle(decay, i);
        FATTN_UNROLL
        for (ushort e = 0; e < 2; e++) {
          const ushort column = 2 * at.pair + e;
          between[e] *= i > min(at.row, column) && i <= max(at.row, column) ? of_token : 1.0f;
        }
        from_start *= i <= own ? of_token : 1.0f;
        to_end *= i > own ? of_token : 1.0f;
        whole *= of_token;
      }
    }

    const float2 weighted = dots * between;
    const float2 inverse = inverse_of(weighted * simd_shuffle(beta, at.row), at);
    device float* target =
        chunks + (long(piece) * params.key_heads * params.group_size + value_head) * kDeltaChunkFloats;
    FATTN_UNROLL
    for (ushort e = 0; e < 2; e++) {
      const ushort column = 2 * at.pair + e;
      target[kSolveAt + 8 * at.row + column] = inverse[e] * simd_shuffle(beta, column);
      target[kScoresAt + 8 * column + at.row] = column >= at.row ? weighted[e] * params.scale : 0.0f;
    }
    if (lane < kDeltaChunk) {
      target[kKeyAt + lane] = from_start * key_norm;
      target[kQueryAt + lane] = from_start * query_norm * params.scale;
      target[kUpdateAt + lane] = to_end * key_norm;
    }
    if (lane == 0) {
      target[kDecayAt] = whole;
    }
  }
}
