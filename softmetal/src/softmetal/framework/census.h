// The number of live Metal objects of each class, for leak tests.
#pragma once
#include <atomic>
#include <cstdint>

namespace softmetal {

enum class MetalClass {
  kDevice,
  kCommandQueue,
  kCommandBuffer,
  kComputeCommandEncoder,
  kBlitCommandEncoder,
  kBuffer,
  kLibrary,
  kFunction,
  kComputePipelineState,
  kCompileOptions,
  kFunctionConstantValues,
  kComputePipelineDescriptor,
  kBinaryArchive,
  kBinaryArchiveDescriptor,
  kCount
};

const char* class_name(MetalClass c);
std::atomic<int64_t>& live_count(MetalClass c);

// An instance variable of each Metal object, which counts it from +alloc to -dealloc.
template <MetalClass c>
struct Counted {
  Counted() { ++live_count(c); }
  ~Counted() { --live_count(c); }
  Counted(const Counted&) = delete;
  Counted& operator=(const Counted&) = delete;
};

}  // namespace softmetal
