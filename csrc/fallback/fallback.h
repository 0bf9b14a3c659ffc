// The ops in plain PyTorch, for CPU and CUDA tensors, with the meaning that the kernels have.
#pragma once

#include <tuple>

#include "../describe/calls.h"

namespace fattn {

// (out, lse) of a call that the planner has accepted. `may_wait`: numbers on the device can be read at no
// cost, as on the CPU. Then a sequence's result does not depend on the others, nor on the capacity, in any
// bit.
std::tuple<at::Tensor, at::Tensor> run_in_torch(const Call& call, bool may_wait);
std::tuple<at::Tensor, at::Tensor> run_in_torch(const MergeCall& call);
at::Tensor run_in_torch(const LogitsCall& call);
at::Tensor run_in_torch(const MaskMapCall& call);
// Writes; there is no result.
std::tuple<> run_in_torch(const CacheWriteCall& call);

}  // namespace fattn
