// FATTN_CHECK=1: looks at what only the device knows (sequence lengths, block tables, slots) before a launch.
#pragma once

#include "../describe/calls.h"

namespace fattn {

// Waits for the device and raises ValueError for a sequence length, block table entry or slot that is out of
// range, or a slot that two tokens have, if the environment asks for it. Without it the kernels clamp
// lengths, and take no key from, and write none to, a place outside the cache.
void check_device_data_if_asked(const Call& call);
void check_device_data_if_asked(const CacheWriteCall& call);

}  // namespace fattn
