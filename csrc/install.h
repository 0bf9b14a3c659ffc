#pragma once

#include <torch/library.h>

namespace fattn {

// Adds the kernels behind torch.nn.attention.varlen to a library of aten's ops on MPS.
void install_varlen_attn(torch::Library& library);

}  // namespace fattn
