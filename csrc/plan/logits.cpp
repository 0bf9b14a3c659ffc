// Plans the operators on logits and rms_norm: one pass each.
#include "planners.h"
#include "slices.h"

namespace fattn {
namespace {

constexpr uint16_t kSimdgroups = 8;     // per threadgroup, if each has its own rows
constexpr int64_t kMaxSimdgroups = 32;  // per threadgroup

// The smallest power of 2 that is not below n.
int64_t power_of_2(int64_t n) {
  int64_t power = 1;
  while (power < n) power *= 2;
  return power;
}

// One simdgroup holds a short row; a longer one is shared by as many simdgroups as can hold it.
// `max_vectors`: per thread.
void share_rows(KernelSpec& spec, int64_t columns, int64_t max_vectors) {
  const int64_t simdgroup_vectors = ceil_div(columns, kSimdWidth * kLogitsVector);
  spec.vectors = uint16_t(std::min(power_of_2(simdgroup_vectors), max_vectors));
  spec.row_simdgroups =
      uint16_t(std::min(power_of_2(ceil_div(simdgroup_vectors, max_vectors)), kMaxSimdgroups));
  spec.simdgroups = spec.row_simdgroups == 1 ? kSimdgroups : spec.row_simdgroups;
}

int64_t group_rows(const KernelSpec& spec) { return spec.simdgroups / spec.row_simdgroups; }

// `group_elements`: of a threadgroup.
void add_grid(Pass& pass, int64_t elements, int64_t group_elements) {
  // Elements per dispatch. As float32 they move 2 GiB: a thirtieth of a second at M1's 68 GB/s, and about
  // half a second if each is in its own cache line.
  constexpr int64_t kMaxElements = int64_t(1) << 28;
  pass.grid = {uint32_t(ceil_div(elements, group_elements)), 1, 1};
  pass.threads = {pass.spec.simdgroups * uint32_t(kSimdWidth), 1, 1};
  if (elements > kMaxElements) cut_into_slices(pass, kMaxElements / group_elements);
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
  if (by_row) share_rows(spec, p.columns, 4);

  add_grid(pass, elements,
           by_row ? group_rows(spec) * p.columns : spec.simdgroups * kSimdWidth * kLogitsVector);
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

Plan plan_rms_norm(const RmsNormProblem& p) {
  Plan plan;
  plan.tuning.source = "up to 8 columns of a row per thread";
  const int64_t elements = p.rows * p.columns;
  if (elements == 0) return plan;

  Pass& pass = plan.add_pass();
  KernelSpec& spec = pass.spec;
  spec.kernel = Kernel::kRmsNorm;
  spec.dtype = p.dtype;
  spec.weight_dtype = p.weight_dtype;
  spec.out_dtype = p.out_dtype;
  spec.norm = p.norm;
  spec.gate = p.gate;
  spec.weighted = p.has_weight;
  spec.vector_loads = p.vector_aligned;
  // By the columns alone: the order of a sum, and so the result, does not depend on the number of rows.
  share_rows(spec, p.columns, 2);
  add_grid(pass, elements, group_rows(spec) * p.columns);
  pass.threadgroup_bytes = uint32_t(ceil_div(spec.row_simdgroups * sizeof(float), 16) * 16);
  pass.bind(kSlotRows, Slot(kBufferRows));
  if (p.has_weight) pass.bind(kSlotWeight, Slot(kBufferWeight));
  if (p.gate != kGateNone) pass.bind(kSlotGate, Slot(kBufferGate));
  pass.bind(kSlotOut);

  RmsNormParams params = p.params;
  params.rows = p.rows;
  params.columns = int32_t(p.columns);
  params.eps = float(p.eps);
  pass.set_params(params);
  return plan;
}

}  // namespace fattn
