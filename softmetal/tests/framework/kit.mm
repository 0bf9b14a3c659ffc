// A Metal extension for torch, written as on a Mac, with the ops for the framework's tests.
#include <ATen/core/Tensor.h>
#include <ATen/mps/MPSStream.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>
#import <Metal/Metal.h>

#include <exception>
#include <string>
#include <vector>

#include "kit.h"

namespace kit {

id<MTLDevice> device() { return at::mps::getCurrentMPSStream()->device(); }

id<MTLBuffer> buffer_of(const at::Tensor& t) { return __builtin_bit_cast(id<MTLBuffer>, t.storage().data()); }

std::string reason(NSError* error) {
  return error ? [[error localizedDescription] UTF8String] : "(no error text)";
}

// Sets the language version from the macro KIT_LANGUAGE.
static void set_language(MTLCompileOptions* options, const std::string& name) {
  options.languageVersion = name == "3.1"   ? MTLLanguageVersion3_1
                            : name == "3.2" ? MTLLanguageVersion3_2
                                            : MTLLanguageVersion4_0;
}

// Sets a combination of math options from the macro KIT_MATH.
static void set_math(MTLCompileOptions* options, const std::string& name) {
  options.mathMode = name == "no mode" ? MTLMathMode(7) : MTLMathModeSafe;
  if (name == "precise functions") options.mathFloatingPointFunctions = MTLMathFloatingPointFunctionsPrecise;
  if (name == "fast math off") options.fastMathEnabled = NO;
  if (name == "fast math off and on") {
    options.fastMathEnabled = NO;
    options.fastMathEnabled = YES;
  }
}

id<MTLLibrary> library(const std::string& source, const Macros& macros) {
  @autoreleasepool {
    MTLCompileOptions* options = [[[MTLCompileOptions alloc] init] autorelease];
    NSMutableDictionary* dictionary = [NSMutableDictionary dictionary];
    for (const auto& entry : macros)
      [dictionary setObject:[NSString stringWithUTF8String:entry.value().c_str()]
                     forKey:[NSString stringWithUTF8String:entry.key().c_str()]];
    options.preprocessorMacros = dictionary;
    if (const auto math = macros.find("KIT_MATH"); math != macros.end()) set_math(options, math->value());
    if (const auto language = macros.find("KIT_LANGUAGE"); language != macros.end())
      set_language(options, language->value());
    NSError* error = nil;
    id<MTLLibrary> library = [device() newLibraryWithSource:[NSString stringWithUTF8String:source.c_str()]
                                                    options:options
                                                      error:&error];
    TORCH_CHECK(library, "library: ", reason(error));
    return library;
  }
}

id<MTLComputePipelineState> pipeline(id<MTLLibrary> library, const std::string& kernel,
                                     MTLFunctionConstantValues* values) {
  @autoreleasepool {
    NSError* error = nil;
    NSString* name = [NSString stringWithUTF8String:kernel.c_str()];
    id<MTLFunction> function = values ? [library newFunctionWithName:name constantValues:values error:&error]
                                      : [library newFunctionWithName:name];
    TORCH_CHECK(function, "function: ", reason(error));
    id<MTLComputePipelineState> state = [device() newComputePipelineStateWithFunction:function error:&error];
    [function release];
    TORCH_CHECK(state, "pipeline: ", reason(error));
    return state;
  }
}

void encode(const std::function<void(id<MTLComputeCommandEncoder>)>& work) {
  at::mps::MPSStream* stream = at::mps::getCurrentMPSStream();
  std::exception_ptr exception;
  std::exception_ptr* thrown = &exception;
  const auto* pointer = &work;
  dispatch_sync(stream->queue(), ^{
    try {
      (*pointer)(stream->commandEncoder());
    } catch (...) {
      *thrown = std::current_exception();
    }
  });
  if (exception) std::rethrow_exception(exception);
}

namespace {

// Constants are (index, value) pairs of float or, where `integral`, int.
at::Tensor run(const std::string& source, const std::string& kernel, at::TensorList buffers,
               const Macros& macros, at::ArrayRef<double> constants, c10::IntArrayRef grid,
               c10::IntArrayRef threads, int64_t threadgroup_bytes) {
  id<MTLLibrary> compiled = library(source, macros);
  MTLFunctionConstantValues* values = nil;
  if (!constants.empty()) {
    values = [[MTLFunctionConstantValues alloc] init];
    for (size_t i = 0; i + 1 < constants.size(); i += 2) {
      float value = float(constants[i + 1]);
      [values setConstantValue:&value type:MTLDataTypeFloat atIndex:NSUInteger(constants[i])];
    }
  }
  id<MTLComputePipelineState> state = nil;
  std::exception_ptr failure;
  try {
    state = pipeline(compiled, kernel, values);
  } catch (...) {
    failure = std::current_exception();
  }
  [values release];
  [compiled release];
  if (failure) std::rethrow_exception(failure);
  encode([&](id<MTLComputeCommandEncoder> encoder) {
    [encoder setComputePipelineState:state];
    for (size_t i = 0; i < buffers.size(); ++i)
      [encoder setBuffer:buffer_of(buffers[i])
                  offset:NSUInteger(buffers[i].storage_offset() * buffers[i].element_size())
                 atIndex:i];
    if (threadgroup_bytes) [encoder setThreadgroupMemoryLength:NSUInteger(threadgroup_bytes) atIndex:0];
    [encoder dispatchThreadgroups:MTLSizeMake(grid[0], grid[1], grid[2])
            threadsPerThreadgroup:MTLSizeMake(threads[0], threads[1], threads[2])];
  });
  [state release];
  return buffers[0];
}

const char* const kScale = R"(
#include <metal_stdlib>
using namespace metal;
constant float factor [[function_constant(0)]];
kernel void scale(device const float* x [[buffer(0)]], device float* y [[buffer(1)]],
                  constant uint& count [[buffer(2)]], uint id [[thread_position_in_grid]]) {
  if (id < count) y[id] = x[id] * factor;
}
)";

at::Tensor scale(const at::Tensor& x) {
  at::Tensor y = at::empty(x.sizes(), x.options());
  if (x.numel() == 0) return y;
  static id<MTLComputePipelineState> state = [] {
    id<MTLLibrary> compiled = library(kScale, Macros());
    MTLFunctionConstantValues* values = [[MTLFunctionConstantValues alloc] init];
    float factor = 2;
    [values setConstantValue:&factor type:MTLDataTypeFloat withName:@"factor"];
    id<MTLComputePipelineState> made = pipeline(compiled, "scale", values);
    [values release];
    [compiled release];
    return made;
  }();
  const uint32_t count = uint32_t(x.numel());
  encode([&](id<MTLComputeCommandEncoder> encoder) {
    [encoder setComputePipelineState:state];
    [encoder setBuffer:buffer_of(x) offset:NSUInteger(x.storage_offset() * x.element_size()) atIndex:0];
    [encoder setBuffer:buffer_of(y) offset:0 atIndex:1];
    [encoder setBytes:&count length:sizeof count atIndex:2];
    [encoder dispatchThreadgroups:MTLSizeMake((count + 63) / 64, 1, 1)
            threadsPerThreadgroup:MTLSizeMake(64, 1, 1)];
  });
  return y;
}

}  // namespace
}  // namespace kit

TORCH_LIBRARY(softmetal_kit, m) {
  m.def("scale(Tensor x) -> Tensor", {at::Tag::pt2_compliant_tag});
  m.def("run(str source, str kernel, Tensor[] buffers, Dict(str, str) macros, float[] constants, int[] grid, "
        "int[] threads, int threadgroup_bytes) -> Tensor",
        kit::run);
  m.def("misuse(str what) -> ()", kit::misuse);
  m.def("facts() -> str[]", kit::facts);
  m.def("archives(str path) -> str[]", [](std::string path) { return kit::archives(path); });
  m.def("open_archive(str path) -> str", [](std::string path) { return kit::open_archive(path); });
}
TORCH_LIBRARY_IMPL(softmetal_kit, MPS, m) { m.impl("scale", kit::scale); }
