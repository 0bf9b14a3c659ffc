// The ops in plain PyTorch, for CPU and CUDA tensors, with the semantics of the kernels.
#pragma once

#include <tuple>

#include "../describe/calls.h"

namespace fattn {

// Returns (out, lse) of a call that the planner has accepted. `may_wait`: reading lengths from the device is
// cheap, as on the CPU. Then the result of a sequence does not depend on the other sequences or on the
// capacity in any bit.
std::tuple<at::Tensor, at::Tensor> run_in_torch(const Call& call, bool may_wait);
std::tuple<at::Tensor, at::Tensor> run_in_torch(const MergeCall& call);
at::Tensor run_in_torch(const LogitsCall& call);
at::Tensor run_in_torch(const MaskMapCall& call);
// Writes; there is no result.
std::tuple<> run_in_torch(const CacheWriteCall& call);

}  // namespace fattn
