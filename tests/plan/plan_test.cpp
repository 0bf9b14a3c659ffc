// Which architectures the gate of matrix units lets through, whatever this machine is. Prints a line for each
// expectation that does not hold; tests/plan/test_plan_program.py compiles it without torch and Metal.
#include <iostream>
#include <string>

#include "plan/plan.h"
#include "selftest/gate.h"

// For sizes of tiles, which no row here has.
std::variant<fattn::Plan, fattn::Refusal> fattn::plan(const Problem&, const DeviceFacts&) {
  return Refusal{};
}

namespace {

void expect(const std::string& architecture, const std::string& why, bool metal4 = true) {
  fattn::DeviceFacts device;
  device.family = 10;
  device.macos = 2602;
  device.architecture = architecture;
  device.metal4 = metal4;
  const std::string found = fattn::why_units_are_off(device, fattn::UnitsSetting::kAuto);
  if (why.empty() ? !found.empty() : found.find(why) == std::string::npos)
    std::cout << "'" << found << "' is not '" << why << "'\n";
}

}  // namespace

int main() {
  for (const char* name : {"applegpu_g17g", "applegpu_g17s", "applegpu_g18p", "applegpu_g20d"})
    expect(name, "");
  for (const std::string name : {"applegpu_g16s", "applegpu_g17p", "applegpu_g", "g17s", ""})
    expect(name, "the GPU's architecture, '" + name + "'");
  expect("applegpu_g17g", "the GPU does not support Metal 4", false);
}
