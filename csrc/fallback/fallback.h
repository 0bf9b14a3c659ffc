// The ops in plain PyTorch, for CPU and CUDA tensors, with the semantics of the kernels.
#pragma once

#include <tuple>
#include <vector>

#include "../describe/calls.h"

namespace fattn {

// Returns out and lse of a call that the planner has accepted. `may_wait`: lengths may be read from the
// device, as on the CPU. Results are then batch-invariant, bit for bit, and independent of the capacity. A
// block mask is always read: only visible blocks are computed.
std::vector<at::Tensor> run_in_torch(const Call& call, bool may_wait);
Gradients run_in_torch(const BackwardCall& call, bool may_wait);
std::tuple<at::Tensor, at::Tensor> run_in_torch(const MergeCall& call);
at::Tensor run_in_torch(const LogitsCall& call);
at::Tensor run_in_torch(const MaskMapCall& call);
std::vector<at::Tensor> run_in_torch(const RotaryCall& call);
at::Tensor run_in_torch(const RmsNormCall& call);
at::Tensor run_in_torch(const GatedDeltaCall& call);
at::Tensor run_in_torch(const GatedDeltaStepCall& call);
at::Tensor run_in_torch(const CausalConv1dCall& call);
// Writes the caches; there is no result.
std::tuple<> run_in_torch(const CacheWriteCall& call);

}  // namespace fattn
