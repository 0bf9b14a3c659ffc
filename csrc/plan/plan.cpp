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
  pass.spec.out_remainder = p.has_out_remainder;
  if (p.has_out_remainder) pass.bind(kSlotOutRemainder);
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

namespace {

template <typename AnyProblem, typename Planner>
std::variant<Plan, Refusal> checked(const AnyProblem& problem, Op op, const DeviceFacts& device,
                                    const Planner& planner) {
  if (auto refusal = check(problem)) return *std::move(refusal);
  if (auto refusal = check(device, op)) return *std::move(refusal);
  return planner(problem);
}

Plan plan_merge(const MergeProblem& problem) {
  Plan plan;
  plan.tuning.source = "one threadgroup per row";
  if (problem.rows > 0 && problem.head_dim > 0) {
    add_merge_pass(plan, problem, uint16_t(merge_simdgroups(problem.parts)));
  }
  return plan;
}

}  // namespace

std::variant<Plan, Refusal> plan(const Problem& problem, const DeviceFacts& device) {
  return checked(problem, problem.op, device, [&](const Problem& p) -> std::variant<Plan, Refusal> {
    if (is_backward(p.op)) return plan_backward(p, device);
    return is_decode(p.op) ? plan_decode(p, device) : plan_prefill(p, device);
  });
}
std::variant<Plan, Refusal> plan(const MergeProblem& problem, const DeviceFacts& device) {
  return checked(problem, Op::kMerge, device, plan_merge);
}
std::variant<Plan, Refusal> plan(const CacheWriteProblem& problem, const DeviceFacts& device) {
  return checked(problem, Op::kCacheWrite, device, plan_cache_write);
}
std::variant<Plan, Refusal> plan(const RotaryProblem& problem, const DeviceFacts& device) {
  return checked(problem, problem.op, device, plan_rotary);
}
std::variant<Plan, Refusal> plan(const RmsNormProblem& problem, const DeviceFacts& device) {
  return checked(problem, Op::kRmsNorm, device, plan_rms_norm);
}
std::variant<Plan, Refusal> plan(const GatedDeltaProblem& problem, const DeviceFacts& device) {
  return checked(problem, problem.op, device,
                 [&](const GatedDeltaProblem& p) { return plan_gated_delta(p, device); });
}
std::variant<Plan, Refusal> plan(const GatedDeltaStepProblem& problem, const DeviceFacts& device) {
  return checked(problem, problem.op, device,
                 [&](const GatedDeltaStepProblem& p) { return plan_gated_delta_step(p, device); });
}
std::variant<Plan, Refusal> plan(const CausalConv1dProblem& problem, const DeviceFacts& device) {
  return checked(problem, Op::kCausalConv1d, device, plan_causal_conv1d);
}
std::variant<Plan, Refusal> plan(const LogitsProblem& problem, const DeviceFacts& device) {
  return checked(problem, problem.op, device, plan_logits);
}
std::variant<Plan, Refusal> plan(const MaskMapProblem& problem, const DeviceFacts& device) {
  return checked(problem, Op::kMaskMap, device, plan_mask_map);
}

}  // namespace fattn
