// MTLCommandQueue, MTLCommandBuffer, the base class of encoders, and the blit encoder. Commands run in order
// when their buffer is committed, on the committing thread; the first failure ends the command buffer.
#include <chrono>
#include <cstring>
#include <mutex>

#include "buffer.h"
#include "dispatch.h"
#include "encoder.h"
#include "validation.h"

NSString* const MTLCommandBufferErrorDomain = @"MTLCommandBufferErrorDomain";

namespace {

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

std::mutex& device_mutex() {  // the device runs one command buffer at a time
  static std::mutex mutex;
  return mutex;
}

}  // namespace

@implementation SMCommandQueue
- (id<MTLCommandBuffer>)commandBuffer {
  SMCommandBuffer* buffer = [[[SMCommandBuffer alloc] init] autorelease];
  buffer->_queue = [self retain];
  return buffer;
}
- (id<MTLCommandBuffer>)commandBufferWithUnretainedReferences {
  return [self commandBuffer];
}
@end

@implementation SMCommandBuffer
- (id<MTLCommandQueue>)commandQueue {
  return _queue;
}
- (BOOL)retainedReferences {
  return YES;
}
- (MTLCommandBufferStatus)status {
  return _status;
}
- (NSError*)error {
  return _error;
}
- (CFTimeInterval)GPUStartTime {
  return _start;
}
- (CFTimeInterval)GPUEndTime {
  return _end;
}

- (void)checkEncodable {
  if (_owner && !softmetal::on_queue(_owner))
    softmetal::violated(
        "the stream's command buffer was used outside a block on the stream's dispatch queue, where other "
        "threads may be encoding");
  if (_open) softmetal::violated("a command encoder is already encoding to this command buffer");
  if (_status > MTLCommandBufferStatusEnqueued)
    softmetal::violated("encoding to a command buffer that was committed");
}
- (id<MTLComputeCommandEncoder>)computeCommandEncoder {
  return [self computeCommandEncoderWithDispatchType:MTLDispatchTypeSerial];
}
- (id<MTLComputeCommandEncoder>)computeCommandEncoderWithDispatchType:(MTLDispatchType)type {
  [self checkEncodable];
  return softmetal::make_compute_encoder(self, type);
}
- (id<MTLBlitCommandEncoder>)blitCommandEncoder {
  [self checkEncodable];
  return [[[SMBlitCommandEncoder alloc] initWithCommandBuffer:self] autorelease];
}

- (void)retainUntilDone:(id)object {
  _retained.push_back([object retain]);
}
- (void)releaseRetained {
  _commands.clear();
  for (id object : _retained) [object release];
  _retained.clear();
}
- (void)addHandler:(MTLCommandBufferHandler)block {
  if (_status > MTLCommandBufferStatusEnqueued) softmetal::violated("a handler was added after commit");
  _handlers.push_back((id)Block_copy(block));
}
- (void)addScheduledHandler:(MTLCommandBufferHandler)block {
  [self addHandler:block];
}
- (void)addCompletedHandler:(MTLCommandBufferHandler)block {
  [self addHandler:block];
}

- (void)enqueue {
  if (_status == MTLCommandBufferStatusNotEnqueued) _status = MTLCommandBufferStatusEnqueued;
}
- (void)commit {
  softmetal::raise_deferred_violations();
  if (_open) softmetal::violated("commit of a command buffer whose encoder has not ended encoding");
  if (_status > MTLCommandBufferStatusEnqueued) softmetal::violated("a command buffer was committed twice");
  _status = MTLCommandBufferStatusCommitted;
  @autoreleasepool {
    [self runCommands];
    [self releaseRetained];
    for (id handler : _handlers) {
      ((MTLCommandBufferHandler)handler)(self);
      Block_release((void*)handler);
    }
    _handlers.clear();
  }
}
- (void)runCommands {
  std::lock_guard lock(device_mutex());
  _start = now();
  MTLCommandBufferStatus outcome = MTLCommandBufferStatusCompleted;
  try {
    for (const auto& command : _commands) command();
  } catch (const std::exception& failure) {
    _error = [softmetal::make_error(MTLCommandBufferErrorDomain, NSInteger(MTLCommandBufferErrorInternal),
                                    failure.what()) retain];
    outcome = MTLCommandBufferStatusError;
  }
  _end = now();
  _status = outcome;
}
- (void)waitUntilScheduled {
  [self waitUntilCompleted];
}
- (void)waitUntilCompleted {
  if (_status < MTLCommandBufferStatusCommitted)
    softmetal::violated("waitUntilCompleted on a command buffer not committed");
}
- (void)pushDebugGroup:(NSString*)string {
  ++_debugGroups;
}
- (void)popDebugGroup {
  if (_debugGroups == 0) softmetal::violated("popDebugGroup without pushDebugGroup");
  --_debugGroups;
}
- (void)dealloc {
  [self releaseRetained];
  for (id handler : _handlers) Block_release((void*)handler);
  [_error release];
  [_queue release];
  [super dealloc];
}
@end

@implementation SMCommandEncoder
- (instancetype)initWithCommandBuffer:(SMCommandBuffer*)commandBuffer {
  if ((self = [super init])) {
    _commandBuffer = [commandBuffer retain];
    commandBuffer->_open = self;
  }
  return self;
}
- (void)checkUsable {
  if (_ended) softmetal::violated("a command encoder was used after endEncoding");
  dispatch_queue_t owner = _commandBuffer->_owner;
  if (owner && !softmetal::on_queue(owner))
    softmetal::violated(
        "the stream's command encoder was used outside a block on the stream's dispatch queue, where other "
        "threads may be encoding");
}
- (void)endEncoding {
  [self checkUsable];
  if (_debugGroups) softmetal::violated("endEncoding with ", _debugGroups, " debug groups still pushed");
  _ended = YES;
  _commandBuffer->_open = nil;
}
- (void)insertDebugSignpost:(NSString*)string {
  [self checkUsable];
}
- (void)pushDebugGroup:(NSString*)string {
  [self checkUsable];
  ++_debugGroups;
}
- (void)popDebugGroup {
  [self checkUsable];
  if (_debugGroups == 0) softmetal::violated("popDebugGroup without pushDebugGroup");
  --_debugGroups;
}
- (void)dealloc {
  if (!_ended) {
    softmetal::violated_in_dealloc("a command encoder was released without endEncoding");
    _commandBuffer->_open = nil;
  }
  [_commandBuffer release];
  [super dealloc];
}
@end

@implementation SMBlitCommandEncoder
- (void)copyFromBuffer:(id<MTLBuffer>)source
          sourceOffset:(NSUInteger)sourceOffset
              toBuffer:(id<MTLBuffer>)destination
     destinationOffset:(NSUInteger)destinationOffset
                  size:(NSUInteger)size {
  [self checkUsable];
  SMBuffer* from = softmetal::checked_buffer(source, "copyFromBuffer");
  SMBuffer* to = softmetal::checked_buffer(destination, "copyFromBuffer");
  if (sourceOffset + size > from->_length || destinationOffset + size > to->_length)
    softmetal::violated("copyFromBuffer: ", size, " bytes from offset ", sourceOffset, " of ", from->_length,
                        " to offset ", destinationOffset, " of ", to->_length, " are out of range");
  [_commandBuffer retainUntilDone:from];
  [_commandBuffer retainUntilDone:to];
  _commandBuffer->_commands.push_back([=] {
    memmove((char*)to->_contents + destinationOffset, (char*)from->_contents + sourceOffset, size);
  });
}
- (void)fillBuffer:(id<MTLBuffer>)buffer range:(NSRange)range value:(uint8_t)value {
  [self checkUsable];
  SMBuffer* to = softmetal::checked_buffer(buffer, "fillBuffer");
  if (range.location + range.length > to->_length)
    softmetal::violated("fillBuffer: ", range.location, "+", range.length, " is beyond the buffer's ",
                        to->_length, " bytes");
  [_commandBuffer retainUntilDone:to];
  _commandBuffer->_commands.push_back(
      [=] { memset((char*)to->_contents + range.location, value, range.length); });
}
@end
