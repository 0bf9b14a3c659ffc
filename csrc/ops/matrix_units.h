// Plans calls on a GPU with matrix units, after the self-test. Compiled only with Metal.
#pragma once

#include "../plan/plan.h"
#include "../plan/problem.h"

namespace fattn {

// The plan of a call that runs next. `may_wait`: first runs the self-test of its size and those that were
// delayed; otherwise it is delayed, and the call does without the units. Raises refusals, and ValueError for
// a wrong FATTN_TENSOR.
Plan plan_to_run(const Problem& problem, bool may_wait);

// What decided the state that the plan of this problem follows; "" if nothing has.
std::string reason_of_state(const Problem& problem);

}  // namespace fattn
