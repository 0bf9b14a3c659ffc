// The GPU of this process as the planner sees it: what Metal says of it, and what was timed on it.
#pragma once

#include "plan/device.h"

namespace fattn {

#ifdef FATTN_WITH_METAL
const DeviceFacts& gpu_facts();
#endif

}  // namespace fattn
