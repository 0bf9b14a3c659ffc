// Uses binary archives like a program; returns the result of each step.
#include "kit.h"

namespace kit {
namespace {

constexpr const char* kSource =
    "#include <metal_stdlib>\nusing namespace metal;\nconstant uint fc [[function_constant(0)]];\n"
    "kernel void fill(device uint* to [[buffer(0)]], uint i [[thread_position_in_grid]]) { to[i] = fc; }";

id<MTLFunction> function(uint32_t constant) {  // +1
  id<MTLLibrary> compiled = library(kSource, Macros());
  MTLFunctionConstantValues* values = [[[MTLFunctionConstantValues alloc] init] autorelease];
  [values setConstantValue:&constant type:MTLDataTypeUInt atIndex:0];
  NSError* error = nil;
  id<MTLFunction> made = [compiled newFunctionWithName:@"fill" constantValues:values error:&error];
  [compiled release];
  return made;
}

MTLComputePipelineDescriptor* descriptor(uint32_t constant, id<MTLBinaryArchive> archive) {
  MTLComputePipelineDescriptor* made = [[[MTLComputePipelineDescriptor alloc] init] autorelease];
  made.computeFunction = [function(constant) autorelease];
  if (archive != nil) made.binaryArchives = [NSArray arrayWithObject:archive];
  return made;
}

std::string outcome(bool good, NSError* error) {
  if (good) return "ok";
  return error == nil ? "no error" : std::to_string([error code]) + " of " + [[error domain] UTF8String];
}

std::string make(MTLComputePipelineDescriptor* descriptor, MTLPipelineOption options) {
  NSError* error = nil;
  id<MTLComputePipelineState> state = [device() newComputePipelineStateWithDescriptor:descriptor
                                                                              options:options
                                                                           reflection:nil
                                                                                error:&error];
  [state release];
  return outcome(state != nil, error);
}

}  // namespace

std::vector<std::string> archives(const std::string& path) {
  std::vector<std::string> steps;
  const auto step = [&](const char* name, const std::string& result) {
    steps.push_back(std::string(name) + "=" + result);
  };
  @autoreleasepool {
    NSError* error = nil;
    NSURL* url = [NSURL fileURLWithPath:[NSString stringWithUTF8String:path.c_str()]];
    MTLBinaryArchiveDescriptor* where = [[[MTLBinaryArchiveDescriptor alloc] init] autorelease];
    id<MTLBinaryArchive> archive = [[device() newBinaryArchiveWithDescriptor:where error:&error] autorelease];
    step("new", outcome(archive != nil, error));
    step("empty to a file", outcome([archive serializeToURL:url error:&error], error));
    step("add without a function",
         outcome([archive addComputePipelineFunctionsWithDescriptor:[[[MTLComputePipelineDescriptor alloc]
                                                                        init] autorelease]
                                                              error:&error],
                 error));
    step("miss", make(descriptor(1, archive), MTLPipelineOptionFailOnBinaryArchiveMiss));
    step("no archive", make(descriptor(1, nil), MTLPipelineOptionFailOnBinaryArchiveMiss));
    step("miss that may compile", make(descriptor(1, archive), MTLPipelineOptionNone));
    step("add",
         outcome([archive addComputePipelineFunctionsWithDescriptor:descriptor(1, nil) error:&error], error));
    step("hit", make(descriptor(1, archive), MTLPipelineOptionFailOnBinaryArchiveMiss));
    step("another constant", make(descriptor(2, archive), MTLPipelineOptionFailOnBinaryArchiveMiss));
    step("to a file", outcome([archive serializeToURL:url error:&error], error));
    NSURL* nowhere = [url URLByAppendingPathComponent:@"below"];
    step("to nowhere", outcome([archive serializeToURL:nowhere error:&error], error));
    where.url = nowhere;
    step("from nowhere", outcome([device() newBinaryArchiveWithDescriptor:where error:&error] != nil, error));
    where.url = url;
    id<MTLBinaryArchive> read = [[device() newBinaryArchiveWithDescriptor:where error:&error] autorelease];
    step("from the file", outcome(read != nil, error));
    step("hit of the file", make(descriptor(1, read), MTLPipelineOptionFailOnBinaryArchiveMiss));
  }
  return steps;
}

std::string open_archive(const std::string& path) {
  @autoreleasepool {
    NSError* error = nil;
    MTLBinaryArchiveDescriptor* where = [[[MTLBinaryArchiveDescriptor alloc] init] autorelease];
    where.url = [NSURL fileURLWithPath:[NSString stringWithUTF8String:path.c_str()]];
    id<MTLBinaryArchive> archive = [[device() newBinaryArchiveWithDescriptor:where error:&error] autorelease];
    return outcome(archive != nil, error);
  }
}

}  // namespace kit
