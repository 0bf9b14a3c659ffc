// Making and recognising buffers.
#pragma once
#include "objects.h"

namespace softmetal {
SMBuffer* new_buffer(size_t length, MTLResourceOptions options);  // nil when out of memory
SMBuffer* new_buffer_over(void* memory, size_t length, MTLResourceOptions options,
                          std::function<void()> release);
// The buffer, if it is a live one: pointers that are not are a common mistake with storage offsets.
SMBuffer* checked_buffer(id<MTLBuffer> buffer, const char* who);
}  // namespace softmetal
