// The order of positions in a program (softmetal_call in abi.h).
#pragma once

#include "abi.h"

namespace softmetal {

// Whether a lane at `a` is behind one at `b`: in an earlier iteration of a common loop, or at an earlier call
// in the source. Before their control flow joins again, the lane behind has to catch up.
bool is_behind(const softmetal_call* a, const softmetal_call* b);

}  // namespace softmetal
