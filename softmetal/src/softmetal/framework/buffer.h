// Creates and validates buffers.
#pragma once
#include "objects.h"

namespace softmetal {
SMBuffer* new_buffer(size_t length, MTLResourceOptions options);  // nil when out of memory
SMBuffer* new_buffer_over(void* memory, size_t length, MTLResourceOptions options,
                          std::function<void()> release);
// Returns the buffer if it is live. Passing another pointer is a common mistake with storage offsets.
SMBuffer* checked_buffer(id<MTLBuffer> buffer, const char* who);
}  // namespace softmetal
