// Which calls use Metal 4's tensor operations on this machine: by TensorSize, after the gates of
// plan/tensor_gate.h and the self-test of tensor_test.h.
#pragma once

#include <string>

#include "../plan/device.h"
#include "../plan/plan.h"
#include "../plan/problem.h"
#include "../plan/tensor.h"

namespace fattn {

#ifdef FATTN_WITH_METAL
// What is known of this GPU; untested sizes stay so.
TensorStates tensor_states(const DeviceFacts& gpu);

// Whether a call may wait for a test: not a step of generation.
bool may_wait_for_tests(const Problem& problem);

// Runs the self-test if the plan of this problem depends on it and it has not run, and before it the tests
// that steps of generation deferred. Without `may_wait` it is deferred, too. Call before a plan. Raises
// ValueError for a wrong FATTN_TENSOR, and nothing else.
void test_tensors_for(const Problem& problem, bool may_wait);
void test_tensors_for(TensorSize size);

// What decided the state that the plan of this problem follows; "" if nothing has.
std::string why_tensors(const Problem& problem);

// Whether the pipelines of this plan can be trusted, if it has tensor operations: each was in the self-test
// of its size, or is compiled, and tested on a small problem, before its first use in a process. If it fails,
// tensor operations of its size are off from now on. Without `may_wait` the test is deferred to the next call
// that may wait. If they cannot be trusted, the call needs another plan.
bool tensors_hold(const Problem& problem, const Plan& plan, bool may_wait);
// Why a call with this plan would run without its tensor operations now, "" if it would not.
const char* why_not_yet(const Problem& problem, const Plan& plan);
// This GPU, for a plan of the problem that uses no tensor operations.
DeviceFacts without_tensors(const Problem& problem);
#endif

}  // namespace fattn
