// Builds the message of a refusal.
#pragma once

#include <array>
#include <cstdio>
#include <string>
#include <type_traits>

#include "plan.h"

namespace fattn {

template <typename... Parts>
Refusal refuse(Refusal::Kind kind, const char* op, const Parts&... parts) {
  auto text = [](const auto& part) {
    using Part = std::decay_t<decltype(part)>;
    if constexpr (std::is_floating_point_v<Part>) {
      std::array<char, 32> digits{};
      std::snprintf(digits.data(), digits.size(), "%g", part);
      return std::string(digits.data());
    } else if constexpr (std::is_arithmetic_v<Part>) {
      return std::to_string(part);
    } else {
      return std::string(part);
    }
  };
  return {kind, std::string(op) + ": " + (text(parts) + ...)};
}

}  // namespace fattn
