// Plans fattn.mask_map, and the same pass before a prefill with a mask but without a map.
#include "planners.h"
#include "slices.h"

namespace fattn {
namespace {

constexpr int64_t kGroupElements = int64_t{kGroupCells} * kCellRows * kCellKeys;

// Elements per dispatch: see logits.cpp.
constexpr int64_t kMaxElements = int64_t(1) << 28;

// Products per byte of memory traffic: an M1 core makes 128 per cycle at 1.28 GHz and has an eighth of 68
// GB/s. The ratio of an M3 Max is nearly the same.
constexpr double kProductsPerByte = 20.0;
// Largest cost of a map, as a fraction of the products' time if the mask hides nothing.
constexpr double kMaxFraction = 1.0 / 16;
// Fewest products per core that pay for another pass: a tenth of a millisecond on M1, where a dispatch that
// waits for another takes some microseconds.
constexpr double kMinProductsPerCore = 1e7;
// With this many keys or fewer, a map saves next to nothing.
constexpr int64_t kMinKeys = 4 * kCellKeys;

// The problem's mask without the dimensions in which it is broadcast.
MaskMapProblem mask_of(const Problem& p) {
  return {.dtype = p.mask_dtype,
          .batch = p.mask.batch == 0 ? 1 : p.batch,
          .heads = p.mask.head == 0 ? 1 : p.q_heads,
          .rows = p.mask.row == 0 ? 1 : p.q_len,
          .keys = p.mask.key == 0 ? 1 : p.kv_len,
          .mask = p.mask};
}

double elements(const MaskMapProblem& p) {
  return double(p.batch) * double(p.heads) * double(p.rows) * double(p.keys);
}

// Cells of a mask, and threadgroups of one row of cells and of all.
struct MapShape {
  int64_t row_cells;
  int64_t key_cells;
  int64_t row_groups;
  double groups;
};

MapShape shape_of(const MaskMapProblem& p) {
  MapShape shape{.row_cells = ceil_div(p.rows, kCellRows), .key_cells = ceil_div(p.keys, kCellKeys)};
  shape.row_groups = ceil_div(shape.key_cells, kGroupCells);
  shape.groups = double(p.batch) * double(p.heads) * double(shape.row_cells) * double(shape.row_groups);
  return shape;
}

void add_pass(Plan& plan, const MaskMapProblem& p) {
  const MapShape shape = shape_of(p);
  Pass& pass = plan.add_pass();
  pass.spec.kernel = Kernel::kMaskMap;
  pass.spec.mask = mask_kind(p.dtype);
  pass.grid = {uint32_t(shape.groups), 1, 1};
  pass.threads = {uint32_t(kGroupCells * kSimdWidth), 1, 1};
  if (pass.groups() > kMaxElements / kGroupElements) cut_into_slices(pass, kMaxElements / kGroupElements);
  pass.bind(kSlotMask);
  pass.bind(kSlotMaskMap);

  MaskMapParams params{};
  params.mask = p.mask;
  params.heads = int32_t(p.heads);
  params.rows = int32_t(p.rows);
  params.keys = int32_t(p.keys);
  params.row_cells = int32_t(shape.row_cells);
  params.key_cells = int32_t(shape.key_cells);
  params.row_groups = int32_t(shape.row_groups);
  pass.set_params(params);
}

}  // namespace

double map_groups(const MaskMapProblem& p) { return shape_of(p).groups; }

// Making the map reads every element of the mask once, however many heads and sequences share it. It saves
// the products of fully hidden cells, and the tests and mask reads of fully visible ones. Their number is
// known only on the GPU, so the cost must be small even if there are none.
bool pays_for_map(const Problem& p, const DeviceFacts& device) {
  if (p.mask_dtype == DType::kOther || p.has_mask_map) return false;
  const MaskMapProblem mask = mask_of(p);
  const double pairs = double(p.batch) * double(p.q_heads) * double(p.q_len) * double(p.kv_len);
  const double products = pairs * double(p.head_dim + p.value_dim);
  const double bytes = elements(mask) * size_of(p.mask_dtype);
  return p.kv_len > kMinKeys && products >= kMinProductsPerCore * double(cores_of(device)) &&
         bytes * kProductsPerByte <= products * kMaxFraction &&
         shape_of(mask).groups <= double(kMaxMapGroups);
}

void add_mask_map(Plan& plan, Problem& p) {
  const MaskMapProblem mask = mask_of(p);
  const MapShape shape = shape_of(mask);
  add_pass(plan, mask);
  const int64_t head_cells = shape.row_cells * shape.key_cells;
  plan.scratch_map_bytes = mask.batch * mask.heads * head_cells;
  p.has_mask_map = true;
  p.mask_map.batch = p.mask.batch == 0 ? 0 : mask.heads * head_cells;
  p.mask_map.head = p.mask.head == 0 ? 0 : head_cells;
  p.mask_map.row = p.mask.row == 0 ? 0 : shape.key_cells;
  p.mask_map.key = p.mask.key == 0 ? 0 : 1;
}

Plan plan_mask_map(const MaskMapProblem& p) {
  Plan plan;
  plan.tuning.source = "a simdgroup for each cell of 16 rows and 32 keys";
  if (elements(p) > 0) add_pass(plan, p);
  return plan;
}

}  // namespace fattn
