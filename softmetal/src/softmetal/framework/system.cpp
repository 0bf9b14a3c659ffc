#include "system.h"

#include <sys/sysctl.h>
#include <sys/utsname.h>
#undef uname

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

namespace softmetal {
namespace {

constexpr unsigned kOldest = 1100;  // macOS 11 is the first one on these GPUs

unsigned parse_macos(const char* text) {
  unsigned major = 0, minor = 0;
  int end = 0;
  const bool is_read = std::sscanf(text, "%2u.%2u%n", &major, &minor, &end) == 2 && !text[end];
  if (is_read && major * 100 + minor >= kOldest && minor < 100) return major * 100 + minor;
  if (*text) std::fprintf(stderr, "softmetal: SOFTMETAL_MACOS is '%s'; use a version such as 26.2\n", text);
  return 0;
}

std::string macos_build() {
  const char* text = std::getenv("SOFTMETAL_MACOS_BUILD");
  return text && *text ? text : "25C56";
}

// Apple skipped macOS 16 to 25, but Darwin did not.
unsigned darwin_of(unsigned macos) { return macos >= 26 ? macos - 1 : macos + 9; }

}  // namespace

unsigned macos_version() {
  static const unsigned version = [] {
    const char* text = std::getenv("SOFTMETAL_MACOS");
    return text ? parse_macos(text) : 0;
  }();
  return version;
}

bool supports_language(unsigned major, unsigned minor) {
  struct {
    unsigned language, macos;
  } constexpr kSince[] = {{301, 1400}, {302, 1500}, {400, 2600}, {401, 2700}};
  const unsigned system = macos_version(), language = major * 100 + minor;
  for (const auto& since : kSince)
    if (system && language >= since.language && system < since.macos) return false;
  return true;
}

}  // namespace softmetal

extern "C" int softmetal_uname(struct utsname* system) {
  const int failed = uname(system);
  const unsigned macos = softmetal::macos_version();
  if (failed || !macos) return failed;
  std::snprintf(system->sysname, sizeof system->sysname, "Darwin");
  std::snprintf(system->release, sizeof system->release, "%u.%u.0", softmetal::darwin_of(macos / 100),
                macos % 100);
  return 0;
}

extern "C" int sysctlbyname(const char* name, void* value, size_t* size, void*, size_t) {
  if (!softmetal::macos_version() || std::strcmp(name, "kern.osversion") != 0) {
    errno = ENOENT;
    return -1;
  }
  const std::string build = softmetal::macos_build();
  const size_t needed = build.size() + 1;
  if (value && *size < needed) {
    errno = ENOMEM;
    return -1;
  }
  if (value) std::memcpy(value, build.c_str(), needed);
  *size = needed;
  return 0;
}
