// From tensors to plain data: the checks that need tensors (rank, shape, dtype, device), and the Problem for
// the planner. All devices share this code, so all raise the same errors.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <tuple>
#include <variant>

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include "arguments.h"
#include "../plan/plan.h"

namespace fattn {

using OptionalTensor = std::optional<at::Tensor>;

// An attention call: its problem, and its tensors under the names of kernels/common/params.h. Absent operands
// are undefined tensors.
struct Call {
  Problem problem;
#define FATTN_TENSOR(slot, type, name, ...) at::Tensor name{};
  FATTN_OPERANDS(FATTN_TENSOR, FATTN_TENSOR, FATTN_NOTHING, FATTN_NOTHING)
#undef FATTN_TENSOR

  at::Device device() const { return query.device(); }
};

// A backward call. Its problem also describes these tensors.
struct BackwardCall : Call {
  at::Tensor grad_out;
  at::Tensor grad_lse{};  // undefined: none
  // The forward's result, in float32 or with its remainder. Undefined if it is rounded: in a row with one
  // dominant key, the products with grad_out nearly cancel, and the rounding error would dominate.
  at::Tensor out{};
  at::Tensor out_remainder{};
  at::Tensor lse{};
};

struct MergeCall {
  MergeProblem problem;
  at::Tensor outs;
  at::Tensor lses;  // or sums

  at::Device device() const { return outs.device(); }
};

// Rows to write into a pair of caches. Either both scales are present or neither.
struct WriteOperands {
  at::Tensor key{};
  at::Tensor value{};
  at::Tensor key_cache{};
  at::Tensor value_cache{};
  at::Tensor slot_mapping{};
  at::Tensor key_scales{};
  at::Tensor value_scales{};
  bool copy_key = false;  // its columns are not contiguous, or it aliases a cache
  bool copy_value = false;

  at::Device device() const { return key.device(); }
};

struct CacheWriteCall : WriteOperands {
  CacheWriteProblem problem{};
};

// Rows to rotate. Only rotary_write has values and caches.
struct RotaryCall : WriteOperands {
  RotaryProblem problem{};
  at::Tensor query{};
  at::Tensor cos{};
  at::Tensor sin{};
  at::Tensor query_norm{};
  at::Tensor key_norm{};
  at::Tensor starts{};
  bool copy_query = false;
};

struct RmsNormCall {
  RmsNormProblem problem{};
  at::Tensor x;
  at::Tensor rows{};    // x, and the gate, with at most four dimensions
  at::Tensor weight{};  // undefined if there is none; so are gates
  at::Tensor gates{};

  at::Device device() const { return x.device(); }
};

// An operator on logits.
struct LogitsCall {
  LogitsProblem problem;
  at::Tensor logits;
  bool copy = false;  // more unmergeable dimensions than the kernels take

  at::Device device() const { return logits.device(); }
};

struct MaskMapCall {
  MaskMapProblem problem;
  at::Tensor mask;

  at::Device device() const { return mask.device(); }
};

// Where the sequences of linear attention are, and their states. Absent tensors here and below are undefined.
struct SequenceOperands {
  at::Tensor cu_seqlens{};
  at::Tensor slots{};
  at::Tensor has_initial_state{};
  at::Tensor state{};
};

// Operands that the gated delta rule and its step share, as they are read.
struct DeltaOperands : SequenceOperands {
  at::Tensor query{};
  at::Tensor key{};
  at::Tensor value{};
  at::Tensor decay{};  // g, or a
  at::Tensor beta{};   // or b
  at::Tensor a_log{};
  at::Tensor dt_bias{};

  at::Device device() const { return query.device(); }
};

struct GatedDeltaCall : DeltaOperands {
  GatedDeltaProblem problem{};
};

struct GatedDeltaStepCall : DeltaOperands {
  GatedDeltaStepProblem problem{};
  at::Tensor gate{};
  at::Tensor conv_weight{};
  at::Tensor conv_bias{};
  at::Tensor norm_weight{};
  at::Tensor conv_state{};
  at::Tensor conv_state_out{};
  at::Tensor counts{};
};

struct CausalConv1dCall : SequenceOperands {
  CausalConv1dProblem problem{};
  at::Tensor x{};
  at::Tensor weight{};
  at::Tensor bias{};

  at::Device device() const { return x.device(); }
};

// Describe a call of `op`, which has the arguments of prefill, or of varlen_prefill.
Call describe_prefill_of(Op op, const Arguments& arguments);
Call describe_varlen_prefill_of(Op op, const Arguments& arguments);
// Describe a call of the op of the same name from its arguments.
#define FATTN_DESCRIBE(op, name) Call describe_##name(const Arguments& arguments);
FATTN_ATTENTION_OPS(FATTN_DESCRIBE)
#undef FATTN_DESCRIBE
BackwardCall describe_prefill_backward(const Arguments& arguments);
BackwardCall describe_varlen_prefill_backward(const Arguments& arguments);
MergeCall describe_merge(const Arguments& arguments);
MergeCall describe_merge_parts(const Arguments& arguments);
CacheWriteCall describe_cache_write(const Arguments& arguments);
RotaryCall describe_rotary(const Arguments& arguments);
RotaryCall describe_rotary_write(const Arguments& arguments);
RmsNormCall describe_rms_norm(const Arguments& arguments);
#define FATTN_DESCRIBE(op, name, ...) LogitsCall describe_##name(const Arguments& arguments);
FATTN_LOGITS_OPS(FATTN_DESCRIBE)
#undef FATTN_DESCRIBE
GatedDeltaCall describe_gated_delta_rule(const Arguments& arguments);
GatedDeltaStepCall describe_gated_delta_step(const Arguments& arguments);
CausalConv1dCall describe_causal_conv1d(const Arguments& arguments);
MaskMapCall describe_mask_map(const Arguments& arguments);
MaskMapCall describe_map_of(const at::Tensor& attn_mask);

// Memory for the rotated `rows`.
at::Tensor empty_rows(const RotaryCall& call, const at::Tensor& rows);
// Returns the rows, or a contiguous copy if the call needs one.
at::Tensor rows_to_read(const at::Tensor& rows, bool copy);

// Shapes of out and lse, and the strides of out. lse is contiguous. A partial result has sums instead of lse,
// with one more dimension.
struct ResultSizes {
  c10::SmallVector<int64_t, 4> out;
  c10::SmallVector<int64_t, 4> out_strides;
  c10::SmallVector<int64_t, 4> lse;
};
ResultSizes result_sizes(const Problem& problem);
// The gradients of query, key, value, sinks and alibi_slopes: contiguous, with shape and dtype of their
// tensors, or for an absent tensor with shape [0] in float32.
using Gradients = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;
Gradients empty_gradients(const Call& call);
std::array<int64_t, 4> map_sizes(const MaskMapProblem& problem);

// Returns the tensor, or a copy if its last dimension is not contiguous. The strides in Problem describe the
// result.
at::Tensor with_contiguous_rows(const at::Tensor& operand);

// Raises the refusal as a Python exception of its kind.
[[noreturn]] void raise(const Refusal& refusal);
template <typename AnyProblem>
Plan plan_or_raise(const AnyProblem& problem, const DeviceFacts& device) {
  auto planned = plan(problem, device);
  if (const Refusal* refusal = std::get_if<Refusal>(&planned)) raise(*refusal);
  return std::get<Plan>(planned);
}

}  // namespace fattn
