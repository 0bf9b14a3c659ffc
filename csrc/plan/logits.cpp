// Plans the operators on logits: one pass each.
#include "planners.h"
#include "slices.h"

namespace fattn {
namespace {

constexpr uint16_t kSimdgroups = 8;     // per threadgroup, if each has its own rows
constexpr int64_t kMaxVectors = 4;      // per thread
constexpr int64_t kMaxSimdgroups = 32;  // per threadgroup

// Elements per dispatch. As float32 they move 2 GiB: a thirtieth of a second at M1's 68 GB/s, and about half
// a second if each is in its own cache line.
constexpr int64_t kMaxElements = int64_t(1) << 28;

// The smallest power of 2 that is not below n.
int64_t power_of_2(int64_t n) {
  int64_t power = 1;
  while (power < n) power *= 2;
  return power;
}

// One simdgroup holds a short row; a longer one is shared by as many simdgroups as can hold it.
void share_rows(KernelSpec& spec, int64_t columns) {
  const int64_t simdgroup_vectors = ceil_div(columns, kSimdWidth * kLogitsVector);
  spec.vectors = uint16_t(std::min(power_of_2(simdgroup_vectors), kMaxVectors));
  spec.row_simdgroups =
      uint16_t(std::min(power_of_2(ceil_div(simdgroup_vectors, kMaxVectors)), kMaxSimdgroups));
  spec.simdgroups = spec.row_simdgroups == 1 ? kSimdgroups : spec.row_simdgroups;
}

Kernel kernel_of(Op op) {
#define FATTN_KERNEL_OF(id, ...) \
  if (op == Op::k##id) return Kernel::k##id;
  FATTN_LOGITS_OPS(FATTN_KERNEL_OF)
#undef FATTN_KERNEL_OF
  return Kernel{};
}

}  // namespace

Plan plan_logits(const LogitsProblem& p) {
  Plan plan;
  const bool by_row = is_row_op(p.op);
  plan.tuning.source = by_row ? "up to 16 columns of a row per thread" : "4 elements per thread";
  const int64_t elements = p.rows * p.columns;
  if (elements == 0) return plan;

  Pass& pass = plan.add_pass();
  KernelSpec& spec = pass.spec;
  spec.kernel = kernel_of(p.op);
  spec.dtype = p.dtype;
  spec.vector_loads = p.vector_aligned;
  spec.softcap = p.softcap > 0.0;
  spec.simdgroups = kSimdgroups;
  if (by_row) share_rows(spec, p.columns);

  const int64_t group_rows = spec.simdgroups / spec.row_simdgroups;
  const int64_t group_elements =
      by_row ? group_rows * p.columns : spec.simdgroups * kSimdWidth * kLogitsVector;
  const int64_t groups = by_row ? ceil_div(p.rows, group_rows) : ceil_div(elements, group_elements);
  pass.grid = {uint32_t(groups), 1, 1};
  pass.threads = {spec.simdgroups * uint32_t(kSimdWidth), 1, 1};
  if (elements > kMaxElements) cut_into_slices(pass, kMaxElements / group_elements);
  // Maximum and sum of each simdgroup that shares a row.
  if (by_row) pass.threadgroup_bytes = uint32_t(ceil_div(spec.row_simdgroups * 2 * sizeof(float), 16) * 16);
  pass.bind(kSlotLogits);
  pass.bind(kSlotOut);

  LogitsParams params{};
  std::copy(p.sizes.begin(), p.sizes.end(), params.sizes);
  std::copy(p.strides.begin(), p.strides.end(), params.strides);
  params.column_stride = p.column_stride;
  params.rows = p.rows;
  params.columns = p.columns;
  params.dims = p.dims;
  params.cap = float(p.softcap);
  pass.set_params(params);
  return plan;
}

}  // namespace fattn
