// The GPU, system and torch of this process as the planner sees them, and what was timed on that GPU.
#pragma once

#include <c10/core/Device.h>

#include "../plan/device.h"

namespace fattn {

#ifdef FATTN_WITH_METAL
const DeviceFacts& gpu_facts();
#endif

// The facts of the GPU that holds a tensor, else those of the smallest supported one.
const DeviceFacts& facts_of(const c10::Device& device);

}  // namespace fattn
