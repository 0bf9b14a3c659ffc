// Plans fattn.rotary and fattn.rotary_write: one pass, a simdgroup per row of a token, a head, query, key or
// value.
#include "kv_format.h"
#include "planners.h"

namespace fattn {
namespace {

constexpr uint16_t kSimdgroups = 8;

}  // namespace

Plan plan_rotary(const RotaryProblem& p) {
  Plan plan;
  plan.tuning.source = "one simdgroup per row";
  const CacheWriteProblem& write = p.write;
  const bool values = p.op == Op::kRotaryWrite;
  const int64_t heads = p.q_heads + write.kv_heads * (values ? 2 : 1);
  if (write.tokens * heads == 0) return plan;

  Pass& pass = plan.add_pass();
  KernelSpec& spec = pass.spec;
  spec.kernel = Kernel::kRotary;
  spec.dtype = write.dtype;
  spec.head_dim = uint16_t(write.key.head_dim);
  spec.value_dim = uint16_t(values ? write.value.head_dim : write.key.head_dim);
  spec.simdgroups = kSimdgroups;
  spec.vector_loads = write.vector_aligned;
  spec.kv_format = write.format;
  spec.scales = write.has_scales;
  spec.long_slots = write.long_slots;
  spec.rotary_dim = uint16_t(p.rotary_dim);
  spec.rotary_offset = uint16_t(p.rotary_offset);
  spec.rotary_style = p.style;
  spec.norm = p.norm;
  spec.table_dtype = p.table_dtype;
  spec.weight_dtype = p.weight_dtype;
  spec.query_norm = p.has_query_norm;
  spec.key_norm = p.has_key_norm;
  spec.slots = p.has_slots;
  spec.starts = p.has_starts;
  spec.values = values;
  spec.vector_tables = p.vector_tables;
  pass.grid = {uint32_t(p.q_len), uint32_t(ceil_div(heads, kSimdgroups)), uint32_t(write.tokens / p.q_len)};
  pass.threads = {kSimdgroups * uint32_t(kSimdWidth), 1, 1};

  pass.bind(kSlotQuery);
  pass.bind(kSlotKey);
  pass.bind(kSlotCos, Slot(kBufferCos));
  pass.bind(kSlotSin, Slot(kBufferSin));
  pass.bind(kSlotOut);
  pass.bind(kSlotKeyCache);
  if (values) {
    pass.bind(kSlotValue);
    pass.bind(kSlotValueCache);
  }
  if (p.has_slots) pass.bind(kSlotSlotMapping);
  if (p.has_starts) pass.bind(kSlotStarts, Slot(kBufferStarts));
  if (p.has_query_norm) pass.bind(kSlotQueryNorm, Slot(kBufferQueryNorm));
  if (p.has_key_norm) pass.bind(kSlotKeyNorm, Slot(kBufferKeyNorm));
  if (write.has_scales) {
    pass.bind(kSlotKeyScales);
    pass.bind(kSlotValueScales);
  }

  RotaryParams params = p.params;
  params.out = row_strides(p.q_heads, p.q_len, write.key.head_dim, p.token_major_out);
  params.key_cache = write.key.cache;
  params.value_cache = write.value.cache;
  params.key_scales = write.key.scales;
  params.value_scales = write.value.scales;
  params.slots = write.num_blocks * write.block_size;
  params.q_heads = int32_t(p.q_heads);
  params.kv_heads = int32_t(write.kv_heads);
  params.block_size = int32_t(write.block_size);
  const auto second = int32_t(p.table_columns == p.rotary_dim ? p.rotary_dim / 2 : 0);
  params.cos.second = params.cos.column * second;
  params.sin.second = params.sin.column * second;
  params.eps = float(p.eps);
  pass.set_params(params);
  return plan;
}

}  // namespace fattn
