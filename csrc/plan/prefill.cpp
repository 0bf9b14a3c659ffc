// Plans fattn.prefill, fattn.paged_prefill and fattn.varlen_prefill, and decodes on matrix units: a pass
// with a threadgroup per tile of query rows, or per part of the keys of a tile. A pass that merges the parts
// follows. A pass that makes a mask map comes first if it saves more than it costs.
#include <bit>

#include "planners.h"
#include "slices.h"
#include "tuned.h"

namespace fattn {
namespace {

// Threadgroups of a decode, of few simdgroups each, whose threadgroup memory fits on a core.
constexpr int64_t kDecodesPerCore = 4;
// Fewest keys of a part: per row of its tile, and in total.
constexpr int64_t kMinKeysPerRow = 8;
constexpr int64_t kMinPartKeys = 256;
// Simdgroups that share a staged tile, at least.
constexpr int64_t kMinSimdgroups = 4;

// Packed rows are (row, head) pairs, and every sequence begins a new tile. This is an upper bound, since
// cu_seqlens is on the GPU; rows before and after the sequences have tiles too. At most batch + 1 tiles are
// surplus, and their threadgroups return at once.
int64_t max_tiles(const Problem& p, bool grouped, int64_t tile_rows) {
  const int64_t pairs = p.q_len * (p.q_heads / p.kv_heads);
  if (!p.packed) return ceil_div(grouped ? pairs : p.q_len, tile_rows);
  return (pairs + (p.batch + 2) * (tile_rows - 1)) / tile_rows;
}

// How a threadgroup divides its work.
struct Tile {
  Kernel kernel;
  int row_fragments;
  int row_groups;  // of row_fragments each
  int tile_keys;
  int simdgroups;
  Scope scope;
  bool early_loads = false;
  bool tuned = false;  // timed on this machine

  int rows() const { return row_groups * row_fragments * kFragment; }
};

// The dtype that selects a row of the tuning table. int4 is multiplied in float32. On a GPU that multiplies
// bfloat natively, the bfloat16 rows assume that, and a quantised cache is multiplied in float32.
DType tile_dtype(const Problem& p, const DeviceFacts& device) {
  if (p.kv_format == kKvInt4) return DType::kFloat32;
  if (device.multiplies_bfloat() && operand_dtype(p, device) == DType::kFloat32) return DType::kFloat32;
  return p.dtype;
}

// Groups of 16 rows. Decodes have few rows and take smaller tiles.
int tensor_row_groups(const Problem& p, const PrefillTensorSizes& sizes) {
  const int64_t rows = p.q_heads / p.kv_heads * p.q_len;
  int groups = sizes.row_groups;
  while (is_decode(p.op) && groups > 1 && rows <= groups / 2 * kTensorRows) groups /= 2;
  return groups;
}

// Selects a row of tuning.h. A simdgroup holds whole rows (prefill.metal), some columns of its rows
// (prefill_wide.metal), or either on matrix units.
Tile tile_of(const Problem& p, const DeviceFacts& device) {
  if (const auto state = units_state(p, device.units); is_on(state)) {
    const auto& [scope, sizes] =
        tensor_row(kPrefillTensorTuning, p.head_dim, state == UnitsState::kRegisters);
    const int row_groups = tensor_row_groups(p, sizes);
    return {.kernel = p.head_dim == kLatentKeyDim ? Kernel::kPrefillLatentTensor : Kernel::kPrefillTensor,
            .row_fragments = kTensorRows / kFragment,
            .row_groups = row_groups,
            .tile_keys = sizes.tile_keys,
            .simdgroups = sizes.simdgroups / sizes.row_groups * row_groups,
            .scope = scope};
  }
  const bool wide = std::max(p.head_dim, p.value_dim) > kMaxRowDim;
  const Kernel kernel = wide ? Kernel::kPrefillWide : Kernel::kPrefill;
  const PrefillRow& built_in = wide ? tuning_row(kPrefillWideTuning, device, p, p.dtype)
                                    : tuning_row(kPrefillTuning, device, p, tile_dtype(p, device));
  const auto& [scope, sizes] = tuned_or(built_in, kernel, device, p);
  return {.kernel = kernel,
          .row_fragments = sizes.row_fragments,
          .row_groups = wide ? sizes.row_groups : sizes.simdgroups,
          .tile_keys = sizes.tile_keys,
          .simdgroups = sizes.simdgroups,
          .scope = scope,
          .early_loads = sizes.early_loads,
          .tuned = scope.source != built_in.scope.source};
}

constexpr int64_t kFloatBytes = sizeof(float);

int64_t scale_bytes(const Problem& p, int keys) {
  return scale_pairs(has_row_scales(p.kv_format), keys) * 2 * kFloatBytes;
}

// The K tile, the V tile, and the scales of their rows.
int64_t bytes_of_rows(const Problem& p, const Tile& tile) {
  const int bytes = size_of(tile_element(p));
  const int pitches = key_pitch(int(p.head_dim), 1, bytes) + value_pitch(int(p.value_dim), 1, bytes);
  return tile.tile_keys * pitches * bytes + scale_bytes(p, tile.tile_keys);
}

// The query in 16-byte pieces, and the products and scales of two steps.
int64_t bytes_of_columns(const Problem& p, const Tile& tile) {
  const int shares = sum_shares(tile.simdgroups / tile.row_groups, tile.tile_keys / kFragment);
  const int pieces = tile.row_fragments * shares * share_pieces(int(p.head_dim), shares, size_of(p.dtype));
  const int products = group_products(shares, tile.row_fragments, tile.tile_keys);
  return tile.row_groups * (pieces * 16 * kSimdWidth + 2 * products * kFloatBytes) +
         scale_bytes(p, 2 * tile.tile_keys);
}

// The query, one staged operand of a step, row parameters, and the keys that each simdgroup saw in two steps.
// Without registers also the scores of a step and a factor per row.
int64_t bytes_of_units(const Problem& p, const Tile& tile) {
  const int64_t operand_bytes = (tile.rows() + tile.tile_keys) * units_size(p)->dim * size_of(p.dtype);
  const int64_t row_bytes =
      tile.rows() * int64_t(sizeof(SavedTensorRow)) + 2 * tile.simdgroups * int64_t(sizeof(uint32_t));
  const int64_t score_bytes = tile.simdgroups * kTensorRows * (score_pitch(tile.tile_keys) + 1) * kFloatBytes;
  return operand_bytes + row_bytes + (tile.scope.registers ? 0 : score_bytes);
}

// The query, the staged values of a product for two simdgroups, the weights of a step, a factor per row, and
// the keys that each simdgroup saw.
int64_t bytes_of_latent_units(const Problem& p, const Tile& tile) {
  const int64_t elements = tile.rows() * p.head_dim + latent_staged(int(p.value_dim), tile.simdgroups);
  return elements * size_of(p.dtype) + tile.rows() * (score_pitch(tile.tile_keys) + 1) * kFloatBytes +
         tile.simdgroups * int64_t(sizeof(uint32_t));
}

// Besides SavedTile.
int64_t bytes_of(const Problem& p, const Tile& tile) {
  if (tile.kernel == Kernel::kPrefillLatentTensor) return bytes_of_latent_units(p, tile);
  if (tile.kernel == Kernel::kPrefillTensor) return bytes_of_units(p, tile);
  return tile.kernel == Kernel::kPrefillWide ? bytes_of_columns(p, tile) : bytes_of_rows(p, tile);
}

// Whether a tile has (row, head) pairs of all query heads that share a key-value head, as packed tiles do.
// Worth it if this saves an eighth of the tiles, as each tile reads the keys. Not under a prefill's mask: its
// map has rows of one head, and the cuts between keys must not depend on whether there is a map.
bool pays_to_group(const Problem& p, int64_t tile_rows) {
  const int64_t group_size = p.q_heads / p.kv_heads;
  if (p.packed || group_size == 1) return false;
  if (is_decode(p.op)) return true;
  if (p.mask_dtype != DType::kOther || p.has_mask_map) return false;
  const int64_t by_head = ceil_div(p.q_len, tile_rows) * group_size;
  return ceil_div(p.q_len * group_size, tile_rows) * 8 <= by_head * 7;
}

// Upper bound of the keys that the rows of a tile see together.
int64_t max_visible_keys(const Problem& p, int64_t tile_rows) {
  const ScoreOptions& options = p.options;
  const int64_t length = max_sequence_keys(p);
  const bool causal = p.is_causal && !p.packed;
  const int64_t keys =
      causal ? std::clamp<int64_t>(std::clamp(p.q_offset, -p.q_len, length) + p.q_len, 0, length) : length;
  if (options.window_left < 0) return keys;
  const int64_t window_right = p.is_causal ? 0 : options.window_right < 0 ? length : options.window_right;
  const int64_t window_keys =
      std::min(options.window_left, length) + std::min(window_right, length) + tile_rows;
  return std::min(keys, window_keys + std::min(options.sink_tokens, length));
}

// The parts of the steps of a tile, one threadgroup each: take_part in kernels/common/steps.h.
struct Parts {
  int64_t count;    // in the grid
  int64_t most;     // per sequence, unless they would exceed `largest`
  int64_t least;    // steps
  int64_t largest;  // steps
};

// The fewest parts that fill seven eighths of the last wave of threadgroups; else the number that fills it
// best.
int64_t parts_that_fill(int64_t tiles, int64_t held, int64_t most) {
  int64_t fullest = 1;
  double fullness = 0.0;
  for (int64_t parts = std::min(held / tiles, most); parts <= most && fullness < 7.0 / 8; ++parts) {
    const double waves = double(ceil_div(tiles * parts, held));
    const double filled = double(tiles * parts) / (waves * double(held));
    if (filled > fullness) fullest = parts;
    fullness = std::max(fullness, filled);
  }
  return fullest;
}

// Halves the rows of a tile if possible; results are bit-identical. Tiles that do not fill one wave of
// threadgroups, with too few keys to cut into parts, leave cores idle. Smaller tiles use them, but read the
// keys more often.
bool halve(Tile& tile) {
  if (uses_units(tile.kernel)) return false;  // the self-test covers no other pipelines
  if (tile.kernel == Kernel::kPrefill && tile.simdgroups > kMinSimdgroups) {
    tile.simdgroups /= 2;
    tile.row_groups = tile.simdgroups;
    return true;
  }
  const bool halves = tile.row_fragments > 1;
  if (halves) tile.row_fragments /= 2;
  return halves;
}

// If the tiles of one sequence do not fill the GPU, each is cut into parts, whatever the batch size: results
// are batch-invariant. Also, no part has more keys than a dispatch may have per core.
//
// Packed tiles are cut only for the second reason, at multiples of a fixed number of keys, so that results
// depend neither on the batch nor on the capacity. The rows and keys of a sequence are known only on the GPU,
// so filling it would need scratch for all rows of the call times the parts of one row over the whole
// capacity; the sequences of a batch fill it together instead. The capacity may be far above every length, so
// a part may keep a core busy four times as long.
//
// With seq_lens, and in a decode, keys are cut by the length of the sequence, into at most as many parts as
// fill the GPU, and the capacity only limits how many of these can have keys.
Parts parts_of(const Problem& p, const DeviceFacts& device, const Tile& tile, int64_t max_rows,
               int64_t tiles) {
  const int64_t dims = p.head_dim + p.value_dim;
  const int64_t max_of_part = int64_t(kMaxProductsPerCore) * (p.packed ? 4 : 1);  // products
  const int64_t max_steps = std::max<int64_t>(max_of_part / (max_rows * dims) / tile.tile_keys, 1);
  const int64_t steps = ceil_div(max_visible_keys(p, max_rows), tile.tile_keys);
  // Window and sink tokens may each end with a partial step.
  const int64_t needed = std::max<int64_t>(ceil_div(steps + 2, max_steps), 1);
  if (p.packed) return {needed, needed, max_steps, max_steps};
  // The results of a part pass through memory to the merge, so they should be small relative to its keys.
  const int64_t least = std::max(kMinKeysPerRow * tile.rows(), kMinPartKeys) / tile.tile_keys;
  const int64_t held = held_by(device, tile.simdgroups);
  if (is_decode(p.op) || p.has_seq_lens) {
    const int64_t most = std::max<int64_t>(std::min(held, kDecodesPerCore * cores_of(device)) / tiles, 1);
    const int64_t largest = std::max(max_steps, least);
    const int64_t visited = steps + (has_window(p) ? 2 : 0);
    return {std::max({std::min(most, ceil_div(visited, least)), ceil_div(visited, largest), int64_t{1}}),
            most, least, largest};
  }
  const int64_t wanted = tiles < held ? parts_that_fill(tiles, held, std::max<int64_t>(steps / least, 1)) : 1;
  const int64_t parts = std::max(wanted, needed);
  return {parts, parts, least, kNoLimit};
}

int32_t window_side(int64_t keys) { return keys < 0 ? kNoLimit : int32_t(std::min<int64_t>(keys, kNoLimit)); }

}  // namespace

Plan plan_tensor_probe(UnitsSize size, bool registers) {
  Plan plan;
  const auto& [scope, sizes] = tensor_row(kPrefillTensorTuning, size.dim, registers);
  plan.tuning = scope;
  Pass& pass = plan.add_pass();
  pass.spec.kernel = Kernel::kTensorProbe;
  pass.spec.dtype = pass.spec.out_dtype = size.dtype;
  pass.spec.head_dim = size.dim;
  pass.spec.value_dim = size.value_dim();
  pass.spec.row_groups = sizes.row_groups;
  pass.spec.tile_keys = sizes.tile_keys;
  pass.spec.simdgroups = sizes.simdgroups;
  pass.spec.row_fragments = kTensorRows / kFragment;
  pass.spec.registers = registers;
  pass.grid = {1, 1, 1};
  pass.threads = {kSimdWidth, 1, 1};
  pass.bind(kSlotTensorFacts, kSlotOut);
  pass.set_params(TensorProbeParams{kMaxTensorFacts});
  return plan;
}

static_assert(kMinMaskBlock % kCellRows == 0 && kMinMaskBlock % kCellKeys == 0, "blocks are whole cells");

PrefillParams prefill_params(const Problem& p, const Strides3& out) {
  PrefillParams params{};
  set_attention_params(params, p);
  params.mask_map = p.mask_map;
  if (p.block_rows > 0) {
    params.map_row_shift = std::countr_zero(uint64_t(p.block_rows / kCellRows));
    params.map_key_shift = std::countr_zero(uint64_t(p.block_keys / kCellKeys));
  }
  params.out = out;
  params.seq_lens_stride = p.seq_lens_stride;
  params.cu_seqlens_stride = p.cu_seqlens_stride;
  params.cu_seqlens_k_stride = p.cu_seqlens_k_stride;
  params.q_len = int32_t(p.q_len);
  params.kv_len = int32_t(p.kv_len);
  // With causality alone, rows beyond these bounds see all keys or none. With windows or slopes, the checks
  // keep q_offset in 32 bits.
  params.q_offset = int32_t(has_window(p) || reads_positions(p.options)
                                ? p.q_offset
                                : std::clamp<int64_t>(p.q_offset, -p.q_len, p.kv_len));
  params.window_left = window_side(p.options.window_left);
  params.window_right = window_side(window_right_of(p));
  params.sink_tokens = int32_t(std::min<int64_t>(p.options.sink_tokens, kNoLimit));
  params.last_rows_meet = p.last_rows_meet;
  return params;
}

Plan plan_prefill(const Problem& problem, const DeviceFacts& device) {
  Plan plan;
  if (is_empty(problem)) return plan;
  Problem p = problem;
  Tile tile = tile_of(p, device);
  plan.tuning = tile.scope;
  plan.units = units_note(p, device.units);
  const int64_t max_rows = tile.rows();
  const int64_t group_size = p.q_heads / p.kv_heads;
  const bool grouped = pays_to_group(p, max_rows);
  if (!is_decode(p.op) && pays_for_map(p, device)) add_mask_map(plan, p);
  // If one fragment of each group holds all rows of a sequence, a second would stay empty. Results do not
  // depend on the rows of a tile.
  const int64_t rows = p.packed ? max_sequence_rows(p) * group_size : p.q_len * (grouped ? group_size : 1);
  const bool on_units = uses_units(tile.kernel);
  if (!on_units && rows <= tile.row_groups * kFragment) tile.row_fragments = 1;
  const bool wide = tile.kernel == Kernel::kPrefillWide;
  // A tile of several rows of blocks visits the keys of all of them.
  while (p.block_rows > 0 && tile.rows() > p.block_rows && halve(tile)) {
  }

  int64_t q_tiles = max_tiles(p, grouped, tile.rows());
  const int64_t heads = p.packed || grouped ? p.kv_heads : p.q_heads;
  const int64_t batch = p.packed ? 1 : p.batch;
  const Parts parts = parts_of(p, device, tile, max_rows, q_tiles * heads);
  while (!tile.tuned && parts.count == 1 && q_tiles * heads * batch < held_by(device, tile.simdgroups) &&
         halve(tile)) {
    q_tiles = max_tiles(p, grouped, tile.rows());
  }

  Pass& pass = plan.add_pass();
  pass.spec = attention_spec(tile.kernel, p, device);
  pass.spec.row_fragments = uint16_t(tile.row_fragments);
  pass.spec.row_groups = uint16_t(wide || on_units ? tile.row_groups : 1);
  pass.spec.tile_keys = uint16_t(tile.tile_keys);
  pass.spec.simdgroups = uint16_t(tile.simdgroups);
  pass.spec.early_loads = tile.early_loads;
  pass.spec.registers = tile.scope.registers;
  pass.spec.causal = p.is_causal;
  pass.spec.window = has_window(p);
  pass.spec.grouped = grouped;
  pass.spec.split = parts.count > 1 || p.part;

  pass.grid = {uint32_t(q_tiles * parts.count), uint32_t(heads), uint32_t(batch)};
  const bool heads_first = put_heads_first(pass, p, device);
  const double keys_of_group = std::ceil(double(max_visible_keys(p, tile.rows())) / double(parts.count));
  const double products_of_group = double(tile.rows()) * keys_of_group * double(p.head_dim + p.value_dim);
  limit_products(pass, device, products_of_group);
  pass.threads = {uint32_t(tile.simdgroups * kSimdWidth), 1, 1};
  const int64_t saved_bytes = saved_tile_bytes(tile.rows(), tile.row_fragments * kFragment);
  pass.threadgroup_bytes = uint32_t(ceil_div(bytes_of(p, tile) + saved_bytes, 16) * 16);

  bind_attention(pass, p);
  const bool merged = parts.count > 1;
  pass.bind(merged ? kSlotPartialOut : kSlotOut, pass.spec.split ? kSlotPartialOut : kSlotOut);
  pass.bind(merged ? kSlotPartialSum : kSlotLse, pass.spec.split ? kSlotPartialSum : kSlotLse);
  pass.spec.out_remainder = p.has_out_remainder && !merged;
  if (pass.spec.out_remainder) pass.bind(kSlotOutRemainder);

  PrefillParams params = prefill_params(p, out_strides(p));
  params.q_tiles = int32_t(q_tiles);
  params.parts = int32_t(parts.count);
  params.max_parts = int32_t(parts.most);
  params.min_part = int32_t(parts.least);
  params.largest_part = int32_t(parts.largest);
  params.heads_first = heads_first;
  pass.set_params(params);
  if (!merged) return plan;
  // The number of simdgroups determines the summation order. The number of packed parts depends on the
  // capacity, as does the number in the grid of a decode.
  const int simdgroups = p.packed ? 1 : merge_simdgroups(parts.most);
  add_merge_of_parts(plan, p, parts.count, simdgroups, {.q_len = int32_t(p.q_len)});
  return plan;
}

}  // namespace fattn
