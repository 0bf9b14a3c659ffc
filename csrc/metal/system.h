// The operating system, which includes Metal's compiler.
#pragma once

#include <string>

namespace fattn::metal {

// The build of macOS, such as "25C56"; "" on other systems.
std::string system_build();

}  // namespace fattn::metal
