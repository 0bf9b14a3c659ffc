// The way to the kernels for MPS tensors: allocation, binding, execution. Part of the build only where there
// is Metal.
#pragma once

#include <tuple>

#include "../describe/calls.h"

namespace fattn {

// Runs a planned call and returns what the op does: (out, lse), one tensor, or nothing where the call writes.
std::tuple<at::Tensor, at::Tensor> launch(const Call& call, const Plan& plan);
std::tuple<at::Tensor, at::Tensor> launch(const MergeCall& call, const Plan& plan);
std::tuple<> launch(const CacheWriteCall& call, const Plan& plan);
at::Tensor launch(const LogitsCall& call, const Plan& plan);
at::Tensor launch(const MaskMapCall& call, const Plan& plan);

}  // namespace fattn
