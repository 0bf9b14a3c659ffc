// FNV-1a, for the names of cached files.
#pragma once

#include <cstdint>
#include <cstdio>
#include <string>
#include <string_view>

namespace fattn::metal {

inline std::string hash_of(std::string_view bytes) {
  uint64_t hash = 0xcbf29ce484222325;
  for (const char byte : bytes) hash = (hash ^ static_cast<unsigned char>(byte)) * 0x100000001b3;
  char digits[17];
  std::snprintf(digits, sizeof digits, "%016llx", static_cast<unsigned long long>(hash));
  return digits;
}

}  // namespace fattn::metal
