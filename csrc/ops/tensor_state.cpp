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
#include "tensor_pipelines.h"
#include "tensor_test.h"
#endif

namespace fattn {
namespace {

constexpr std::array<std::pair<const char*, TensorSetting>, 4> kSettings{
    {{"", TensorSetting::kAuto},
     {"0", TensorSetting::kOff},
     {"threadgroup", TensorSetting::kThreadgroup},
     {"registers", TensorSetting::kRegisters}}};

struct Verdicts {
  std::mutex mutex;  // of the other members
  TensorSetting setting = TensorSetting::kAuto;
  std::string wrong_setting;  // what is wrong with it
  std::string folder;         // of verdicts; "": they are not kept
#ifdef FATTN_WITH_METAL
  std::vector<std::pair<TensorSize, TensorVerdict>> known;

  // That of this process or, without a setting by hand, of an earlier one.
  std::optional<TensorVerdict> of(TensorSize size, const DeviceFacts& gpu) {
    for (const auto& [one, verdict] : known) {
      if (one == size) return verdict;
    }
    if (setting != TensorSetting::kAuto || !wrong_setting.empty()) return std::nullopt;
    const auto kept = read_verdict(folder, size, gpu);
    if (kept) known.emplace_back(size, *kept);
    return kept;
  }
#endif
};
Verdicts& verdicts() {
  static auto& all = *new Verdicts;
  return all;
}

// Changes what verdicts depend on, and forgets them.
template <typename Change>
void change(const Change& make) {
  {
    Verdicts& all = verdicts();
    std::lock_guard lock(all.mutex);
    make(all);
#ifdef FATTN_WITH_METAL
    all.known.clear();
#endif
  }
#ifdef FATTN_WITH_METAL
  forget_tested_pipelines();
#endif
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
  change([&](Verdicts& all) {
    all.setting = is_known ? found->second : TensorSetting::kAuto;
    all.wrong_setting = fault;
  });
  return fault;
}

void set_tensor_folder(std::string folder) {
  change([&](Verdicts& all) { all.folder = std::move(folder); });
}

using Row = c10::Dict<std::string, std::string>;

// Call, dtype, dim, state and reason of each size that the self-test decides.
c10::List<Row> rows_of_states() {
  c10::List<Row> rows;
#ifdef FATTN_WITH_METAL
  const DeviceFacts& gpu = gpu_facts();
  Verdicts& all = verdicts();
  std::lock_guard lock(all.mutex);
  for (const TensorSize size : all_sizes()) {
    if (!is_decided_by_test(size, gpu, all.setting)) continue;
    const TensorVerdict verdict = all.of(size, gpu).value_or(TensorVerdict{});
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
  Verdicts& all = verdicts();
  std::lock_guard lock(all.mutex);
  return why_tensors_are_off(gpu, all.setting);
#else
  return "torch_fattn was built without Metal";
#endif
}

void test_all_tensors() {
#ifdef FATTN_WITH_METAL
  for (const TensorSize size : all_sizes()) test_tensors_for(size);
#endif
}

}  // namespace

#ifdef FATTN_WITH_METAL
void add_tensor_states(DeviceFacts& gpu) {
  Verdicts& all = verdicts();
  std::lock_guard lock(all.mutex);
  for (const TensorSize size : all_sizes()) {
    if (!is_decided_by_test(size, gpu, all.setting)) continue;
    const auto verdict = all.of(size, gpu);
    gpu.tensors.set(size, verdict ? verdict->state : TensorState::kUntested);
  }
  gpu.only_prefills_on_tensors = gpu.tensors.any() && !why_tensors_are_off(gpu, all.setting).empty();
}

TensorSetting tensor_setting() {
  Verdicts& all = verdicts();
  std::lock_guard lock(all.mutex);
  TORCH_CHECK_VALUE(all.wrong_setting.empty(), all.wrong_setting);
  return all.setting;
}

void test_tensors_for(TensorSize size) {
  if (gpu_facts().tensors.of(size) != TensorState::kUntested) return;
  static auto& testing = *new std::mutex;
  std::lock_guard one_at_a_time(testing);
  const DeviceFacts& gpu = gpu_facts();
  if (gpu.tensors.of(size) != TensorState::kUntested) return;
  settle(size, test_tensors(size, gpu, tensor_setting()));
}

void settle(TensorSize size, const TensorVerdict& verdict) {
  const DeviceFacts& gpu = gpu_facts();
  {
    Verdicts& all = verdicts();
    std::lock_guard lock(all.mutex);
    std::erase_if(all.known, [&](const auto& known) { return known.first == size; });
    all.known.emplace_back(size, verdict);
    if (verdict.lasting && all.setting == TensorSetting::kAuto) write_verdict(all.folder, size, gpu, verdict);
  }
  forget_gpu_facts();
}

std::string reason_of_state(const Problem& problem) {
  const auto size = tensor_size(problem);
  if (!size) return "";
  const DeviceFacts& gpu = gpu_facts();
  Verdicts& all = verdicts();
  std::lock_guard lock(all.mutex);
  if (!is_decided_by_test(*size, gpu, all.setting)) return "no timing on this GPU found them faster";
  const auto verdict = all.of(*size, gpu);
  std::string why = verdict ? verdict->why : "";
  if (!why_tensors_are_off(gpu, all.setting).empty())
    why += (why.empty() ? "" : "; ") + gpu.tuned->provenance;
  return why;
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
