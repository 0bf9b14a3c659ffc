#include "tensor_pipelines.h"

#include <algorithm>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include <c10/util/Exception.h>

#include "../describe/calls.h"
#include "../metal/executor.h"
#include "gpu.h"
#include "tensor_problems.h"
#include "tensor_state.h"
#include "tensor_test.h"

namespace fattn {
namespace {

constexpr const char* kImpossible = "not used: no small problem can test this pipeline";
constexpr const char* kSizeDeferred = "not tested yet on this GPU; the next prefill or warmup does it";
constexpr const char* kDeferred = "not tested yet with these options; the next prefill or warmup does it";

template <typename T>
bool has(const std::vector<T>& all, const T& one) {
  return std::find(all.begin(), all.end(), one) != all.end();
}

std::vector<KernelSpec> tensor_pipelines(const Plan& plan) {
  std::vector<KernelSpec> found;
  for (uint32_t i = 0; i < plan.pass_count; ++i) {
    if (is_tensor(plan.passes[i].spec.kernel)) found.push_back(plan.passes[i].spec);
  }
  return found;
}

// What is known of the pipelines of tensor operations in this process.
class Pipelines {
 public:
  // The self-test of a size, which it has passed, has tested these.
  void add_tested_with(TensorSize size) {
    std::lock_guard lock(mutex_);
    if (has(listed_, size)) return;
    for (const KernelSpec& pipeline : pipelines_of_test(size, gpu_facts())) passed_.push_back(pipeline);
    listed_.push_back(size);
  }

  // Those that no test has passed.
  std::vector<KernelSpec> untested(std::vector<KernelSpec> wanted) {
    std::lock_guard lock(mutex_);
    std::erase_if(wanted, [&](const KernelSpec& pipeline) { return has(passed_, pipeline); });
    return wanted;
  }

  bool has_impossible(const std::vector<KernelSpec>& pipelines) {
    std::lock_guard lock(mutex_);
    return std::any_of(pipelines.begin(), pipelines.end(),
                       [&](const KernelSpec& pipeline) { return has(impossible_, pipeline); });
  }

  void add(const std::vector<KernelSpec>& pipelines, bool passed) {
    std::lock_guard lock(mutex_);
    auto& all = passed ? passed_ : impossible_;
    all.insert(all.end(), pipelines.begin(), pipelines.end());
  }

  void defer(TensorSize size, const Problem& problem) {
    std::lock_guard lock(mutex_);
    const bool is_known = std::any_of(deferred_sizes_.begin(), deferred_sizes_.end(),
                                      [&](const auto& known) { return known.first == size; });
    if (!is_known) deferred_sizes_.emplace_back(size, problem);
  }
  void defer(const std::vector<KernelSpec>& pipelines, const Problem& problem) {
    std::lock_guard lock(mutex_);
    const bool is_known = std::any_of(deferred_.begin(), deferred_.end(),
                                      [&](const auto& known) { return known.first == pipelines; });
    if (!is_known) deferred_.emplace_back(pipelines, problem);
  }

  auto take_deferred_sizes() {
    std::lock_guard lock(mutex_);
    return std::exchange(deferred_sizes_, {});
  }
  auto take_deferred() {
    std::lock_guard lock(mutex_);
    return std::exchange(deferred_, {});
  }

  void forget() {
    std::lock_guard lock(mutex_);
    passed_.clear();
    impossible_.clear();
    listed_.clear();
    deferred_.clear();
    deferred_sizes_.clear();
  }

 private:
  std::mutex mutex_;
  std::vector<KernelSpec> passed_;
  std::vector<KernelSpec> impossible_;  // no test has them
  std::vector<TensorSize> listed_;      // whose self-test's pipelines are in passed_
  std::vector<std::pair<std::vector<KernelSpec>, Problem>> deferred_;  // with a call that has them
  std::vector<std::pair<TensorSize, Problem>> deferred_sizes_;  // whose self-test has not run, likewise
};
Pipelines& pipelines() {
  static auto& all = *new Pipelines;
  return all;
}

enum class Use : uint8_t { kYes, kDeferred, kImpossible, kFailed };

// Tests pipelines of a call, unless another thread has done it meanwhile.
Use test_pipelines(const std::vector<KernelSpec>& wanted, const Problem& problem) {
  static auto& testing = *new std::mutex;
  std::lock_guard one_at_a_time(testing);
  const DeviceFacts& gpu = gpu_facts();
  if (!is_on(tensor_state(problem, gpu.tensors))) return Use::kFailed;
  if (pipelines().has_impossible(wanted)) return Use::kImpossible;
  const std::vector<KernelSpec> untested = pipelines().untested(wanted);
  if (untested.empty()) return Use::kYes;
  const OptionsVerdict verdict = test_options(problem, untested, gpu);
  if (verdict.test == OptionsTest::kFailed) {
    settle(*tensor_size(problem), verdict.of_size);
    return Use::kFailed;
  }
  const bool passed = verdict.test == OptionsTest::kPassed;
  pipelines().add(untested, passed);
  return passed ? Use::kYes : Use::kImpossible;
}

void run_deferred_tests() {
  for (const auto& [size, problem] : pipelines().take_deferred_sizes()) {
    test_tensors_for(size);
    tested_plan(problem, Untested::kDefer);  // what is left to test of that call
  }
  for (const auto& [deferred, problem] : pipelines().take_deferred()) test_pipelines(deferred, problem);
}

void test_size_of(const Problem& problem, Untested untested) {
  const auto size = tensor_size(problem);
  if (untested == Untested::kTest) {
    run_deferred_tests();
    if (size) test_tensors_for(*size);
  } else if (untested == Untested::kDefer && size &&
             gpu_facts().tensors.of(*size) == TensorState::kUntested) {
    tensor_setting();  // a wrong one is refused here, not in the call that runs the test
    pipelines().defer(*size, problem);
  }
}

// Compiles the pipelines of a plan; if one does not compile, its size is off from now on.
bool compiles(const Plan& plan, TensorSize size) {
  try {
    metal::prepare(plan);
    return true;
  } catch (const c10::Error& error) {
    const std::string text = error.what_without_backtrace();
    settle(size, {TensorState::kOff, summary_of(text), is_lasting(text)});
  } catch (...) {  // on macOS also Objective-C exceptions
    settle(size, {TensorState::kOff, "it did not compile", false});
  }
  return false;
}

Use use_of(const Plan& plan, const Problem& problem, Untested what) {
  const TensorSize size = *tensor_size(problem);
  if (tensor_setting() != TensorSetting::kAuto)
    return what == Untested::kShow || compiles(plan, size) ? Use::kYes : Use::kFailed;
  pipelines().add_tested_with(size);
  const std::vector<KernelSpec> untested = pipelines().untested(tensor_pipelines(plan));
  if (pipelines().has_impossible(untested)) return Use::kImpossible;
  if (what == Untested::kShow) {
    return untested.empty() || untested_of(problem) == Untested::kTest ? Use::kYes : Use::kDeferred;
  }
  if (what == Untested::kDefer && !untested.empty()) {
    pipelines().defer(untested, problem);
    return Use::kDeferred;
  }
  if (!compiles(plan, size)) return Use::kFailed;
  return untested.empty() ? Use::kYes : test_pipelines(untested, problem);
}

}  // namespace

Untested untested_of(const Problem& problem) {
  const bool is_packed_step = problem.packed && most_sequence_rows(problem) == 1;
  // Steps over a shared prefix make partial results of it.
  const bool is_step = is_packed_step || is_decode(problem.op) || problem.part;
  return is_step && !is_backward(problem.op) ? Untested::kDefer : Untested::kTest;
}

TestedPlan tested_plan(const Problem& problem, Untested untested) {
  const DeviceFacts& gpu = gpu_facts();
  if (!gpu.tensors.any()) return {plan_or_raise(problem, gpu)};
  test_size_of(problem, untested);
  TestedPlan planned{plan_or_raise(problem, gpu_facts())};
  if (!has_tensors(planned.plan)) {
    const bool is_untested = tensor_state(problem, gpu_facts().tensors) == TensorState::kUntested;
    if (is_untested && untested_of(problem) == Untested::kDefer) planned.why_off = kSizeDeferred;
    return planned;
  }
  switch (use_of(planned.plan, problem, untested)) {
    case Use::kYes:
      return planned;
    case Use::kFailed:  // its size is off now
      return {plan_or_raise(problem, gpu_facts())};
    case Use::kDeferred:
      return {plan_or_raise(problem, gpu_without_tensors()), kDeferred};
    case Use::kImpossible:
      return {plan_or_raise(problem, gpu_without_tensors()), kImpossible};
  }
}

void forget_tested_pipelines() { pipelines().forget(); }

}  // namespace fattn
