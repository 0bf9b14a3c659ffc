// Creates libraries and pipelines.
#pragma once
#include "objects.h"

namespace softmetal {
id<MTLLibrary> new_library(NSString* source, MTLCompileOptions* options, NSError** error);
id<MTLComputePipelineState> new_pipeline(MTLComputePipelineDescriptor* descriptor, NSError** error);

id<MTLBinaryArchive> new_archive(MTLBinaryArchiveDescriptor* descriptor, NSError** error);
// Whether one of the descriptor's archives contains its pipeline.
bool is_archived(MTLComputePipelineDescriptor* descriptor);
void report_archive_miss(NSError** error);

// Resolves the constants of `program` by index. Throws CompileError for a value of the wrong type.
ConstantsByIndex resolve_constants(MTLFunctionConstantValues* values, const Program& program);
}  // namespace softmetal
