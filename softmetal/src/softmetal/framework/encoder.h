// The encoders.
#pragma once
#include "objects.h"

@interface SMBlitCommandEncoder : SMCommandEncoder <MTLBlitCommandEncoder> {
  softmetal::Counted<softmetal::MetalClass::kBlitCommandEncoder> _counted;
}
@end

namespace softmetal {
id<MTLComputeCommandEncoder> make_compute_encoder(SMCommandBuffer* buffer,
                                                  MTLDispatchType type);  // autoreleased
}
