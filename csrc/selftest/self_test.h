// The self-test of the matrix units: how a GPU lays out their operands is not documented, so the kernels may
// use them only where they were seen to be right.
#pragma once

#include <string>

#include "../plan/plan.h"

namespace fattn {

struct Verdict {
  UnitsState state = UnitsState::kUntested;
  std::string why;
  bool lasting = true;  // false: a later process tests again
};

// Tests the kernels of a size on the current stream, and waits for it: that they compile, soon and for all
// their threads; what the probe says of the layout; and results of trials against those of the simdgroup
// kernels. Registers come first, then threadgroup memory; if both fail, the verdict is off. Never raises.
Verdict run_self_test(UnitsSize size, const DeviceFacts& gpu);

struct Fault {
  std::string why;  // "": none
  bool lasting = true;

  explicit operator bool() const { return !why.empty(); }
};
// Compiles the pipelines of a plan, and returns what is wrong with them. Never raises.
Fault compiler_fault(const Plan& plan);

}  // namespace fattn
