// Keeps what the self-test of tensor operations found, for later processes. Plain text: a file for each size,
// GPU, build of the system and sources. Compiled only with Metal.
#pragma once

#include <optional>
#include <string>

#include "../plan/device.h"
#include "../plan/tensor.h"

namespace fattn {

struct TensorVerdict {
  TensorState state = TensorState::kUntested;
  std::string why;
  bool lasting = true;  // false: a later process tests again
};

// `folder`: "" for none. A file that is damaged, or of another format, is none.
std::optional<TensorVerdict> read_verdict(const std::string& folder, TensorSize size,
                                          const DeviceFacts& device);
// Replaces the file atomically; a folder that cannot be written changes nothing.
void write_verdict(const std::string& folder, TensorSize size, const DeviceFacts& device,
                   const TensorVerdict& verdict) noexcept;

}  // namespace fattn
