// Keeps the verdicts of the self-test for later processes. Plain text: a file for each size, GPU, build of
// the system and sources.
#pragma once

#include <optional>
#include <string>

#include "self_test.h"

namespace fattn {

// `folder`: "" for none. A file that is damaged, or of another format, is none.
std::optional<Verdict> read_verdict(const std::string& folder, UnitsSize size, const DeviceFacts& device);
// Replaces the file atomically; a folder that cannot be written changes nothing.
void write_verdict(const std::string& folder, UnitsSize size, const DeviceFacts& device,
                   const Verdict& verdict) noexcept;

}  // namespace fattn
