// Keeps compiled pipelines between runs, one per binary archive. An archive is used only if it is intact and
// was made for this GPU, this system and these sources; otherwise it is made again. Errors here never fail a
// call.
#pragma once

#import <Metal/Metal.h>

#include <string>

#include "executor.h"  // set_archive_folder

namespace fattn::metal {

// Returns the pipeline of the descriptor, or nil if no archive has it. `what` identifies it.
id<MTLComputePipelineState> new_archived_pipeline(MTLComputePipelineDescriptor* descriptor,
                                                  const std::string& what) noexcept;

void keep_pipeline(MTLComputePipelineDescriptor* descriptor, const std::string& what) noexcept;

}  // namespace fattn::metal
