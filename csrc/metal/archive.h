// Compiled pipelines kept between runs, each in a binary archive of its own. What is found there is used only
// if it is of this GPU, this system and these sources, and whole; else it is made again. Nothing here can
// make a call fail.
#pragma once

#import <Metal/Metal.h>

#include <string>

#include "executor.h"  // set_archive_folder

namespace fattn::metal {

// The pipeline that the descriptor describes, or nil where it is not kept. `what` identifies it.
id<MTLComputePipelineState> new_archived_pipeline(MTLComputePipelineDescriptor* descriptor,
                                                  const std::string& what) noexcept;

void keep_pipeline(MTLComputePipelineDescriptor* descriptor, const std::string& what) noexcept;

}  // namespace fattn::metal
