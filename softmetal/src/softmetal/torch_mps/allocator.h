// Storage of mps tensors: its data pointer is the id<MTLBuffer>, as on a Mac, not an address of memory.
#pragma once
#include <c10/core/Allocator.h>
#include <c10/core/Storage.h>

namespace softmetal {

c10::Allocator* allocator();

// The allocator of tensors on the CPU that torch counts as pinned.
c10::Allocator* pinned_allocator();
bool is_pinned(const void* memory);

// The bytes behind an mps storage.
void* host_bytes(const c10::StorageImpl& storage);
// An mps storage over the memory of a CPU storage, which it keeps alive. No copy.
c10::DataPtr wrap_host_storage(c10::Storage host);
c10::Storage make_storage(c10::DataPtr data, size_t bytes);

}  // namespace softmetal
