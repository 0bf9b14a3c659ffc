// FATTN_CHECK=1: looks at what only the device knows (sequence lengths, block tables) before a launch.
#pragma once

#include "describe.h"

namespace fattn {

// Waits for the device and raises ValueError for a sequence length or block table entry that is out of range,
// if the environment asks for it. Without it the kernels clamp such values.
void check_device_data_if_asked(const Call& call);

}  // namespace fattn
