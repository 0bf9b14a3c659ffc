// Shared by the test extension's files.
#pragma once
#include <ATen/core/Dict.h>
#import <Metal/Metal.h>

#include <functional>
#include <string>
#include <vector>

namespace kit {

using Macros = c10::Dict<std::string, std::string>;

id<MTLDevice> device();
std::string reason(NSError* error);
id<MTLLibrary> library(const std::string& source, const Macros& macros);  // +1
id<MTLComputePipelineState> pipeline(id<MTLLibrary> library, const std::string& kernel,
                                     MTLFunctionConstantValues* values);  // +1
void encode(const std::function<void(id<MTLComputeCommandEncoder>)>&
                work);  // on torch's stream and its shared encoder

void misuse(const std::string& what);  // breaks one rule of Metal's API; "nothing" breaks none
std::vector<std::string> archives(const std::string& path);  // "step=outcome" lines; writes the file
std::string open_archive(const std::string& path);           // the outcome
std::vector<std::string> facts();  // "name=value" lines of the device, a pipeline and a library

}  // namespace kit
