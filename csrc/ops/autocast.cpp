// Under torch.autocast the attention ops cast query, key and value as F.scaled_dot_product_attention does. A
// float attn_mask keeps its dtype: the kernels add it in float32. merge, mask_map and the
// operators on logits keep their dtypes: merge has a single operand, and the latter compute in float32.
#include "autocast.h"

#include "../plan/problem.h"

namespace fattn {
namespace {

constexpr size_t kOperands = 3;  // query, key, value: the first arguments of every attention op

template <c10::DeviceType device>
void register_casts(torch::Library& library) {
  // explain shows the plan of the call under autocast.
#define FATTN_NAMES(op, name, ...) #name, #name ".part", "_plan_" #name,
  for (const char* name : {FATTN_ATTENTION_OPS(FATTN_NAMES) "attention", "varlen_attention"}) {
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&run_with_casts<device, kOperands>>());
  }
#undef FATTN_NAMES
}

}  // namespace

TORCH_LIBRARY_IMPL(fattn, AutocastCPU, library) { register_casts<c10::kCPU>(library); }
TORCH_LIBRARY_IMPL(fattn, AutocastCUDA, library) { register_casts<c10::kCUDA>(library); }
TORCH_LIBRARY_IMPL(fattn, AutocastMPS, library) { register_casts<c10::kMPS>(library); }

}  // namespace fattn
