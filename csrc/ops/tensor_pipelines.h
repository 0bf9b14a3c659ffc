// The plans of calls on a GPU with tensor operations: a call runs a pipeline of theirs only after a test of
// that very pipeline on this machine. Compiled only with Metal.
#pragma once

#include <cstdint>

#include "../plan/plan.h"
#include "../plan/problem.h"

namespace fattn {

// What a call does about a test that has not run.
enum class Untested : uint8_t {
  kTest,   // runs it, and before it those that were deferred
  kDefer,  // goes without tensor operations, and leaves it to the next call that tests
  kShow,   // nothing: it is explained, not run
};
// Steps of generation never wait for a test.
Untested untested_of(const Problem& problem);

struct TestedPlan {
  Plan plan;
  // Why a call goes without tensor operations that its size has, or a step whose size is not tested; else "".
  const char* why_off = "";
};
// Each pipeline of tensor operations in the plan was in the self-test of its size, or has passed a small
// problem with the options of a call in this process. If one fails, its size is off from now on. Raises
// refusals, and ValueError for a wrong FATTN_TENSOR.
TestedPlan tested_plan(const Problem& problem, Untested untested);

// Call this after something that verdicts depend on has changed.
void forget_tested_pipelines();

}  // namespace fattn
