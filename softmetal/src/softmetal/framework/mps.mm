// MPSCommandBuffer: a command buffer that can commit and continue, as torch's stream uses it.
#import <MetalPerformanceShaders/MetalPerformanceShaders.h>

@implementation MPSCommandBuffer
+ (instancetype)commandBufferFromCommandQueue:(id<MTLCommandQueue>)queue {
  return [self commandBufferWithCommandBuffer:[queue commandBuffer]];
}
+ (instancetype)commandBufferWithCommandBuffer:(id<MTLCommandBuffer>)commandBuffer {
  return [[[self alloc] initWithCommandBuffer:commandBuffer] autorelease];
}
- (instancetype)initWithCommandBuffer:(id<MTLCommandBuffer>)commandBuffer {
  if ((self = [super init])) _commandBuffer = [commandBuffer retain];
  return self;
}
- (void)dealloc {
  [_commandBuffer release];
  [super dealloc];
}
- (id<MTLCommandBuffer>)commandBuffer {
  return _commandBuffer;
}
- (id<MTLCommandBuffer>)rootCommandBuffer {
  return _commandBuffer;
}

- (NSString*)label {
  return _commandBuffer.label;
}
- (void)setLabel:(NSString*)label {
  _commandBuffer.label = label;
}
- (id<MTLDevice>)device {
  return _commandBuffer.device;
}
- (id<MTLCommandQueue>)commandQueue {
  return _commandBuffer.commandQueue;
}
- (BOOL)retainedReferences {
  return _commandBuffer.retainedReferences;
}
- (MTLCommandBufferStatus)status {
  return _commandBuffer.status;
}
- (NSError*)error {
  return _commandBuffer.error;
}
- (CFTimeInterval)GPUStartTime {
  return _commandBuffer.GPUStartTime;
}
- (CFTimeInterval)GPUEndTime {
  return _commandBuffer.GPUEndTime;
}
- (id<MTLComputeCommandEncoder>)computeCommandEncoder {
  return [_commandBuffer computeCommandEncoder];
}
- (id<MTLComputeCommandEncoder>)computeCommandEncoderWithDispatchType:(MTLDispatchType)type {
  return [_commandBuffer computeCommandEncoderWithDispatchType:type];
}
- (id<MTLBlitCommandEncoder>)blitCommandEncoder {
  return [_commandBuffer blitCommandEncoder];
}
- (void)addScheduledHandler:(MTLCommandBufferHandler)block {
  [_commandBuffer addScheduledHandler:block];
}
- (void)addCompletedHandler:(MTLCommandBufferHandler)block {
  [_commandBuffer addCompletedHandler:block];
}
- (void)enqueue {
  [_commandBuffer enqueue];
}
- (void)commit {
  [_commandBuffer commit];
}
- (void)waitUntilScheduled {
  [_commandBuffer waitUntilScheduled];
}
- (void)waitUntilCompleted {
  [_commandBuffer waitUntilCompleted];
}
- (void)pushDebugGroup:(NSString*)string {
  [_commandBuffer pushDebugGroup:string];
}
- (void)popDebugGroup {
  [_commandBuffer popDebugGroup];
}
@end
