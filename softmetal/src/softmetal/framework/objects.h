// The Objective-C classes behind Metal's protocols.
#pragma once
#import <Metal/Metal.h>

#include <functional>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "census.h"
#include "memory.h"
#include "program.h"

namespace softmetal {
NSString* to_ns(const std::string& text);  // autoreleased
std::string to_std(NSString* text);
NSError* make_error(NSString* domain, NSInteger code, const std::string& text);
id<MTLDevice> system_device();  // not retained
}  // namespace softmetal

// The properties that most of Metal's protocols declare.
@interface SMObject : NSObject {
 @public
  NSString* _label;
}
@property(copy) NSString* label;
@property(readonly) id<MTLDevice> device;
@end

@interface SMDevice : NSObject <MTLDevice> {
  softmetal::Counted<softmetal::MetalClass::kDevice> _counted;
}
@end

@interface SMBuffer : SMObject <MTLBuffer> {
 @public
  void* _contents;
  NSUInteger _length;
  MTLResourceOptions _options;
  softmetal::Block _block;         // empty for memory that the buffer does not own:
  std::function<void()> _release;  // returns that memory
  softmetal::Counted<softmetal::MetalClass::kBuffer> _counted;
}
@end

@interface SMLibrary : SMObject <MTLLibrary> {
 @public
  std::shared_ptr<softmetal::Program> _program;
  NSUInteger _maxThreads;  // MTLCompileOptions.maxTotalThreadsPerThreadgroup, 0 if not set
  softmetal::Counted<softmetal::MetalClass::kLibrary> _counted;
}
@end

@interface SMFunction : SMObject <MTLFunction> {
 @public
  std::shared_ptr<softmetal::Program> _program;
  std::string _name;
  softmetal::ConstantsByIndex _constants;
  NSUInteger _maxThreads;
  softmetal::Counted<softmetal::MetalClass::kFunction> _counted;
}
@end

@interface SMComputePipelineState : SMObject <MTLComputePipelineState> {
 @public
  std::unique_ptr<softmetal::Pipeline> _pipeline;
  std::string _name;  // the kernel's name
  NSUInteger _maxThreads, _staticThreadgroupBytes;
  softmetal::Counted<softmetal::MetalClass::kComputePipelineState> _counted;
}
@end

@interface SMBinaryArchive : SMObject <MTLBinaryArchive> {
 @public
  std::set<std::string> _pipelines;  // their archive_key
  softmetal::Counted<softmetal::MetalClass::kBinaryArchive> _counted;
}
@end

@interface SMCommandQueue : SMObject <MTLCommandQueue> {
  softmetal::Counted<softmetal::MetalClass::kCommandQueue> _counted;
}
@end

@class SMCommandEncoder;

@interface SMCommandBuffer : SMObject <MTLCommandBuffer> {
 @public
  std::vector<std::function<void()>> _commands;  // each throws when it fails
  std::vector<id> _retained;                     // objects that the commands use
  std::vector<id> _handlers;                     // copied blocks
  MTLCommandBufferStatus _status;
  NSError* _error;
  SMCommandQueue* _queue;
  dispatch_queue_t _owner;  // if not null: the only dispatch queue whose blocks may encode
  SMCommandEncoder* _open;  // not retained: the encoder retains the command buffer
  int _debugGroups;
  double _start, _end;
  softmetal::Counted<softmetal::MetalClass::kCommandBuffer> _counted;
}
- (void)checkEncodable;
- (void)retainUntilDone:(id)object;
@end

@interface SMCommandEncoder : SMObject <MTLCommandEncoder> {
 @public
  SMCommandBuffer* _commandBuffer;
  BOOL _ended;
  int _debugGroups;
}
- (instancetype)initWithCommandBuffer:(SMCommandBuffer*)commandBuffer;
- (void)checkUsable;
@end
