// The C++ face of the framework, for code without Objective-C. Objects travel as void*, which is what an id
// is.
#pragma once
#include <cstddef>

namespace softmetal {

void* make_buffer(size_t bytes);  // id<MTLBuffer> with one reference; throws std::bad_alloc
// A buffer over someone else's memory, which `give_back(owner)` returns when the last reference goes.
void* wrap_memory(void* memory, size_t bytes, void* owner, void (*give_back)(void* owner));
void* buffer_contents(void* buffer);
size_t buffer_length(void* buffer);
void release_object(void* object);

size_t allocated_bytes();  // of all live buffers
size_t device_memory();    // bytes a process may reasonably use
const char* device_name();
unsigned apple_family();  // that the device claims (SOFTMETAL_GPU_FAMILY, 8 if not set)
unsigned core_count();    // GPU cores that the device claims (SOFTMETAL_GPU_CORES, 8 if not set)

}  // namespace softmetal
