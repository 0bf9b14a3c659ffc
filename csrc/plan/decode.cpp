// Plans fattn.decode and fattn.paged_decode: one pass over the chunks of all sequences, and one that merges
// the chunks of each.
#include "planners.h"

namespace fattn {
namespace {

// Simdgroups beside each other with eight rows of the same keys each, as many as the rows need: 1, 2 or 4.
int64_t row_groups_for(int64_t packed_rows, int64_t simdgroups) {
  int64_t groups = 1;
  while (groups < simdgroups && groups * kFragment < packed_rows) groups *= 2;
  return groups;
}

// Threadgroups of one key-value head that the GPU holds at a time; 0 cores: not known.
int64_t workers_of(const DeviceFacts& device, const DecodeRow& row, int64_t threadgroups_abreast) {
  static const int smallest = DeviceFacts().cores;
  const int64_t cores = device.cores > 0 ? device.cores : smallest;
  return std::max<int64_t>(cores * row.threadgroups_per_core / threadgroups_abreast, 1);
}

// At least as many chunks as any sequence can have: chunks_of in kernels/schedule.h. A window's two ranges
// may begin and end within a chunk.
int64_t parts_of(const Problem& p, const CausalSpan& span) {
  const int64_t all = std::max<int64_t>(ceil_div(p.kv_len, span.least_chunk), 1);
  if (p.options.window_left < 0) return std::min<int64_t>(all, span.most_chunks);
  const int64_t window_keys = std::min(p.options.window_left, p.kv_len) + p.q_len;
  const int64_t sink_keys = std::min(p.options.sink_tokens, p.kv_len);
  const int64_t of_window =
      ceil_div(window_keys, span.least_chunk) + ceil_div(sink_keys, span.least_chunk) + 1;
  return std::min({all, of_window, int64_t(span.most_chunks) + 3});
}

CausalSpan span_of(const Problem& p, const DecodeRow& row, int64_t row_groups, int64_t workers) {
  CausalSpan span{};
  span.q_len = int32_t(p.q_len);
  span.window_left =
      p.options.window_left < 0 ? kNoWindow : int32_t(std::min<int64_t>(p.options.window_left, kNoWindow));
  span.sink_tokens = int32_t(std::min<int64_t>(p.options.sink_tokens, kNoWindow));
  span.capacity = int32_t(p.kv_len);
  span.chunk_unit = row.tile_keys * row.simdgroups;
  // More rows make a partial result larger, so it should stand for more keys.
  span.least_chunk = int32_t(row.least_chunk * row_groups);
  span.most_chunks = int32_t(workers);
  span.seq_lens_stride = p.seq_lens_stride;
  return span;
}

}  // namespace

Plan plan_decode(const Problem& p, const DeviceFacts& device) {
  Plan plan;
  if (is_empty(p)) return plan;
  DecodeRow row = tuning_row(kDecodeTuning, device, p.dtype, std::max(p.head_dim, p.value_dim));
  if (p.kv_format != kKvFloat) {
    const QuantisedRow& quantised = quantised_row(p.dtype, p.kv_format);
    row.tile_keys = quantised.tile_keys;
    row.provenance = quantised.provenance;
  }
  plan.tuning = row.provenance;

  const int64_t group_size = p.q_heads / p.kv_heads;
  const int64_t packed_rows = group_size * p.q_len;
  const int64_t row_groups = row_groups_for(packed_rows, row.simdgroups);
  const int64_t row_blocks = ceil_div(packed_rows, row_groups * kFragment);
  const int64_t workers = workers_of(device, row, p.kv_heads * row_blocks);
  const CausalSpan span = span_of(p, row, row_groups, workers);
  const int64_t parts = parts_of(p, span);
  const int64_t shares = std::min(workers, p.batch * parts);

  Pass& pass = plan.add_pass();
  pass.spec = attention_spec(Kernel::kDecode, p);
  pass.spec.row_fragments = 1;
  pass.spec.row_groups = uint16_t(row_groups);
  pass.spec.tile_keys = row.tile_keys;
  pass.spec.simdgroups = row.simdgroups;
  pass.spec.split = parts > 1;
  pass.spec.has_seq_lens = p.has_seq_lens;
  pass.spec.block_size = uint32_t(p.block_size);
  pass.spec.window = p.options.window_left >= 0;
  pass.spec.softcap = p.options.softcap > 0.0;
  pass.spec.alibi = p.options.alibi_slopes;
  pass.spec.sinks = p.options.sinks;
  pass.spec.tree = p.options.tree_mask;
  pass.spec.one_row = p.q_len == 1 && pass.spec.mask == kMaskNone && !p.options.tree_mask;
  pass.grid = {uint32_t(shares), uint32_t(p.kv_heads * row_blocks), 1};
  pass.threads = {uint32_t(row.simdgroups * kSimdWidth), 1, 1};
  const int64_t operand_bytes = p.dtype == DType::kFloat16 ? 2 : 4;
  const int64_t query_bytes = row_groups * kFragment * p.head_dim * operand_bytes;
  const int64_t shared_rows = row_groups == row.simdgroups ? 1 : row.simdgroups * kFragment;
  const int64_t state_bytes = shared_rows * (p.value_dim + 4 + 2) * int64_t(sizeof(float));
  const bool row_scales = p.kv_format == kKvInt8 || p.kv_format == kKvFp8E4M3;
  const int64_t scale_bytes = (row_scales ? row.simdgroups * row.tile_keys : 1) * 2 * int64_t(sizeof(float));
  // As Metal counts it.
  pass.threadgroup_bytes = uint32_t(ceil_div(query_bytes + state_bytes + scale_bytes, 16) * 16);

  bind_attention(pass, p);
  if (p.has_seq_lens) pass.bind(Buffer::kSeqLens, kSlotSeqLens);
  if (p.op == Op::kPagedDecode) pass.bind(Buffer::kBlockTables, kSlotBlockTables);
  if (p.options.sinks) pass.bind(Buffer::kSinks, kSlotSinks);
  if (p.options.alibi_slopes) pass.bind(Buffer::kAlibiSlopes, kSlotAlibiSlopes);
  if (p.options.tree_mask) pass.bind(Buffer::kTreeMask, kSlotTreeMask);

  const double softcap = p.options.softcap;
  DecodeParams params{};
  params.query = p.query;
  params.key = p.key;
  params.value = p.value;
  params.key_scales = p.key_scales;
  params.value_scales = p.value_scales;
  params.mask = p.mask;
  params.block_table_batch_stride = p.block_table_batch_stride;
  params.block_table_entry_stride = p.block_table_entry_stride;
  params.sinks_stride = p.options.sinks_stride;
  params.alibi_slopes_stride = p.options.alibi_slopes_stride;
  params.tree_mask_batch_stride = p.options.tree_mask_batch_stride;
  params.tree_mask_row_stride = p.options.tree_mask_row_stride;
  params.span = span;
  params.batch = int32_t(p.batch);
  params.q_heads = int32_t(p.q_heads);
  params.group_size = int32_t(group_size);
  params.num_blocks = int32_t(p.num_blocks);
  params.row_blocks = int32_t(row_blocks);
  params.score_scale = float(softcap > 0.0 ? p.scale / softcap : p.scale * score_unit(p));
  params.softcap = float(softcap * score_unit(p));
  params.slope_scale = float(score_unit(p));
  params.shares = int32_t(shares);
  pass.set_params(params);

  if (parts == 1) {
    pass.bind(Buffer::kOut, kSlotOut);
    pass.bind(Buffer::kLse, kSlotLse);
    return plan;
  }
  pass.bind(Buffer::kScratchOut, kSlotPartialOut);
  pass.bind(Buffer::kScratchLse, kSlotPartialLse);
  const int64_t rows = p.batch * p.q_heads * p.q_len;
  plan.scratch_out_floats = parts * rows * p.value_dim;
  plan.scratch_lse_floats = parts * rows;
  // The same number of simdgroups whatever the capacity: they decide the order of the sum.
  Pass& merge = add_merge_pass(plan, {DType::kFloat32, parts, rows, p.value_dim}, p.dtype,
                               merge_simdgroups(span.most_chunks));
  merge.spec.split = true;
  merge.spec.has_seq_lens = p.has_seq_lens;
  merge.spec.window = pass.spec.window;
  if (p.has_seq_lens) merge.bind(Buffer::kSeqLens, kSlotSeqLens);
  MergeParams merge_params{};
  merge_params.rows = rows;
  merge_params.parts = int32_t(parts);
  merge_params.head_dim = int32_t(p.value_dim);
  merge_params.rows_per_sequence = p.q_heads * p.q_len;
  merge_params.span = params.span;
  merge.set_params(merge_params);
  return plan;
}

}  // namespace fattn
