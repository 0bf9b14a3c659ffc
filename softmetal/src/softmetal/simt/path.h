// The order of positions in a program (softmetal_call in abi.h).
#pragma once

#include "abi.h"

namespace softmetal {

// Whether a lane at `a` is behind one at `b`: in an earlier iteration of a common loop, or at an earlier call
// in the source. It must catch up before their control flow joins again.
bool is_behind(const softmetal_call* a, const softmetal_call* b);

}  // namespace softmetal
