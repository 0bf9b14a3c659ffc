// MTLBuffer, and the C++ interface of buffers.
#include <atomic>
#include <mutex>
#include <new>
#include <unordered_set>

#include "buffer.h"
#include "host.h"
#include "validation.h"

namespace softmetal {
namespace {

std::atomic<size_t> g_allocated_bytes{0};
std::atomic<size_t> g_peak_bytes{0};

struct LiveBuffers {
  std::mutex mutex;
  std::unordered_set<const void*> objects;
};
LiveBuffers& live() {
  static LiveBuffers* buffers = new LiveBuffers;  // never destroyed: tensors may outlive static destructors
  return *buffers;
}

SMBuffer* announce(SMBuffer* buffer) {
  const size_t now = g_allocated_bytes += buffer->_length;
  for (size_t peak = g_peak_bytes; peak < now && !g_peak_bytes.compare_exchange_weak(peak, now);) {
  }
  std::lock_guard lock(live().mutex);
  live().objects.insert(buffer);
  return buffer;
}

}  // namespace

SMBuffer* new_buffer(size_t length, MTLResourceOptions options) {
  Block block = allocate_block(length);
  if (!block.contents) return nil;
  SMBuffer* buffer = [[SMBuffer alloc] init];
  buffer->_block = block;
  buffer->_contents = block.contents;
  buffer->_length = length;
  buffer->_options = options;
  return announce(buffer);
}

SMBuffer* new_buffer_over(void* memory, size_t length, MTLResourceOptions options,
                          std::function<void()> release) {
  SMBuffer* buffer = [[SMBuffer alloc] init];
  buffer->_contents = memory;
  buffer->_length = length;
  buffer->_options = options;
  buffer->_release = std::move(release);
  return announce(buffer);
}

SMBuffer* checked_buffer(id<MTLBuffer> buffer, const char* who) {
  const void* address = (const void*)buffer;
  {
    std::lock_guard lock(live().mutex);
    if (live().objects.count(address)) return (SMBuffer*)buffer;
  }
  violated(who, ": ", address,
           " is not an MTLBuffer of this device (a storage's data pointer is the buffer; a tensor's is not)");
}

void* make_buffer(size_t bytes) {
  // Linux would overcommit, and kill the process when the memory is written.
  SMBuffer* buffer = bytes > device_memory() ? nil : new_buffer(bytes, MTLResourceStorageModeShared);
  if (!buffer) throw std::bad_alloc();
  return (void*)buffer;
}
void* wrap_memory(void* memory, size_t bytes, void* owner, void (*give_back)(void*)) {
  return (void*)new_buffer_over(memory, bytes, MTLResourceStorageModeShared, [=] { give_back(owner); });
}
void* buffer_contents(void* buffer) { return ((SMBuffer*)buffer)->_contents; }
size_t buffer_length(void* buffer) { return ((SMBuffer*)buffer)->_length; }
void release_object(void* object) { [(id)object release]; }
size_t allocated_bytes() { return g_allocated_bytes; }
size_t peak_bytes() { return g_peak_bytes; }
void restart_peak() { g_peak_bytes = g_allocated_bytes.load(); }

}  // namespace softmetal

@implementation SMBuffer
- (void)dealloc {
  {
    std::lock_guard lock(softmetal::live().mutex);
    softmetal::live().objects.erase((void*)self);
  }
  softmetal::g_allocated_bytes -= _length;
  if (_block.mapping) softmetal::free_block(_block);
  if (_release) _release();
  [super dealloc];
}
- (NSUInteger)length {
  return _length;
}
- (void*)contents {
  return self.storageMode == MTLStorageModePrivate ? nullptr : _contents;
}
- (uint64_t)gpuAddress {
  return (uint64_t)_contents;
}
- (NSUInteger)allocatedSize {
  return _block.mapping ? _block.mapped : _length;
}
- (MTLResourceOptions)resourceOptions {
  return _options;
}
- (MTLCPUCacheMode)cpuCacheMode {
  return MTLCPUCacheMode(_options & 15);
}
- (MTLStorageMode)storageMode {
  return MTLStorageMode(_options >> 4 & 15);
}
- (MTLHazardTrackingMode)hazardTrackingMode {
  return MTLHazardTrackingMode(_options >> 8 & 3);
}
- (void)didModifyRange:(NSRange)range {
  if (range.location + range.length > _length)
    softmetal::violated("didModifyRange: ", range.location, "+", range.length, " is beyond the buffer's ",
                        _length, " bytes");
}
@end
