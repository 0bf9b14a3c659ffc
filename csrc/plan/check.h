// Refuses problems that the kernels do not support, and GPUs that cannot run them.
#pragma once

#include <optional>

#include "plan.h"

namespace fattn {

std::optional<Refusal> check(const Problem& problem);
std::optional<Refusal> check(const MergeProblem& problem);
std::optional<Refusal> check(const CacheWriteProblem& problem);
std::optional<Refusal> check(const RotaryProblem& problem);
std::optional<Refusal> check(const LogitsProblem& problem);
std::optional<Refusal> check(const MaskMapProblem& problem);
std::optional<Refusal> check(const DeviceFacts& device, Op op);

}  // namespace fattn
