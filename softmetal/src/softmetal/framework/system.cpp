// The simulated macOS: SOFTMETAL_MACOS=26.2, and its build, SOFTMETAL_MACOS_BUILD=25C56.
#include <sys/sysctl.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

namespace softmetal {
namespace {

std::string environment(const char* name, const char* otherwise) {
  const char* value = getenv(name);
  return value && *value ? value : otherwise;
}

// The release of Darwin in this macOS: 24.6.0 in 15.6, 25.2.0 in 26.2. Empty for text that is not a version.
std::string darwin_release(const std::string& macos) {
  int major = 0, minor = 0;
  if (sscanf(macos.c_str(), "%d.%d", &major, &minor) != 2) return "";
  constexpr int kFirstNumberedByYear = 26;
  const int release = major >= kFirstNumberedByYear ? major - 1 : major + 9;
  return std::to_string(release) + "." + std::to_string(minor) + ".0";
}

std::string fact(const std::string& name) {
  const std::string release = darwin_release(environment("SOFTMETAL_MACOS", ""));
  if (release.empty()) return "";
  if (name == "kern.ostype") return "Darwin";
  if (name == "kern.osrelease") return release;
  if (name == "kern.osversion") return environment("SOFTMETAL_MACOS_BUILD", "25C56");
  return "";
}

}  // namespace
}  // namespace softmetal

extern "C" int sysctlbyname(const char* name, void* value, size_t* size, void*, size_t) {
  const std::string text = softmetal::fact(name);
  if (text.empty()) {
    errno = ENOENT;
    return -1;
  }
  const size_t needed = text.size() + 1;
  if (value && *size < needed) {
    errno = ENOMEM;
    return -1;
  }
  if (value) memcpy(value, text.c_str(), needed);
  *size = needed;
  return 0;
}
