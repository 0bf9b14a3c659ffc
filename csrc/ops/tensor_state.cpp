#include "tensor_state.h"

#include <algorithm>
#include <array>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Dict.h>
#include <ATen/core/List.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include "../plan/supported.h"
#include "../plan/tensor_gate.h"
#include "../plan/tuned.h"
#include "gpu.h"

#ifdef FATTN_WITH_METAL
#include "../metal/executor.h"
#include "tensor_problems.h"
#include "tensor_test.h"
#endif

namespace fattn {
namespace {

constexpr std::array<std::pair<const char*, TensorSetting>, 4> kSettings{
    {{"", TensorSetting::kAuto},
     {"0", TensorSetting::kOff},
     {"threadgroup", TensorSetting::kThreadgroup},
     {"registers", TensorSetting::kRegisters}}};

struct Sizes {
  std::mutex mutex;  // of the members below; not held while a test runs
  TensorSetting setting = TensorSetting::kAuto;
  std::string wrong_setting;  // what is wrong with it
  std::string folder;         // of verdicts; "": they are not kept
#ifdef FATTN_WITH_METAL
  std::vector<std::pair<TensorSize, TensorVerdict>> verdicts;
  // Pipelines that were tested: those of the self-test of a size, and others. And those that steps of
  // generation met, with a call.
  std::vector<std::pair<TensorSize, std::vector<KernelSpec>>> of_tests;
  std::vector<KernelSpec> tested;
  std::vector<KernelSpec> refused;  // no test has them: their calls run without tensor operations
  std::vector<std::pair<KernelSpec, Problem>> deferred;
  std::vector<TensorSize> deferred_sizes;  // whose self-test has not run
  std::mutex testing;                      // held while a test runs

  // The pipelines of a plan with tensor operations of this size that were not tested.
  std::vector<KernelSpec> untested(const Plan& plan, TensorSize size, const DeviceFacts& gpu) {
    const auto has = [](const std::vector<KernelSpec>& specs, const KernelSpec& pipeline) {
      return std::find(specs.begin(), specs.end(), pipeline) != specs.end();
    };
    std::vector<KernelSpec> found;
    std::lock_guard lock(mutex);
    if (setting != TensorSetting::kAuto) return found;
    auto own = std::find_if(of_tests.begin(), of_tests.end(),
                            [&](const auto& known) { return known.first == size; });
    if (own == of_tests.end()) own = of_tests.insert(own, {size, pipelines_of_test(size, gpu)});
    for (uint32_t i = 0; i < plan.pass_count; ++i) {
      const KernelSpec& pipeline = plan.passes[i].spec;
      const bool has_passed = has(own->second, pipeline) || has(tested, pipeline);
      if (is_tensor(pipeline.kernel) && !has_passed) found.push_back(pipeline);
    }
    return found;
  }

  bool refuses(const std::vector<KernelSpec>& pipelines) {
    std::lock_guard lock(mutex);
    return std::any_of(pipelines.begin(), pipelines.end(), [&](const KernelSpec& pipeline) {
      return std::find(refused.begin(), refused.end(), pipeline) != refused.end();
    });
  }

  void defer(const std::vector<KernelSpec>& pipelines, const Problem& problem) {
    std::lock_guard lock(mutex);
    for (const KernelSpec& pipeline : pipelines) {
      const bool is_known = std::any_of(deferred.begin(), deferred.end(),
                                        [&](const auto& known) { return known.first == pipeline; });
      if (!is_known) deferred.emplace_back(pipeline, problem);
    }
  }

  void defer(TensorSize size) {
    std::lock_guard lock(mutex);
    const bool is_known =
        std::find(deferred_sizes.begin(), deferred_sizes.end(), size) != deferred_sizes.end();
    if (!is_known) deferred_sizes.push_back(size);
  }

  // The verdict of this process or, without a setting by hand, of an earlier one.
  std::optional<TensorVerdict> find(TensorSize size, const DeviceFacts& gpu) {
    for (const auto& [known, verdict] : verdicts) {
      if (known == size) return verdict;
    }
    if (setting != TensorSetting::kAuto || !wrong_setting.empty()) return std::nullopt;
    const auto kept = read_verdict(folder, size, gpu);
    if (kept) verdicts.emplace_back(size, *kept);
    return kept;
  }
#endif
};
Sizes& sizes() {
  static auto& all = *new Sizes;
  return all;
}

// Changes what verdicts depend on, and forgets them.
template <typename Change>
void change(const Change& make) {
  {
    Sizes& all = sizes();
    std::lock_guard lock(all.mutex);
    make(all);
#ifdef FATTN_WITH_METAL
    all.verdicts.clear();
    all.of_tests.clear();
    all.tested.clear();
    all.refused.clear();
    all.deferred.clear();
    all.deferred_sizes.clear();
#endif
  }
  forget_gpu_facts();
}

std::vector<TensorSize> all_sizes() {
  std::vector<TensorSize> all;
  for (const bool is_backward : {false, true}) {
    for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
      for (const uint16_t dim : kTensorDims) {
        if (!is_backward || dim <= kMaxBackwardHeadDim) all.push_back({dtype, dim, is_backward});
      }
    }
  }
  return all;
}

// Returns what is wrong with the setting, "" if nothing; a wrong one raises at the first call that it is for.
std::string set_tensor_setting(const std::string& given) {
  const auto* found = std::find_if(kSettings.begin(), kSettings.end(),
                                   [&](const auto& known) { return given == known.first; });
  const bool is_known = found != kSettings.end();
  const std::string fault =
      is_known ? ""
               : "FATTN_TENSOR is '" + given +
                     "' and must be 0, threadgroup or registers; unset it for what the self-test finds";
  change([&](Sizes& all) {
    all.setting = is_known ? found->second : TensorSetting::kAuto;
    all.wrong_setting = fault;
  });
  return fault;
}

void set_tensor_folder(std::string folder) {
  change([&](Sizes& all) { all.folder = std::move(folder); });
}

using Row = c10::Dict<std::string, std::string>;

// Call, dtype, dim, state and reason of each size that the self-test decides.
c10::List<Row> rows_of_states() {
  c10::List<Row> rows;
#ifdef FATTN_WITH_METAL
  const DeviceFacts& gpu = gpu_facts();
  Sizes& all = sizes();
  std::lock_guard lock(all.mutex);
  for (const TensorSize size : all_sizes()) {
    if (!is_decided_by_test(size, gpu, all.setting)) continue;
    const TensorVerdict verdict = all.find(size, gpu).value_or(TensorVerdict{});
    Row row;
    row.insert("call", call_of(size));
    row.insert("dtype", name_of(size.dtype));
    row.insert("dim", std::to_string(size.dim));
    row.insert("state", name_of(verdict.state));
    row.insert("why", verdict.why);
    rows.push_back(row);
  }
#endif
  return rows;
}

// Why the sizes that are not in rows_of_states use no tensor operations; "" if all are in it.
std::string why_all_are_off() {
#ifdef FATTN_WITH_METAL
  const DeviceFacts& gpu = gpu_facts();
  Sizes& all = sizes();
  std::lock_guard lock(all.mutex);
  return why_tensors_are_off(gpu, all.setting);
#else
  return "torch_fattn was built without Metal";
#endif
}

#ifdef FATTN_WITH_METAL
// Keeps a verdict, in this process and, if it does not depend on a setting by hand, in a file.
void settle(TensorSize size, const TensorVerdict& verdict) {
  const DeviceFacts& gpu = gpu_facts();
  {
    Sizes& all = sizes();
    std::lock_guard lock(all.mutex);
    std::erase_if(all.verdicts, [&](const auto& known) { return known.first == size; });
    std::erase_if(all.of_tests, [&](const auto& known) { return known.first == size; });
    all.verdicts.emplace_back(size, verdict);
    if (verdict.lasting && all.setting == TensorSetting::kAuto) write_verdict(all.folder, size, gpu, verdict);
  }
  forget_gpu_facts();
}
#endif

#ifdef FATTN_WITH_METAL
// Tests the pipelines of a call, and turns tensor operations of its size off if they fail. Returns whether
// they passed.
bool pass(const std::vector<KernelSpec>& pipelines, const Problem& problem) {
  const OptionsVerdict verdict = test_options(problem, pipelines, gpu_facts());
  if (verdict.test == OptionsTest::kFailed) {
    settle(*tensor_size(problem), verdict.of_size);
    return false;
  }
  const bool has_passed = verdict.test == OptionsTest::kPassed;
  Sizes& all = sizes();
  std::lock_guard lock(all.mutex);
  auto& known = has_passed ? all.tested : all.refused;
  known.insert(known.end(), pipelines.begin(), pipelines.end());
  return has_passed;
}

void run_deferred_tests() {
  Sizes& all = sizes();
  std::vector<std::pair<KernelSpec, Problem>> deferred;
  std::vector<TensorSize> deferred_sizes;
  {
    std::lock_guard lock(all.mutex);
    deferred.swap(all.deferred);
    deferred_sizes.swap(all.deferred_sizes);
  }
  for (const TensorSize size : deferred_sizes) test_tensors_for(size);
  if (deferred.empty()) return;
  std::lock_guard one_at_a_time(all.testing);
  for (const auto& [pipeline, problem] : deferred) {
    if (is_on(tensor_state(problem, gpu_facts().tensors))) pass({pipeline}, problem);
  }
}
#endif

void test_all_tensors() {
#ifdef FATTN_WITH_METAL
  for (const TensorSize size : all_sizes()) test_tensors_for(size);
#endif
}

}  // namespace

#ifdef FATTN_WITH_METAL
TensorStates tensor_states(const DeviceFacts& gpu) {
  TensorStates states;
  Sizes& all = sizes();
  std::lock_guard lock(all.mutex);
  for (const TensorSize size : all_sizes()) {
    if (!is_decided_by_test(size, gpu, all.setting)) continue;
    const auto verdict = all.find(size, gpu);
    states.set(size, verdict ? verdict->state : TensorState::kUntested);
  }
  return states;
}

void test_tensors_for(TensorSize size) {
  if (gpu_facts().tensors.of(size) != TensorState::kUntested) return;
  Sizes& all = sizes();
  std::lock_guard one_at_a_time(all.testing);
  const DeviceFacts& gpu = gpu_facts();
  if (gpu.tensors.of(size) != TensorState::kUntested) return;
  TensorSetting setting;
  {
    std::lock_guard lock(all.mutex);
    TORCH_CHECK_VALUE(all.wrong_setting.empty(), all.wrong_setting);
    setting = all.setting;
  }
  settle(size, test_tensors(size, gpu, setting));
}

std::string why_tensors(const Problem& problem) {
  const auto size = tensor_size(problem);
  if (!size) return "";
  const DeviceFacts& gpu = gpu_facts();
  Sizes& all = sizes();
  std::lock_guard lock(all.mutex);
  if (!is_decided_by_test(*size, gpu, all.setting)) return "no timing on this GPU found them faster";
  const auto verdict = all.find(*size, gpu);
  std::string why = verdict ? verdict->why : "";
  if (!why_tensors_are_off(gpu, all.setting).empty())
    why += (why.empty() ? "" : "; ") + gpu.tuned->provenance;
  return why;
}

bool may_wait_for_tests(const Problem& problem) {
  const bool is_packed_step = problem.packed && most_sequence_rows(problem) == 1;
  // Steps over a shared prefix make partial results of it.
  return is_backward(problem.op) || !(is_packed_step || is_decode(problem.op) || problem.part);
}

bool tensors_hold(const Problem& problem, const Plan& plan, bool may_wait) {
  if (!has_tensors(plan)) return true;
  Sizes& all = sizes();
  const DeviceFacts& gpu = gpu_facts();
  const TensorSize size = *tensor_size(problem);
  std::vector<KernelSpec> pipelines = all.untested(plan, size, gpu);
  if (all.refuses(pipelines)) return false;
  if (!may_wait && !pipelines.empty()) {
    all.defer(pipelines, problem);
    return false;
  }
  try {
    metal::prepare(plan);
  } catch (const c10::Error& error) {
    settle(size, {TensorState::kOff, summary_of(error.what_without_backtrace())});
    return false;
  }
  if (pipelines.empty()) return true;
  std::lock_guard one_at_a_time(all.testing);
  pipelines = all.untested(plan, size, gpu);
  return pipelines.empty() || (!all.refuses(pipelines) && pass(pipelines, problem));
}

const char* why_not_yet(const Problem& problem, const Plan& plan) {
  if (!has_tensors(plan)) return "";
  Sizes& all = sizes();
  const std::vector<KernelSpec> pipelines = all.untested(plan, *tensor_size(problem), gpu_facts());
  if (all.refuses(pipelines)) return "not used: no small problem can test this pipeline";
  const bool is_deferred = !pipelines.empty() && !may_wait_for_tests(problem);
  return is_deferred ? "not tested yet with these options; the next prefill or warmup does it" : "";
}

DeviceFacts without_tensors(const Problem& problem) {
  DeviceFacts facts = gpu_facts();
  if (const auto size = tensor_size(problem)) facts.tensors.set(*size, TensorState::kOff);
  return facts;
}

void test_tensors_for(const Problem& problem, bool may_wait) {
  const TensorStates& states = gpu_facts().tensors;
  if (!states.any()) return;
  const auto size = tensor_size(problem);
  if (!may_wait) {
    if (size && states.of(*size) == TensorState::kUntested) sizes().defer(*size);
    return;
  }
  run_deferred_tests();
  if (size) test_tensors_for(*size);
}
#endif

TORCH_LIBRARY_FRAGMENT(fattn, library) {
  library.def("_set_tensor_setting(str setting) -> str", set_tensor_setting);
  library.def("_set_tensor_folder(str folder) -> ()", set_tensor_folder);
  library.def("_tensor_states() -> Dict(str, str)[]", rows_of_states);
  library.def("_why_tensors_are_off() -> str", why_all_are_off);
  library.def("_test_all_tensors() -> ()", test_all_tensors);
}

}  // namespace fattn
