// Compiled kernels: source -> library -> pipeline, each made once per process and kept.
#pragma once

#import <Metal/Metal.h>

#include "../plan/plan.h"

namespace fattn::metal {

struct Pipeline {
  id<MTLComputePipelineState> state = nil;
  uint32_t max_threads = 0;      // per threadgroup, as Metal reports it
  uint32_t execution_width = 0;  // threads of a simdgroup
};

// Thread-safe. Raises a RuntimeError with the Metal compiler's text if the kernel does not compile.
const Pipeline& pipeline_for(const KernelSpec& spec);

// archive.mm keeps compiled pipelines between runs, one per binary archive. An archive is used only if it is
// intact and was made for this GPU, this system and these sources; otherwise it is made again. Errors there
// never fail a call. Returns the pipeline of the descriptor, or nil if no archive has it; `what` identifies
// it.
id<MTLComputePipelineState> new_archived_pipeline(MTLComputePipelineDescriptor* descriptor,
                                                  const std::string& what) noexcept;
void keep_pipeline(MTLComputePipelineDescriptor* descriptor, const std::string& what) noexcept;

}  // namespace fattn::metal
