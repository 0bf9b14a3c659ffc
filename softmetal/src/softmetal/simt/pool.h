// The OS threads that share a dispatch. The calling thread also works, so a small dispatch does not wait.
#pragma once

#include <stdint.h>

namespace softmetal {

// Calls body(context, slot) on the calling thread (slot 0) and on up to `helpers` others (slots 1...), and
// returns when all are done. Calls must not overlap.
void run_on_threads(uint32_t helpers, void (*body)(void* context, uint32_t slot), void* context);

}  // namespace softmetal
