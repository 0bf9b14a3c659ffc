// Under torch.autocast the attention ops cast query, key and value as F.scaled_dot_product_attention does. A
// float attn_mask keeps its dtype: the kernels add it in float32. torch_fattn.sdpa casts every operand, the
// mask too. merge, mask_map and the operators on logits keep their dtypes: merge has a single operand, and
// the latter compute in float32.
#include <algorithm>
#include <cstdint>

#include <ATen/autocast_mode.h>
#include <torch/library.h>

#include "../plan/problem.h"

namespace fattn {
namespace {

// Calls an op with the tensors among its first `most` arguments cast.
template <c10::DeviceType device, size_t most>
void run_with_casts(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(
      at::autocast::get_autocast_dispatch_key_from_device_type(device));
  const at::ScalarType dtype = at::autocast::get_autocast_dtype(device);
  const size_t arguments = op.schema().arguments().size();
  for (size_t i = 0; i < std::min(arguments, most); ++i) {
    c10::IValue& operand = torch::jit::peek(*stack, i, arguments);
    if (operand.isTensor()) operand = at::autocast::cached_cast(dtype, operand.toTensor(), device);
  }
  op.callBoxed(stack);
}

template <c10::DeviceType device>
void register_casts(torch::Library& library) {
  // explain shows the plan of the call under autocast.
#define FATTN_NAMES(op, name, ...) #name, #name ".part", "_plan_" #name,
  for (const char* name : {FATTN_ATTENTION_OPS(FATTN_NAMES) "attention", "varlen_attention"}) {
    constexpr size_t kOperands = 3;  // query, key, value
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&run_with_casts<device, kOperands>>());
  }
#undef FATTN_NAMES
  for (const char* name : {"sdpa", "_sdpa_and_reason"}) {
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&run_with_casts<device, SIZE_MAX>>());
  }
}

}  // namespace

TORCH_LIBRARY_IMPL(fattn, AutocastCPU, library) { register_casts<c10::kCPU>(library); }
TORCH_LIBRARY_IMPL(fattn, AutocastCUDA, library) { register_casts<c10::kCUDA>(library); }
TORCH_LIBRARY_IMPL(fattn, AutocastMPS, library) { register_casts<c10::kMPS>(library); }

}  // namespace fattn
