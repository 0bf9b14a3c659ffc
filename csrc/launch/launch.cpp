// Allocates results and scratch of a plan, and binds all buffers.
#include "launch.h"

#include <array>

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>

#include "../describe/tensor_checks.h"
#include "../metal/executor.h"

namespace fattn {
namespace {

using at::Tensor;
using metal::Bindings;
using metal::BufferView;

// An empty operand may lack a buffer, or begin at the end of one. Kernels do not read it, but Metal needs a
// bound buffer: `stand_in`. Const access, because mutable access would copy a copy-on-write operand.
BufferView view_of(const Tensor& tensor, const Tensor& stand_in) {
  const Tensor& bound = tensor.numel() > 0 ? tensor : stand_in;
  return {const_cast<void*>(bound.storage().data()),
          bound.storage_offset() * static_cast<int64_t>(bound.element_size())};
}

// A written tensor. This materialises a copy-on-write operand.
BufferView writable_view_of(const Tensor& tensor) {
  return {tensor.storage().mutable_data(),
          tensor.storage_offset() * static_cast<int64_t>(tensor.element_size())};
}

// Binds operands that are defined. A written one without elements is not written.
struct Binder {
  Bindings& bindings;
  const Tensor& stand_in;

  void reads(Slot slot, const Tensor& tensor) const {
    if (tensor.defined()) bindings[slot] = view_of(tensor, stand_in);
  }
  void writes(Slot slot, const Tensor& tensor) const {
    if (!tensor.defined()) return;
    bindings[slot] = tensor.numel() > 0 ? writable_view_of(tensor) : view_of(tensor, stand_in);
  }
};

Tensor empty_floats(at::IntArrayRef sizes, const Tensor& like) {
  return at::empty(sizes, like.options().dtype(at::kFloat));
}

// Binds the inputs of an attention call. Returns query, key and value as they are bound.
std::array<Tensor, 3> bind_inputs(const Call& call, const Tensor& stand_in, Bindings& bindings) {
#define FATTN_BIND(slot, type, name, ...) \
  if (call.name.defined()) bindings[kSlot##slot] = view_of(call.name, stand_in);
  FATTN_OPERANDS(FATTN_BIND, FATTN_BIND, FATTN_NOTHING, FATTN_NOTHING)
#undef FATTN_BIND
  const std::array<Tensor, 3> rows = {with_contiguous_rows(call.query), with_contiguous_rows(call.key),
                                      with_contiguous_rows(call.value)};
  bindings[kSlotQuery] = view_of(rows[0], stand_in);
  bindings[kSlotKey] = view_of(rows[1], stand_in);
  bindings[kSlotValue] = view_of(rows[2], stand_in);
  return rows;
}

// Binds the operands of a write that are defined. Returns key and value as they are bound.
std::array<Tensor, 2> bind_write(const WriteOperands& call, const Tensor& stand_in, Bindings& bindings) {
  const std::array<Tensor, 2> rows = {rows_to_read(call.key, call.copy_key),
                                      rows_to_read(call.value, call.copy_value)};
  const Binder binder{bindings, stand_in};
  binder.reads(kSlotKey, rows[0]);
  binder.reads(kSlotValue, rows[1]);
  binder.reads(kSlotSlotMapping, call.slot_mapping);
  binder.writes(kSlotKeyCache, call.key_cache);
  binder.writes(kSlotValueCache, call.value_cache);
  binder.writes(kSlotKeyScales, call.key_scales);
  binder.writes(kSlotValueScales, call.value_scales);
  return rows;
}

// Allocates and binds the mask map that the plan makes; undefined if it makes none.
Tensor made_map(const Plan& plan, const Tensor& like, Bindings& bindings) {
  Tensor map;
  if (plan.scratch_map_bytes > 0) {
    map = at::empty({plan.scratch_map_bytes}, like.options().dtype(at::kByte));
    bindings[kSlotMaskMap] = view_of(map, like);
  }
  return map;
}

// Binds scratch and results (out, lse and the remainder of out if there is one), and runs the plan. Freeing
// the scratch on return is safe: torch's allocator reuses memory only for later work of the same stream.
void run_with_scratch(const Plan& plan, Bindings& bindings, const std::vector<Tensor>& results) {
  const Tensor& out = results[0];
  bindings[kSlotOut] = view_of(out, out);
  bindings[kSlotLse] = view_of(results[1], out);
  if (results.size() > 2) bindings[kSlotOutRemainder] = view_of(results[2], out);
  Tensor scratch_out, scratch_lse;
  if (plan.scratch_out_floats > 0) {
    scratch_out = empty_floats({plan.scratch_out_floats}, out);
    scratch_lse = empty_floats({plan.scratch_sum_floats}, out);
    bindings[kSlotPartialOut] = view_of(scratch_out, out);
    bindings[kSlotPartialSum] = view_of(scratch_lse, out);
  }
  const Tensor map = made_map(plan, out, bindings);
  metal::execute(plan, bindings);
}

void bind_sequences(const SequenceOperands& call, const Binder& binder) {
  binder.reads(kSlotSeqlens, call.cu_seqlens);
  binder.reads(kSlotStateSlots, call.slots);
  binder.reads(kSlotHasInitial, call.has_initial_state);
  binder.writes(kSlotState, call.state);
}

// Binds what the gated delta rule and its step share.
void bind_delta(const DeltaOperands& call, const Tensor& out, const Binder& binder) {
  bind_sequences(call, binder);
  binder.reads(kSlotQuery, call.query);
  binder.reads(kSlotKey, call.key);
  binder.reads(kSlotValue, call.value);
  for (const Slot slot : {kSlotDecay, kSlotRawDecay}) binder.reads(slot, call.decay);
  for (const Slot slot : {kSlotBeta, kSlotRawBeta}) binder.reads(slot, call.beta);
  binder.reads(kSlotALog, call.a_log);
  binder.reads(kSlotDtBias, call.dt_bias);
  binder.reads(kSlotOut, out);
}

}  // namespace

std::vector<Tensor> launch(const Call& call, const Plan& plan) {
  const ResultSizes sizes = result_sizes(call.problem);
  const auto options = call.query.options().dtype(scalar_type_of(out_dtype(call.problem)));
  const auto empty_out = [&] { return at::empty_strided(sizes.out, sizes.out_strides, options); };
  std::vector<Tensor> results = {empty_out(), empty_floats(sizes.lse, call.query)};
  if (call.problem.has_out_remainder) results.push_back(empty_out());
  if (plan.pass_count > 0) launch_into(call, plan, results);
  return results;
}

void launch_into(const Call& call, const Plan& plan, const std::vector<Tensor>& results) {
  Bindings bindings;
  const auto bound = bind_inputs(call, results[0], bindings);
  run_with_scratch(plan, bindings, results);
}

Gradients launch(const BackwardCall& call, const Plan& plan) {
  const Gradients gradients = empty_gradients(call);
  if (plan.pass_count == 0) {  // no rows: the other gradients are 0
    const auto& [query_grad, key_grad, value_grad, sinks_grad, alibi_grad] = gradients;
    for (const Tensor& gradient : {key_grad, value_grad, sinks_grad, alibi_grad}) gradient.zero_();
  } else {
    launch_into(call, plan, gradients);
  }
  return gradients;
}

void launch_into(const BackwardCall& call, const Plan& plan, const Gradients& gradients) {
  const auto& [query_grad, key_grad, value_grad, sinks_grad, alibi_grad] = gradients;
  Bindings bindings;
  const auto bound = bind_inputs(call, query_grad, bindings);
  const Tensor grad_out = with_contiguous_rows(call.grad_out);
  const Tensor lse = call.lse.contiguous();
  bindings[kSlotGradOut] = view_of(grad_out, query_grad);
  bindings[kSlotLse] = view_of(lse, query_grad);
  const Tensor grad_lse = call.grad_lse.defined() ? call.grad_lse.contiguous() : Tensor();
  const Tensor out = call.out.defined() ? with_contiguous_rows(call.out) : Tensor();
  if (grad_lse.defined()) bindings[kSlotGradLse] = view_of(grad_lse, query_grad);
  if (out.defined()) bindings[kSlotSavedOut] = view_of(out, query_grad);
  const Tensor remainder = call.out_remainder.defined() ? with_contiguous_rows(call.out_remainder) : Tensor();
  if (remainder.defined()) bindings[kSlotOutRemainder] = view_of(remainder, query_grad);
  bindings[kSlotGradQuery] = view_of(query_grad, query_grad);
  bindings[kSlotGradKey] = view_of(key_grad, query_grad);
  bindings[kSlotGradValue] = view_of(value_grad, query_grad);
  bindings[kSlotGradSinks] = view_of(sinks_grad, query_grad);
  bindings[kSlotGradAlibi] = view_of(alibi_grad, query_grad);
  const Tensor row_states = empty_floats({plan.scratch_row_floats}, query_grad);
  bindings[kSlotRowStates] = view_of(row_states, query_grad);
  const Tensor map = made_map(plan, query_grad, bindings);
  metal::execute(plan, bindings);
}

std::tuple<Tensor, Tensor> launch(const MergeCall& call, const Plan& plan) {
  const auto sizes = call.outs.sizes().slice(1);
  const Tensor out = at::empty(sizes, call.outs.options().dtype(scalar_type_of(call.problem.out_dtype)));
  const Tensor lse = at::empty(sizes.slice(0, 3), call.lses.options());
  if (plan.pass_count == 0) return {out, lse};

  // The partial results are bound like the scratch of decode's second pass.
  const Tensor outs = call.outs.contiguous();
  const Tensor lses = call.lses.contiguous();
  Bindings bindings;
  bindings[kSlotPartialOut] = view_of(outs, out);
  bindings[kSlotPartialSum] = view_of(lses, out);
  run_with_scratch(plan, bindings, {out, lse});
  return {out, lse};
}

std::tuple<> launch(const CacheWriteCall& call, const Plan& plan) {
  if (plan.pass_count == 0) return {};
  Bindings bindings;
  const auto bound = bind_write(call, call.slot_mapping, bindings);
  metal::execute(plan, bindings);
  return {};
}

std::vector<Tensor> launch(const RotaryCall& call, const Plan& plan) {
  const bool writes = call.problem.op == Op::kRotaryWrite;
  std::vector<Tensor> results = {empty_rows(call, call.query)};
  if (!writes) results.push_back(empty_rows(call, call.key));
  if (plan.pass_count == 0) return results;
  const Tensor query = rows_to_read(call.query, call.copy_query);
  Bindings bindings;
  const auto bound = bind_write(call, call.cos, bindings);
  if (!writes) bindings[kSlotKeyCache] = view_of(results[1], call.cos);
  bindings[kSlotQuery] = view_of(query, call.cos);
  bindings[kSlotCos] = view_of(call.cos, call.cos);
  bindings[kSlotSin] = view_of(call.sin, call.cos);
  if (call.query_norm.defined()) bindings[kSlotQueryNorm] = view_of(call.query_norm, call.cos);
  if (call.key_norm.defined()) bindings[kSlotKeyNorm] = view_of(call.key_norm, call.cos);
  if (call.starts.defined()) bindings[kSlotStarts] = view_of(call.starts, call.cos);
  bindings[kSlotOut] = view_of(results[0], call.cos);
  metal::execute(plan, bindings);
  return results;
}

Tensor launch(const MaskMapCall& call, const Plan& plan) {
  const Tensor map = at::empty(map_sizes(call.problem), call.mask.options().dtype(at::kByte));
  if (plan.pass_count == 0) return map;
  Bindings bindings;
  bindings[kSlotMask] = view_of(call.mask, map);
  bindings[kSlotMaskMap] = view_of(map, map);
  metal::execute(plan, bindings);
  return map;
}

Tensor launch(const RmsNormCall& call, const Plan& plan) {
  const auto dtype = scalar_type_of(call.problem.out_dtype);
  const Tensor out = at::empty(call.x.sizes(), call.x.options().dtype(dtype));
  if (plan.pass_count == 0) return out;
  const Tensor x = with_contiguous_rows(call.rows);
  const Tensor gate = call.gates.defined() ? with_contiguous_rows(call.gates) : call.gates;
  Bindings bindings;
  bindings[kSlotRows] = view_of(x, out);
  if (call.weight.defined()) bindings[kSlotWeight] = view_of(call.weight, out);
  if (gate.defined()) bindings[kSlotGate] = view_of(gate, out);
  bindings[kSlotOut] = view_of(out, out);
  metal::execute(plan, bindings);
  return out;
}

Tensor launch(const GatedDeltaCall& call, const Plan& plan) {
  const GatedDeltaProblem& p = call.problem;
  const Tensor out = at::empty({p.batch, p.length, p.value_heads, p.value_dim}, call.query.options());
  if (plan.pass_count == 0) return out.zero_();
  Bindings bindings;
  const Binder binder{bindings, out.numel() > 0 ? out : call.state};
  bind_delta(call, out, binder);
  const Tensor chunks = empty_floats({plan.scratch_chunk_floats}, out);
  binder.reads(kSlotChunks, chunks);
  metal::execute(plan, bindings);
  return out;
}

Tensor launch(const GatedDeltaStepCall& call, const Plan& plan) {
  const GatedDeltaStepProblem& p = call.problem;
  const Tensor out = at::empty({p.batch, p.length, p.value_heads, p.value_dim}, call.query.options());
  if (plan.pass_count == 0) return out.zero_();
  Bindings bindings;
  const Binder binder{bindings, out};
  bind_delta(call, out, binder);
  binder.reads(kSlotOutGate, call.gate);
  binder.reads(kSlotConvWeight, call.conv_weight);
  binder.reads(kSlotConvBias, call.conv_bias);
  binder.reads(kSlotNormWeight, call.norm_weight);
  binder.writes(kSlotConvState, call.conv_state);
  binder.writes(kSlotConvStateOut, call.conv_state_out);
  binder.reads(kSlotCounts, call.counts);
  metal::execute(plan, bindings);
  return out;
}

Tensor launch(const CausalConv1dCall& call, const Plan& plan) {
  const Tensor out = at::empty(call.x.sizes(), call.x.options());
  if (plan.pass_count == 0) return out.zero_();
  Bindings bindings;
  const Binder binder{bindings, call.weight};
  bind_sequences(call, binder);
  binder.reads(kSlotRows, call.x);
  binder.reads(kSlotWeight, call.weight);
  binder.reads(kSlotBias, call.bias);
  binder.reads(kSlotOut, out);
  metal::execute(plan, bindings);
  return out;
}

Tensor launch(const LogitsCall& call, const Plan& plan) {
  const Tensor out = at::empty(call.logits.sizes(), call.logits.options());
  if (plan.pass_count == 0) return out;
  const Tensor logits = rows_to_read(call.logits, call.copy);
  Bindings bindings;
  bindings[kSlotLogits] = view_of(logits, out);
  bindings[kSlotOut] = view_of(out, out);
  metal::execute(plan, bindings);
  return out;
}

}  // namespace fattn
