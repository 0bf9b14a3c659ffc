// Under torch.autocast the attention ops cast query, key and value as F.scaled_dot_product_attention does. A
// float attn_mask keeps its dtype: the kernels add it in float32. merge, mask_map and the
// operators on logits keep their dtypes: merge has a single operand, and the latter compute in float32.
#include <string>

#include <ATen/autocast_mode.h>
#include <torch/library.h>

namespace fattn {
namespace {

constexpr size_t kOperands = 3;  // query, key, value: the first arguments of every attention op

template <c10::DeviceType device>
void run_with_casts(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(
      at::autocast::get_autocast_dispatch_key_from_device_type(device));
  const at::ScalarType dtype = at::autocast::get_autocast_dtype(device);
  const size_t arguments = op.schema().arguments().size();
  for (size_t i = 0; i < kOperands; ++i) {
    c10::IValue& operand = torch::jit::peek(*stack, i, arguments);
    operand = at::autocast::cached_cast(dtype, operand.toTensor(), device);
  }
  op.callBoxed(stack);
}

template <c10::DeviceType device>
void register_casts(torch::Library& library) {
  for (const char* name : {"prefill", "decode", "paged_decode", "paged_prefill", "varlen_prefill"}) {
    // explain shows the plan of the call under autocast.
    for (const std::string& op :
         {std::string(name), std::string(name) + ".part", std::string("_plan_") + name}) {
      library.impl(op.c_str(), torch::CppFunction::makeFromBoxedFunction<&run_with_casts<device>>());
    }
  }
}

}  // namespace

TORCH_LIBRARY_IMPL(fattn, AutocastCPU, library) { register_casts<c10::kCPU>(library); }
TORCH_LIBRARY_IMPL(fattn, AutocastCUDA, library) { register_casts<c10::kCUDA>(library); }
TORCH_LIBRARY_IMPL(fattn, AutocastMPS, library) { register_casts<c10::kMPS>(library); }

}  // namespace fattn
