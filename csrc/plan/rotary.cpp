// Plans fattn.cache_write, fattn.rotary and fattn.rotary_write: one pass. A simdgroup takes a row, the query,
// key or value of a token and head, or rows of several heads.
#include "kv_format.h"
#include "planners.h"

namespace fattn {
namespace {

constexpr uint16_t kSimdgroups = 8;
// From this many tokens on, all GPUs are busy with eight narrow heads per simdgroup, which loads factors
// once.
constexpr int64_t kManyTokens = 1024;
constexpr int64_t kSharedHeads = 8, kNarrowHead = 128;  // one pass of the kernel over the columns

Plan one_row_per_simdgroup() {
  Plan plan;
  plan.tuning.source = "one simdgroup per row";
  return plan;
}

// `values`: whether values are written, too.
Pass& add_pass(Plan& plan, Kernel kernel, const CacheWriteProblem& p, bool values) {
  Pass& pass = plan.add_pass();
  KernelSpec& spec = pass.spec;
  spec.kernel = kernel;
  spec.dtype = p.dtype;
  spec.head_dim = uint16_t(p.key.head_dim);
  spec.value_dim = uint16_t(p.value.head_dim);
  spec.simdgroups = kSimdgroups;
  spec.vector_loads = p.vector_aligned;
  spec.kv_format = p.format;
  spec.scales = p.has_scales;
  spec.long_slots = p.long_slots;
  pass.threads = {kSimdgroups * uint32_t(kSimdWidth), 1, 1};
  pass.bind(kSlotKey);
  pass.bind(kSlotKeyCache);
  if (values) {
    pass.bind(kSlotValue);
    pass.bind(kSlotValueCache);
  }
  if (p.has_scales) {
    pass.bind(kSlotKeyScales);
    pass.bind(kSlotValueScales);
  }
  return pass;
}

template <typename Params>
void add_caches(Params& params, const CacheWriteProblem& p) {
  params.key_cache = p.key.cache;
  params.value_cache = p.value.cache;
  params.key_scales = p.key.scales;
  params.value_scales = p.value.scales;
  params.slots = p.num_blocks * p.block_size;
  params.kv_heads = int32_t(p.kv_heads);
  params.block_size = int32_t(p.block_size);
}

}  // namespace

Plan plan_cache_write(const CacheWriteProblem& p) {
  Plan plan = one_row_per_simdgroup();
  const int64_t rows = p.tokens * p.kv_heads;
  if (rows == 0 || p.num_blocks * p.block_size == 0) return plan;

  Pass& pass = add_pass(plan, Kernel::kCacheWrite, p, true);
  pass.grid = {uint32_t(ceil_div(rows, kSimdgroups)), p.value_in_key ? 1u : 2u, 1};
  pass.bind(kSlotSlotMapping);

  CacheWriteParams params = p.params;
  add_caches(params, p);
  params.rows = int32_t(rows);
  pass.set_params(params);
  return plan;
}

Plan plan_rotary(const RotaryProblem& p) {
  Plan plan = one_row_per_simdgroup();
  const CacheWriteProblem& write = p.write;
  const bool values = p.op == Op::kRotaryWrite;
  if (write.tokens * (p.q_heads + write.kv_heads) == 0) return plan;

  Pass& pass = add_pass(plan, Kernel::kRotary, write, values);
  KernelSpec& spec = pass.spec;
  static_cast<RotaryForm&>(spec) = p;
  spec.query_norm = p.has_query_norm;
  spec.key_norm = p.has_key_norm;
  spec.slots = p.has_slots;
  spec.starts = p.has_starts;
  spec.values = values;
  spec.vector_tables = p.vector_tables;
  const bool shares = write.tokens >= kManyTokens && write.key.head_dim <= kNarrowHead;
  const int64_t heads_each = shares ? kSharedHeads : 1;
  if (shares) plan.tuning.source = "eight heads per simdgroup";
  const int64_t q_units = ceil_div(p.q_heads, heads_each), kv_units = ceil_div(write.kv_heads, heads_each);
  const int64_t units = write.tokens * (q_units + kv_units * (values ? 2 : 1));
  pass.grid = {uint32_t(ceil_div(units, kSimdgroups)), 1, 1};

  pass.bind(kSlotQuery);
  pass.bind(kSlotCos, Slot(kBufferCos));
  pass.bind(kSlotSin, Slot(kBufferSin));
  pass.bind(kSlotOut);
  if (p.has_slots) pass.bind(kSlotSlotMapping);
  if (p.has_starts) pass.bind(kSlotStarts, Slot(kBufferStarts));
  if (p.has_query_norm) pass.bind(kSlotQueryNorm, Slot(kBufferQueryNorm));
  if (p.has_key_norm) pass.bind(kSlotKeyNorm, Slot(kBufferKeyNorm));

  RotaryParams params = p.params;
  add_caches(params, write);
  params.out = row_strides(p.q_heads, p.q_len, write.key.head_dim, p.token_major_out);
  params.q_heads = int32_t(p.q_heads);
  params.q_units = int32_t(q_units);
  params.kv_units = int32_t(kv_units);
  params.tokens = int32_t(write.tokens);
  params.q_len = int32_t(p.q_len);
  const auto second = int32_t(p.table_columns == p.rotary_dim ? p.rotary_dim / 2 : 0);
  params.cos.second = params.cos.column * second;
  params.sin.second = params.sin.column * second;
  params.eps = float(p.eps);
  pass.set_params(params);
  return plan;
}

}  // namespace fattn
