// Metal's API validation. A broken rule throws ValidationError, which reaches Python as RuntimeError("Metal
// validation: ..."); on a Mac with validation enabled the process would stop.
#pragma once
#include <sstream>
#include <stdexcept>
#include <string>

namespace softmetal {

struct ValidationError : std::logic_error {
  explicit ValidationError(const std::string& rule) : std::logic_error("Metal validation: " + rule) {}
};

template <class... Parts>
std::string text(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
}

template <class... Parts>
[[noreturn]] void violated(const Parts&... parts) {
  throw ValidationError(text(parts...));
}

// Records a broken rule in -dealloc, which must not throw; the next commit or synchronize raises it.
void violated_in_dealloc(const std::string& rule) noexcept;
void raise_deferred_violations();

}  // namespace softmetal
