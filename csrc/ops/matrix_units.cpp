#include "matrix_units.h"

#include <algorithm>
#include <array>
#include <string>
#include <utility>

#include <ATen/core/Dict.h>
#include <ATen/core/List.h>
#include <torch/library.h>

#include "../describe/calls.h"
#include "../plan/tuned.h"
#include "../selftest/gate.h"
#include "gpu.h"

#ifdef FATTN_WITH_METAL
#include "../selftest/verdicts.h"
#endif

namespace fattn {
namespace {

// Sets FATTN_TENSOR. Returns the error of an invalid value, "" otherwise.
std::string set_setting(const std::string& given) {
  static constexpr std::array<std::pair<const char*, UnitsSetting>, 4> kSettings{
      {{"", UnitsSetting::kAuto},
       {"0", UnitsSetting::kOff},
       {"threadgroup", UnitsSetting::kThreadgroup},
       {"registers", UnitsSetting::kRegisters}}};
  const auto* found = std::find_if(kSettings.begin(), kSettings.end(),
                                   [&](const auto& known) { return given == known.first; });
  const bool is_known = found != kSettings.end();
  const std::string wrong =
      is_known ? ""
               : "FATTN_TENSOR is '" + given +
                     "' and must be 0, threadgroup or registers; unset it for what the self-test finds";
#ifdef FATTN_WITH_METAL
  use_units_setting(is_known ? found->second : UnitsSetting::kAuto, wrong);
#endif
  return wrong;
}

void set_folder([[maybe_unused]] std::string folder) {
#ifdef FATTN_WITH_METAL
  use_verdict_folder(std::move(folder));
#endif
}

using Row = c10::Dict<std::string, std::string>;

// Call, dtype, dim, state and reason for each size that passes the gate.
c10::List<Row> rows_of_states() {
  c10::List<Row> rows;
#ifdef FATTN_WITH_METAL
  const DeviceFacts& gpu = gpu_facts();
  for (const UnitsSize size : all_units_sizes()) {
    if (!passes_gate(size, gpu)) continue;
    const Verdict verdict = verdict_of(size, gpu);
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

// Why sizes missing from rows_of_states do not use matrix units; "" if none is missing.
std::string why_all_are_off() {
#ifdef FATTN_WITH_METAL
  return why_units_are_off(gpu_facts());
#else
  return "torch_fattn was built without Metal";
#endif
}

void test_all_sizes() {
#ifdef FATTN_WITH_METAL
  for (const UnitsSize size : all_units_sizes()) test_size(size, gpu_facts());
#endif
}

}  // namespace

#ifdef FATTN_WITH_METAL
Plan plan_to_run(const Problem& problem, bool may_wait) {
  if (!gpu_facts().units.any()) return plan_or_raise(problem, gpu_facts());
  const auto size = units_size(problem);
  if (may_wait) {
    test_delayed_sizes(gpu_facts());
    if (size) test_size(*size, gpu_facts());
  } else if (size && gpu_facts().units.of(*size) == UnitsState::kUntested) {
    delay_test(*size);
  }
  Plan plan = plan_or_raise(problem, gpu_facts());
  while (uses_units(plan) && !compiles(plan, *size, gpu_facts())) plan = plan_or_raise(problem, gpu_facts());
  return plan;
}

std::string reason_of_state(const Problem& problem) {
  const auto size = units_size(problem);
  if (!size) return "";
  const DeviceFacts& gpu = gpu_facts();
  if (!passes_gate(*size, gpu)) return "no timing on this GPU found them faster";
  std::string why = verdict_of(*size, gpu).why;
  if (!why_units_are_off(gpu).empty()) why += (why.empty() ? "" : "; ") + gpu.tuned->provenance;
  return why;
}
#endif

TORCH_LIBRARY_FRAGMENT(fattn, library) {
  library.def("_set_tensor_setting(str setting) -> str", set_setting);
  library.def("_set_tensor_folder(str folder) -> ()", set_folder);
  library.def("_tensor_states() -> Dict(str, str)[]", rows_of_states);
  library.def("_why_tensors_are_off() -> str", why_all_are_off);
  library.def("_test_all_tensors() -> ()", test_all_sizes);
}

}  // namespace fattn
