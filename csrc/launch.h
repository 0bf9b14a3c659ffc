// The way to the kernels for MPS tensors: allocation, binding, execution. Part of the build only where there
// is Metal.
#pragma once

#include <tuple>

#include "describe.h"

namespace fattn {

// Runs a planned call and returns (out, lse), or nothing where the call writes.
std::tuple<at::Tensor, at::Tensor> launch(const Call& call, const Plan& plan);
std::tuple<at::Tensor, at::Tensor> launch(const MergeCall& call, const Plan& plan);
std::tuple<> launch(const CacheWriteCall& call, const Plan& plan);

}  // namespace fattn
