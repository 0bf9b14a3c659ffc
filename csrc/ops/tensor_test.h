// The self-test of tensor operations: how a GPU lays out their operands is not documented, so the kernels may
// use them only where they were seen to be right. Compiled only with Metal.
#pragma once

#include <cstdint>
#include <vector>

#include "../plan/plan.h"
#include "../plan/tensor_gate.h"
#include "tensor_file.h"

namespace fattn {

// Tests the kernels of a size on the current stream, and waits for it: that they compile, soon and for all
// their threads; what the probe says of the layout; and results of problems against those of the simdgroup
// kernels. Registers come first, then threadgroup memory; if both fail, the verdict is off. With a setting by
// hand they are only compiled. Never raises.
TensorVerdict test_tensors(TensorSize size, const DeviceFacts& gpu, TensorSetting setting);

enum class OptionsTest : uint8_t { kPassed, kFailed, kImpossible };
struct OptionsVerdict {
  OptionsTest test;
  TensorVerdict of_size;  // if it failed: why tensor operations of its size are off from now on
};

// Tests pipelines of a call that the problems above do not have, on a small problem; impossible if no small
// problem has them. Never raises.
OptionsVerdict test_options(const Problem& problem, const std::vector<KernelSpec>& pipelines,
                            const DeviceFacts& gpu);

}  // namespace fattn
