// Plans fattn.decode and fattn.paged_decode: one pass over the keys in splits, and one that merges the
// splits.
#include "planners.h"

namespace fattn {
namespace {

// As many threadgroups as the GPU holds at a time and not one more, for a second wave would wait for the
// first; of enough keys to be worth a partial result. seq_lens is on the device, so the number of splits
// follows the capacity; the kernel shares out the keys that are really there.
int64_t choose_splits(const Problem& p, const DeviceFacts& device, const DecodeRow& row,
                      int64_t threadgroups) {
  static const int smallest = DeviceFacts().cores;
  const int64_t cores = device.cores > 0 ? device.cores : smallest;
  const int64_t wanted = cores * row.threadgroups_per_core / threadgroups;
  const int64_t useful = ceil_div(p.kv_len, row.min_keys_per_split);
  return std::clamp<int64_t>(std::min(wanted, useful), 1, kMaxSplits);
}

}  // namespace

Plan plan_decode(const Problem& p, const DeviceFacts& device) {
  Plan plan;
  if (is_empty(p)) return plan;
  const DecodeRow& row = tuning_row(kDecodeTuning, device, p.dtype, std::max(p.head_dim, p.value_dim));
  plan.tuning = row.provenance;

  const int64_t group_size = p.q_heads / p.kv_heads;
  const int64_t packed_rows = group_size * p.q_len;
  const int64_t row_fragments = packed_rows > kFragment ? 2 : 1;
  const int64_t row_blocks = ceil_div(packed_rows, row_fragments * kFragment);
  const int64_t splits = choose_splits(p, device, row, p.batch * p.kv_heads * row_blocks);

  Pass& pass = plan.add_pass();
  pass.spec = attention_spec(Kernel::kDecode, p);
  pass.spec.row_fragments = uint16_t(row_fragments);
  pass.spec.tile_keys = row.tile_keys;
  pass.spec.simdgroups = row.simdgroups;
  pass.spec.split = splits > 1;
  pass.spec.has_seq_lens = p.has_seq_lens;
  pass.spec.block_size = uint32_t(p.block_size);
  pass.grid = {uint32_t(splits), uint32_t(p.kv_heads * row_blocks), uint32_t(p.batch)};
  pass.threads = {uint32_t(row.simdgroups * kSimdWidth), 1, 1};
  // Eight rows of every simdgroup's output, with their maxima and sums.
  pass.threadgroup_bytes = uint32_t(row.simdgroups * kFragment * (p.value_dim + 2) * sizeof(float));

  bind_attention(pass, p);
  if (p.has_seq_lens) pass.bind(Buffer::kSeqLens, kSlotSeqLens);
  if (p.op == Op::kPagedDecode) pass.bind(Buffer::kBlockTables, kSlotBlockTables);

  DecodeParams params{};
  params.query = p.query;
  params.key = p.key;
  params.value = p.value;
  params.mask = p.mask;
  params.seq_lens_stride = p.seq_lens_stride;
  params.block_table_batch_stride = p.block_table_batch_stride;
  params.block_table_entry_stride = p.block_table_entry_stride;
  params.batch = int32_t(p.batch);
  params.q_len = int32_t(p.q_len);
  params.capacity = int32_t(p.kv_len);
  params.q_heads = int32_t(p.q_heads);
  params.group_size = int32_t(group_size);
  params.splits = int32_t(splits);
  params.num_blocks = int32_t(p.num_blocks);
  params.row_blocks = int32_t(row_blocks);
  params.score_scale = score_scale(p);
  pass.set_params(params);

  if (splits == 1) {
    pass.bind(Buffer::kOut, kSlotOut);
    pass.bind(Buffer::kLse, kSlotLse);
    return plan;
  }
  pass.bind(Buffer::kScratchOut, kSlotPartialOut);
  pass.bind(Buffer::kScratchLse, kSlotPartialLse);
  const int64_t rows = p.batch * p.q_heads * p.q_len;
  plan.scratch_out_floats = splits * rows * p.value_dim;
  plan.scratch_lse_floats = splits * rows;
  add_merge_pass(plan, {DType::kFloat32, splits, rows, p.value_dim}, p.dtype);
  return plan;
}

}  // namespace fattn
