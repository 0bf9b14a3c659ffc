// MPSCommandBuffer: a command buffer that can commit and continue, as torch's stream uses it. Apple's wraps
// another command buffer; here it is that command buffer.
#import <MetalPerformanceShaders/MetalPerformanceShaders.h>

#include "objects.h"

@implementation SMCommandBuffer (MPSCommandBuffer)
- (id<MTLCommandBuffer>)commandBuffer {
  return self;
}
- (id<MTLCommandBuffer>)rootCommandBuffer {
  return self;
}
@end

// No object has this class, so it needs none of the methods that it declares.
#pragma clang diagnostic ignored "-Wincomplete-implementation"
#pragma clang diagnostic ignored "-Wobjc-property-implementation"
#pragma clang diagnostic ignored "-Wprotocol"
@implementation MPSCommandBuffer
+ (instancetype)commandBufferFromCommandQueue:(id<MTLCommandQueue>)queue {
  return (MPSCommandBuffer*)[queue commandBuffer];
}
+ (instancetype)commandBufferWithCommandBuffer:(id<MTLCommandBuffer>)commandBuffer {
  return (MPSCommandBuffer*)[[commandBuffer retain] autorelease];
}
- (instancetype)initWithCommandBuffer:(id<MTLCommandBuffer>)commandBuffer {
  [self release];
  return (MPSCommandBuffer*)[commandBuffer retain];
}
@end
