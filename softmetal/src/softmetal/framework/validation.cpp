// Deferred validation errors and the census of live objects.
#include "validation.h"

#include <array>
#include <mutex>
#include <utility>

#include "census.h"

namespace softmetal {
namespace {
std::mutex g_mutex;
std::string g_deferred;
}  // namespace

void violated_in_dealloc(const std::string& rule) noexcept {
  std::lock_guard lock(g_mutex);
  if (g_deferred.empty()) g_deferred = rule;
}

void raise_deferred_violations() {
  std::string rule;
  {
    std::lock_guard lock(g_mutex);
    rule = std::exchange(g_deferred, {});
  }
  if (!rule.empty()) throw ValidationError(rule);
}

const char* class_name(MetalClass c) {
  static const char* const names[] = {"MTLDevice",
                                      "MTLCommandQueue",
                                      "MTLCommandBuffer",
                                      "MTLComputeCommandEncoder",
                                      "MTLBlitCommandEncoder",
                                      "MTLBuffer",
                                      "MTLLibrary",
                                      "MTLFunction",
                                      "MTLComputePipelineState",
                                      "MTLCompileOptions",
                                      "MTLFunctionConstantValues",
                                      "MTLComputePipelineDescriptor",
                                      "MTLBinaryArchive",
                                      "MTLBinaryArchiveDescriptor"};
  static_assert(std::size(names) == size_t(MetalClass::kCount));
  return names[size_t(c)];
}

std::atomic<int64_t>& live_count(MetalClass c) {
  static std::array<std::atomic<int64_t>, size_t(MetalClass::kCount)> counts{};
  return counts[size_t(c)];
}

}  // namespace softmetal
