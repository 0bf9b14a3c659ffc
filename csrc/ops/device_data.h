// FATTN_CHECK=1: checks data on the device (sequence lengths, block tables, slots) before a launch.
#pragma once

#include "../describe/calls.h"

namespace fattn {

// If FATTN_CHECK is set, waits for the device and raises ValueError for a sequence length, block table entry
// or slot that is out of range, or for a slot of two tokens. Otherwise the kernels clamp lengths, and neither
// read nor write outside the cache.
void check_device_data_if_enabled(const Call& call);
void check_device_data_if_enabled(const CacheWriteCall& call);
void check_device_data_if_enabled(const RotaryCall& call);
void check_device_data_if_enabled(const GatedDeltaCall& call);
void check_device_data_if_enabled(const GatedDeltaStepCall& call);
void check_device_data_if_enabled(const CausalConv1dCall& call);

}  // namespace fattn
