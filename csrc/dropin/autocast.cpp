// Under torch.autocast torch_fattn.sdpa casts every operand, the mask too, as F.scaled_dot_product_attention
// does.
#include <ATen/autocast_mode.h>
#include <torch/library.h>

namespace fattn {
namespace {

template <c10::DeviceType device>
void run_with_all_cast(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(
      at::autocast::get_autocast_dispatch_key_from_device_type(device));
  const at::ScalarType dtype = at::autocast::get_autocast_dtype(device);
  const size_t arguments = op.schema().arguments().size();
  for (size_t i = 0; i < arguments; ++i) {
    c10::IValue& operand = torch::jit::peek(*stack, i, arguments);
    if (operand.isTensor()) operand = at::autocast::cached_cast(dtype, operand.toTensor(), device);
  }
  op.callBoxed(stack);
}

template <c10::DeviceType device>
void register_casts(torch::Library& library) {
  for (const char* name : {"sdpa", "_sdpa_and_reason"}) {
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&run_with_all_cast<device>>());
  }
}

}  // namespace

TORCH_LIBRARY_IMPL(fattn, AutocastCPU, library) { register_casts<c10::kCPU>(library); }
TORCH_LIBRARY_IMPL(fattn, AutocastCUDA, library) { register_casts<c10::kCUDA>(library); }
TORCH_LIBRARY_IMPL(fattn, AutocastMPS, library) { register_casts<c10::kMPS>(library); }

}  // namespace fattn
