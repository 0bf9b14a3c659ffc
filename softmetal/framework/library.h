// Making libraries and pipelines.
#pragma once
#include "objects.h"

namespace softmetal {
id<MTLLibrary> new_library(NSString* source, MTLCompileOptions* options, NSError** error);
id<MTLComputePipelineState> new_pipeline(MTLComputePipelineDescriptor* descriptor, NSError** error);

// By index, as a function of `program` gets them. Throws CompileError naming what is missing, unknown or of a wrong type.
ConstantsByIndex resolve_constants(MTLFunctionConstantValues* values, const Program& program, const std::string& kernel);
}  // namespace softmetal
