// Stores self-test verdicts for later processes, as plain text: a file for each size, GPU, system build and
// sources.
#pragma once

#include <optional>
#include <string>

#include "self_test.h"

namespace fattn {

// `folder`: "" for none. A damaged file, or one of another format, is ignored.
std::optional<Verdict> read_verdict(const std::string& folder, UnitsSize size, const DeviceFacts& device);
// Replaces the file atomically; a folder that cannot be written changes nothing.
void write_verdict(const std::string& folder, UnitsSize size, const DeviceFacts& device,
                   const Verdict& verdict) noexcept;

}  // namespace fattn
