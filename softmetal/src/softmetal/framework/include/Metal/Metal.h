// <Metal/Metal.h>: the compute part of Apple's Metal API, as far as softmetal runs it. Names, types,
// selectors and values are Apple's; tests/framework/test_api_truth.py compares them with Apple's metal-cpp
// headers.
#pragma once
#import <Metal/MTLTypes.h>
#import <Metal/MTLResource.h>
#import <Metal/MTLBuffer.h>
#import <Metal/MTLLibrary.h>
#import <Metal/MTLBinaryArchive.h>
#import <Metal/MTLComputePipeline.h>
#import <Metal/MTLEvent.h>
#import <Metal/MTLCommandEncoder.h>
#import <Metal/MTLBlitCommandEncoder.h>
#import <Metal/MTLComputeCommandEncoder.h>
#import <Metal/MTLCommandBuffer.h>
#import <Metal/MTLCommandQueue.h>
#import <Metal/MTLDevice.h>
