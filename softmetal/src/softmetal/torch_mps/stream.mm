// Implements torch's MPSStream and MPSDevice (declared by the wheel's headers, defined in libtorch_cpu.dylib
// on a Mac) on softmetal.
#include <ATen/mps/MPSDevice.h>
#include <ATen/mps/MPSStream.h>

#include <atomic>
#include <cstring>
#include <exception>
#include <mutex>
#include <utility>

#include "../framework/dispatch.h"
#include "../framework/host.h"
#include "../framework/objects.h"
#include "../framework/validation.h"
#include "allocator.h"
#include "stream.h"
#include "torch_version.h"

namespace {

std::atomic<int> g_pending{0};      // streams with uncommitted commands
std::atomic<bool> g_failed{false};  // a committed command buffer failed and its error is not yet reported
std::mutex g_failure_mutex;
std::string g_failure;

void remember_failure(NSError* error) {
  std::lock_guard lock(g_failure_mutex);
  if (g_failure.empty()) g_failure = softmetal::to_std([error localizedDescription]);
  g_failed = true;
}

void raise_failure() {
  if (!g_failed.load(std::memory_order_acquire)) return;
  std::string failure;
  {
    std::lock_guard lock(g_failure_mutex);
    failure = std::exchange(g_failure, {});
    g_failed = false;
  }
  TORCH_CHECK(failure.empty(), "Metal command buffer failed: ", failure);
}

}  // namespace

namespace at::mps {

MPSDevice* MPSDevice::_device = nullptr;
MPSDevice::MPSDevice() : _mtl_device(MTLCreateSystemDefaultDevice()) {}
MPSDevice::~MPSDevice() { [_mtl_device release]; }
MPSDevice* MPSDevice::getInstance() {
  static MPSDevice* device = new MPSDevice;
  return device;
}
std::string MPSDevice::getName() const { return softmetal::device_name(); }
unsigned MPSDevice::getCoreCount() const { return softmetal::core_count(); }

bool is_available() { return true; }
#if SOFTMETAL_TORCH_AT_LEAST(2, 14)
bool MPSDevice::isMacOS13Plus(MacOSVersion version) const { return is_macos_at_least(version); }
bool is_macos_at_least(MacOSVersion version) { return version <= MacOSVersion::MACOS_15_2; }
bool has_mpp() { return false; }
#else
bool MPSDevice::isMacOS13Plus(MacOSVersion version) const { return is_macos_13_or_newer(version); }
bool is_macos_13_or_newer(MacOSVersion version) { return version <= MacOSVersion::MACOS_VER_15_2_PLUS; }
#endif
#if SOFTMETAL_TORCH_AT_LEAST(2, 15)
MetalLanguageVersion metal_language_version() { return MetalLanguageVersion::METAL_3_2; }
#endif
bool is_apple_family_or_newer(AppleGPUFamily family) {
  return [MPSDevice::getInstance()->device() supportsFamily:MTLGPUFamily(family)];
}
at::Allocator* GetMPSAllocator() { return softmetal::allocator(); }

MPSStream::MPSStream(Stream stream) : _stream(stream) {
  _commandQueue = [MPSDevice::getInstance()->device() newCommandQueue];
  _serialQueue = dispatch_queue_create("metal gpu stream", DISPATCH_QUEUE_SERIAL);
}
MPSStream::~MPSStream() = default;
MTLDevice_t MPSStream::device() const { return MPSDevice::getInstance()->device(); }

MPSCommandBuffer_t MPSStream::commandBuffer() {
  if (!softmetal::on_queue(_serialQueue))
    softmetal::violated(
        "the stream's command buffer and encoder may only be used in a block on the stream's dispatch queue, "
        "since other threads may be encoding");
  if (!_commandBuffer) {
    _commandBuffer = [[MPSCommandBuffer commandBufferFromCommandQueue:_commandQueue] retain];
    ((SMCommandBuffer*)_commandBuffer.commandBuffer)->_owner = _serialQueue;
    g_pending.fetch_add(1, std::memory_order_release);
  }
  return _commandBuffer;
}
MTLComputeCommandEncoder_t MPSStream::commandEncoder() {
  MPSCommandBuffer_t buffer = commandBuffer();
  if (!_commandEncoder) _commandEncoder = [[buffer computeCommandEncoder] retain];
  return _commandEncoder;
}
void MPSStream::endKernelCoalescing() {
  if (!_commandEncoder) return;
  MTLComputeCommandEncoder_t encoder = [std::exchange(_commandEncoder, nil) autorelease];
  [encoder endEncoding];
}

void MPSStream::commit() {
  MPSCommandBuffer_t buffer = std::exchange(_commandBuffer, nil);
  std::exception_ptr violation;
  try {
    endKernelCoalescing();
    [buffer commit];
    if (buffer.status == MTLCommandBufferStatusError) remember_failure(buffer.error);
  } catch (...) {
    violation = std::current_exception();
  }
  // Only now: other threads take it as "their kernels have run".
  if (buffer) g_pending.fetch_sub(1, std::memory_order_release);
  [buffer release];
  if (violation) std::rethrow_exception(violation);
}
void MPSStream::commitAndWait() {
  commit();
  raise_failure();
}
void MPSStream::synchronize(SyncType type) {
  switch (type) {
    case SyncType::NONE:
    case SyncType::COMMIT_ADAPTIVE:
      return;
    case SyncType::COMMIT_AND_WAIT:
      return commitAndWait();
    case SyncType::COMMIT:
    case SyncType::COMMIT_AND_CONTINUE:
      return commit();
  }
}
void MPSStream::addCompletedHandler(MTLCommandBufferHandler block) {
  [commandBuffer() addCompletedHandler:block];
}

void MPSStream::copy(MTLBuffer_t source, MTLBuffer_t destination, size_t length, size_t source_offset,
                     size_t destination_offset, uint64_t, SyncType sync) {
  dispatch_sync_with_rethrow(_serialQueue, ^{
    endKernelCoalescing();
    id<MTLBlitCommandEncoder> encoder = [commandBuffer() blitCommandEncoder];
    [encoder copyFromBuffer:source
               sourceOffset:source_offset
                   toBuffer:destination
          destinationOffset:destination_offset
                       size:length];
    [encoder endEncoding];
    synchronize(sync);
  });
}
void MPSStream::copy_and_sync(MTLBuffer_t source, MTLBuffer_t destination, size_t length,
                              size_t source_offset, size_t destination_offset, bool non_blocking,
                              uint64_t profile) {
  copy(source, destination, length, source_offset, destination_offset, profile,
       non_blocking ? SyncType::COMMIT : SyncType::COMMIT_AND_WAIT);
}
void MPSStream::executeMPSGraph(MPSGraph*, NSDictionary*, NSDictionary*, SyncType) {
  TORCH_CHECK(false, "softmetal has no MPSGraph; encode a Metal kernel instead");
}

void dispatch_sync_with_rethrow(dispatch_queue_t queue, void (^block)()) {
  std::exception_ptr exception;
  std::exception_ptr* thrown = &exception;
  dispatch_sync(queue, ^{
    try {
      block();
    } catch (...) {
      *thrown = std::current_exception();
    }
  });
  if (exception) std::rethrow_exception(exception);
}

}  // namespace at::mps

namespace softmetal {

void finish_streams() {
  if (g_pending.load(std::memory_order_acquire)) synchronize_all_streams(/*wait=*/true);
  raise_failure();
}
void commit_streams() {
  if (g_pending.load(std::memory_order_acquire)) synchronize_all_streams(/*wait=*/false);
}
void* stream_command_buffer() {
  at::mps::MPSStream* stream = at::mps::getCurrentMPSStream();
  MPSCommandBuffer* buffer = stream->commandBuffer();
  stream->endKernelCoalescing();
  return (void*)buffer;
}
void* stream_dispatch_queue() { return (void*)at::mps::getCurrentMPSStream()->queue(); }

}  // namespace softmetal
