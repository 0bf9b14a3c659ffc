// Order of places in a program, as lanes keep them (softmetal_call in abi.h).
#pragma once

#include "abi.h"

namespace softmetal {

// Whether a lane at `a` is behind one at `b`: in an earlier iteration of a loop that both are in, or at an
// earlier call of the source. Where the flow of the two joins again, the one behind has to catch up.
bool is_behind(const softmetal_call* a, const softmetal_call* b);

}  // namespace softmetal
