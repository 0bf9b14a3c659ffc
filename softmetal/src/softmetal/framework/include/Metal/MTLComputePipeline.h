// A compiled kernel, ready to dispatch.
#pragma once
#import <Metal/MTLBinaryArchive.h>
#import <Metal/MTLTypes.h>

typedef NS_OPTIONS(NSUInteger, MTLPipelineOption) {
  MTLPipelineOptionNone = 0,
  MTLPipelineOptionBindingInfo = 1,
  MTLPipelineOptionBufferTypeInfo = 1 << 1,
  MTLPipelineOptionFailOnBinaryArchiveMiss = 1 << 2,
};

@class MTLComputePipelineReflection;
typedef MTLComputePipelineReflection* MTLAutoreleasedComputePipelineReflection;

@interface MTLComputePipelineDescriptor : NSObject <NSCopying> {
  NSString* _label;
  id<MTLFunction> _computeFunction;
  BOOL _threadGroupSizeIsMultipleOfThreadExecutionWidth;
  NSUInteger _maxTotalThreadsPerThreadgroup;
  NSArray<id<MTLBinaryArchive>>* _binaryArchives;
}
@property(nonatomic, copy) NSString* label;
@property(nonatomic, retain) id<MTLFunction> computeFunction;
@property(nonatomic) BOOL threadGroupSizeIsMultipleOfThreadExecutionWidth;
@property(nonatomic) NSUInteger maxTotalThreadsPerThreadgroup;
@property(nonatomic, copy) NSArray<id<MTLBinaryArchive>>* binaryArchives;
- (void)reset;
@end

@protocol MTLComputePipelineState <NSObject>
@property(readonly) NSString* label;
@property(readonly) id<MTLDevice> device;
@property(readonly) NSUInteger maxTotalThreadsPerThreadgroup;
@property(readonly) NSUInteger threadExecutionWidth;
@property(readonly) NSUInteger staticThreadgroupMemoryLength;
@end
