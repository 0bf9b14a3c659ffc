// Writes rows of keys and values into the slots of a cache. A simdgroup writes one row: the key or the value
// of one token and head.
#include "lane_row.h"

using namespace fattn;

[[kernel, max_total_threads_per_threadgroup(fattn::kThreads)]] void fattn_cache_write(
    const device Element* key [[buffer(fattn::kSlotKey)]],
    const device Element* value [[buffer(fattn::kSlotValue)]],
    device Stored* key_cache [[buffer(fattn::kSlotKeyCache)]],
    device Stored* value_cache [[buffer(fattn::kSlotValueCache)]],
    const device SlotNumber* slot_mapping [[buffer(fattn::kSlotSlotMapping)]],
    device Scale* key_scales [[buffer(fattn::kSlotKeyScales), function_constant(fc_scales)]],
    device Scale* value_scales [[buffer(fattn::kSlotValueScales), function_constant(fc_scales)]],
    constant CacheWriteParams& params [[buffer(fattn::kSlotParams)]],
    uint3 group [[threadgroup_position_in_grid]], ushort simdgroup_index [[simdgroup_index_in_threadgroup]],
    ushort lane [[thread_index_in_simdgroup]]) {
  const int row = int(group.x) * kSimdgroups + simdgroup_index;
  if (row >= params.rows) {
    return;
  }
  const int token = row / params.kv_heads;
  const int head = row % params.kv_heads;
  const long slot = slot_mapping[token * params.slot_stride];
  if (slot < 0 || slot >= params.slots) {
    return;
  }
  const SlotPlace place = place_of(slot, params.block_size);
  const bool is_key = group.y == 0;
  device Scale* scales = nullptr;
  if (is_key) {
    if (fc_scales) {
      scales = key_scales + offset_of(place, head, params.key_scales);
    }
    write_row<kHeadDim>(key + token * params.key_token_stride + head * params.key_head_stride,
                        key_cache + offset_of(place, head, params.key_cache), scales, lane);
  } else {
    if (fc_scales) {
      scales = value_scales + offset_of(place, head, params.value_scales);
    }
    write_row<kValueDim>(value + token * params.value_token_stride + head * params.value_head_stride,
                         value_cache + offset_of(place, head, params.value_cache), scales, lane);
  }
}
