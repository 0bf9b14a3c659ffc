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

}  // namespace fattn::metal
