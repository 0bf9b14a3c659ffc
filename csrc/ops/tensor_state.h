// The states of Metal 4's tensor operations on this machine, for each TensorSize: by the gates of
// plan/tensor_gate.h and the self-test of tensor_test.h.
#pragma once

#include <string>

#include "../plan/device.h"
#include "../plan/problem.h"
#include "../plan/tensor.h"
#include "../plan/tensor_gate.h"
#include "tensor_file.h"

namespace fattn {

#ifdef FATTN_WITH_METAL
// Adds what is known of this GPU, with its tuned rows; untested sizes stay so.
void add_tensor_states(DeviceFacts& gpu);

// Runs the self-test of a size if it decides and has not run. Raises ValueError for a wrong FATTN_TENSOR, and
// nothing else.
void test_tensors_for(TensorSize size);
// Keeps a verdict, in this process and, if it is lasting and no setting decided it, in a file.
void settle(TensorSize size, const TensorVerdict& verdict);

// FATTN_TENSOR; nothing tests a variant that it chose. Raises ValueError if it is wrong.
TensorSetting tensor_setting();
// What decided the state that the plan of this problem follows; "" if nothing has.
std::string reason_of_state(const Problem& problem);
#endif

}  // namespace fattn
