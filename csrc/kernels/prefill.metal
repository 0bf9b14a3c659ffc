// Prefill: many query rows over dense keys and values (FlashAttention-2: Dao 2023; the tile is of the kind
// MLX calls steel).
//
// A threadgroup owns kSimdgroups * kRowFragments * 8 query rows of one head and walks the keys in steps of
// kTileKeys. K and V of a step are staged once in threadgroup memory; query, scores, weights and output stay
// in registers. While a step is computed, the next one is on its way from device memory: each thread holds
// its share of it in registers. Steps that every row of the tile sees whole take the first loop, without any
// test; only the steps on the diagonal, at the ragged end, or under an attn_mask take the second. Steps that
// no row sees are not visited.
#include "query.h"
#include "scores.h"

namespace fattn {

FATTN_CONSTEXPR int kKeyPitch = kHeadDim + kKeyPadBytes / int(sizeof(Element));
FATTN_CONSTEXPR int kValuePitch = kValueDim + kValuePadBytes / int(sizeof(Element));
FATTN_CONSTEXPR int kTileRows = kSimdgroups * kRowFragments * 8;

// One thread's share of kTileKeys rows of N elements: chunks of 16 bytes, between device memory and a tile.
template <int N>
struct TileShare {
  static constant constexpr int kRowChunks = N / kWideChunk;
  static constant constexpr int kTileChunks = kTileKeys * kRowChunks;

  uint4 words[(kTileChunks + kThreads - 1) / kThreads];

  // Rows from `rows` on become 0, and are not read. kWhole: there are enough.
  template <bool kWhole>
  void fetch(const device Element* source, long stride, int rows, ushort thread_index) thread {
    rows = kWhole ? kTileKeys : min(rows, kTileKeys);
#pragma clang loop unroll(full)
    for (int i = 0; i < kTileChunks; i += kThreads) {
      const int row = (i + thread_index) / kRowChunks;
      const int column = (i + thread_index) % kRowChunks * kWideChunk;
      const bool exists = kWhole && kTileChunks % kThreads == 0 ? true : row < rows;
      if (!exists) {
        words[i / kThreads] = uint4(0);
      } else {
        const device Element* from = source + row * stride + column;
        words[i / kThreads] =
            fc_vector_loads ? *reinterpret_cast<const device uint4*>(from) : chunk_words(from);
      }
    }
  }

  void place(threadgroup Element* tile, int pitch, ushort thread_index) const thread {
#pragma clang loop unroll(full)
    for (int i = 0; i < kTileChunks; i += kThreads) {
      const int row = (i + thread_index) / kRowChunks;
      const int column = (i + thread_index) % kRowChunks * kWideChunk;
      if (kTileChunks % kThreads == 0 || row < kTileKeys) {
        *reinterpret_cast<threadgroup uint4*>(tile + row * pitch + column) = words[i / kThreads];
      }
    }
  }

  bool has_special_values() const thread {
    float seen = 0.0f;
#pragma clang loop unroll(full)
    for (int i = 0; i < kTileChunks; i += kThreads) {
      Operand elements[kWideChunk];
#pragma clang loop unroll(full)
      for (int w = 0; w < 4; w++) {
        unpack(words[i / kThreads][w], elements, w * kWordElements, Element(0.0f));
      }
      seen = special_values(elements, seen);
    }
    return isnan(seen);
  }
};

// What a thread holds of the next step.
struct StepShare {
  TileShare<kHeadDim> keys;
  TileShare<kValueDim> values;

  template <bool kWhole>
  void fetch(const device Element* key, const device Element* value, constant PrefillParams& params,
             int first_key, ushort thread_index) thread {
    const int rows = params.kv_len - first_key;
    keys.fetch<kWhole>(key + first_key * params.key.row, params.key.row, rows, thread_index);
    values.fetch<kWhole>(value + first_key * params.value.row, params.value.row, rows, thread_index);
  }

  void place(threadgroup Element* key_tile, threadgroup Element* value_tile, ushort thread_index) const
      thread {
    keys.place(key_tile, kKeyPitch, thread_index);
    values.place(value_tile, kValuePitch, thread_index);
  }
};

// Scores of one staged step. Fragments from `fragments` on are seen by no row of this simdgroup.
inline void score_step(thread OnlineAttention& attention, thread const QueryRegisters& query,
                       const threadgroup Element* tile, int fragments, LanePosition at) {
  attention.clear_scores();
#pragma clang loop unroll(full)
  for (int c = 0; c < kKeyChunks; c++) {
    Operand first[kKeyFragments][kKeyChunk];
    Operand second[kKeyFragments][kKeyChunk];
#pragma clang loop unroll(full)
    for (int k = 0; k < kKeyFragments; k++) {
      const threadgroup Element* row = tile + (k * 8 + at.pair * 2) * kKeyPitch;
      read_key_chunk(row, c, true, at, first[k]);
      read_key_chunk(row + kKeyPitch, c, true, at, second[k]);
    }
    attention.multiply_key_chunk(query, c, fragments, first, second);
  }
}

inline void value_step(thread OnlineAttention& attention, const threadgroup Element* tile, int fragments,
                       bool special, LanePosition at) {
#pragma clang loop unroll(full)
  for (int k = 0; k < kKeyFragments; k++) {
    if (k >= fragments) {
      continue;
    }
    Operand run[kValueDim / 4];
    read_value(tile + (k * 8 + at.row) * kValuePitch, true, at, run);
    if (special) {
      attention.multiply_special_values(k, run, at);
    } else {
      attention.multiply_values(k, run);
    }
  }
}

}  // namespace fattn

using namespace fattn;

[[kernel, max_total_threads_per_threadgroup(fattn::kThreads)]] void fattn_prefill(
    const device Element* query [[buffer(fattn::kSlotQuery)]],
    const device Element* key [[buffer(fattn::kSlotKey)]],
    const device Element* value [[buffer(fattn::kSlotValue)]],
    device Element* out [[buffer(fattn::kSlotOut)]], device float* lse [[buffer(fattn::kSlotLse)]],
    constant PrefillParams& params [[buffer(fattn::kSlotParams)]],
    const device uchar* mask [[buffer(fattn::kSlotMask), function_constant(fc_has_mask)]],
    uint3 group [[threadgroup_position_in_grid]], ushort simdgroup_index [[simdgroup_index_in_threadgroup]],
    ushort lane [[thread_index_in_simdgroup]], ushort thread_index [[thread_index_in_threadgroup]]) {
  // Declared as 16-byte words for their alignment.
  threadgroup uint4 key_storage[kTileKeys * kKeyPitch / kWideChunk];
  threadgroup uint4 value_storage[kTileKeys * kValuePitch / kWideChunk];
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
  QueryRegisters query_rows;
  Visibility visible;
  ScoreModifiers modifiers;
  attention.clear();
  modifiers.scale = params.score_scale;
  visible.mask_key_stride = params.mask.key;
#pragma clang loop unroll(full)
  for (int r = 0; r < kRowFragments; r++) {
    const int row = simdgroup_row + r * 8 + at.row;
    const bool exists = row < params.q_len;
    query_rows.load(r, exists ? query + row * params.query.row : nullptr, at);
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

  StepShare next;
  if (whole_steps_end > 0) {
    next.fetch<true>(key, value, params, 0, thread_index);
  } else if (any_sees > 0) {
    next.fetch<false>(key, value, params, 0, thread_index);
  }

  int first_key = 0;
  for (; first_key < whole_steps_end; first_key += kTileKeys) {
    threadgroup_barrier(mem_flags::mem_threadgroup);  // the previous step has been read
    next.place(key_tile, value_tile, thread_index);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    const int next_key = first_key + kTileKeys;
    if (next_key < whole_steps_end) {
      next.fetch<true>(key, value, params, next_key, thread_index);
    } else if (next_key < any_sees) {
      next.fetch<false>(key, value, params, next_key, thread_index);
    }
    if (simdgroup_sees > 0) {
      score_step(attention, query_rows, key_tile, kKeyFragments, at);
      modify_scores(attention, modifiers, first_key, at);
      attention.weigh();
      value_step(attention, value_tile, kKeyFragments, false, at);
    }
  }

  for (; first_key < any_sees; first_key += kTileKeys) {
    const bool any_special = simd_any(next.values.has_special_values());
    threadgroup_barrier(mem_flags::mem_threadgroup);
    next.place(key_tile, value_tile, thread_index);
    if (lane == 0) {
      special_values_in_tile[simdgroup_index] = any_special;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (first_key + kTileKeys < any_sees) {
      next.fetch<false>(key, value, params, first_key + kTileKeys, thread_index);
    }
    uint special = 0;
    for (int i = 0; i < kSimdgroups; i++) {
      special |= special_values_in_tile[i];
    }
    const int fragments = (simdgroup_sees - first_key + 7) / 8;
    if (fragments > 0) {
      score_step(attention, query_rows, key_tile, fragments, at);
      modify_scores(attention, modifiers, first_key, at);
      hide_scores(attention, visible, mask, first_key, ~0u, at);
      attention.weigh();
      value_step(attention, value_tile, fragments, special != 0, at);
    }
  }

  attention.finish();
#pragma clang loop unroll(full)
  for (int r = 0; r < kRowFragments; r++) {
    const int row = simdgroup_row + r * 8 + at.row;
    if (row >= params.q_len) {
      continue;
    }
    const long flat_row = (batch * params.q_heads + head) * params.q_len + row;
    const float scale = inverse_sum(attention.row_sum[r]);
    device Element* out_row = out + flat_row * kValueDim;
#pragma clang loop unroll(full)
    for (int i = 0; i < kValueDim / 4; i++) {
      out_row[value_column(i, at.pair)] = Element(attention.out[r][i / 2].thread_elements()[i & 1] * scale);
    }
    if (at.pair == 0) {
      lse[flat_row] = log_sum_exp(attention.row_max[r], attention.row_sum[r]);
    }
  }
}
