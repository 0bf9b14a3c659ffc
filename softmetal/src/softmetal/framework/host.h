// The C++ interface of the framework, for code without Objective-C. Objects are passed as void*, as an id is
// a pointer.
#pragma once
#include <cstddef>

namespace softmetal {

void* make_buffer(size_t bytes);  // id<MTLBuffer> with one reference; throws std::bad_alloc
// A buffer over existing memory; `give_back(owner)` is called when the last reference is released.
void* wrap_memory(void* memory, size_t bytes, void* owner, void (*give_back)(void* owner));
void* buffer_contents(void* buffer);
size_t buffer_length(void* buffer);
void release_object(void* object);

size_t allocated_bytes();  // of all live buffers
size_t peak_bytes();       // the maximum since restart_peak()
void restart_peak();
size_t device_memory();  // bytes that a process may reasonably use
const char* device_name();
unsigned apple_family();  // the family that the device reports (SOFTMETAL_GPU_FAMILY, default 8)
unsigned core_count();    // the GPU cores that the device reports (SOFTMETAL_GPU_CORES, default 8)

}  // namespace softmetal
