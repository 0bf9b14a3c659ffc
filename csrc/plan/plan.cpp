// Problem + DeviceFacts -> Plan or Refusal.
#include "planners.h"

namespace fattn {

Pass& add_merge_pass(Plan& plan, const MergeProblem& p, uint16_t simdgroups) {
  Pass& pass = plan.add_pass();
  pass.spec.kernel = Kernel::kMerge;
  pass.spec.dtype = p.dtype;
  pass.spec.out_dtype = p.out_dtype;
  pass.spec.split = p.sums;
  pass.spec.simdgroups = simdgroups;
  pass.grid = {uint32_t(p.rows), 1, 1};  // a threadgroup per row
  pass.threads = {uint32_t(pass.spec.simdgroups * kSimdWidth), 1, 1};
  pass.threadgroup_bytes =
      uint32_t(ceil_div(simdgroups * (kSimdWidth * 4 + kMergeSumFloats) * sizeof(float), 16) * 16);
  pass.bind(kSlotPartialOut);
  pass.bind(kSlotPartialSum);
  pass.bind(kSlotOut);
  pass.bind(kSlotLse);
  MergeParams params{};
  params.rows = p.rows;
  params.parts = int32_t(p.parts);
  params.head_dim = int32_t(p.head_dim);
  pass.set_params(params);
  return pass;
}

Pass& add_merge_of_parts(Plan& plan, const Problem& p, int64_t parts, int simdgroups,
                         const CausalSpan& span) {
  const int64_t rows = (p.packed ? 1 : p.batch) * p.q_heads * p.q_len;
  plan.scratch_out_floats = parts * rows * p.value_dim;
  plan.scratch_sum_floats = parts * rows * kSumFloats;
  const MergeProblem merged{
      .out_dtype = out_dtype(p), .sums = true, .parts = parts, .rows = rows, .head_dim = p.value_dim};
  Pass& pass = add_merge_pass(plan, merged, uint16_t(simdgroups));
  pass.spec.token_major_out = is_token_major(p);
  MergeParams params{};
  params.rows = rows;
  params.parts = int32_t(parts);
  params.head_dim = int32_t(p.value_dim);
  params.rows_per_sequence = p.q_heads * p.q_len;
  params.span = span;
  params.puts_part = p.part;
  pass.set_params(params);
  return pass;
}

std::variant<Plan, Refusal> plan(const Problem& problem, const DeviceFacts& device) {
  if (auto refusal = check(problem)) return *std::move(refusal);
  if (auto refusal = check(device, problem.op)) return *std::move(refusal);
  if (is_backward(problem.op)) return plan_backward(problem, device);
  return is_decode(problem.op) ? plan_decode(problem, device) : plan_prefill(problem, device);
}

std::variant<Plan, Refusal> plan(const MergeProblem& problem, const DeviceFacts& device) {
  if (auto refusal = check(problem)) return *std::move(refusal);
  if (auto refusal = check(device, Op::kMerge)) return *std::move(refusal);
  Plan plan;
  plan.tuning = "one threadgroup per row";
  if (problem.rows > 0 && problem.head_dim > 0) {
    add_merge_pass(plan, problem, uint16_t(merge_simdgroups(problem.parts)));
  }
  return plan;
}

std::variant<Plan, Refusal> plan(const CacheWriteProblem& problem, const DeviceFacts& device) {
  if (auto refusal = check(problem)) return *std::move(refusal);
  if (auto refusal = check(device, Op::kCacheWrite)) return *std::move(refusal);
  return plan_cache_write(problem);
}

std::variant<Plan, Refusal> plan(const RotaryProblem& problem, const DeviceFacts& device) {
  if (auto refusal = check(problem)) return *std::move(refusal);
  if (auto refusal = check(device, problem.op)) return *std::move(refusal);
  return plan_rotary(problem);
}

std::variant<Plan, Refusal> plan(const RmsNormProblem& problem, const DeviceFacts& device) {
  if (auto refusal = check(problem)) return *std::move(refusal);
  if (auto refusal = check(device, Op::kRmsNorm)) return *std::move(refusal);
  return plan_rms_norm(problem);
}

std::variant<Plan, Refusal> plan(const LogitsProblem& problem, const DeviceFacts& device) {
  if (auto refusal = check(problem)) return *std::move(refusal);
  if (auto refusal = check(device, problem.op)) return *std::move(refusal);
  return plan_logits(problem);
}

std::variant<Plan, Refusal> plan(const MaskMapProblem& problem, const DeviceFacts& device) {
  if (auto refusal = check(problem)) return *std::move(refusal);
  if (auto refusal = check(device, Op::kMaskMap)) return *std::move(refusal);
  return plan_mask_map(problem);
}

}  // namespace fattn
