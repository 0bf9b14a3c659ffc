// Environment variables, files, and the folder of this package.
#pragma once
#include <dlfcn.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>

namespace softmetal {

inline std::string environment(const char* name, const std::string& fallback) {
  const char* value = getenv(name);
  return value && *value ? value : fallback;
}

inline std::string content_of(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

// The folder that contains the package `softmetal`; this library is in the package's _build.
inline std::string package_parent() {
  static const int here = 0;
  Dl_info info;
  if (!dladdr(&here, &info)) return ".";
  namespace fs = std::filesystem;
  return fs::weakly_canonical(info.dli_fname).parent_path().parent_path().parent_path().string();
}

}  // namespace softmetal
