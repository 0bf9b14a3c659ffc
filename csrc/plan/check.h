// Whether a problem is one that the kernels can run.
#pragma once

#include <optional>

#include "plan.h"

namespace fattn {

std::optional<Refusal> check(const Problem& problem);
std::optional<Refusal> check(const MergeProblem& problem);

}  // namespace fattn
