// Properties of GPU, system and torch for the planner, with the sizes that were timed on this GPU.
#pragma once

#include <string_view>

#include <c10/core/Device.h>

#include "../plan/device.h"

namespace fattn {

#ifdef FATTN_WITH_METAL
// References stay valid.
const DeviceFacts& gpu_facts();
#endif

// Properties of the GPU that holds a tensor; for other devices, of the smallest supported GPU.
const DeviceFacts& facts_of(const c10::Device& device);

// The state of matrix units of this name; raises if there is none.
UnitsState units_state(std::string_view name);

}  // namespace fattn
