// The only include of torch's MPS headers, which are internal to torch and may change: see ../README.md.
#pragma once

#import <Metal/Metal.h>

#include <ATen/mps/MPSDevice.h>
#include <ATen/mps/MPSStream.h>

#include <exception>

#include "foundation.h"

namespace fattn::metal {

inline id<MTLDevice> metal_device() { return at::mps::MPSDevice::getInstance()->device(); }

inline int gpu_core_count() { return static_cast<int>(at::mps::MPSDevice::getInstance()->getCoreCount()); }

// The compute encoder that torch's own ops share. Dispatches run serially, also across command buffers: each
// sees all earlier writes.
class SharedEncoder {
 public:
  explicit SharedEncoder(at::mps::MPSStream* stream) : stream_(stream) {}
  id<MTLComputeCommandEncoder> get() const { return stream_->commandEncoder(); }
  // Commits the encoded commands; the next command begins a new command buffer.
  void commit() const { stream_->synchronize(at::mps::SyncType::COMMIT); }

 private:
  at::mps::MPSStream* stream_;
};

// Calls encode(shared_encoder) on the stream's dispatch queue, so that our commands keep their order relative
// to torch's ops.
template <typename Encode>
void with_shared_encoder(const Encode& encode) {
  at::mps::MPSStream* stream = at::mps::getCurrentMPSStream();
  std::exception_ptr error;
  std::exception_ptr* error_out = &error;  // an exception must not leave the block
  const Encode* encode_in = &encode;
  dispatch_sync(stream->queue(), ^{
    const AutoreleasePool pool;
    try {
      (*encode_in)(SharedEncoder(stream));
    } catch (...) {
      *error_out = std::current_exception();
    }
  });
  if (error) std::rethrow_exception(error);
}

}  // namespace fattn::metal
