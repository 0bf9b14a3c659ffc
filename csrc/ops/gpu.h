// The GPU, system and torch of this process for the planner, with the sizes that were timed on that GPU.
#pragma once

#include <c10/core/Device.h>

#include "../plan/device.h"

namespace fattn {

#ifdef FATTN_WITH_METAL
const DeviceFacts& gpu_facts();
#endif

// The facts of the GPU that holds a tensor; for other devices those of the smallest supported GPU.
const DeviceFacts& facts_of(const c10::Device& device);

}  // namespace fattn
