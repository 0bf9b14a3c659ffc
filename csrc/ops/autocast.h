// Casts operands under torch.autocast, as F.scaled_dot_product_attention does.
#pragma once

#include <algorithm>
#include <cstdint>

#include <ATen/autocast_mode.h>
#include <torch/library.h>

namespace fattn {

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

}  // namespace fattn
