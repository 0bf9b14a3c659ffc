// Plans fattn.prefill: one pass, one threadgroup per tile of query rows.
#include "planners.h"

namespace fattn {

Plan plan_prefill(const Problem& p, const DeviceFacts& device) {
  Plan plan;
  if (is_empty(p)) return plan;
  const PrefillRow& row = tuning_row(kPrefillTuning, device, p.dtype, std::max(p.head_dim, p.value_dim));
  plan.tuning = row.provenance;

  Pass& pass = plan.add_pass();
  pass.spec = attention_spec(Kernel::kPrefill, p);
  pass.spec.row_fragments = row.row_fragments;
  pass.spec.tile_keys = row.tile_keys;
  pass.spec.simdgroups = row.simdgroups;
  pass.spec.causal = p.is_causal;

  const int64_t tile_rows = int64_t(row.simdgroups) * row.row_fragments * kFragment;
  const int64_t q_tiles = ceil_div(p.q_len, tile_rows);
  pass.grid = {uint32_t(q_tiles), uint32_t(p.q_heads), uint32_t(p.batch)};
  pass.threads = {uint32_t(row.simdgroups * kSimdWidth), 1, 1};
  // The K tile, the V tile, and one flag per simdgroup.
  const int64_t key_bytes = p.head_dim * size_of(p.dtype) + kKeyPadBytes;
  const int64_t value_bytes = p.value_dim * size_of(p.dtype) + kValuePadBytes;
  pass.threadgroup_bytes =
      uint32_t(row.tile_keys * (key_bytes + value_bytes) + row.simdgroups * sizeof(uint32_t));

  bind_attention(pass, p);
  pass.bind(Buffer::kOut, kSlotOut);
  pass.bind(Buffer::kLse, kSlotLse);

  PrefillParams params{};
  params.query = p.query;
  params.key = p.key;
  params.value = p.value;
  params.mask = p.mask;
  params.q_len = int32_t(p.q_len);
  params.kv_len = int32_t(p.kv_len);
  params.q_heads = int32_t(p.q_heads);
  params.group_size = int32_t(p.q_heads / p.kv_heads);
  // Beyond these bounds every row sees all keys, or none: clamping keeps the kernel's arithmetic in 32 bits.
  params.q_offset = int32_t(std::clamp<int64_t>(p.q_offset, -p.q_len, p.kv_len));
  params.score_scale = float(p.scale * score_unit(p));
  params.q_tiles = int32_t(q_tiles);
  pass.set_params(params);
  return plan;
}

}  // namespace fattn
