// Runs plans on MPS tensors: allocation, binding, execution. Compiled only with Metal.
#pragma once

#include <tuple>
#include <vector>

#include "../describe/calls.h"

namespace fattn {

// Runs a planned call and returns the results of the op: out, lse and the remainder of out if the call has
// one; gradients; one tensor; or none if the op writes.
std::vector<at::Tensor> launch(const Call& call, const Plan& plan);
// The same into the caller's results, with the sizes and order of result_sizes() or empty_gradients().
void launch_into(const Call& call, const Plan& plan, const std::vector<at::Tensor>& results);
void launch_into(const BackwardCall& call, const Plan& plan, const Gradients& gradients);
Gradients launch(const BackwardCall& call, const Plan& plan);
std::tuple<at::Tensor, at::Tensor> launch(const MergeCall& call, const Plan& plan);
std::tuple<> launch(const CacheWriteCall& call, const Plan& plan);
std::vector<at::Tensor> launch(const RotaryCall& call, const Plan& plan);
at::Tensor launch(const RmsNormCall& call, const Plan& plan);
at::Tensor launch(const GatedDeltaCall& call, const Plan& plan);
at::Tensor launch(const GatedDeltaStepCall& call, const Plan& plan);
at::Tensor launch(const CausalConv1dCall& call, const Plan& plan);
at::Tensor launch(const LogitsCall& call, const Plan& plan);
at::Tensor launch(const MaskMapCall& call, const Plan& plan);

}  // namespace fattn
