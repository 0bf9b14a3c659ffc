#include "tensor_test.h"

#include <algorithm>
#include <exception>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/ops/full.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/Exception.h>

#include "../metal/executor.h"
#include "tensor_problems.h"

namespace fattn {
namespace {

// What is above the backend: the caller's autograd, autocast, modes and transforms do not see the test.
constexpr c10::DispatchKeySet kAbove =
    c10::autograd_dispatch_keyset | c10::autocast_dispatch_keyset |
    c10::DispatchKeySet(
        {c10::DispatchKey::ADInplaceOrView, c10::DispatchKey::Functionalize, c10::DispatchKey::Python,
         c10::DispatchKey::PythonTLSSnapshot, c10::DispatchKey::PythonDispatcher,
         c10::DispatchKey::FuncTorchBatched, c10::DispatchKey::FuncTorchGradWrapper,
         c10::DispatchKey::FuncTorchDynamicLayerFrontMode, c10::DispatchKey::FuncTorchDynamicLayerBackMode});

std::vector<int32_t> probe(const Plan& plan) {
  const at::Tensor facts = at::full({kMostTensorFacts}, -1, at::device(at::kMPS).dtype(at::kInt));
  metal::Bindings bindings;
  bindings[kSlotTensorFacts].buffer = const_cast<void*>(facts.storage().data());
  metal::execute(plan, bindings);
  const at::Tensor read = facts.cpu();
  const auto* first = read.const_data_ptr<int32_t>();
  return {first, first + read.numel()};
}

// Whether the {column, row} pairs of all lanes name each element of a tile once.
bool covers(const int32_t* pairs, int64_t capacity, int64_t rows, int64_t columns) {
  std::vector<int> held(size_t(rows * columns), 0);
  for (int64_t i = 0; i < capacity * kSimdWidth; ++i) {
    const int32_t column = pairs[2 * i], row = pairs[2 * i + 1];
    if (column == -1 && row == -1) continue;
    if (column < 0 || column >= columns || row < 0 || row >= rows) return false;
    ++held[size_t(row * columns + column)];
  }
  return std::all_of(held.begin(), held.end(), [](int count) { return count == 1; });
}

// What the kernels of a variant cannot use of the layout, "" if nothing.
std::string fault_of_layout(const std::vector<int32_t>& facts, const KernelSpec& spec) {
  const int32_t scores = facts[0], reduced = facts[1], out = facts[2];
  const int64_t rows = int64_t(spec.row_fragments) * kFragment;
  const int64_t keys = spec.head_dim == kLatentKeyDim ? kLatentProductKeys : spec.tile_keys;
  const int64_t out_columns = int64_t(spec.value_dim) * spec.row_groups / spec.simdgroups;
  const bool is_listed =
      scores > 0 && out > 0 && scores <= 2 * kMostScoreElements && out <= 2 * kMostOutElements;
  const int32_t* pairs = facts.data() + kTensorHeadFacts;
  if (!is_listed || !covers(pairs, scores, rows, keys) ||
      !covers(pairs + int64_t{2} * kSimdWidth * scores, out, rows, out_columns))
    return "the probe does not find each element of a product in one lane";
  if (!spec.registers) return "";
  if (scores > kMostScoreElements || out > kMostOutElements || reduced > kMostReducedRows)
    return "a lane has more elements than the kernel keeps track of";
  if (facts[3] == 0 || facts[4] == 0) return "elements do not match the rows of a reduction";
  if (facts[5] == 0) return "scores are not laid out like a left operand";
  return "";
}

std::string fault_of_probe(TensorSize size, TensorState variant) {
  const Plan plan = plan_tensor_probe(size, variant == TensorState::kRegisters);
  compile_or_raise(plan);
  return fault_of_layout(probe(plan), plan.passes[0].spec);
}

std::string fault_of_variant(TensorSize size, TensorState variant, const DeviceFacts& gpu, bool by_hand) {
  if (by_hand) {
    compile_problems(size, {variant}, gpu);
    return "";
  }
  if (const std::string fault = fault_of_probe(size, variant); !fault.empty()) return fault;
  compile_problems(size, {variant, TensorState::kOff}, gpu);
  for (const TensorProblem& problem : kTensorProblems) {
    if (!has_problem(size, problem)) continue;
    const std::string fault = fault_of_problem(size, problem, variant, gpu);
    if (!fault.empty()) return "in " + std::string(problem.what) + " " + fault;
  }
  return "";
}

struct Fault {
  std::string why;
  bool lasting = true;
};

// A fault of compilers and kernels is lasting; others, such as too little memory, may not be.
template <typename Test>
Fault caught_fault(const Test& test) {
  try {
    return {test()};
  } catch (const CompileFault& fault) {
    return {fault.what(), fault.lasting};
  } catch (const c10::Error& error) {
    return {summary_of(error.what_without_backtrace()), false};
  } catch (const std::exception& error) {
    return {summary_of(error.what()), false};
  } catch (...) {  // on macOS also Objective-C exceptions
    return {"the self-test did not end", false};
  }
}

}  // namespace

TensorVerdict test_tensors(TensorSize size, const DeviceFacts& gpu, TensorSetting setting) {
  const c10::impl::ExcludeDispatchKeyGuard backend_only(kAbove);
  const bool by_hand = setting != TensorSetting::kAuto;
  std::string why;
  bool lasting = true;
  for (const TensorState variant : {TensorState::kRegisters, TensorState::kThreadgroup}) {
    const bool has_registers = setting != TensorSetting::kThreadgroup && !size.is_latent();
    if (variant == TensorState::kRegisters && !has_registers) continue;
    const Fault fault = caught_fault([&] { return fault_of_variant(size, variant, gpu, by_hand); });
    if (fault.why.empty()) {
      const std::string passed = by_hand ? "FATTN_TENSOR, without a self-test" : "passed the self-test";
      return {variant, passed + (why.empty() ? "" : "; " + why), lasting};
    }
    why += (why.empty() ? "" : "; ") + std::string(name_of(variant)) + ": " + fault.why;
    lasting = lasting && fault.lasting;
  }
  return {TensorState::kOff, why, lasting};
}

OptionsVerdict test_options(const Problem& problem, const std::vector<KernelSpec>& pipelines,
                            const DeviceFacts& gpu) {
  const c10::impl::ExcludeDispatchKeyGuard backend_only(kAbove);
  bool is_possible = true;
  const Fault fault = caught_fault([&] {
    const auto found = fault_of_options(problem, pipelines, gpu);
    is_possible = found.has_value();
    return found.value_or("");
  });
  if (!is_possible) return {OptionsTest::kImpossible, {}};
  if (fault.why.empty()) return {OptionsTest::kPassed, {}};
  return {OptionsTest::kFailed,
          {TensorState::kOff, "in a small problem with the options of a call " + fault.why, fault.lasting}};
}

}  // namespace fattn
