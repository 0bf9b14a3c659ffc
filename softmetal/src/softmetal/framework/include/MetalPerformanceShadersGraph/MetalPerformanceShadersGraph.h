// <MetalPerformanceShadersGraph/MetalPerformanceShadersGraph.h>: the class names that torch's ATen/mps
// headers mention.
#pragma once
#import <MetalPerformanceShaders/MetalPerformanceShaders.h>

@class MPSGraphExecutable, MPSGraphExecutionDescriptor, MPSGraphCompilationDescriptor, MPSGraphDevice;
@interface MPSGraph : NSObject
@end
@interface MPSGraphTensor : NSObject <NSCopying>
@end
@interface MPSGraphTensorData : NSObject
@end
