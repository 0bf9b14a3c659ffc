// The simulated macOS: its version, and the languages that it supports.
#pragma once

namespace softmetal {

unsigned macos_version();  // 2602 for SOFTMETAL_MACOS=26.2; 0 without one
// Whether the system has this version of MSL, such as 4, 0. Always true without a simulated macOS.
bool supports_language(unsigned major, unsigned minor);

}  // namespace softmetal
