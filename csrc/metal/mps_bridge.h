// The one place that includes torch's MPS headers, which are internal to torch and may change with it:
// ../README.md says what to look at when they do.
#pragma once

#import <Metal/Metal.h>

#include <ATen/mps/MPSDevice.h>
#include <ATen/mps/MPSStream.h>

#include <exception>

namespace fattn::metal {

inline id<MTLDevice> metal_device() { return at::mps::MPSDevice::getInstance()->device(); }

inline int gpu_core_count() { return static_cast<int>(at::mps::MPSDevice::getInstance()->getCoreCount()); }

// Calls encode(encoder) with the compute encoder that torch's own ops share, on the queue that guards it: so
// our work keeps its place among theirs. The encoder runs its dispatches one after the other, each seeing
// what the ones before it wrote.
template <typename Encode>
void with_shared_encoder(const Encode& encode) {
  at::mps::MPSStream* stream = at::mps::getCurrentMPSStream();
  std::exception_ptr error;
  std::exception_ptr* error_out = &error;  // an exception must not leave the block
  const Encode* encode_in = &encode;
  dispatch_sync(stream->queue(), ^{
    @autoreleasepool {
      try {
        (*encode_in)(stream->commandEncoder());
      } catch (...) {
        *error_out = std::current_exception();
      }
    }
  });
  if (error) std::rethrow_exception(error);
}

}  // namespace fattn::metal
