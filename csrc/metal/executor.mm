// Encodes plans on the shared encoder of torch's MPS stream.
#include "executor.h"

#include <sys/sysctl.h>

#include <algorithm>

#include <c10/util/Exception.h>

#include "foundation.h"
#include "mps_bridge.h"
#include "pipelines.h"

namespace fattn::metal {
namespace {

constexpr int kNewestFamily = 20;                                // leaves room for newer GPUs
constexpr auto kFamilyMetal4 = static_cast<MTLGPUFamily>(5002);  // older SDKs do not name it

int apple_family(id<MTLDevice> device) {
  int family = kNewestFamily;
  while (family > 0 && ![device supportsFamily:static_cast<MTLGPUFamily>(MTLGPUFamilyApple1 + family - 1)]) {
    --family;
  }
  return family;
}

std::string architecture_of(id<MTLDevice> device) {
  if (@available(macOS 14.0, *)) return utf8([[device architecture] name]);
  return "";
}

DeviceFacts read_device_facts() {
  const AutoreleasePool pool;
  id<MTLDevice> device = metal_device();
  TORCH_CHECK(device != nil, "fattn needs a GPU, and torch finds no Metal device");
  return {.name = utf8([device name]),
          .family = apple_family(device),
          .cores = gpu_core_count(),
          .max_threadgroup_bytes = static_cast<int64_t>([device maxThreadgroupMemoryLength]),
          .working_set_bytes = static_cast<int64_t>([device recommendedMaxWorkingSetSize]),
          .metal4 = static_cast<bool>([device supportsFamily:kFamilyMetal4]),
          .architecture = architecture_of(device)};
}

MTLSize size_of(const std::array<uint32_t, 3>& extent) {
  return MTLSizeMake(extent[0], extent[1], extent[2]);
}

// The storage pointer of an MPS tensor is its MTLBuffer.
id<MTLBuffer> metal_buffer(const BufferView& view) { return __builtin_bit_cast(id<MTLBuffer>, view.buffer); }

void encode(const Pass& pass, const Pipeline& pipeline, const Bindings& bindings,
            const SharedEncoder& shared) {
  id<MTLComputeCommandEncoder> encoder = shared.get();
  [encoder setComputePipelineState:pipeline.state];
  for (uint32_t i = 0; i < pass.binding_count; ++i) {
    const Binding& binding = pass.bindings[i];
    const BufferView& view = bindings[binding.operand];
    TORCH_INTERNAL_ASSERT(view.buffer != nullptr, "no memory for ", name_of(binding.operand));
    [encoder setBuffer:metal_buffer(view)
                offset:static_cast<NSUInteger>(view.byte_offset)
               atIndex:binding.slot];
  }
  [encoder setBytes:pass.params.data() length:pass.params_size atIndex:kSlotParams];
  [encoder dispatchThreadgroups:size_of(pass.grid) threadsPerThreadgroup:size_of(pass.threads)];
}

// Encodes each slice in its own command buffer.
void encode_slices(const Pass& whole, const Pipeline& pipeline, const Bindings& bindings,
                   const SharedEncoder& encoder) {
  Pass pass = whole;
  const int64_t groups = whole.groups();
  GridSlice slice{0, int32_t(pass.grid[0]), int32_t(pass.grid[1])};
  for (; slice.first_group < groups; slice.first_group += pass.slice) {
    [encoder.get() setBytes:&slice length:sizeof slice atIndex:kSlotSlice];
    pass.grid = {uint32_t(std::min<int64_t>(pass.slice, groups - slice.first_group)), 1, 1};
    encode(pass, pipeline, bindings, encoder);
    encoder.commit();
  }
}

// Compiles a missing pipeline, which can take seconds, before it occupies the stream's queue.
const Pipeline* prepare_pass(const Pass& pass) {
  const Pipeline& pipeline = pipeline_for(pass.spec);
  const uint32_t threads = pass.threads[0] * pass.threads[1] * pass.threads[2];
  TORCH_CHECK(threads <= pipeline.max_threads, function_name(pass.spec.kernel), " needs ", threads,
              " threads per threadgroup and this GPU runs it with at most ", pipeline.max_threads);
  TORCH_CHECK(pipeline.execution_width == kSimdWidth, function_name(pass.spec.kernel),
              " is for simdgroups of ", kSimdWidth, " threads and this GPU runs it with ",
              pipeline.execution_width);
  return &pipeline;
}

}  // namespace

const DeviceFacts& device_facts() {
  static const DeviceFacts& facts = *new DeviceFacts(read_device_facts());
  return facts;
}

void execute(const Plan& plan, const Bindings& bindings) {
  std::array<const Pipeline*, std::tuple_size_v<decltype(Plan::passes)>> pipelines{};
  for (uint32_t i = 0; i < plan.pass_count; ++i) pipelines[i] = prepare_pass(plan.passes[i]);
  with_shared_encoder([&](const SharedEncoder& encoder) {
    for (uint32_t i = 0; i < plan.pass_count; ++i) {
      const auto encode_pass = plan.passes[i].spec.sliced ? encode_slices : encode;
      encode_pass(plan.passes[i], *pipelines[i], bindings, encoder);
    }
  });
}

void prepare(const Plan& plan) {
  for (uint32_t i = 0; i < plan.pass_count; ++i) prepare_pass(plan.passes[i]);
}

std::string system_build() {
  char text[64];
  size_t size = sizeof text;
  return sysctlbyname("kern.osversion", text, &size, nullptr, 0) == 0 ? text : "";
}

}  // namespace fattn::metal
