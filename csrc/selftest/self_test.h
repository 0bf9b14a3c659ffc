// The self-test of the matrix units. A GPU's layout of their operands is not documented, so kernels use them
// only after a test has passed.
#pragma once

#include <string>

#include "../plan/plan.h"

namespace fattn {

struct Verdict {
  UnitsState state = UnitsState::kUntested;
  std::string why;
  bool lasting = true;  // false: a later process tests again
};

// Tests the kernels of a size on the current stream, and waits for it: that they compile quickly and for all
// their threads, that the probed layout is usable, and that trials match the simdgroup kernels. Registers are
// tested first, then threadgroup memory; if both fail, the verdict is off. Never raises.
Verdict run_self_test(UnitsSize size, const DeviceFacts& gpu);

struct Fault {
  std::string why;  // "": none
  bool lasting = true;

  explicit operator bool() const { return !why.empty(); }
};
// Compiles the pipelines of a plan and returns their fault. Never raises.
Fault compiler_fault(const Plan& plan);

}  // namespace fattn
