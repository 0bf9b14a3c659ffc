// MTLComputeCommandEncoder: bindings, the rules of a dispatch, and its execution.
#include "encoder.h"

#include <cstdlib>
#include <cstring>

#include "buffer.h"
#include "faults.h"
#include "launches.h"
#include "validation.h"

namespace softmetal {
namespace {

struct Binding {
  SMBuffer* buffer = nil;  // retained by the command buffer
  NSUInteger offset = 0;
  std::shared_ptr<std::vector<uint64_t>> bytes;  // a copy made by setBytes, in 8-byte units for alignment
  NSUInteger length = 0;                         // bytes of the copy
  bool bound() const { return buffer || bytes; }
};

struct Bindings {
  Binding buffer[SOFTMETAL_MAX_BUFFERS];
  uint32_t threadgroup[SOFTMETAL_MAX_BUFFERS] = {};  // bytes
};

// One encoded dispatch. It owns the copies made by setBytes.
struct Dispatch {
  SMComputePipelineState* pipeline;
  softmetal_arguments arguments;
  std::vector<std::shared_ptr<std::vector<uint64_t>>> bytes;
  softmetal_uint3 grid, threads;
  uint32_t threadgroup_bytes;
};

softmetal_uint3 to_uint3(MTLSize size) {
  return {uint32_t(size.width), uint32_t(size.height), uint32_t(size.depth)};
}

void check_index(const char* who, NSUInteger index) {
  if (index >= SOFTMETAL_MAX_BUFFERS)
    violated(who, ": index ", index, " is above ", SOFTMETAL_MAX_BUFFERS - 1);
}

void check_sizes(SMComputePipelineState* pipeline, MTLSize grid, MTLSize threads) {
  for (NSUInteger n : {grid.width, grid.height, grid.depth})
    if (n == 0 || n > UINT32_MAX) violated("dispatch of '", pipeline->_name, "': the grid has a side of ", n);
  for (NSUInteger n : {threads.width, threads.height, threads.depth})
    if (n == 0) violated("dispatch of '", pipeline->_name, "': threadsPerThreadgroup has a side of 0");
  NSUInteger total = threads.width * threads.height * threads.depth;
  if (total > pipeline->_maxThreads)
    violated("dispatch of '", pipeline->_name, "': ", total,
             " threads per threadgroup exceed the pipeline's ", "maxTotalThreadsPerThreadgroup of ",
             pipeline->_maxThreads);
}

void check_arguments(SMComputePipelineState* pipeline, const Bindings& bindings) {
  const softmetal_kernel& kernel = pipeline->_pipeline->kernel();
  for (uint32_t i = 0; i < kernel.argument_count; ++i) {
    const softmetal_argument& argument = kernel.arguments[i];
    if (!argument.used) continue;
    if (argument.kind == SOFTMETAL_ARG_THREADGROUP) {
      if (!bindings.threadgroup[argument.index])
        violated("dispatch of '", pipeline->_name, "': no threadgroup memory length is set at index ",
                 argument.index, " for '", argument.name, "'");
    } else if (!bindings.buffer[argument.index].bound()) {
      violated("dispatch of '", pipeline->_name, "': no buffer is set at index ", argument.index, " for '",
               argument.name, "'");
    }
  }
}

uint32_t check_threadgroup_memory(SMComputePipelineState* pipeline, const Bindings& bindings) {
  NSUInteger total = pipeline->_staticThreadgroupBytes;
  for (uint32_t bytes : bindings.threadgroup) total += bytes;
  if (total > SOFTMETAL_MAX_THREADGROUP_BYTES)
    violated("dispatch of '", pipeline->_name, "': ", total, " bytes of threadgroup memory (",
             pipeline->_staticThreadgroupBytes, " static) exceed the device's ",
             SOFTMETAL_MAX_THREADGROUP_BYTES);
  return uint32_t(total);
}

std::shared_ptr<Dispatch> make_dispatch(SMComputePipelineState* pipeline, const Bindings& bindings,
                                        MTLSize grid, MTLSize threads) {
  auto dispatch = std::make_shared<Dispatch>();
  dispatch->pipeline = pipeline;
  dispatch->grid = to_uint3(grid);
  dispatch->threads = to_uint3(threads);
  softmetal_arguments& arguments = dispatch->arguments;
  memcpy(arguments.threadgroup_length, bindings.threadgroup, sizeof bindings.threadgroup);
  for (int i = 0; i < SOFTMETAL_MAX_BUFFERS; ++i) {
    const Binding& binding = bindings.buffer[i];
    if (binding.buffer) {
      arguments.buffer[i] = static_cast<char*>(binding.buffer->_contents) + binding.offset;
      arguments.buffer_length[i] = binding.buffer->_length - binding.offset;
    } else if (binding.bytes) {
      dispatch->bytes.push_back(binding.bytes);
      arguments.buffer[i] = binding.bytes->data();
      arguments.buffer_length[i] = binding.length;
    }
  }
  return dispatch;
}

void run(const Dispatch& dispatch) {
  const softmetal_settings* settings = softmetal_current_settings();
  const softmetal_kernel& kernel = dispatch.pipeline->_pipeline->kernel(current_mode());
  fault_dispatch(dispatch.pipeline->_name, dispatch.pipeline->_pipeline->macros());
  softmetal_launch launch{&kernel, &dispatch.arguments, dispatch.grid, dispatch.threads};
  softmetal_counters counters{};
  char* error = nullptr;
  int failed = softmetal_run(&launch, settings, &counters, &error);
  log_launch(
      {dispatch.pipeline->_name, dispatch.grid, dispatch.threads, dispatch.threadgroup_bytes, counters});
  if (!failed) {
    fault_results(dispatch.pipeline->_name, dispatch.pipeline->_pipeline->macros(), counters.threadgroups,
                  dispatch.arguments);
    return;
  }
  std::string findings = error ? error : "kernel '" + dispatch.pipeline->_name + "' failed";
  free(error);
  throw std::runtime_error(findings);
}

}  // namespace
}  // namespace softmetal

@interface SMComputeCommandEncoder : SMCommandEncoder <MTLComputeCommandEncoder> {
 @public
  MTLDispatchType _dispatchType;
  SMComputePipelineState* _pipeline;  // retained by the command buffer
  softmetal::Bindings _bindings;
  softmetal::Counted<softmetal::MetalClass::kComputeCommandEncoder> _counted;
}
@end

namespace softmetal {
id<MTLComputeCommandEncoder> make_compute_encoder(SMCommandBuffer* buffer, MTLDispatchType type) {
  SMComputeCommandEncoder* encoder =
      [[[SMComputeCommandEncoder alloc] initWithCommandBuffer:buffer] autorelease];
  encoder->_dispatchType = type;
  return encoder;
}
}  // namespace softmetal

@implementation SMComputeCommandEncoder
- (MTLDispatchType)dispatchType {
  return _dispatchType;
}

- (void)setComputePipelineState:(id<MTLComputePipelineState>)state {
  [self checkUsable];
  if (!state) softmetal::violated("setComputePipelineState: the pipeline state is nil");
  if ((SMComputePipelineState*)state == _pipeline) return;
  [_commandBuffer retainUntilDone:state];
  _pipeline = (SMComputePipelineState*)state;
}

- (void)setBuffer:(id<MTLBuffer>)buffer offset:(NSUInteger)offset atIndex:(NSUInteger)index {
  [self checkUsable];
  softmetal::check_index("setBuffer", index);
  softmetal::Binding& binding = _bindings.buffer[index];
  SMBuffer* object = buffer ? softmetal::checked_buffer(buffer, "setBuffer") : nil;
  if (object && offset >= object->_length)
    softmetal::violated("setBuffer: offset ", offset, " is beyond the ", object->_length,
                        " bytes of the buffer at index ", index);
  if (object && object != binding.buffer) [_commandBuffer retainUntilDone:object];
  binding = {object, offset, nullptr, 0};
}
- (void)setBufferOffset:(NSUInteger)offset atIndex:(NSUInteger)index {
  [self checkUsable];
  softmetal::check_index("setBufferOffset", index);
  SMBuffer* buffer = _bindings.buffer[index].buffer;
  if (!buffer) softmetal::violated("setBufferOffset: no buffer is set at index ", index);
  [self setBuffer:buffer offset:offset atIndex:index];
}
- (void)setBuffers:(const id<MTLBuffer>[])buffers
           offsets:(const NSUInteger[])offsets
         withRange:(NSRange)range {
  for (NSUInteger i = 0; i < range.length; ++i)
    [self setBuffer:buffers[i] offset:offsets[i] atIndex:range.location + i];
}
- (void)setBytes:(const void*)bytes length:(NSUInteger)length atIndex:(NSUInteger)index {
  [self checkUsable];
  softmetal::check_index("setBytes", index);
  if (!bytes || length == 0 || length > 4096)
    softmetal::violated("setBytes: length ", length, " at index ", index,
                        " is not 1..4096; use a buffer for more");
  auto copy = std::make_shared<std::vector<uint64_t>>((length + 7) / 8);
  memcpy(copy->data(), bytes, length);
  _bindings.buffer[index] = {nil, 0, std::move(copy), length};
}
- (void)setThreadgroupMemoryLength:(NSUInteger)length atIndex:(NSUInteger)index {
  [self checkUsable];
  softmetal::check_index("setThreadgroupMemoryLength", index);
  if (length % 16)
    softmetal::violated("setThreadgroupMemoryLength: ", length, " at index ", index,
                        " is not a multiple of 16");
  if (length > SOFTMETAL_MAX_THREADGROUP_BYTES)
    softmetal::violated("setThreadgroupMemoryLength: ", length, " exceeds the device's ",
                        SOFTMETAL_MAX_THREADGROUP_BYTES);
  _bindings.threadgroup[index] = uint32_t(length);
}

- (void)dispatchThreadgroups:(MTLSize)grid threadsPerThreadgroup:(MTLSize)threads {
  [self checkUsable];
  if (!_pipeline) softmetal::violated("dispatch without a compute pipeline state");
  softmetal::check_sizes(_pipeline, grid, threads);
  softmetal::check_arguments(_pipeline, _bindings);
  uint32_t threadgroupBytes = softmetal::check_threadgroup_memory(_pipeline, _bindings);
  auto dispatch = softmetal::make_dispatch(_pipeline, _bindings, grid, threads);
  dispatch->threadgroup_bytes = threadgroupBytes;
  _commandBuffer->_commands.push_back([dispatch] { softmetal::run(*dispatch); });
}
- (void)dispatchThreads:(MTLSize)size threadsPerThreadgroup:(MTLSize)threads {
  [self checkUsable];
  if (!(threads.width && threads.height && threads.depth))
    softmetal::violated("dispatchThreads: threadsPerThreadgroup has a side of 0");
  if (size.width % threads.width || size.height % threads.height || size.depth % threads.depth)
    softmetal::violated("dispatchThreads: the grid is not a multiple of the threadgroup, and softmetal runs "
                        "uniform threadgroups "
                        "only; use dispatchThreadgroups");
  [self dispatchThreadgroups:MTLSizeMake(size.width / threads.width, size.height / threads.height,
                                         size.depth / threads.depth)
       threadsPerThreadgroup:threads];
}
- (void)useResource:(id<MTLResource>)resource usage:(MTLResourceUsage)usage {
  [self checkUsable];
}
- (void)memoryBarrierWithScope:(MTLBarrierScope)scope {
  [self checkUsable];
}
- (void)memoryBarrierWithResources:(const id<MTLResource>[])resources count:(NSUInteger)count {
  [self checkUsable];
}
@end
