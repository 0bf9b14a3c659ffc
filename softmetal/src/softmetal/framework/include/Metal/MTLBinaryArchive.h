// Compiled pipelines in a file.
#pragma once
#import <Metal/MTLTypes.h>

@class MTLComputePipelineDescriptor;
@protocol MTLDevice;

extern NSString* const MTLBinaryArchiveDomain;

typedef NS_ENUM(NSUInteger, MTLBinaryArchiveError) {
  MTLBinaryArchiveErrorNone = 0,
  MTLBinaryArchiveErrorInvalidFile = 1,
  MTLBinaryArchiveErrorUnexpectedElement = 2,
  MTLBinaryArchiveErrorCompilationFailure = 3,
  MTLBinaryArchiveErrorInternalError = 4,
};

@interface MTLBinaryArchiveDescriptor : NSObject <NSCopying> {
  NSURL* _url;
}
@property(nonatomic, copy) NSURL* url;
@end

@protocol MTLBinaryArchive <NSObject>
@property(copy) NSString* label;
@property(readonly) id<MTLDevice> device;
- (BOOL)addComputePipelineFunctionsWithDescriptor:(MTLComputePipelineDescriptor*)descriptor
                                            error:(NSError**)error;
- (BOOL)serializeToURL:(NSURL*)url error:(NSError**)error;
@end
