// Plans every attention call on "mps"; with matrix units, after the self-test. Compiled only with Metal.
#pragma once

#include "../plan/plan.h"
#include "../plan/problem.h"

namespace fattn {

// The plan of a call that is about to run. `may_wait`: first runs the self-tests of its size and of delayed
// sizes; otherwise the self-test is delayed, and the call runs without the units. Raises refusals, and
// ValueError for an invalid FATTN_TENSOR.
Plan plan_to_run(const Problem& problem, bool may_wait);

// The reason for the state of this problem's size; "" if it has none.
std::string reason_of_state(const Problem& problem);

}  // namespace fattn
