#pragma once

#include <torch/library.h>

namespace fattn {

// Whether our kernels in torch's ops are on. When off they call torch's.
bool is_installed();

// Registers our kernels of the ops in torch.nn.attention.varlen with a library of aten's ops on MPS,
// permanently.
void register_varlen_attn(torch::Library& library);

}  // namespace fattn
