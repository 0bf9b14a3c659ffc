// Problem + DeviceFacts -> Plan or Refusal.
#include "check.h"
#include "planners.h"

namespace fattn {

void add_merge_pass(Plan& plan, const MergeProblem& p, DType out_dtype) {
  Pass& pass = plan.add_pass();
  pass.spec.kernel = Kernel::kMerge;
  pass.spec.dtype = p.dtype;
  pass.spec.out_dtype = out_dtype;
  pass.spec.simdgroups = p.parts > 32  ? 8
                         : p.parts > 8 ? 4
                                       : 1;  // at least four parts each, if there are so many
  pass.grid = {uint32_t(p.rows), 1, 1};      // a threadgroup per row
  pass.threads = {uint32_t(pass.spec.simdgroups * kSimdWidth), 1, 1};
  pass.threadgroup_bytes = uint32_t(pass.spec.simdgroups * kMergeColumns * sizeof(float));
  pass.bind(Buffer::kScratchOut, kSlotPartialOut);
  pass.bind(Buffer::kScratchLse, kSlotPartialLse);
  pass.bind(Buffer::kOut, kSlotOut);
  pass.bind(Buffer::kLse, kSlotLse);
  pass.set_params(MergeParams{p.rows, int32_t(p.parts), int32_t(p.head_dim)});
}

std::variant<Plan, Refusal> plan(const Problem& problem, const DeviceFacts& device) {
  if (auto refusal = check(problem)) return *std::move(refusal);
  if (auto refusal = check(device, problem.op)) return *std::move(refusal);
  return problem.op == Op::kPrefill ? plan_prefill(problem, device) : plan_decode(problem, device);
}

std::variant<Plan, Refusal> plan(const MergeProblem& problem, const DeviceFacts& device) {
  if (auto refusal = check(problem)) return *std::move(refusal);
  if (auto refusal = check(device, Op::kMerge)) return *std::move(refusal);
  Plan plan;
  plan.tuning = "one simdgroup per row";
  if (problem.rows > 0 && problem.head_dim > 0) add_merge_pass(plan, problem, problem.dtype);
  return plan;
}

}  // namespace fattn
