// <MetalPerformanceShaders/MetalPerformanceShaders.h>: MPSCommandBuffer, which torch's stream returns, and
// the names that torch's ATen/mps headers mention. There are no MPS kernels here.
#pragma once
#import <Metal/Metal.h>

typedef NS_ENUM(uint32_t, MPSDataType) {
  MPSDataTypeInvalid = 0,
};

@interface MPSCommandBuffer : NSObject <MTLCommandBuffer>
+ (instancetype)commandBufferFromCommandQueue:(id<MTLCommandQueue>)commandQueue;
+ (instancetype)commandBufferWithCommandBuffer:(id<MTLCommandBuffer>)commandBuffer;
- (instancetype)initWithCommandBuffer:(id<MTLCommandBuffer>)commandBuffer;
@property(readonly) id<MTLCommandBuffer> commandBuffer;
@property(readonly) id<MTLCommandBuffer> rootCommandBuffer;
@end

@class MPSNDArray, MPSNDArrayDescriptor, MPSImage;
#define MPSShape NSArray
@interface MPSKernel : NSObject
@end
