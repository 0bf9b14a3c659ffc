// Prefill: many query rows over dense keys and values (FlashAttention-2: Dao 2023; the tile is of the kind
// MLX calls steel).
//
// A threadgroup owns kSimdgroups * kRowFragments * 8 query rows of one head and walks the keys in steps of
// kTileKeys. K and V of a step are staged once in threadgroup memory; query, scores, weights and output stay
// in registers. Steps that every row of the tile sees whole take the first loop, without any test; only the
// steps on the diagonal, at the ragged end, or under an attn_mask take the second. Steps that no row sees are
// not visited.
#include "scores.h"

namespace fattn {

FATTN_CONSTEXPR int kKeyPitch = kHeadDim + kTilePad;
FATTN_CONSTEXPR int kValuePitch = kValueDim + kTilePad;
FATTN_CONSTEXPR int kTileRows = kSimdgroups * kRowFragments * 8;

// Copies `rows` rows of N elements into a tile of kTileKeys rows; the rest becomes 0, and is not read.
// Returns NaN if this thread copied an infinity or NaN, else 0 (asked for with `inspect`).
template <int N>
inline float stage(const device Element* source, long stride, int rows, threadgroup Element* tile, int pitch,
                   ushort thread_index, bool inspect) {
  float seen = 0.0f;
  for (int i = thread_index; i < kTileKeys * (N / 4); i += kThreads) {
    const int row = i / (N / 4);
    const int column = (i % (N / 4)) * 4;
    vec<Element, 4> chunk = vec<Element, 4>(Element(0.0f));
    if (row < rows) {
      const device Element* from = source + row * stride + column;
      if (fc_vector_loads) {
        chunk = *reinterpret_cast<const device vec<Element, 4>*>(from);
      } else {
        chunk = vec<Element, 4>(from[0], from[1], from[2], from[3]);
      }
    }
    *reinterpret_cast<threadgroup vec<Element, 4>*>(tile + row * pitch + column) = chunk;
    if (inspect) {
      float values[4] = {float(chunk[0]), float(chunk[1]), float(chunk[2]), float(chunk[3])};
      seen = special_values(values, seen);
    }
  }
  return seen;
}

// Scores of one staged step. Fragments from `fragments` on are seen by no row of this simdgroup.
inline void score_step(thread OnlineAttention& attention, const threadgroup Element* tile, int fragments,
                       LanePosition at) {
#pragma unroll
  for (int k = 0; k < kKeyFragments; k++) {
    if (k >= fragments) {
      attention.hide_keys(k);
      continue;
    }
    const threadgroup Element* row = tile + (k * 8 + at.pair * 2) * kKeyPitch + at.row * (kHeadDim / 8);
    float first[kHeadDim / 8];
    float second[kHeadDim / 8];
    read_run(row, true, first);
    read_run(row + kKeyPitch, true, second);
    attention.multiply_keys(k, first, second);
  }
}

inline void value_step(thread OnlineAttention& attention, const threadgroup Element* tile, int fragments,
                       bool special, LanePosition at) {
#pragma unroll
  for (int k = 0; k < kKeyFragments; k++) {
    if (k >= fragments) {
      continue;
    }
    float run[kValueDim / 4];
    read_run(tile + (k * 8 + at.row) * kValuePitch + at.pair * (kValueDim / 4), true, run);
    if (special) {
      attention.multiply_special_values(k, run, at);
    } else {
      attention.multiply_values(k, run);
    }
  }
}

}  // namespace fattn

using namespace fattn;

kernel void fattn_prefill(
    const device Element* query [[buffer(fattn::kSlotQuery)]],
    const device Element* key [[buffer(fattn::kSlotKey)]],
    const device Element* value [[buffer(fattn::kSlotValue)]],
    device Element* out [[buffer(fattn::kSlotOut)]], device float* lse [[buffer(fattn::kSlotLse)]],
    constant PrefillParams& params [[buffer(fattn::kSlotParams)]],
    const device uchar* mask [[buffer(fattn::kSlotMask), function_constant(fc_has_mask)]],
    uint3 group [[threadgroup_position_in_grid]], ushort simdgroup_index [[simdgroup_index_in_threadgroup]],
    ushort lane [[thread_index_in_simdgroup]], ushort thread_index [[thread_index_in_threadgroup]]) {
  // Declared as vectors for their alignment.
  threadgroup vec<Element, 4> key_storage[kTileKeys * kKeyPitch / 4];
  threadgroup vec<Element, 4> value_storage[kTileKeys * kValuePitch / 4];
  threadgroup uint special_values_in_tile[kSimdgroups];

  threadgroup Element* key_tile = reinterpret_cast<threadgroup Element*>(key_storage);
  threadgroup Element* value_tile = reinterpret_cast<threadgroup Element*>(value_storage);

  // Under a causal mask the last rows have the most keys: start them first.
  const int tile = params.q_tiles - 1 - int(group.x);
  const long head = group.y;
  const long batch = group.z;
  const LanePosition at = lane_position(lane);
  const int tile_row = tile * kTileRows;
  const int simdgroup_row = tile_row + simdgroup_index * (kRowFragments * 8);

  query += batch * params.query.batch + head * params.query.head;
  key += batch * params.key.batch + (head / params.group_size) * params.key.head;
  value += batch * params.value.batch + (head / params.group_size) * params.value.head;

  OnlineAttention attention;
  Visibility visible;
  attention.clear();
  visible.mask_key_stride = params.mask.key;
#pragma unroll
  for (int r = 0; r < kRowFragments; r++) {
    const int row = simdgroup_row + r * 8 + at.row;
    const bool exists = row < params.q_len;
    attention.load_query(r, exists ? query + row * params.query.row : nullptr, at);
    const int causal_limit = fc_causal ? min(params.kv_len, params.q_offset + row + 1) : params.kv_len;
    visible.limit[r] = exists ? causal_limit : 0;
    visible.mask_row[r] = batch * params.mask.batch + head * params.mask.head + row * params.mask.row;
  }

  // Keys [0, all_see) are visible to every row of the threadgroup's tile, keys from any_sees on to none;
  // `simdgroup_sees` is the same upper bound for the rows of this simdgroup.
  int all_see = params.kv_len;
  int any_sees = params.kv_len;
  int simdgroup_sees = simdgroup_row < params.q_len ? params.kv_len : 0;
  if (fc_causal) {
    const int last_row = min(tile_row + kTileRows, params.q_len) - 1;
    const int last_simdgroup_row = min(simdgroup_row + kRowFragments * 8, params.q_len) - 1;
    all_see = clamp(params.q_offset + tile_row + 1, 0, params.kv_len);
    any_sees = clamp(params.q_offset + last_row + 1, 0, params.kv_len);
    simdgroup_sees = min(simdgroup_sees, params.q_offset + last_simdgroup_row + 1);
  }
  const int whole_steps_end = fc_has_mask ? 0 : all_see - all_see % kTileKeys;

  for (int first_key = 0; first_key < whole_steps_end; first_key += kTileKeys) {
    threadgroup_barrier(mem_flags::mem_threadgroup);  // the previous step has been read
    stage<kHeadDim>(key + first_key * params.key.row, params.key.row, kTileKeys, key_tile, kKeyPitch,
                    thread_index, false);
    stage<kValueDim>(value + first_key * params.value.row, params.value.row, kTileKeys, value_tile,
                     kValuePitch, thread_index, false);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (simdgroup_sees > 0) {
      score_step(attention, key_tile, kKeyFragments, at);
      scale_scores(attention, params.score_scale);
      attention.weigh();
      value_step(attention, value_tile, kKeyFragments, false, at);
    }
  }

  for (int first_key = whole_steps_end; first_key < any_sees; first_key += kTileKeys) {
    const int rows = min(kTileKeys, params.kv_len - first_key);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    stage<kHeadDim>(key + first_key * params.key.row, params.key.row, rows, key_tile, kKeyPitch, thread_index,
                    false);
    const float seen = stage<kValueDim>(value + first_key * params.value.row, params.value.row, rows,
                                        value_tile, kValuePitch, thread_index, true);
    const bool any_special = simd_any(isnan(seen));
    if (lane == 0) {
      special_values_in_tile[simdgroup_index] = any_special;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    uint special = 0;
    for (int i = 0; i < kSimdgroups; i++) {
      special |= special_values_in_tile[i];
    }
    const int fragments = (simdgroup_sees - first_key + 7) / 8;
    if (fragments > 0) {
      score_step(attention, key_tile, fragments, at);
      scale_scores(attention, params.score_scale);
      hide_scores(attention, visible, mask, first_key, ~0u, at);
      attention.weigh();
      value_step(attention, value_tile, fragments, special != 0, at);
    }
  }

  attention.finish();
#pragma unroll
  for (int r = 0; r < kRowFragments; r++) {
    const int row = simdgroup_row + r * 8 + at.row;
    if (row >= params.q_len) {
      continue;
    }
    const long flat_row = (batch * params.q_heads + head) * params.q_len + row;
    const float scale = inverse_sum(attention.row_sum[r]);
    device Element* out_row = out + flat_row * kValueDim + at.pair * (kValueDim / 4);
#pragma unroll
    for (int i = 0; i < kValueDim / 4; i++) {
      out_row[i] = Element(attention.out[r][i / 2].thread_elements()[i & 1] * scale);
    }
    if (at.pair == 0) {
      lse[flat_row] = log_sum_exp(attention.row_max[r], attention.row_sum[r]);
    }
  }
}
