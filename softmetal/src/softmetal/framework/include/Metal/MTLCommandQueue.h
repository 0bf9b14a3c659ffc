// Creates command buffers.
#pragma once
#import <Metal/MTLCommandBuffer.h>

@protocol MTLCommandQueue <NSObject>
@property(copy) NSString* label;
@property(readonly) id<MTLDevice> device;
- (id<MTLCommandBuffer>)commandBuffer;
- (id<MTLCommandBuffer>)commandBufferWithUnretainedReferences;
@end
