// Plans fattn.cache_write: one pass, a simdgroup per row of a token, a head, key or value.
#include "kv_format.h"
#include "planners.h"

namespace fattn {
namespace {

constexpr uint16_t kSimdgroups = 8;

}  // namespace

Plan plan_cache_write(const CacheWriteProblem& p) {
  Plan plan;
  plan.tuning.source = "one simdgroup per row";
  const int64_t slots = p.num_blocks * p.block_size;
  const int64_t rows = p.tokens * p.kv_heads;
  if (rows == 0 || slots == 0) return plan;

  Pass& pass = plan.add_pass();
  pass.spec.kernel = Kernel::kCacheWrite;
  pass.spec.dtype = p.dtype;
  pass.spec.head_dim = uint16_t(p.key.head_dim);
  pass.spec.value_dim = uint16_t(p.value.head_dim);
  pass.spec.simdgroups = kSimdgroups;
  pass.spec.vector_loads = p.vector_aligned;
  pass.spec.kv_format = p.format;
  pass.spec.scales = p.has_scales;
  pass.spec.long_slots = p.long_slots;
  pass.grid = {uint32_t(ceil_div(rows, kSimdgroups)), p.value_in_key ? 1u : 2u, 1};
  pass.threads = {kSimdgroups * uint32_t(kSimdWidth), 1, 1};

  pass.bind(kSlotKey);
  pass.bind(kSlotValue);
  pass.bind(kSlotKeyCache);
  pass.bind(kSlotValueCache);
  pass.bind(kSlotSlotMapping);
  if (p.has_scales) {
    pass.bind(kSlotKeyScales);
    pass.bind(kSlotValueScales);
  }

  CacheWriteParams params{};
  params.key_token_stride = p.key.token_stride;
  params.key_head_stride = p.key.head_stride;
  params.value_token_stride = p.value.token_stride;
  params.value_head_stride = p.value.head_stride;
  params.key_cache = p.key.cache;
  params.value_cache = p.value.cache;
  params.key_scales = p.key.scales;
  params.value_scales = p.value.scales;
  params.slot_stride = p.slot_stride;
  params.slots = slots;
  params.rows = int32_t(rows);
  params.kv_heads = int32_t(p.kv_heads);
  params.block_size = int32_t(p.block_size);
  pass.set_params(params);
  return plan;
}

}  // namespace fattn
