// One violation of Metal's API rules per name.
#include <ATen/mps/MPSStream.h>
#include <sys/utsname.h>

#include <map>

#include "kit.h"

namespace kit {
namespace {

const char* const kSource = R"(
#include <metal_stdlib>
using namespace metal;
kernel void add(device const float* x [[buffer(0)]], device float* y [[buffer(1)]], constant float& k [[buffer(2)]],
                threadgroup float* scratch [[threadgroup(0)]], uint id [[thread_position_in_grid]],
                uint lane [[thread_index_in_threadgroup]]) {
  scratch[lane] = x[id];
  y[id] = scratch[lane] + k;
}
[[max_total_threads_per_threadgroup(64)]]
kernel void limited(device float* y [[buffer(0)]], uint id [[thread_position_in_grid]]) { y[id] = 1; }
kernel void big(device float* y [[buffer(0)]], threadgroup float* extra [[threadgroup(0)]],
                uint lane [[thread_index_in_threadgroup]]) {
  threadgroup float tile[7000];
  tile[lane] = 1;
  extra[lane] = tile[lane];
  y[lane] = extra[lane];
}
)";

// A correct dispatch of 32 threads; each misuse changes one thing.
struct Bench {
  id<MTLBuffer> x = nil, y = nil;
  id<MTLLibrary> compiled = nil;
  id<MTLComputePipelineState> add = nil;

  Bench() {
    x = [device() newBufferWithLength:128 options:MTLResourceStorageModeShared];
    y = [device() newBufferWithLength:128 options:MTLResourceStorageModeShared];
    compiled = library(kSource, Macros());
    add = pipeline(compiled, "add", nil);
  }
  ~Bench() {
    [x release];
    [y release];
    [compiled release];
    [add release];
  }
  void bind(id<MTLComputeCommandEncoder> encoder) const {
    float k = 1;
    [encoder setComputePipelineState:add];
    [encoder setBuffer:x offset:0 atIndex:0];
    [encoder setBuffer:y offset:0 atIndex:1];
    [encoder setBytes:&k length:sizeof k atIndex:2];
    [encoder setThreadgroupMemoryLength:128 atIndex:0];
  }
  static void dispatch(id<MTLComputeCommandEncoder> encoder, NSUInteger groups = 1, NSUInteger threads = 32) {
    [encoder dispatchThreadgroups:MTLSizeMake(groups, 1, 1) threadsPerThreadgroup:MTLSizeMake(threads, 1, 1)];
  }
};

using Encoder = id<MTLComputeCommandEncoder>;

// Misuses of an otherwise correct encoder.
const std::map<std::string, std::function<void(const Bench&, Encoder)>>& encoder_misuses() {
  static const std::map<std::string, std::function<void(const Bench&, Encoder)>> misuses = {
      {"nothing", [](const Bench&, Encoder e) { Bench::dispatch(e); }},
      {"unset buffer",
       [](const Bench&, Encoder e) {
         [e setBuffer:nil offset:0 atIndex:1];
         Bench::dispatch(e);
       }},
      {"unset threadgroup memory",
       [](const Bench&, Encoder e) {
         [e setThreadgroupMemoryLength:0 atIndex:0];
         Bench::dispatch(e);
       }},
      {"no groups", [](const Bench&, Encoder e) { Bench::dispatch(e, 0); }},
      {"no threads", [](const Bench&, Encoder e) { Bench::dispatch(e, 1, 0); }},
      {"1025 threads", [](const Bench&, Encoder e) { Bench::dispatch(e, 1, 1025); }},
      {"more threads than the attribute",
       [](const Bench& b, Encoder e) {
         id<MTLComputePipelineState> limited = [pipeline(b.compiled, "limited", nil) autorelease];
         [e setComputePipelineState:limited];
         [e setBuffer:b.y offset:0 atIndex:0];
         Bench::dispatch(e, 1, 65);
       }},
      {"offset out of range", [](const Bench& b, Encoder e) { [e setBuffer:b.x offset:128 atIndex:0]; }},
      {"buffer offset out of range", [](const Bench&, Encoder e) { [e setBufferOffset:500 atIndex:0]; }},
      {"offset of an unset buffer", [](const Bench&, Encoder e) { [e setBufferOffset:0 atIndex:9]; }},
      {"setBytes 4097",
       [](const Bench&, Encoder e) {
         std::vector<char> bytes(4097);
         [e setBytes:bytes.data() length:bytes.size() atIndex:2];
       }},
      {"setBytes 0", [](const Bench&, Encoder e) { [e setBytes:"" length:0 atIndex:2]; }},
      {"index 31", [](const Bench& b, Encoder e) { [e setBuffer:b.x offset:0 atIndex:31]; }},
      {"no buffer object",
       [](const Bench& b, Encoder e) {
         [e setBuffer:(id<MTLBuffer>)((char*)(void*)b.x + 16) offset:0 atIndex:0];
       }},
      {"threadgroup memory of 100",
       [](const Bench&, Encoder e) { [e setThreadgroupMemoryLength:100 atIndex:0]; }},
      {"threadgroup memory of 64 KiB",
       [](const Bench&, Encoder e) { [e setThreadgroupMemoryLength:65536 atIndex:0]; }},
      {"static and dynamic threadgroup memory",
       [](const Bench& b, Encoder e) {
         id<MTLComputePipelineState> big = [pipeline(b.compiled, "big", nil) autorelease];
         [e setComputePipelineState:big];
         [e setBuffer:b.y offset:0 atIndex:0];
         [e setThreadgroupMemoryLength:8192 atIndex:0];
         Bench::dispatch(e);
       }},
      {"nil pipeline", [](const Bench&, Encoder e) { [e setComputePipelineState:nil]; }},
      {"pop without push", [](const Bench&, Encoder e) { [e popDebugGroup]; }},
      {"nested dispatch_sync",
       [](const Bench&, Encoder) {
         dispatch_sync(at::mps::getCurrentMPSStream()->queue(), ^{
                       });
       }},
      {"second encoder",
       [](const Bench&, Encoder) {
         [at::mps::getCurrentMPSStream()->commandBuffer() computeCommandEncoder];
       }},
  };
  return misuses;
}

// Misuses of command buffers, on a separate queue.
void command_buffer_misuse(const std::string& what) {
  Bench bench;
  id<MTLCommandQueue> queue = [[device() newCommandQueue] autorelease];
  id<MTLCommandBuffer> commands = [queue commandBuffer];
  Encoder encoder = [commands computeCommandEncoder];
  bench.bind(encoder);
  Bench::dispatch(encoder);
  struct End {  // always ends the encoder
    Encoder encoder;
    bool open = true;
    ~End() {
      if (open) [encoder endEncoding];
    }
  } end{encoder};
  if (what == "commit with an open encoder") [commands commit];
  [encoder endEncoding];
  end.open = false;
  if (what == "encode after endEncoding") Bench::dispatch(encoder);
  if (what == "wait before commit") [commands waitUntilCompleted];
  [commands commit];
  if (what == "commit twice") [commands commit];
  if (what == "encoder after commit") [commands computeCommandEncoder];
}

// An exception that leaves @autoreleasepool leaks the pool, here as in Apple's runtime.
void in_pool(const std::function<void()>& work) {
  std::exception_ptr exception;
  @autoreleasepool {
    try {
      work();
    } catch (...) {
      exception = std::current_exception();
    }
  }
  if (exception) std::rethrow_exception(exception);
}

}  // namespace

void misuse(const std::string& what) {
  if (what == "encoder off the queue") {
    at::mps::getCurrentMPSStream()->commandEncoder();
  } else if (what == "kept encoder off the queue") {
    __block Encoder kept = nil;
    Encoder* slot = &kept;
    encode([=](Encoder encoder) { *slot = encoder; });
    [kept setThreadgroupMemoryLength:16 atIndex:0];
  } else if (what == "released without endEncoding") {
    in_pool([] { [[[[device() newCommandQueue] autorelease] commandBuffer] computeCommandEncoder]; });
  } else if (encoder_misuses().count(what)) {
    Bench bench;
    encode([&](Encoder encoder) {
      bench.bind(encoder);
      encoder_misuses().at(what)(bench, encoder);
    });
  } else {
    in_pool([&] { command_buffer_misuse(what); });
  }
}

std::vector<std::string> facts() {
  @autoreleasepool {
    Bench bench;
    id<MTLComputePipelineState> limited = [pipeline(bench.compiled, "limited", nil) autorelease];
    id<MTLComputePipelineState> big = [pipeline(bench.compiled, "big", nil) autorelease];
    id<MTLDevice> d = device();
    auto number = [](const char* name, NSUInteger value) {
      return std::string(name) + "=" + std::to_string(value);
    };
    struct utsname system;
    uname(&system);
    std::string names = [[[bench.compiled.functionNames sortedArrayUsingSelector:@selector(compare:)]
        componentsJoinedByString:@","] UTF8String];
    return {std::string("name=") + [d.name UTF8String],
            number("apple7", [d supportsFamily:MTLGPUFamilyApple7]),
            number("apple8", [d supportsFamily:MTLGPUFamilyApple8]),
            number("apple9", [d supportsFamily:MTLGPUFamilyApple9]),
            number("apple10", [d supportsFamily:MTLGPUFamilyApple10]),
            number("metal3", [d supportsFamily:MTLGPUFamilyMetal3]),
            number("metal4", [d supportsFamily:MTLGPUFamilyMetal4]),
            std::string("architecture=") + [d.architecture.name UTF8String],
            std::string("system=") + system.sysname + " " + system.release,
            number("threadgroup memory", d.maxThreadgroupMemoryLength),
            number("threads", d.maxThreadsPerThreadgroup.width),
            number("width", bench.add.threadExecutionWidth),
            number("pipeline threads", bench.add.maxTotalThreadsPerThreadgroup),
            number("limited threads", limited.maxTotalThreadsPerThreadgroup),
            number("static bytes", big.staticThreadgroupMemoryLength),
            "functions=" + names};
  }
}

}  // namespace kit
