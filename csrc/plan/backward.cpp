// Plans fattn.prefill_backward and fattn.varlen_prefill_backward: a pass over the query rows, whose
// threadgroups walk keys, and a pass over the keys, whose threadgroups walk rows. Sinks and ALiBi slopes each
// add a pass after these. A pass that makes a mask map comes first if it saves more than it costs.
#include "planners.h"
#include "refuse.h"
#include "slices.h"

namespace fattn {
namespace {

constexpr int64_t kHeadSimdgroups = 8;
constexpr int kMaxWalked = 32;  // rows or keys per step

// How a threadgroup divides its work: `groups` groups of simdgroups own `owned` fragments each, and the
// simdgroups of a group divide the columns.
struct Tile {
  Kernel kernel;
  int owned;
  int groups;
  int walked;  // rows or keys per step
  int simdgroups;
  Scope scope;

  int shares() const { return simdgroups / groups; }
  int rows() const { return groups * owned * kFragment; }
  bool walks_keys() const {
    return kernel == Kernel::kBackwardQuery || kernel == Kernel::kBackwardQueryTensor;
  }
};

// Whether the products have the descriptors of prefill's products, which plan_tensor_probe covers.
consteval bool products_are_probed() {
  for (const uint16_t dim : kUnitsDims) {
    if (dim > kMaxBackwardHeadDim) continue;
    for (const bool registers : {false, true}) {
      const PrefillTensorSizes& probed = tensor_row(kPrefillTensorTuning, dim, registers).sizes;
      const BackwardTensorSizes& row = tensor_row(kBackwardTensorTuning, dim, registers).sizes;
      if (row.walked != probed.tile_keys || row.shares != probed.simdgroups / probed.row_groups) return false;
    }
  }
  return true;
}
static_assert(products_are_probed());

// The tile of the pass over query rows (`walks_keys`) or over keys.
Tile tensor_tile(bool walks_keys, const Problem& p, bool registers) {
  constexpr int kGradients = 2;  // of key and value, each in simdgroups of its own
  const auto& [scope, sizes] = tensor_row(kBackwardTensorTuning, p.head_dim, registers);
  Tile tile = {.kernel = Kernel::kBackwardQueryTensor,
               .owned = kTensorRows / kFragment,
               .groups = sizes.row_groups,
               .walked = sizes.walked,
               .simdgroups = sizes.row_groups * sizes.shares,
               .scope = scope};
  if (walks_keys) return tile;
  tile.kernel = Kernel::kBackwardKeyTensor;
  tile.groups = sizes.key_groups;
  tile.simdgroups = sizes.key_groups * kGradients * sizes.shares;
  return tile;
}

Tile tile_of(bool walks_keys, const Problem& p, const DeviceFacts& device) {
  if (const UnitsState state = units_state(p, device.units); is_on(state))
    return tensor_tile(walks_keys, p, state == UnitsState::kRegisters);
  const DType dtype = operand_dtype(p, device);
  const auto& [scope, sizes] = walks_keys ? tuning_row(kBackwardQueryTuning, device, p, dtype)
                                          : tuning_row(kBackwardKeyTuning, device, p, dtype);
  return {.kernel = walks_keys ? Kernel::kBackwardQuery : Kernel::kBackwardKey,
          .owned = sizes.owned,
          .groups = sizes.groups,
          .walked = sizes.walked,
          .simdgroups = sizes.simdgroups,
          .scope = scope};
}

// Both operands of the own rows, and one of a step. Without registers also the gradients of a step.
int64_t bytes_of_units(const Problem& p, const Tile& tile) {
  const int64_t operand_bytes = (2 * tile.rows() + tile.walked) * units_size(p)->dim * size_of(p.dtype);
  const int64_t score_bytes =
      tile.simdgroups * kTensorRows * score_pitch(tile.walked) * int64_t(sizeof(float));
  return operand_bytes + (tile.scope.registers ? 0 : score_bytes);
}

// The staged rows, and the blocks that the simdgroups of a group exchange.
int64_t bytes_of(const Problem& p, const Tile& tile) {
  if (uses_units(tile.kernel)) return bytes_of_units(p, tile);
  const int bytes = size_of(p.dtype), shares = tile.shares();
  const int pitches =
      key_pitch(int(p.head_dim), shares, bytes) + value_pitch(int(p.value_dim), shares, bytes);
  const int pairs = shared_block_pairs(shares, tile.groups, tile.walked / kFragment, tile.owned);
  return tile.walked * pitches * bytes + pairs * int64_t(2 * sizeof(float));
}

// Row state in threadgroup memory: SavedStepRow in step_rows.h (on matrix units of two steps) or SavedTile in
// prefill_rows.h (on matrix units also states and modifiers of rows, and the keys that simdgroups saw).
int64_t saved_bytes(const Tile& tile) {
  const bool on_units = uses_units(tile.kernel);
  if (!tile.walks_keys()) return tile.walked * kSavedStepRowBytes * (on_units ? 2 : 1);
  constexpr auto kStateBytes = int64_t(kRowStateFloats * sizeof(float));
  const int64_t state_bytes = tile.simdgroups * (kTensorRows * kStateBytes + 2 * int64_t(sizeof(uint32_t))) +
                              tile.rows() * int64_t(sizeof(SavedTensorRow));
  return saved_tile_bytes(tile.rows(), tile.owned * kFragment) + (on_units ? state_bytes : 0);
}

// The query rows of all results, in the order of lse.
int64_t result_rows(const Problem& p) { return (p.packed ? 1 : p.batch) * p.q_heads * p.q_len; }

// Tensors that live from the forward to the backward: query, key, value, lse, and `out` if it is given, which
// has two bytes more in its remainder if it has two.
int64_t kept_bytes(const Problem& p) {
  const int64_t keys = (p.packed ? 1 : p.batch) * p.kv_len * p.kv_heads;
  const int64_t operands = result_rows(p) * p.head_dim + keys * (p.head_dim + p.value_dim);
  const int64_t floats = result_rows(p) * (p.has_saved_out ? 1 + p.value_dim : 1);
  return operands * size_of(p.dtype) + floats * int64_t(sizeof(float));
}

// Gradients have the shapes of their operands and are contiguous.
Strides3 contiguous(const Problem& p, int64_t rows, int64_t heads, int64_t dim) {
  if (p.packed) return {.batch = 0, .head = dim, .row = heads * dim};
  return {.batch = heads * rows * dim, .head = rows * dim, .row = dim};
}

BackwardParams params_of(const Problem& p) {
  BackwardParams params{};
  params.forward = prefill_params(p, contiguous(p, p.q_len, p.q_heads, p.head_dim));
  params.forward.parts = 1;
  params.grad_out = p.grad_out;
  params.saved_out = p.out;
  params.out_remainder = p.out_remainder;
  params.grad_key = contiguous(p, p.kv_len, p.kv_heads, p.head_dim);
  params.grad_value = contiguous(p, p.kv_len, p.kv_heads, p.value_dim);
  params.grad_scale = float(p.scale);
  return params;
}

int64_t threadgroup_bytes(const Problem& p, const Tile& tile) {
  return ceil_div(bytes_of(p, tile) + saved_bytes(tile), 16) * 16;
}

// Tiles of rows or keys, heads, sequences. A packed call has one more tile per sequence, and for the rows
// before and after all sequences.
std::array<int64_t, 3> grid_of(const Tile& tile, const Problem& p) {
  const int64_t rows = p.q_len * (p.packed ? p.q_heads / p.kv_heads : 1);
  const int64_t surplus = p.packed ? p.batch + 2 : 1;
  const int64_t tiles = ((tile.walks_keys() ? rows : p.kv_len) + surplus * (tile.rows() - 1)) / tile.rows();
  return {tiles, tile.walks_keys() && !p.packed ? p.q_heads : p.kv_heads, p.packed ? 1 : p.batch};
}

int64_t threadgroups_of(const Tile& tile, const Problem& p) {
  const auto [tiles, heads, batch] = grid_of(tile, p);
  return tiles * heads * batch;
}

// The maximum number of rows or keys that a threadgroup walks.
int64_t walked_by(const Tile& tile, const Problem& p) {
  if (tile.walks_keys()) return max_sequence_keys(p);
  return (p.packed ? max_sequence_rows(p) : p.q_len) * (p.q_heads / std::max<int64_t>(p.kv_heads, 1));
}

// Products per walked row or key.
double products_of_walked(const Tile& tile, const Problem& p) {
  return double(tile.rows()) * 2.5 * double(p.head_dim + p.value_dim);
}

// What both walks share.
Pass& add_walk(Plan& plan, const Problem& p, const DeviceFacts& device, const Tile& tile) {
  Pass& pass = plan.add_pass();
  pass.spec = attention_spec(tile.kernel, p, device);
  pass.spec.row_groups = uint16_t(tile.groups);
  pass.spec.simdgroups = uint16_t(tile.simdgroups);
  pass.spec.registers = tile.scope.registers;
  pass.spec.causal = p.is_causal;
  pass.spec.window = has_window(p);
  pass.threads = {uint32_t(tile.simdgroups * kSimdWidth), 1, 1};
  pass.threadgroup_bytes = uint32_t(threadgroup_bytes(p, tile));
  bind_attention(pass, p);
  pass.bind(kSlotGradOut);
  pass.bind(kSlotRowStates);

  const auto [tiles, heads, batch] = grid_of(tile, p);
  pass.grid = {uint32_t(tiles), uint32_t(heads), uint32_t(batch)};
  BackwardParams params = params_of(p);
  if (tile.walks_keys()) params.forward.q_tiles = int32_t(tiles);
  params.forward.heads_first = put_heads_first(pass, p, device);
  limit_products(pass, device, products_of_walked(tile, p) * double(walked_by(tile, p)));
  pass.set_params(params);
  return pass;
}

// Halves the own rows or keys of a tile if possible; results are bit-identical. A core computes for four
// simdgroups at a time: with fewer, a walk takes as long.
bool halve(Tile& tile) {
  if (uses_units(tile.kernel)) return false;  // the self-test covers no smaller tiles
  const bool groups = tile.owned == 1;
  if (groups && (tile.groups == 1 || tile.simdgroups <= 4)) return false;
  (groups ? tile.groups : tile.owned) /= 2;
  if (groups) tile.simdgroups /= 2;
  return true;
}

// Fewer threadgroups than cores leave cores idle. Halves of tiles use them, and have memory for longer steps.
// Without a causal mask all tiles take equally long, and are halved only if each half has a core of its own.
// Tiles of one fragment stay: their halves would stage as much for fewer simdgroups.
void use_idle_cores(Tile& tile, const Problem& p, const DeviceFacts& device) {
  const int64_t most = p.is_causal ? cores_of(device) - 1 : cores_of(device) / 2;
  if (tile.owned == 1 || threadgroups_of(tile, p) > most || !halve(tile)) return;
  Tile longer = tile;
  longer.walked = kMaxWalked;
  if (threadgroup_bytes(p, longer) <= device.max_threadgroup_bytes) tile = longer;
}

// A walk cannot be split over dispatches, and macOS kills a dispatch that runs for some seconds.
std::optional<Refusal> check_walk(const Tile& tile, const Problem& p) {
  const auto most = int64_t(4 * kMaxProductsPerCore / products_of_walked(tile, p));
  const int64_t walked = walked_by(tile, p);
  if (walked <= most) return std::nullopt;
  return refuse(Refusal::Kind::kNotImplemented, name_of(p.op), walked,
                tile.walks_keys() ? " keys" : " query rows of all heads that share keys", " are above ", most,
                ", the limit for the gradients of a sequence; use shorter sequences");
}

void add_query_pass(Plan& plan, const Problem& p, const DeviceFacts& device, const Tile& tile) {
  Pass& pass = add_walk(plan, p, device, tile);
  pass.spec.row_fragments = uint16_t(tile.owned);
  pass.spec.tile_keys = uint16_t(tile.walked);
  pass.spec.grad_lse = p.has_grad_lse;
  pass.spec.saved_out = p.has_saved_out;
  pass.spec.out_remainder = p.has_out_remainder;
  if (p.has_grad_lse) pass.bind(kSlotGradLse);
  if (p.has_saved_out) pass.bind(kSlotSavedOut);
  if (p.has_out_remainder) pass.bind(kSlotOutRemainder);
  pass.bind(kSlotLse);
  pass.bind(kSlotGradQuery, kSlotOut);
}

void add_key_pass(Plan& plan, const Problem& p, const DeviceFacts& device, const Tile& tile) {
  Pass& pass = add_walk(plan, p, device, tile);
  pass.spec.row_fragments = 1;  // a lane holds scores of one row at a time
  pass.spec.tile_keys = uint16_t(tile.owned * kFragment);
  pass.spec.step_rows = uint16_t(tile.walked);
  pass.bind(kSlotGradKey);
  pass.bind(kSlotGradValue);
}

// The gradient of sinks or of slopes.
void add_head_pass(Plan& plan, const Problem& p, Slot result, const NumberTensor& numbers) {
  const bool of_sinks = result == kSlotGradSinks;
  Pass& pass = plan.add_pass();
  pass.spec.kernel = Kernel::kBackwardHead;
  pass.spec.dtype = dtype_of(numbers.kind);
  pass.spec.simdgroups = kHeadSimdgroups;
  pass.spec.mask = mask_kind(p.mask_dtype);
  pass.spec.sinks = of_sinks;
  pass.spec.sinks_kind = of_sinks ? numbers.kind : uint32_t{kKindFloat32};
  pass.spec.packed = p.packed && numbers.of_sequences;
  pass.grid = {uint32_t(p.q_heads * (numbers.of_sequences ? p.batch : 1)), 1, 1};
  pass.threads = {kHeadSimdgroups * kSimdWidth, 1, 1};
  pass.threadgroup_bytes = uint32_t(ceil_div(kHeadSimdgroups * int64_t(sizeof(float)), 16) * 16);
  pass.bind(kSlotRowStates);
  if (of_sinks) pass.bind(kSlotSinks);
  if (pass.spec.packed) pass.bind(kSlotCuSeqlens);
  pass.bind(result, kSlotOut);

  BackwardHeadParams params{};
  params.sinks_stride = numbers.stride;
  params.cu_seqlens_stride = p.cu_seqlens_stride;
  params.sequences = int32_t(numbers.of_sequences || p.packed ? 1 : p.batch);
  params.q_heads = int32_t(p.q_heads);
  params.q_len = int32_t(p.q_len);
  pass.set_params(params);
}

}  // namespace

std::variant<Plan, Refusal> plan_backward(const Problem& problem, const DeviceFacts& device) {
  Plan plan;
  if (is_empty(problem)) return plan;
  Problem p = problem;
  Tile rows = tile_of(/*walks_keys=*/true, p, device);
  Tile keys = tile_of(/*walks_keys=*/false, p, device);
  for (Tile* tile : {&rows, &keys}) {
    use_idle_cores(*tile, p, device);
    auto refusal = check_walk(*tile, p);
    while (refusal && halve(*tile)) refusal = check_walk(*tile, p);
    if (!refusal) continue;
    if (!uses_units(tile->kernel)) return *std::move(refusal);
    DeviceFacts without_units = device;
    without_units.units = {};
    auto found = plan_backward(problem, without_units);
    if (Plan* smaller = std::get_if<Plan>(&found)) smaller->units = "so many rows or keys need smaller tiles";
    return found;
  }
  plan.tuning = rows.scope;
  plan.key_tuning = keys.scope;
  plan.units = units_note(p, device.units);
  if (pays_for_map(p, device)) add_mask_map(plan, p);
  plan.kept_bytes = kept_bytes(p);
  plan.scratch_row_floats = result_rows(p) * kRowStateFloats;

  add_query_pass(plan, p, device, rows);
  if (p.kv_len > 0) add_key_pass(plan, p, device, keys);
  const ScoreOptions& options = p.options;
  if (options.sinks.given) add_head_pass(plan, p, kSlotGradSinks, options.sinks);
  if (options.alibi_slopes.given) add_head_pass(plan, p, kSlotGradAlibi, options.alibi_slopes);
  return plan;
}

}  // namespace fattn
