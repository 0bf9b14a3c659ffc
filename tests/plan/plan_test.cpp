// Gates of csrc/plan, which needs neither torch nor Metal. Prints a line for each
// expectation that does not hold and exits with 1; tests/plan/test_plan_program.py compiles and runs it.
#include <cstdio>
#include <string>
#include <string_view>
#include <variant>

#include "plan/plan.h"
#include "selftest/gate.h"
#include "plan/tuned.h"

namespace {

using namespace fattn;

int failures = 0;

#define EXPECT(condition)                                                    \
  do {                                                                       \
    if (!(condition)) {                                                      \
      ++failures;                                                            \
      std::printf("%s:%d: %s: %s\n", __FILE__, __LINE__, place, #condition); \
    }                                                                        \
  } while (false)

DeviceFacts gpu(int family, int cores) {
  DeviceFacts facts;
  facts.family = family;
  facts.cores = cores;
  return facts;
}

bool has(std::string_view text, std::string_view part) { return text.find(part) != std::string_view::npos; }

void test_explain() {
  const char* place = "explain";
  DeviceFacts device = gpu(8, 10);
  device.name = "a \"GPU\"";
  const auto result = plan(MergeProblem{.parts = 3, .rows = 7, .head_dim = 64}, device);
  EXPECT(std::holds_alternative<Plan>(result));
  const std::string text = to_json(std::get<Plan>(result), device);
  EXPECT(has(text, R"("device":{"name":"a \"GPU\"","family":8,"cores":10,)"));
  EXPECT(has(text, R"("kernel":"fattn_merge","source":"merge.metal")"));
}

void test_tensor_gates() {
  const char* place = "gates of tensor operations";
  DeviceFacts m5 = gpu(10, 10);
  m5.macos = 2602;
  m5.metal4 = true;
  m5.architecture = "applegpu_g17g";
  const auto why = [](const DeviceFacts& device, UnitsSetting setting = UnitsSetting::kAuto) {
    return why_units_are_off(device, setting);
  };
  EXPECT(why(m5).empty());
  EXPECT(why(m5, UnitsSetting::kOff) == "FATTN_TENSOR=0");

  DeviceFacts other = m5;
  other.macos = 2601;
  EXPECT(why(other) == "macOS 26.1 is not macOS 26.2 or newer");
  EXPECT(!why(other, UnitsSetting::kThreadgroup).empty());  // not by hand either
  other.macos = 0;
  EXPECT(why(other) == "this system is not macOS 26.2 or newer");
  EXPECT(why(other, UnitsSetting::kRegisters).empty());
  other = m5;
  other.macos = 2700;
  EXPECT(why(other).empty());

  other = m5;
  other.family = 9;
  EXPECT(has(why(other), "this is of Apple family 9") && why(other, UnitsSetting::kThreadgroup).empty());
  other = m5;
  other.metal4 = false;
  EXPECT(why(other) == "the GPU does not support Metal 4");
  other = m5;
  for (const char* architecture : {"applegpu_g16s", "applegpu_g17p", "applegpu_g", "g17s", ""}) {
    other.architecture = architecture;
    EXPECT(has(why(other), "the GPU's architecture, '" + std::string(architecture) + "'"));
  }
  for (const char* architecture : {"applegpu_g17s", "applegpu_g18p", "applegpu_g20d"}) {
    other.architecture = architecture;
    EXPECT(why(other).empty());
  }
}

// Prefills in float16 with heads of 65 to 128 were faster on tensor operations.
void test_tensors_before_m5() {
  const char* place = "tensor operations before M5";
  const TunedRow row{.kernel = Kernel::kPrefillTensor,
                     .dtype = DType::kFloat16,
                     .min_dim = 65,
                     .max_dim = 128,
                     .macos = 2602};
  EXPECT(fault_of({row}).empty());
  TunedRow wrong = row;
  wrong.simdgroups = 4;
  EXPECT(has(fault_of({row, wrong}), "row 1: a row of prefill_tensor has no sizes"));

  const TunedRows tuned{.rows = {row}, .provenance = "timed here", .routes = {}};
  DeviceFacts m4 = gpu(9, 10);
  m4.macos = 2602;
  m4.metal4 = true;
  m4.tuned = &tuned;
  const UnitsSize timed{DType::kFloat16, 96};
  const auto on = [](UnitsSize size, const DeviceFacts& device, UnitsSetting setting = UnitsSetting::kAuto) {
    return passes_gate(size, device, setting);
  };
  EXPECT(on(timed, m4) && on({DType::kFloat16, 128}, m4));
  EXPECT(!on({DType::kFloat16, 64}, m4) && !on({DType::kBFloat16, 96}, m4));
  EXPECT(!on({DType::kFloat16, 96, true}, m4));  // gradients were not timed
  EXPECT(!on(timed, m4, UnitsSetting::kOff) && on({DType::kFloat16, 64}, m4, UnitsSetting::kRegisters));

  DeviceFacts other = m4;
  other.family = 10;  // with an older architecture
  EXPECT(on(timed, other) && !on({DType::kFloat16, 64}, other));
  other = m4;
  other.tuned = nullptr;
  EXPECT(!on(timed, other));
  other = m4;
  other.metal4 = false;
  EXPECT(!on(timed, other));
  other = m4;
  other.macos = 2603;
  EXPECT(!on(timed, other));
  TunedRows earlier = tuned;
  earlier.rows[0].macos = other.macos = 2601;
  other.tuned = &earlier;
  EXPECT(!on(timed, other));
}

}  // namespace

int main() {
  test_explain();
  test_tensor_gates();
  test_tensors_before_m5();
  return failures == 0 ? 0 : 1;
}
