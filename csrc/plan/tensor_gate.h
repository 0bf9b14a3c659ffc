// The cheap part of the decision about tensor operations: what GPU and system say of themselves, and what was
// timed.
#pragma once

#include <string>

#include "device.h"

namespace fattn {

// FATTN_TENSOR.
enum class TensorSetting : uint8_t { kAuto, kOff, kThreadgroup, kRegisters };

// Why this machine does not use tensor operations, in words; "" if the self-test decides. A variant that is
// set by hand needs no GPU with units for them, but the system, if it is macOS: compilers before 26.2 accept
// the kernels and give them another calling convention.
std::string why_tensors_are_off(const DeviceFacts& device, TensorSetting setting);

// Whether the self-test decides for a size. On a GPU without units it does for prefills that were timed to be
// faster on tensor operations there (tuned.h).
bool is_decided_by_test(TensorSize size, const DeviceFacts& device, TensorSetting setting);

}  // namespace fattn
