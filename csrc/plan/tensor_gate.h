// Cheap checks before the self-test of tensor operations: properties of GPU and system, and tuned rows.
#pragma once

#include <string>

#include "device.h"

namespace fattn {

// FATTN_TENSOR.
enum class TensorSetting : uint8_t { kAuto, kOff, kThreadgroup, kRegisters };

// Why this machine does not use tensor operations; "" if it must run the self-test. An explicit setting skips
// the check for tensor units, but not for macOS 26.2: older compilers accept the kernels but use another
// calling convention.
std::string why_tensors_are_off(const DeviceFacts& device, TensorSetting setting);

// Whether the self-test runs for a size. On a GPU without tensor units it runs only for prefills that were
// timed to be faster on tensor operations (tuned.h).
bool is_decided_by_test(TensorSize size, const DeviceFacts& device, TensorSetting setting);

}  // namespace fattn
