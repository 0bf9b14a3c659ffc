// The simulated macOS: what it is, and what it supports.
#pragma once

namespace softmetal {

unsigned macos_version();  // 2602 for SOFTMETAL_MACOS=26.2; 0 without one
// Whether the system has MSL 4.0 (as 4, 0). Without a simulated macOS every version is there.
bool supports_language(unsigned major, unsigned minor);

}  // namespace softmetal
