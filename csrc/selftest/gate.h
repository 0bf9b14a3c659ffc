// Cheap checks before the self-test of the matrix units: properties of GPU and system, and tuned rows.
#pragma once

#include <string>

#include "../plan/device.h"

namespace fattn {

// FATTN_TENSOR.
enum class UnitsSetting : uint8_t { kAuto, kOff, kThreadgroup, kRegisters };

// Why this machine does not use matrix units; "" if the self-test is to run. An explicit setting skips the
// check of the GPU, but not of macOS 26.2: older compilers accept the kernels but use another calling
// convention.
std::string why_units_are_off(const DeviceFacts& device, UnitsSetting setting);

// Whether a size may have a state other than off. On a GPU without matrix units, only prefills that were
// timed to be faster on tensor operations may (tuned.h).
bool passes_gate(UnitsSize size, const DeviceFacts& device, UnitsSetting setting);

}  // namespace fattn
