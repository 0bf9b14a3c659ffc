// Properties of GPU, system and torch for the planner, with the sizes that were timed on this GPU.
#pragma once

#include <string_view>

#include <c10/core/Device.h>

#include "../plan/device.h"

namespace fattn {

#ifdef FATTN_WITH_METAL
const DeviceFacts& gpu_facts();
// The same without tensor operations.
const DeviceFacts& gpu_without_tensors();
#endif
// Call this after a change of tuned rows, settings or tensor states. References stay valid.
void forget_gpu_facts();

// Properties of the GPU that holds a tensor; for other devices, of the smallest supported GPU.
const DeviceFacts& facts_of(const c10::Device& device);

// The state of tensor operations of this name; raises if there is none.
TensorState tensor_state(std::string_view name);

}  // namespace fattn
