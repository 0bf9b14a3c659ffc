#pragma once

#include <torch/library.h>

namespace fattn {

// Whether our kernels in torch's ops are on. Those that are off do what torch did before.
bool is_installed();

// Adds the kernels behind torch.nn.attention.varlen to a library of aten's ops on MPS, for good.
void register_varlen_attn(torch::Library& library);

}  // namespace fattn
