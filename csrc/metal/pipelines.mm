// Compiles the embedded kernels on first use and keeps them for the life of the process.
#include "pipelines.h"

#include <chrono>
#include <cstring>
#include <functional>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include <c10/util/Exception.h>

#include "foundation.h"
#include "executor.h"
#include "mps_bridge.h"
#include "once_map.h"

namespace fattn::metal {
namespace {

using Macros = std::vector<std::pair<std::string, std::string>>;

struct KernelSource {
  const char* name;
  const char* text;
};
constexpr KernelSource kSources[] = {
#include "../generated/kernel_sources.inc"
};

struct Library {
  id<MTLLibrary> library = nil;
};

class Stopwatch {
 public:
  double seconds() const { return std::chrono::duration<double>(Clock::now() - start_).count(); }

 private:
  using Clock = std::chrono::steady_clock;
  Clock::time_point start_ = Clock::now();
};

// The compiled pipelines and their compile times.
class Record {
 public:
  void add(const Compiled& pipeline) {
    std::lock_guard lock(mutex_);
    pipelines_.push_back(pipeline);
  }
  std::vector<Compiled> copy() {
    std::lock_guard lock(mutex_);
    return pipelines_;
  }

 private:
  std::mutex mutex_;
  std::vector<Compiled> pipelines_;
};

Record& record() {
  static auto& record = *new Record;
  return record;
}

struct SpecHash {
  size_t operator()(const KernelSpec& spec) const {
    size_t hash = 0;
    const auto add = [&hash](uint64_t field) {
      hash = (hash ^ field) * 0x9E3779B97F4A7C15u;
      hash ^= hash >> 29;
    };
    add(static_cast<uint64_t>(spec.kernel) | static_cast<uint64_t>(spec.dtype) << 8 |
        static_cast<uint64_t>(spec.out_dtype) << 16 | static_cast<uint64_t>(spec.mask) << 24 |
        static_cast<uint64_t>(spec.block_size) << 32);
    add(static_cast<uint64_t>(spec.head_dim) | static_cast<uint64_t>(spec.value_dim) << 16 |
        static_cast<uint64_t>(spec.row_fragments) << 32 | static_cast<uint64_t>(spec.tile_keys) << 48);
    add(static_cast<uint64_t>(spec.simdgroups) << 4 | spec.causal << 3 | spec.vector_loads << 2 |
        spec.split << 1 | static_cast<uint64_t>(spec.has_seq_lens) |
        static_cast<uint64_t>(spec.rotary_dim) << 24 | static_cast<uint64_t>(spec.kv_format) << 40);
    return hash;
  }
};

const char* source_text(const char* name) {
  for (const KernelSource& source : kSources) {
    if (std::strcmp(source.name, name) == 0) return source.text;
  }
  TORCH_INTERNAL_ASSERT(false, "no embedded kernel source ", name);
}

std::string describe(const KernelSpec& spec, const Macros& macros) {
  std::string text = std::string(source_name(spec.kernel)) + ".metal with";
  for (const auto& [name, value] : macros) text += " " + name + "=" + value;
  return text;
}

std::string describe_constants(const KernelSpec& spec) {
  std::string text;
  for (const ConstantValue& constant : constants_of(spec)) {
    text += std::string(" ") + constant_name(constant.index) + "=" + std::to_string(constant.value);
  }
  return text;
}

std::string text_of(NSError* error) {
  const std::string text = utf8([error localizedDescription]);
  return text.empty() ? "no reason given" : text;
}

NSString* to_nsstring(const std::string& text) { return [NSString stringWithUTF8String:text.c_str()]; }

// SDKs before macOS 26 lack the name.
constexpr auto kLanguageVersion4_0 = static_cast<MTLLanguageVersion>(4 << 16);

MTLCompileOptions* compile_options(Kernel kernel, const Macros& macros) {
  MTLCompileOptions* options = [[[MTLCompileOptions alloc] init] autorelease];
  options.languageVersion = uses_units(kernel) ? kLanguageVersion4_0 : MTLLanguageVersion3_1;
  NSMutableDictionary* values = [NSMutableDictionary dictionaryWithCapacity:macros.size()];
  for (const auto& [name, value] : macros) [values setObject:to_nsstring(value) forKey:to_nsstring(name)];
  options.preprocessorMacros = values;
  // NaN and infinities carry meaning, so fast math is off; the kernels call fast functions by name. macOS 15
  // split the switch into two options, both fast by default.
#ifdef __MAC_15_0
  if (@available(macOS 15.0, *)) {
    options.mathMode = MTLMathModeSafe;
    options.mathFloatingPointFunctions = MTLMathFloatingPointFunctionsPrecise;
    return options;
  }
#endif
  options.fastMathEnabled = NO;
  return options;
}

// Removes the limit from the attributes of the kernels.
constexpr char kUnlimited[] = "#define max_total_threads_per_threadgroup(limit)\n";

id<MTLLibrary> new_library(const KernelSpec& spec, const Macros& macros, bool limited) {
  NSError* error = nil;
  const std::string text = std::string(limited ? "" : kUnlimited) + source_text(source_name(spec.kernel));
  id<MTLLibrary> library = [metal_device() newLibraryWithSource:to_nsstring(text)
                                                        options:compile_options(spec.kernel, macros)
                                                          error:&error];
  TORCH_CHECK(library != nil, "the Metal compiler rejected ", describe(spec, macros), ":\n", text_of(error));
  return library;
}

// One library serves all values of the function constants.
Library* library_for(const KernelSpec& spec, const Macros& macros, double* seconds) {
  static auto& libraries = *new OnceMap<std::string, Library>;
  return libraries.get(describe(spec, macros), [&] {
    const Stopwatch watch;
    auto* library = new Library{new_library(spec, macros, true)};
    *seconds = watch.seconds();
    return library;
  });
}

MTLFunctionConstantValues* constant_values(const KernelSpec& spec) {
  MTLFunctionConstantValues* values = [[[MTLFunctionConstantValues alloc] init] autorelease];
  for (const ConstantValue& constant : constants_of(spec)) {
    const bool flag = constant.value != 0;
    [values setConstantValue:constant.is_bool ? static_cast<const void*>(&flag) : &constant.value
                        type:constant.is_bool ? MTLDataTypeBool : MTLDataTypeUInt
                     atIndex:constant.index];
  }
  return values;
}

id<MTLFunction> new_function(id<MTLLibrary> library, const KernelSpec& spec, const Macros& macros) {
  NSError* error = nil;
  id<MTLFunction> function =
      [library newFunctionWithName:[NSString stringWithUTF8String:function_name(spec.kernel)]
                    constantValues:constant_values(spec)
                             error:&error];
  TORCH_CHECK(function != nil, "Metal did not find the function ", function_name(spec.kernel), " in ",
              describe(spec, macros), ": ", text_of(error));
  return function;
}

Pipeline* build_pipeline(const KernelSpec& spec) {
  const AutoreleasePool pool;
  const Macros macros = macros_of(spec);
  Compiled compiled{.spec = spec};
  Library* library = library_for(spec, macros, &compiled.library_seconds);
  const Stopwatch watch;
  NSError* error = nil;
  id<MTLFunction> function = new_function(library->library, spec, macros);
  MTLComputePipelineDescriptor* descriptor = [[[MTLComputePipelineDescriptor alloc] init] autorelease];
  descriptor.computeFunction = function;
  [function release];
  const std::string what = describe(spec, macros) + describe_constants(spec);
  id<MTLComputePipelineState> state = new_archived_pipeline(descriptor, what);
  compiled.archived = state != nil;
  if (!compiled.archived) {
    state = [metal_device() newComputePipelineStateWithDescriptor:descriptor
                                                          options:MTLPipelineOptionNone
                                                       reflection:nil
                                                            error:&error];
    TORCH_CHECK(state != nil, "Metal could not create a pipeline for ", describe(spec, macros), ": ",
                text_of(error));
    keep_pipeline(descriptor, what);
  }
  compiled.pipeline_seconds = watch.seconds();
  record().add(compiled);
  return new Pipeline{state, static_cast<uint32_t>([state maxTotalThreadsPerThreadgroup]),
                      static_cast<uint32_t>([state threadExecutionWidth])};
}

Resources measure_without_limit(const KernelSpec& spec) {
  const AutoreleasePool pool;
  const Macros macros = macros_of(spec);
  NSError* error = nil;
  id<MTLLibrary> library = [new_library(spec, macros, false) autorelease];
  id<MTLFunction> function = [new_function(library, spec, macros) autorelease];
  id<MTLComputePipelineState> state =
      [[metal_device() newComputePipelineStateWithFunction:function error:&error] autorelease];
  TORCH_CHECK(state != nil, "Metal could not create a pipeline for ", describe(spec, macros), ": ",
              text_of(error));
  return {spec, uint32_t([state maxTotalThreadsPerThreadgroup]), uint32_t([state threadExecutionWidth]),
          uint32_t([state staticThreadgroupMemoryLength])};
}

}  // namespace

const Pipeline& pipeline_for(const KernelSpec& spec) {
  static auto& pipelines = *new OnceMap<KernelSpec, Pipeline, SpecHash>;
  return *pipelines.get(spec, [&] { return build_pipeline(spec); });
}

const char* source_digest() { return source_text("digest"); }

std::vector<Compiled> compiled_pipelines() { return record().copy(); }

std::vector<Resources> resources_without_limit(const std::vector<int64_t>& numbers) {
  const std::vector<Compiled> all = record().copy();
  std::vector<Resources> found;
  for (const int64_t number : numbers) found.push_back(measure_without_limit(all.at(size_t(number)).spec));
  return found;
}

}  // namespace fattn::metal
