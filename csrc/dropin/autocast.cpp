// Under torch.autocast torch_fattn.sdpa casts every operand, the mask too, as F.scaled_dot_product_attention
// does.
#include "../ops/autocast.h"

namespace fattn {
namespace {

template <c10::DeviceType device>
void register_casts(torch::Library& library) {
  for (const char* name : {"sdpa", "_sdpa_and_reason"}) {
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&run_with_casts<device, SIZE_MAX>>());
  }
}

}  // namespace

TORCH_LIBRARY_IMPL(fattn, AutocastCPU, library) { register_casts<c10::kCPU>(library); }
TORCH_LIBRARY_IMPL(fattn, AutocastCUDA, library) { register_casts<c10::kCUDA>(library); }
TORCH_LIBRARY_IMPL(fattn, AutocastMPS, library) { register_casts<c10::kMPS>(library); }

}  // namespace fattn
