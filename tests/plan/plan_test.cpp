// Which GPUs and systems the gate of matrix units lets through, whatever this machine is. Prints a line for
// each expectation that does not hold; tests/plan/test_plan_program.py compiles it without torch and Metal.
#include <iostream>
#include <string>

#include "plan/plan.h"
#include "plan/tuned.h"
#include "selftest/gate.h"

// For sizes of tiles, which these rows do not have.
std::variant<fattn::Plan, fattn::Refusal> fattn::plan(const Problem&, const DeviceFacts&) {
  return Refusal{};
}

namespace {

using namespace fattn;

DeviceFacts gpu(int family, int macos = 2602, std::string architecture = "applegpu_g17g",
                bool metal4 = true) {
  DeviceFacts facts;
  facts.family = family;
  facts.macos = macos;
  facts.architecture = architecture;
  facts.metal4 = metal4;
  return facts;
}

void expect_off(const DeviceFacts& device, const std::string& why,
                UnitsSetting setting = UnitsSetting::kAuto) {
  const std::string found = why_units_are_off(device, setting);
  if (why.empty() ? !found.empty() : found.find(why) == std::string::npos)
    std::cout << "'" << found << "' is not '" << why << "'\n";
}

void expect(bool holds, const char* what) {
  if (!holds) std::cout << what << "\n";
}

}  // namespace

int main() {
  expect_off(gpu(10), "");
  expect_off(gpu(10, 2700), "");
  expect_off(gpu(10, 2601), "macOS 26.1 is not macOS 26.2 or newer");
  expect_off(gpu(10, 0), "this system is not macOS 26.2 or newer");
  expect_off(gpu(9), "this is of Apple family 9");
  expect_off(gpu(10, 2602, "applegpu_g17g", false), "the GPU does not support Metal 4");
  for (const std::string name : {"applegpu_g16s", "applegpu_g17p", "applegpu_g", "g17s", ""})
    expect_off(gpu(10, 2602, name), "the GPU's architecture, '" + name + "'");
  for (const char* name : {"applegpu_g17s", "applegpu_g18p", "applegpu_g20d"})
    expect_off(gpu(10, 2602, name), "");
  expect_off(gpu(10), "FATTN_TENSOR=0", UnitsSetting::kOff);
  expect_off(gpu(10, 2601), "macOS 26.1", UnitsSetting::kThreadgroup);  // not by hand either
  expect_off(gpu(10, 0), "", UnitsSetting::kRegisters);
  expect_off(gpu(9), "", UnitsSetting::kThreadgroup);

  // Prefills in float16 with heads of 65 to 128 were faster on an M4.
  const TunedRow row{.kernel = Kernel::kPrefillTensor,
                     .dtype = DType::kFloat16,
                     .min_dim = 65,
                     .max_dim = 128,
                     .macos = 2602};
  const TunedRows tuned{.rows = {row}, .provenance = "timed here", .routes = {}};
  const UnitsSize timed{DType::kFloat16, 96};
  const auto is_on = [&](UnitsSize size, DeviceFacts device) {
    device.tuned = &tuned;
    return passes_gate(size, device, UnitsSetting::kAuto);
  };
  expect(is_on(timed, gpu(9)) && is_on({DType::kFloat16, 128}, gpu(9)), "a tuned size is off");
  expect(!is_on({DType::kFloat16, 64}, gpu(9)) && !is_on({DType::kBFloat16, 96}, gpu(9)),
         "another size is on");
  expect(!is_on({DType::kFloat16, 96, true}, gpu(9)), "gradients, which were not timed, are on");
  expect(is_on(timed, gpu(10, 2602, "applegpu_g16s")), "a tuned size of an older architecture is off");
  expect(!is_on(timed, gpu(9, 2602, "", false)) && !is_on(timed, gpu(9, 2603)), "another system is on");
}
