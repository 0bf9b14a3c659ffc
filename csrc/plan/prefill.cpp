// Plans fattn.prefill, fattn.paged_prefill and fattn.varlen_prefill: one pass, one threadgroup per tile of
// query rows; before it, where that pays, one that makes a map of the mask.
#include "planners.h"
#include "slices.h"
#include "tuned.h"

namespace fattn {
namespace {

// Packed rows are (row, head) pairs, and every sequence begins a tile of its own. As many tiles are enough
// whatever cu_seqlens says, which only the GPU knows; the rows before and behind the sequences have theirs.
// At most batch + 1 tiles are too many; their threadgroups return at once.
int64_t most_tiles(const Problem& p, int64_t tile_rows) {
  if (!p.packed) return ceil_div(p.q_len, tile_rows);
  const int64_t pairs = p.q_len * (p.q_heads / p.kv_heads);
  return (pairs + (p.batch + 2) * (tile_rows - 1)) / tile_rows;
}

// How a threadgroup divides its work.
struct Shape {
  Kernel kernel;
  int64_t row_fragments;
  int64_t row_groups;  // of so many fragments
  int64_t tile_keys;
  int64_t simdgroups;
  bool early_loads;
  int64_t threadgroup_bytes;
  const char* provenance;
};

// Where no sequence has more pairs than fill one fragment of each group, a second would stay empty. No bit of
// a result depends on how many rows a tile has.
int64_t row_fragments_for(const Problem& p, int64_t row_groups, int64_t most) {
  const int64_t pairs = p.max_seqlen_q * (p.q_heads / p.kv_heads);
  return p.packed && pairs <= row_groups * kFragment ? 1 : most;
}

int64_t scale_bytes(const Problem& p, int64_t keys) {
  return (has_row_scales(p.kv_format) ? keys : 1) * 2 * int64_t(sizeof(float));
}

// What stands aside of each row, and where the keys begin.
int64_t aside_bytes(int64_t rows) {
  return rows * (kAsideLongs * int64_t(sizeof(int64_t)) + kAsideWords * int64_t(sizeof(int32_t))) +
         kStartLongs * int64_t(sizeof(int64_t));
}

// Simdgroups with whole rows: prefill.metal.
Shape shape_of_rows(const Problem& p, const DeviceFacts& device) {
  // The tile of int4 is of float32, as its operands are.
  const DType tile_dtype = p.kv_format == kKvInt4 ? DType::kFloat32 : p.dtype;
  const int64_t dim = std::max(p.head_dim, p.value_dim);
  const PrefillRow row = tuned_or(tuning_row(kPrefillTuning, device, tile_dtype, dim), device, p);
  // The K tile, the V tile, the scales of their rows, and one flag per simdgroup.
  const int64_t element_bytes = size_of(tile_element(p));
  const int64_t key_bytes = p.head_dim * element_bytes + kKeyPadBytes;
  const int64_t value_bytes = p.value_dim * element_bytes + kValuePadBytes;
  const int64_t row_fragments = row_fragments_for(p, row.simdgroups, row.row_fragments);
  const int64_t bytes = row.tile_keys * (key_bytes + value_bytes) + scale_bytes(p, row.tile_keys) +
                        row.simdgroups * int64_t(sizeof(uint32_t)) +
                        aside_bytes(row.simdgroups * row_fragments * kFragment);
  return {.kernel = Kernel::kPrefill,
          .row_fragments = row_fragments,
          .row_groups = row.simdgroups,
          .tile_keys = row.tile_keys,
          .simdgroups = row.simdgroups,
          .early_loads = row.early_loads,
          .threadgroup_bytes = bytes,
          .provenance = row.provenance};
}

// Simdgroups that share out the columns of their rows: prefill_wide.metal.
Shape shape_of_columns(const Problem& p, const DeviceFacts& device) {
  const int64_t dim = std::max(p.head_dim, p.value_dim);
  const PrefillWideRow row = tuned_or(tuning_row(kPrefillWideTuning, device, p.dtype, dim), device, p);
  const int64_t row_fragments = row_fragments_for(p, row.row_groups, row.row_fragments);
  const int64_t fragments = row.row_groups * row_fragments;
  // Where simdgroups of a group outnumber the key fragments, each sums a share of the columns.
  const int64_t sum_shares =
      std::max<int64_t>(row.simdgroups / row.row_groups * kFragment / row.tile_keys, 1);
  // The query, in pieces of 16 bytes for each lane; the products and the scales of two steps; and where the
  // results of each row go.
  const int64_t pair_bytes = 2 * size_of(p.dtype);
  const int64_t share_columns = ceil_div(p.head_dim / kFragment, sum_shares);
  const int64_t query_bytes =
      fragments * sum_shares * ceil_div(share_columns * pair_bytes, 16) * 16 * kSimdWidth;
  const int64_t product_bytes =
      2 * fragments * sum_shares * kFragment * row.tile_keys * int64_t(sizeof(float));
  return {.kernel = Kernel::kPrefillWide,
          .row_fragments = row_fragments,
          .row_groups = row.row_groups,
          .tile_keys = row.tile_keys,
          .simdgroups = row.simdgroups,
          .early_loads = row.early_loads,
          .threadgroup_bytes = query_bytes + product_bytes + scale_bytes(p, 2 * row.tile_keys) +
                               aside_bytes(fragments * kFragment),
          .provenance = row.provenance};
}

// Keys that the rows of a tile see between them.
int64_t most_visible_keys(const Problem& p, int64_t tile_rows) {
  const ScoreOptions& options = p.options;
  if (options.window_left < 0) return p.kv_len;
  const int64_t window_right = p.is_causal ? 0 : options.window_right < 0 ? p.kv_len : options.window_right;
  const int64_t window_keys =
      std::min(options.window_left, p.kv_len) + std::min(window_right, p.kv_len) + tile_rows;
  return std::min(p.kv_len, window_keys + std::min(options.sink_tokens, p.kv_len));
}

int32_t window_side(int64_t keys) { return keys < 0 ? kNoLimit : int32_t(std::min<int64_t>(keys, kNoLimit)); }

}  // namespace

Plan plan_prefill(const Problem& problem, const DeviceFacts& device) {
  Plan plan;
  if (is_empty(problem)) return plan;
  Problem p = problem;
  if (pays_for_map(p, device)) add_mask_map(plan, p);
  const bool wide = std::max(p.head_dim, p.value_dim) > kMaxRowDim;
  const Shape shape = (wide ? shape_of_columns : shape_of_rows)(p, device);
  plan.tuning = shape.provenance;
  const ScoreOptions& options = p.options;
  // Causal rows have no window to their right.
  const int64_t window_right = p.is_causal ? -1 : options.window_right;

  Pass& pass = plan.add_pass();
  pass.spec = attention_spec(shape.kernel, p);
  pass.spec.row_fragments = uint16_t(shape.row_fragments);
  pass.spec.row_groups = uint16_t(wide ? shape.row_groups : 1);
  pass.spec.tile_keys = uint16_t(shape.tile_keys);
  pass.spec.simdgroups = uint16_t(shape.simdgroups);
  pass.spec.early_loads = shape.early_loads;
  pass.spec.causal = p.is_causal;
  pass.spec.window = options.window_left >= 0 || window_right >= 0;

  const int64_t tile_rows = shape.row_groups * shape.row_fragments * kFragment;
  const int64_t q_tiles = most_tiles(p, tile_rows);
  pass.grid = {uint32_t(q_tiles), uint32_t(p.packed ? p.kv_heads : p.q_heads),
               uint32_t(p.packed ? 1 : p.batch)};
  const double products_of_group =
      double(tile_rows) * double(most_visible_keys(p, tile_rows)) * double(p.head_dim + p.value_dim);
  const double most_groups = std::max(most_products(device) / products_of_group, double(cores_of(device)));
  if (most_groups < double(pass.groups())) {
    cut_into_slices(pass, int64_t(most_groups));
  }
  pass.threads = {uint32_t(shape.simdgroups * kSimdWidth), 1, 1};
  pass.threadgroup_bytes = uint32_t(ceil_div(shape.threadgroup_bytes, 16) * 16);

  bind_attention(pass, p);
  pass.bind(Buffer::kOut, kSlotOut);
  pass.bind(Buffer::kLse, kSlotLse);

  PrefillParams params{};
  set_attention_params(params, p);
  params.mask_map = p.mask_map;
  params.out = out_strides(p);
  params.seq_lens_stride = p.seq_lens_stride;
  params.cu_seqlens_stride = p.cu_seqlens_stride;
  params.cu_seqlens_k_stride = p.cu_seqlens_k_stride;
  params.q_len = int32_t(p.q_len);
  params.kv_len = int32_t(p.kv_len);
  // Where position only decides what is causal, every row beyond these bounds sees all keys, or none; else
  // the checks keep it in 32 bits.
  params.q_offset =
      int32_t(pass.spec.window || options.alibi_slopes ? p.q_offset
                                                       : std::clamp<int64_t>(p.q_offset, -p.q_len, p.kv_len));
  params.window_left = window_side(options.window_left);
  params.window_right = window_side(window_right);
  params.sink_tokens = int32_t(std::min<int64_t>(options.sink_tokens, kNoLimit));
  params.q_tiles = int32_t(q_tiles);
  params.kv_rows = int32_t(p.kv_rows);
  params.last_rows_meet = p.last_rows_meet;
  pass.set_params(params);
  return plan;
}

}  // namespace fattn
