// The allocator of mps storages.
#include "allocator.h"

#include <cstring>
#include <mutex>
#include <new>
#include <unordered_map>

#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>

#include "../framework/host.h"
#include "stream.h"

namespace softmetal {
namespace {

const c10::Device kDevice(c10::DeviceType::MPS, 0);

void release_buffer(void* buffer) { release_object(buffer); }

c10::DataPtr own(void* buffer) { return {buffer, buffer, &release_buffer, kDevice}; }

struct BufferAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    if (bytes == 0) return {nullptr, kDevice};  // as on a Mac: an empty storage has no buffer
    try {
      return own(make_buffer(bytes));
    } catch (const std::bad_alloc&) {  // the message and error type of a Mac
      TORCH_CHECK(false, "MPS backend out of memory: tried to allocate ", bytes, " bytes");
    }
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release_buffer; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    finish_streams();
    memcpy(buffer_contents(to), buffer_contents(const_cast<void*>(from)), bytes);
  }
};

// Here the device can read all memory, so pinned memory is only a set of addresses.
struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    c10::DataPtr memory = c10::GetAllocator(c10::DeviceType::CPU)->allocate(bytes);
    void* address = memory.get();
    if (address == nullptr) return {nullptr, c10::Device(c10::DeviceType::CPU)};
    const std::lock_guard lock(mutex);
    allocated.emplace(address, std::move(memory));
    return {address, address, &release, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override { memcpy(to, from, bytes); }

  static void release(void* address) {
    const std::lock_guard lock(mutex);
    allocated.erase(address);
  }
  static inline std::mutex mutex;
  static inline auto& allocated = *new std::unordered_map<const void*, c10::DataPtr>;
};

BufferAllocator g_allocator;
const bool g_registered = (c10::SetAllocator(c10::DeviceType::MPS, &g_allocator, 1), true);

}  // namespace

c10::Allocator* allocator() { return &g_allocator; }

c10::Allocator* pinned_allocator() {
  static PinnedAllocator pinned;
  return &pinned;
}

bool is_pinned(const void* memory) {
  const std::lock_guard lock(PinnedAllocator::mutex);
  return PinnedAllocator::allocated.contains(memory);
}

void* host_bytes(const c10::StorageImpl& storage) {
  void* buffer = const_cast<void*>(storage.data());
  return buffer ? buffer_contents(buffer) : nullptr;
}

c10::DataPtr wrap_host_storage(c10::Storage host) {
  size_t bytes = host.nbytes();
  if (bytes == 0) return {nullptr, kDevice};
  void* memory = host.mutable_data();
  auto give_back = [](void* owner) {
    c10::raw::intrusive_ptr::decref(static_cast<c10::StorageImpl*>(owner));
  };
  return own(wrap_memory(memory, bytes, host.unsafeReleaseStorageImpl(), give_back));
}

c10::Storage make_storage(c10::DataPtr data, size_t bytes) {
  return c10::Storage(c10::Storage::use_byte_size_t(), bytes, std::move(data), &g_allocator,
                      /*resizable=*/true);
}

}  // namespace softmetal
