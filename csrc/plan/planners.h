// Shared by the planners. Internal to csrc/plan.
#pragma once

#include <algorithm>
#include <cmath>
#include <numbers>

#include "../kernels/common/saved.h"
#include "kv_format.h"
#include "plan.h"
#include "supported.h"
#include "tuning.h"

namespace fattn {

Plan plan_prefill(const Problem& problem, const DeviceFacts& device);
Plan plan_decode(const Problem& problem, const DeviceFacts& device);
std::variant<Plan, Refusal> plan_backward(const Problem& problem, const DeviceFacts& device);
Plan plan_cache_write(const CacheWriteProblem& problem);
Plan plan_rotary(const RotaryProblem& problem);
Plan plan_logits(const LogitsProblem& problem);
Plan plan_rms_norm(const RmsNormProblem& problem);
Plan plan_gated_delta(const GatedDeltaProblem& problem, const DeviceFacts& device);
Plan plan_gated_delta_step(const GatedDeltaStepProblem& problem, const DeviceFacts& device);
Plan plan_causal_conv1d(const CausalConv1dProblem& problem);
Plan plan_mask_map(const MaskMapProblem& problem);
// Appends the pass that merges partial results (kSlotPartialOut, kSlotPartialSum) into kSlotOut and
// kSlotLse.
Pass& add_merge_pass(Plan& plan, const MergeProblem& problem, uint16_t simdgroups);
// The same for the parts of a call whose keys are split, and their scratch. `span` cut them, in a decode.
Pass& add_merge_of_parts(Plan& plan, const Problem& p, int64_t parts, int simdgroups, const CausalSpan& span);

// The parameters of prefill and its backward that do not depend on tiles. window_right is ignored for causal
// rows.
PrefillParams prefill_params(const Problem& problem, const Strides3& out);
inline int64_t window_right_of(const Problem& p) { return p.is_causal ? -1 : p.options.window_right; }
inline bool has_window(const Problem& p) { return p.options.window_left >= 0 || window_right_of(p) >= 0; }

// Whether a map of the problem's mask is worth its cost. add_mask_map adds the pass that makes it, and sets
// the map of the problem.
bool pays_for_map(const Problem& problem, const DeviceFacts& device);
void add_mask_map(Plan& plan, Problem& problem);
// Threadgroups of the pass that makes the map.
double map_groups(const MaskMapProblem& problem);

// The eps of a norm.
std::optional<Refusal> check_eps(const char* op, double eps);

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Packed rows outside every sequence still have results, as rows without keys do.
inline bool is_empty(const Problem& p) {
  return (p.batch == 0 && !p.packed) || p.q_heads == 0 || p.q_len == 0;
}

inline MaskKind mask_kind(DType dtype) {
  if (is_float(dtype)) return MaskKind(int{kMaskFloat32} + float_kind(dtype));
  return dtype == DType::kBool ? kMaskBool : kMaskNone;
}

// The dtype in which Q, K and V are multiplied: OperandOf in kernels/common/config.h.
inline DType operand_dtype(const Problem& p, const DeviceFacts& device) {
  if (p.dtype == DType::kFloat16 && p.kv_format != kKvInt4) return p.dtype;
  if (device.multiplies_bfloat() && p.dtype == DType::kBFloat16 && p.kv_format == kKvFloat) return p.dtype;
  return DType::kFloat32;
}

// The element dtype of prefill's tiles: TileElementOf in kernels/common/config.h.
inline DType tile_element(const Problem& p) {
  if (p.kv_format == kKvFloat) return p.dtype;
  return p.kv_format == kKvInt4 ? DType::kFloat32 : DType::kFloat16;
}

// The kernels' score units per natural unit: see kernels/common/softmax.h.
inline double score_unit(const Problem& p) {
  return mask_kind(p.mask_dtype) > kMaskBool ? 1.0 : std::numbers::log2e;
}

inline KernelSpec attention_spec(Kernel kernel, const Problem& p, const DeviceFacts& device) {
  KernelSpec spec;
  spec.kernel = kernel;
  spec.dtype = p.dtype;
  spec.out_dtype = p.dtype;
  spec.native_bfloat = operand_dtype(p, device) == DType::kBFloat16;
  spec.head_dim = uint16_t(p.head_dim);
  spec.value_dim = uint16_t(p.value_dim);
  spec.mask = mask_kind(p.mask_dtype);
  // Not for decode, where masks alternate between odd and even lengths: that would need two pipelines.
  spec.mask_pairs = p.mask_pairs && is_simdgroup_prefill(kernel);
  spec.mask_map = p.has_mask_map;
  spec.vector_loads = p.vector_aligned;
  spec.has_seq_lens = p.has_seq_lens;
  spec.block_size = uint32_t(p.block_size);
  set_score_features(spec, p);
  spec.packed = p.packed;
  spec.packed_keys = p.packed_keys;
  spec.kv_format = p.kv_format;
  spec.scales = p.has_scales;
  return spec;
}

inline void bind_attention(Pass& pass, const Problem& p) {
  pass.bind(kSlotQuery);
  pass.bind(kSlotKey);
  pass.bind(kSlotValue);
  if (p.has_scales) {
    pass.bind(kSlotKeyScales);
    pass.bind(kSlotValueScales);
  }
  if (p.mask_dtype != DType::kOther) pass.bind(kSlotMask);
  if (p.has_mask_map) pass.bind(kSlotMaskMap);
  if (p.has_seq_lens) pass.bind(kSlotSeqLens);
  if (p.block_size > 0) pass.bind(kSlotBlockTables);
#define FATTN_TENSOR(slot, name, shapes) \
  if (p.options.name.given) pass.bind(kSlot##slot);
  FATTN_SCORE_OPTIONS(FATTN_NOTHING, FATTN_TENSOR)
#undef FATTN_TENSOR
  if (p.options.tree_mask) pass.bind(kSlotTreeMask);
  if (p.packed) pass.bind(kSlotCuSeqlens);
  if (p.packed_keys) pass.bind(kSlotCuSeqlensK);
}

// The parameters that all attention kernels share.
template <typename Params>
void set_attention_params(Params& params, const Problem& p) {
#define FATTN_COPY(type, name) params.name = p.name;
  FATTN_OPERAND_STRIDES(FATTN_COPY)
#undef FATTN_COPY
  params.block_table_batch_stride = p.block_table_batch_stride;
  params.block_table_entry_stride = p.block_table_entry_stride;
  params.batch = int32_t(p.batch);
  params.q_heads = int32_t(p.q_heads);
  params.group_size = int32_t(p.q_heads / p.kv_heads);
  params.num_blocks = int32_t(p.num_blocks);
  const ScoreParams score = score_params(p);
#define FATTN_COPY(type, name) params.name = score.name;
  FATTN_SCORE_STRIDES(FATTN_COPY)
  FATTN_SCORE_PARAMS(FATTN_COPY)
#undef FATTN_COPY
}

}  // namespace fattn
