// Decode: a few query rows per sequence over a long cache, dense or paged, split over the keys
// ("Flash-Decoding": Dao et al. 2023).
//
// All query heads that share a key-value head are packed into the rows of one 8x8 fragment (group_size *
// q_len rows), so K and V are read once for the whole group. They go straight from device memory into
// fragments (see tile.h): no threadgroup memory, no barrier in the loop. The simdgroups of a threadgroup take
// the steps of its split in turn; their states are merged at the end. With more than one split the result is
// a partial one, for merge.metal.
#include "keys.h"
#include "scores.h"

namespace fattn {

FATTN_CONSTEXPR int kPackedRows = kRowFragments * 8;  // per threadgroup

// One step of kTileKeys keys. kEdge: some key may not exist or not be visible to some row.
template <bool kEdge>
inline void decode_step(thread OnlineAttention& attention, thread const KeyTable& table,
                        thread const Visibility& visible, const device Element* key,
                        const device Element* value, const device uchar* mask, constant DecodeParams& params,
                        int first_key, LanePosition at) {
  const device Element* rows[kKeyFragments][2];
  uint present = 0;
#pragma clang loop unroll(full)
  for (int k = 0; k < kKeyFragments; k++) {
#pragma clang loop unroll(full)
    for (int e = 0; e < 2; e++) {
      const KeyPlace place = table.find(first_key + k * 8 + at.pair * 2 + e);
      rows[k][e] = row_at(key, place, params.key);
      present |= uint(place.exists) << (2 * k + e);
    }
  }
  attention.clear_scores();
#pragma clang loop unroll(full)
  for (int c = 0; c < kKeyChunks; c++) {
    Operand chunk[2][kKeyFragments][kKeyChunk];
#pragma clang loop unroll(full)
    for (int k = 0; k < kKeyFragments; k++) {
#pragma clang loop unroll(full)
      for (int e = 0; e < 2; e++) {
        if (!kEdge || (present >> (2 * k + e)) & 1) {
          read_key_chunk(rows[k][e], c, fc_vector_loads, at, chunk[e][k]);
        } else {
          fill_run(chunk[e][k], 0.0f);
        }
      }
    }
    attention.multiply_key_chunk(c, kKeyFragments, chunk[0], chunk[1]);
  }
  scale_scores(attention, params.score_scale);
  if (kEdge) {
    hide_scores(attention, visible, mask, first_key, present, at);
  }
  attention.weigh();
#pragma clang loop unroll(full)
  for (int k = 0; k < kKeyFragments; k++) {
    const KeyPlace place = table.find(first_key + k * 8 + at.row);
    Operand run[kValueDim / 4];
    if (!kEdge || place.exists) {
      read_value(row_at(value, place, params.value), fc_vector_loads, at, run);
    } else {
      fill_run(run, 0.0f);
    }
    if (kEdge && simd_any(isnan(special_values(run, 0.0f)))) {
      attention.multiply_special_values(k, run, at);
    } else {
      attention.multiply_values(k, run);
    }
  }
}

// Whether every key of a step has a place in the pool. Each lane looks up one key of 32.
inline bool all_exist(thread const KeyTable& table, int first_key, ushort lane) {
  bool exist = true;
#pragma clang loop unroll(full)
  for (int key = 0; key < kTileKeys; key += kSimdWidth) {
    exist = exist && table.find(first_key + key + lane % kTileKeys).exists;
  }
  return simd_all(exist);
}

}  // namespace fattn

using namespace fattn;

[[kernel, max_total_threads_per_threadgroup(fattn::kThreads)]] void fattn_decode(
    const device Element* query [[buffer(fattn::kSlotQuery)]],
    const device Element* key [[buffer(fattn::kSlotKey)]],
    const device Element* value [[buffer(fattn::kSlotValue)]],
    device Element* out [[buffer(fattn::kSlotOut), function_constant(fc_whole)]],
    device float* lse [[buffer(fattn::kSlotLse), function_constant(fc_whole)]],
    constant DecodeParams& params [[buffer(fattn::kSlotParams)]],
    const device uchar* mask [[buffer(fattn::kSlotMask), function_constant(fc_has_mask)]],
    const device int* seq_lens [[buffer(fattn::kSlotSeqLens), function_constant(fc_has_seq_lens)]],
    const device int* block_tables [[buffer(fattn::kSlotBlockTables), function_constant(fc_paged)]],
    device float* partial_out [[buffer(fattn::kSlotPartialOut), function_constant(fc_split)]],
    device float* partial_lse [[buffer(fattn::kSlotPartialLse), function_constant(fc_split)]],
    uint3 group [[threadgroup_position_in_grid]], ushort simdgroup_index [[simdgroup_index_in_threadgroup]],
    ushort lane [[thread_index_in_simdgroup]], ushort thread_index [[thread_index_in_threadgroup]]) {
  // The states of the simdgroups, eight rows at a time.
  threadgroup float shared_out[kSimdgroups * 8 * kValueDim];
  threadgroup float shared_max[kSimdgroups * 8];
  threadgroup float shared_sum[kSimdgroups * 8];

  const int split = group.x;
  const int kv_head = int(group.y) / params.row_blocks;
  const int first_packed_row = (int(group.y) % params.row_blocks) * kPackedRows;
  const long batch = group.z;
  const int packed_rows = params.group_size * params.q_len;
  const LanePosition at = lane_position(lane);

  KeyTable table;
  table.length = params.capacity;
  if (fc_has_seq_lens) {
    table.length = clamp(seq_lens[batch * params.seq_lens_stride], 0, params.capacity);
  }
  table.num_blocks = params.num_blocks;
  table.entry_stride = params.block_table_entry_stride;
  if (fc_paged) {
    table.blocks = block_tables + batch * params.block_table_batch_stride;
  } else {
    key += batch * params.key.batch;
    value += batch * params.value.batch;
  }
  query += batch * params.query.batch;
  key += kv_head * params.key.head;
  value += kv_head * params.value.head;

  OnlineAttention attention;
  Visibility visible;
  attention.clear();
  visible.mask_key_stride = params.mask.key;
#pragma clang loop unroll(full)
  for (int r = 0; r < kRowFragments; r++) {
    const int packed_row = first_packed_row + r * 8 + at.row;
    const bool exists = packed_row < packed_rows;
    const int head = kv_head * params.group_size + packed_row / params.q_len;
    const int row = packed_row % params.q_len;
    attention.load_query(r, exists ? query + head * params.query.head + row * params.query.row : nullptr, at);
    visible.limit[r] = exists ? table.length - params.q_len + row + 1 : 0;
    visible.mask_row[r] = batch * params.mask.batch + head * params.mask.head + row * params.mask.row;
  }

  // This threadgroup's share of the keys: whole steps, as even as whole steps can be.
  const int steps = (table.length + kTileKeys - 1) / kTileKeys;
  const int steps_per_split = (steps + params.splits - 1) / params.splits;
  const int last_step = min(steps, (split + 1) * steps_per_split);
  const int all_see = fc_has_mask ? 0 : table.length - params.q_len + 1;

  for (int step = split * steps_per_split + simdgroup_index; step < last_step; step += kSimdgroups) {
    const int first_key = step * kTileKeys;
    const bool plain = first_key + kTileKeys <= all_see && (!fc_paged || all_exist(table, first_key, lane));
    if (plain) {
      decode_step<false>(attention, table, visible, key, value, mask, params, first_key, at);
    } else {
      decode_step<true>(attention, table, visible, key, value, mask, params, first_key, at);
    }
  }
  attention.finish();

#pragma clang loop unroll(full)
  for (int r = 0; r < kRowFragments; r++) {
    const int shared_row = simdgroup_index * 8 + at.row;
    threadgroup_barrier(mem_flags::mem_threadgroup);  // the previous eight rows have been read
#pragma clang loop unroll(full)
    for (int i = 0; i < kValueDim / 4; i++) {
      shared_out[shared_row * kValueDim + value_column(i, at.pair)] =
          attention.out[r][i / 2].thread_elements()[i & 1];
    }
    if (at.pair == 0) {
      shared_max[shared_row] = attention.row_max[r];
      shared_sum[shared_row] = attention.row_sum[r];
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);

    for (int i = thread_index; i < 8 * kValueDim; i += kThreads) {
      const int fragment_row = i / kValueDim;
      const int column = i % kValueDim;
      const int packed_row = first_packed_row + r * 8 + fragment_row;
      if (packed_row >= packed_rows) {
        continue;
      }
      float row_max = -INFINITY;
      for (int s = 0; s < kSimdgroups; s++) {
        row_max = fmax(row_max, shared_max[s * 8 + fragment_row]);
      }
      const float origin = row_max == -INFINITY ? 0.0f : row_max;
      float sum = 0.0f;
      float weighted = 0.0f;
      for (int s = 0; s < kSimdgroups; s++) {
        const float weight = weight_of(shared_max[s * 8 + fragment_row] - origin);
        sum += weight * shared_sum[s * 8 + fragment_row];
        weighted += weight * shared_out[(s * 8 + fragment_row) * kValueDim + column];
      }
      const long head = kv_head * params.group_size + packed_row / params.q_len;
      const long flat_row = (batch * params.q_heads + head) * params.q_len + packed_row % params.q_len;
      const float result = weighted * inverse_sum(sum);
      if (fc_split) {
        const long rows = long(params.batch) * params.q_heads * params.q_len;
        partial_out[(split * rows + flat_row) * kValueDim + column] = result;
        if (column == 0) {
          partial_lse[split * rows + flat_row] = log_sum_exp(row_max, sum);
        }
      } else {
        out[flat_row * kValueDim + column] = Element(result);
        if (column == 0) {
          lse[flat_row] = log_sum_exp(row_max, sum);
        }
      }
    }
  }
}
