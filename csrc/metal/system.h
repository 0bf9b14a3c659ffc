// The operating system, which Metal's compiler is a part of.
#pragma once

#include <string>

namespace fattn::metal {

// A fact of the kernel by name, such as "kern.osversion", the build of macOS; "" if it has none of that name.
std::string kernel_fact(const char* name);

}  // namespace fattn::metal
