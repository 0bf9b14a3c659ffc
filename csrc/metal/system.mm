#include "system.h"

#include <sys/sysctl.h>

namespace fattn::metal {

std::string system_build() {
  char text[64];
  size_t size = sizeof text;
  return sysctlbyname("kern.osversion", text, &size, nullptr, 0) == 0 ? text : "";
}

}  // namespace fattn::metal
