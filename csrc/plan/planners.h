// What the planners share. Internal to csrc/plan.
#pragma once

#include <algorithm>
#include <cmath>
#include <numbers>

#include "plan.h"
#include "supported.h"
#include "tuning.h"

namespace fattn {

Plan plan_prefill(const Problem& problem, const DeviceFacts& device);
Plan plan_decode(const Problem& problem, const DeviceFacts& device);
Plan plan_cache_write(const CacheWriteProblem& problem);
// Appends the pass that merges partial results (kScratchOut, kScratchLse) into kOut and kLse.
Pass& add_merge_pass(Plan& plan, const MergeProblem& problem, DType out_dtype, uint16_t simdgroups);

// A few parts for each.
inline uint16_t merge_simdgroups(int64_t parts) { return parts > 16 ? 8 : parts > 4 ? 4 : 1; }

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

inline bool is_empty(const Problem& p) { return p.batch == 0 || p.q_heads == 0 || p.q_len == 0; }

inline MaskKind mask_kind(DType dtype) {
  switch (dtype) {
    case DType::kBool:
      return kMaskBool;
    case DType::kFloat32:
      return kMaskFloat32;
    case DType::kFloat16:
      return kMaskFloat16;
    case DType::kBFloat16:
      return kMaskBFloat16;
    case DType::kInt8:
    case DType::kUInt8:
    case DType::kOther:
      return kMaskNone;
  }
  return kMaskNone;
}

// The kernels' score units per natural unit: see kernels/softmax.h.
inline double score_unit(const Problem& p) {
  return mask_kind(p.mask_dtype) > kMaskBool ? 1.0 : std::numbers::log2e;
}

inline KernelSpec attention_spec(Kernel kernel, const Problem& p) {
  KernelSpec spec;
  spec.kernel = kernel;
  spec.dtype = p.dtype;
  spec.out_dtype = p.dtype;
  spec.head_dim = uint16_t(p.head_dim);
  spec.value_dim = uint16_t(p.value_dim);
  spec.mask = mask_kind(p.mask_dtype);
  spec.vector_loads = p.vector_aligned;
  return spec;
}

inline void bind_attention(Pass& pass, const Problem& p) {
  pass.bind(Buffer::kQuery, kSlotQuery);
  pass.bind(Buffer::kKey, kSlotKey);
  pass.bind(Buffer::kValue, kSlotValue);
  if (p.mask_dtype != DType::kOther) pass.bind(Buffer::kMask, kSlotMask);
}

}  // namespace fattn
