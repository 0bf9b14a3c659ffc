#include "system.h"

#include <sys/sysctl.h>

namespace fattn::metal {

std::string kernel_fact(const char* name) {
  char text[256];
  size_t size = sizeof text;
  return sysctlbyname(name, text, &size, nullptr, 0) == 0 ? text : "";
}

}  // namespace fattn::metal
