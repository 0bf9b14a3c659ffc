// The calls that the self-test of a size runs.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "../describe/calls.h"

namespace fattn {

// A call with random operands, in memory that is NaN wherever kernels must not read.
struct Trial {
  std::string what;
  BackwardCall call;            // a forward has no gradients
  std::optional<Call> forward;  // of a backward, which reads its results
};
// Partial tiles, rows that see no key, keys that no row sees, all options together, and all layouts; and a
// large problem, since a wrong layout may show only there (published, a fork of llama.cpp: 64 x 512 was right
// and 1024 x 2048 wrong).
std::vector<Trial> trials_of(UnitsSize size);

// Runs two plans of the trial and describes how the first's results are wrong; "" if they match.
std::string difference(const Trial& trial, const Plan& tested, const Plan& expected);

}  // namespace fattn
