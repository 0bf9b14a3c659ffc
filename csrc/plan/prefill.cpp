// Plans fattn.prefill, fattn.paged_prefill and fattn.varlen_prefill: one pass, a threadgroup per tile of
// query rows, or several where its keys are cut into parts; then one that merges these. First of all, where
// that pays, one that makes a map of the mask.
#include "planners.h"
#include "slices.h"
#include "tuned.h"

namespace fattn {
namespace {

// A core has room for so many simdgroups of a prefill, by their registers.
constexpr int64_t kSimdgroupsPerCore = 16;
// Keys of a part at least: for each row of its tile, and in all.
constexpr int64_t kLeastKeysPerRow = 8;
constexpr int64_t kLeastPartKeys = 256;
// Of threadgroups, in which the end does not count.
constexpr int64_t kManyWaves = 16;
// That read a staged tile together.
constexpr int64_t kFewestSimdgroups = 4;

// Packed rows are (row, head) pairs, and every sequence begins a tile of its own. As many tiles are enough
// whatever cu_seqlens says, which only the GPU knows; the rows before and behind the sequences have theirs.
// At most batch + 1 tiles are too many; their threadgroups return at once.
int64_t most_tiles(const Problem& p, bool grouped, int64_t tile_rows) {
  const int64_t pairs = p.q_len * (p.q_heads / p.kv_heads);
  if (!p.packed) return ceil_div(grouped ? pairs : p.q_len, tile_rows);
  return (pairs + (p.batch + 2) * (tile_rows - 1)) / tile_rows;
}

// How a threadgroup divides its work.
struct Tile {
  Kernel kernel;
  int64_t row_fragments;
  int64_t row_groups;  // of so many fragments
  int64_t tile_keys;
  int64_t simdgroups;
  bool early_loads;
  const char* provenance;
  bool tuned;  // on the user's own machine

  int64_t rows() const { return row_groups * row_fragments * kFragment; }
};

// The dtype whose rows a tile takes. That of int4 is of float32, as its operands are; and a GPU that
// multiplies bfloat as such has rows for that, which those of a quantised cache are not.
DType tile_dtype(const Problem& p, const DeviceFacts& device) {
  if (p.kv_format == kKvInt4) return DType::kFloat32;
  if (device.multiplies_bfloat() && operand_dtype(p, device) == DType::kFloat32) return DType::kFloat32;
  return p.dtype;
}

// Of the tables of tuning.h: simdgroups with whole rows (prefill.metal), or such that share out the columns
// of their rows (prefill_wide.metal).
Tile tile_of(const Problem& p, const DeviceFacts& device) {
  const int64_t dim = std::max(p.head_dim, p.value_dim);
  if (dim > kMaxRowDim) {
    const PrefillWideRow& built_in = tuning_row(kPrefillWideTuning, device, p.dtype, dim);
    const PrefillWideRow row = tuned_or(built_in, device, p);
    return {Kernel::kPrefillWide, row.row_fragments, row.row_groups, row.tile_keys,
            row.simdgroups,       row.early_loads,   row.provenance, row.provenance != built_in.provenance};
  }
  const PrefillRow& built_in = tuning_row(kPrefillTuning, device, tile_dtype(p, device), dim);
  const PrefillRow row = tuned_or(built_in, device, p);
  return {Kernel::kPrefill, row.row_fragments, row.simdgroups, row.tile_keys,
          row.simdgroups,   row.early_loads,   row.provenance, row.provenance != built_in.provenance};
}

int64_t scale_bytes(const Problem& p, int64_t keys) {
  return (has_row_scales(p.kv_format) ? keys : 1) * 2 * int64_t(sizeof(float));
}

// What is saved of each row, and where the keys begin.
int64_t saved_bytes(const Tile& tile) {
  return tile.rows() * int64_t(sizeof(SavedPlaces) + sizeof(SavedLimits)) + int64_t(sizeof(SavedStarts));
}

// The K tile, the V tile, and the scales of their rows.
int64_t bytes_of_rows(const Problem& p, const Tile& tile) {
  const int64_t element_bytes = size_of(tile_element(p));
  const int64_t key_bytes = p.head_dim * element_bytes + kKeyPadBytes;
  const int64_t value_bytes = p.value_dim * element_bytes + kValuePadBytes;
  return tile.tile_keys * (key_bytes + value_bytes) + scale_bytes(p, tile.tile_keys) + saved_bytes(tile);
}

// The query, in pieces of 16 bytes for each lane; the products and the scales of two steps.
int64_t bytes_of_columns(const Problem& p, const Tile& tile) {
  const int64_t fragments = tile.row_groups * tile.row_fragments;
  // Where simdgroups of a group outnumber the key fragments, each sums a share of the columns.
  const int64_t sum_shares =
      std::max<int64_t>(tile.simdgroups / tile.row_groups * kFragment / tile.tile_keys, 1);
  const int64_t pair_bytes = 2 * size_of(p.dtype);
  const int64_t share_columns = ceil_div(p.head_dim / kFragment, sum_shares);
  const int64_t query_bytes =
      fragments * sum_shares * ceil_div(share_columns * pair_bytes, 16) * 16 * kSimdWidth;
  const int64_t product_bytes =
      2 * fragments * sum_shares * kFragment * tile.tile_keys * int64_t(sizeof(float));
  return query_bytes + product_bytes + scale_bytes(p, 2 * tile.tile_keys) + saved_bytes(tile);
}

// Whether a tile has (row, head) pairs of all query heads that share a key-value head, as packed ones do:
// where that makes fewer tiles by an eighth, each of which reads the keys. Not under a mask: a map of it is
// by rows of one head, and whether there is one must not decide where keys are cut.
bool pays_to_group(const Problem& p, int64_t tile_rows) {
  const int64_t group_size = p.q_heads / p.kv_heads;
  if (p.packed || group_size == 1 || p.mask_dtype != DType::kOther) return false;
  const int64_t by_head = ceil_div(p.q_len, tile_rows) * group_size;
  return ceil_div(p.q_len * group_size, tile_rows) * 8 <= by_head * 7;
}

// Keys that the rows of a tile see between them.
int64_t most_visible_keys(const Problem& p, int64_t tile_rows) {
  const ScoreOptions& options = p.options;
  const bool causal = p.is_causal && !p.packed;
  const int64_t keys =
      causal ? std::clamp<int64_t>(std::clamp(p.q_offset, -p.q_len, p.kv_len) + p.q_len, 0, p.kv_len)
             : p.kv_len;
  if (options.window_left < 0) return keys;
  const int64_t window_right = p.is_causal ? 0 : options.window_right < 0 ? p.kv_len : options.window_right;
  const int64_t window_keys =
      std::min(options.window_left, p.kv_len) + std::min(window_right, p.kv_len) + tile_rows;
  return std::min(keys, window_keys + std::min(options.sink_tokens, p.kv_len));
}

// The parts that the steps of a tile are cut into, each for a threadgroup: take_part in kernels/steps.h.
struct Parts {
  int64_t count;
  int64_t least;  // steps
};

// The fewest that leave no more than an eighth of the last wave of threadgroups idle, else those that leave
// the least.
int64_t parts_that_fill(int64_t tiles, int64_t held, int64_t most) {
  int64_t fullest = 1;
  double share = 0.0;
  for (int64_t parts = std::min(held / tiles, most); parts <= most && share < 7.0 / 8; ++parts) {
    const double waves = double(ceil_div(tiles * parts, held));
    const double filled = double(tiles * parts) / (waves * double(held));
    if (filled > share) fullest = parts;
    share = std::max(share, filled);
  }
  return fullest;
}

// Threadgroups that the GPU holds at a time.
int64_t held_by(const DeviceFacts& device, const Tile& tile) {
  return cores_of(device) * std::max<int64_t>(kSimdgroupsPerCore / tile.simdgroups, 1);
}

// Makes more tiles of the rows, each with half of them, if the tile allows: no bit of a result depends on how
// many rows it has. Tiles that do not fill one wave of threadgroups, over too few keys to be cut into parts,
// leave cores idle; smaller ones read the keys more often instead.
bool halve(Tile& tile) {
  if (tile.kernel == Kernel::kPrefill && tile.simdgroups > kFewestSimdgroups) {
    tile.simdgroups /= 2;
    tile.row_groups = tile.simdgroups;
    return true;
  }
  const bool halves = tile.row_fragments > 1;
  if (halves) tile.row_fragments /= 2;
  return halves;
}

// Whether the longest tiles of all heads start first. The last head's would leave cores idle at the end, the
// more so the fewer waves of threadgroups there are; but the tiles of one head read the same keys.
bool longest_first(const Problem& p, const DeviceFacts& device, const Tile& tile, int64_t threadgroups) {
  return p.is_causal && !p.packed && threadgroups < kManyWaves * held_by(device, tile);
}

// A sequence whose tiles are too few to keep the GPU busy has several parts of each. That is decided by one
// sequence, as if it were alone: its result does not depend on the others of the batch. And no part has more
// keys than a dispatch may have for each core, whatever the rows of its tile.
//
// Packed tiles are cut for that second reason alone, at multiples of one number of keys, so that neither the
// batch nor the capacity changes a bit. How many rows a sequence has, and over how many keys, only the GPU
// knows; here room for partial results would have to be made for all rows of the call times the parts that
// one row over the whole capacity would like to have. Their tiles have the rows of all heads that share keys,
// and the sequences of a batch fill the GPU together. The capacity may be far beyond every length, so a part
// may keep a core busy four times as long.
Parts parts_of(const Problem& p, const DeviceFacts& device, const Tile& tile, int64_t most_rows,
               int64_t tiles) {
  const int64_t dims = p.head_dim + p.value_dim;
  const int64_t most_of_part = int64_t(kMostProductsPerCore) * (p.packed ? 4 : 1);  // products
  const int64_t most_steps = std::max<int64_t>(most_of_part / (most_rows * dims) / tile.tile_keys, 1);
  const int64_t steps = ceil_div(most_visible_keys(p, most_rows), tile.tile_keys);
  // The ends of a window and of the sink tokens may take a step more each.
  const int64_t needed = std::max<int64_t>(ceil_div(steps + 2, most_steps), 1);
  if (p.packed) return {needed, most_steps};
  // A part's results are written, and read again by the merge: they should be few beside its keys.
  const int64_t least = std::max(kLeastKeysPerRow * tile.rows(), kLeastPartKeys) / tile.tile_keys;
  const int64_t held = held_by(device, tile);
  const int64_t wanted = tiles < held ? parts_that_fill(tiles, held, std::max<int64_t>(steps / least, 1)) : 1;
  return {std::max(wanted, needed), least};
}

// The pass that merges the parts.
void add_merge(Plan& plan, const Problem& p, int64_t parts) {
  const int64_t rows = (p.packed ? 1 : p.batch) * p.q_heads * p.q_len;
  plan.scratch_out_floats = parts * rows * p.value_dim;
  plan.scratch_sum_floats = parts * rows * kSumFloats;
  // The number of simdgroups decides the order of the sum; the parts of packed tiles go by the capacity.
  const uint16_t simdgroups = p.packed ? 1 : merge_simdgroups(parts);
  Pass& pass = add_merge_pass(plan, parts_of_call(p, parts, rows), simdgroups);
  MergeParams params{};
  params.rows = rows;
  params.parts = int32_t(parts);
  params.head_dim = int32_t(p.value_dim);
  // Packed rows are token-major always, and lse and the parts are not.
  pass.spec.token_major_out = (p.packed || p.token_major_out) && !p.part && p.q_len > 1 && p.q_heads > 1;
  params.rows_per_sequence = p.q_heads * p.q_len;
  params.span.q_len = int32_t(p.q_len);
  params.puts_part = p.part;
  pass.set_params(params);
}

int32_t window_side(int64_t keys) { return keys < 0 ? kNoLimit : int32_t(std::min<int64_t>(keys, kNoLimit)); }

}  // namespace

Plan plan_prefill(const Problem& problem, const DeviceFacts& device) {
  Plan plan;
  if (is_empty(problem)) return plan;
  Problem p = problem;
  Tile tile = tile_of(p, device);
  plan.tuning = tile.provenance;
  const int64_t most_rows = tile.rows();
  const int64_t group_size = p.q_heads / p.kv_heads;
  const bool grouped = pays_to_group(p, most_rows);
  if (pays_for_map(p, device)) add_mask_map(plan, p);
  // Where no sequence has more rows than fill one fragment of each group, a second would stay empty. No bit
  // of a result depends on how many rows a tile has.
  const int64_t rows = p.packed ? most_sequence_rows(p) * group_size : p.q_len * (grouped ? group_size : 1);
  if (rows <= tile.row_groups * kFragment) tile.row_fragments = 1;
  const bool wide = tile.kernel == Kernel::kPrefillWide;
  const ScoreOptions& options = p.options;
  // Causal rows have no window to their right.
  const int64_t window_right = p.is_causal ? -1 : options.window_right;

  int64_t q_tiles = most_tiles(p, grouped, tile.rows());
  const int64_t heads = p.packed || grouped ? p.kv_heads : p.q_heads;
  const int64_t batch = p.packed ? 1 : p.batch;
  const Parts parts = parts_of(p, device, tile, most_rows, q_tiles * heads);
  while (!tile.tuned && parts.count == 1 && q_tiles * heads * batch < held_by(device, tile) && halve(tile)) {
    q_tiles = most_tiles(p, grouped, tile.rows());
  }

  Pass& pass = plan.add_pass();
  pass.spec = attention_spec(tile.kernel, p, device);
  pass.spec.row_fragments = uint16_t(tile.row_fragments);
  pass.spec.row_groups = uint16_t(wide ? tile.row_groups : 1);
  pass.spec.tile_keys = uint16_t(tile.tile_keys);
  pass.spec.simdgroups = uint16_t(tile.simdgroups);
  pass.spec.early_loads = tile.early_loads;
  pass.spec.causal = p.is_causal;
  pass.spec.window = options.window_left >= 0 || window_right >= 0;
  pass.spec.grouped = grouped;
  pass.spec.split = parts.count > 1 || p.part;

  const bool heads_first = longest_first(p, device, tile, q_tiles * parts.count * heads * batch);
  pass.grid = {uint32_t(q_tiles * parts.count), uint32_t(heads), uint32_t(batch)};
  if (heads_first) std::swap(pass.grid[0], pass.grid[1]);
  const double keys_of_group = std::ceil(double(most_visible_keys(p, tile.rows())) / double(parts.count));
  const double products_of_group = double(tile.rows()) * keys_of_group * double(p.head_dim + p.value_dim);
  const double most_groups = std::max(most_products(device) / products_of_group, double(cores_of(device)));
  if (most_groups < double(pass.groups())) {
    cut_into_slices(pass, int64_t(most_groups));
  }
  pass.threads = {uint32_t(tile.simdgroups * kSimdWidth), 1, 1};
  const int64_t bytes = wide ? bytes_of_columns(p, tile) : bytes_of_rows(p, tile);
  pass.threadgroup_bytes = uint32_t(ceil_div(bytes, 16) * 16);

  bind_attention(pass, p);
  const bool merged = parts.count > 1;
  pass.bind(merged ? Buffer::kScratchOut : Buffer::kOut, pass.spec.split ? kSlotPartialOut : kSlotOut);
  pass.bind(merged ? Buffer::kScratchSum : Buffer::kLse, pass.spec.split ? kSlotPartialSum : kSlotLse);

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
  params.parts = int32_t(parts.count);
  params.least_part = int32_t(parts.least);
  params.heads_first = heads_first;
  pass.set_params(params);
  if (merged) add_merge(plan, p, parts.count);
  return plan;
}

}  // namespace fattn
