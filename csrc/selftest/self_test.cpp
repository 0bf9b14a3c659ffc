#include "self_test.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <exception>
#include <functional>
#include <future>
#include <utility>
#include <vector>

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/full.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/Exception.h>

#include "../launch/launch.h"
#include "../metal/executor.h"
#include "trial.h"

namespace fattn {
namespace {

// Metal's compiler takes about 0.2 s for such a kernel (published, M4 Pro).
constexpr double kMaxCompileSeconds = 20.0;

// Hides the caller's autograd, autocast, modes and transforms.
constexpr c10::DispatchKeySet kAbove =
    c10::autograd_dispatch_keyset | c10::autocast_dispatch_keyset |
    c10::DispatchKeySet(
        {c10::DispatchKey::ADInplaceOrView, c10::DispatchKey::Functionalize, c10::DispatchKey::Python,
         c10::DispatchKey::PythonTLSSnapshot, c10::DispatchKey::PythonDispatcher,
         c10::DispatchKey::FuncTorchBatched, c10::DispatchKey::FuncTorchGradWrapper,
         c10::DispatchKey::FuncTorchDynamicLayerFrontMode, c10::DispatchKey::FuncTorchDynamicLayerBackMode});

// The first line of an error and, for a compiler's, its first diagnostic.
std::string summary_of(const std::string& error) {
  const size_t end = error.find('\n');
  std::string text = error.substr(0, end);
  if (const size_t at = error.find("error: "); end != std::string::npos && at != std::string::npos)
    text += " " + error.substr(at, error.find('\n', at) - at);
  constexpr size_t kMaxLength = 600;
  return text.substr(0, kMaxLength);
}

// Converts an exception to a fault that is not lasting, since errors such as out of memory may not recur.
Fault caught(const std::function<Fault()>& step) {
  try {
    return step();
  } catch (const c10::Error& error) {
    return {summary_of(error.what_without_backtrace()), false};
  } catch (const std::exception& error) {
    return {summary_of(error.what()), false};
  } catch (...) {  // on macOS also Objective-C exceptions
    return {"the self-test did not end", false};
  }
}

// Compiles on as many threads as torch has, until a plan fails. Plans are taken in order, so the fault is
// that of the first plan that fails however the threads are scheduled.
Fault compile_all(const std::vector<Plan>& plans) {
  std::vector<Fault> faults(plans.size());
  std::atomic<size_t> next{0};
  std::atomic<bool> failed{false};
  std::vector<std::future<void>> compilers(static_cast<size_t>(at::get_num_threads()));
  for (std::future<void>& compiler : compilers) {
    compiler = std::async(std::launch::async, [&] {
      while (!failed) {
        const size_t i = next++;
        if (i >= plans.size()) return;
        faults[i] = compiler_fault(plans[i]);
        if (faults[i]) failed = true;
      }
    });
  }
  for (std::future<void>& compiler : compilers) compiler.wait();
  const auto first =
      std::find_if(faults.begin(), faults.end(), [](const Fault& fault) { return bool(fault); });
  return first == faults.end() ? Fault{} : *first;
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

// Why the kernels of a variant cannot use the layout; "" if they can.
std::string fault_of_layout(const int32_t* facts, const KernelSpec& spec) {
  const int32_t scores = facts[0], reduced = facts[1], out = facts[2];
  const int64_t rows = int64_t(spec.row_fragments) * kFragment;
  const int64_t keys = spec.head_dim == kLatentKeyDim ? kLatentProductKeys : spec.tile_keys;
  const int64_t out_columns = int64_t(spec.value_dim) * spec.row_groups / spec.simdgroups;
  const bool is_listed =
      scores > 0 && out > 0 && scores <= 2 * kMaxScoreElements && out <= 2 * kMaxOutElements;
  const int32_t* pairs = facts + kTensorHeadFacts;
  if (!is_listed || !covers(pairs, scores, rows, keys) ||
      !covers(pairs + int64_t{2} * kSimdWidth * scores, out, rows, out_columns))
    return "the probe does not find each element of a product in one lane";
  if (!spec.registers) return "";
  if (scores > kMaxScoreElements || out > kMaxOutElements || reduced > kMaxReducedRows)
    return "a lane has more elements than the kernel keeps track of";
  if (facts[3] == 0 || facts[4] == 0) return "elements do not match the rows of a reduction";
  if (facts[5] == 0) return "scores are not laid out like a left operand";
  return "";
}

Fault fault_of_probe(UnitsSize size, UnitsState variant) {
  const Plan plan = plan_tensor_probe(size, variant == UnitsState::kRegisters);
  if (Fault fault = compiler_fault(plan)) return fault;
  const at::Tensor facts = at::full({kMaxTensorFacts}, -1, at::kInt).to(at::kMPS);
  metal::Bindings bindings;
  bindings[kSlotTensorFacts].buffer = const_cast<void*>(facts.storage().data());
  metal::execute(plan, bindings);
  return {fault_of_layout(facts.cpu().const_data_ptr<int32_t>(), plan.passes[0].spec)};
}

// A plan with the kernels of a variant, or of simdgroups for kOff, regardless of tuning.
Plan plan_with(const Problem& problem, UnitsState variant, const DeviceFacts& gpu) {
  DeviceFacts facts = gpu;
  facts.tuned = nullptr;
  facts.only_prefills_on_units = false;
  facts.units.set_all(variant);
  Plan made = plan_or_raise(problem, facts);
  TORCH_CHECK(uses_units(made) == is_on(variant), name_of(problem.op), " does not follow the state ",
              name_of(variant));
  return made;
}

Fault fault_of_variant(UnitsSize size, UnitsState variant, const DeviceFacts& gpu) {
  if (Fault fault = fault_of_probe(size, variant)) return fault;
  std::vector<Trial> trials = trials_of(size);
  std::vector<Plan> plans;
  for (const Trial& trial : trials) {
    plans.push_back(plan_with(trial.call.problem, variant, gpu));
    plans.push_back(plan_with(trial.call.problem, UnitsState::kOff, gpu));
    if (trial.forward) plans.push_back(plan_with(trial.forward->problem, UnitsState::kOff, gpu));
  }
  if (Fault fault = compile_all(plans)) return fault;
  const Plan* plan = plans.data();
  for (Trial& trial : trials) {
    const Plan& tested = *plan++;
    const Plan& expected = *plan++;
    if (trial.forward) {
      const std::vector<at::Tensor> results = launch(*trial.forward, *plan++);
      trial.call.out = results[0];
      trial.call.lse = results[1];
      trial.call.out_remainder = results[2];
    }
    const std::string wrong = difference(trial, tested, expected);
    if (!wrong.empty()) return {"in " + trial.what + " " + wrong};
  }
  return {};
}

}  // namespace

// A compiler error is lasting if it has a diagnostic, or if there are too many threads. Others, such as a
// crashed system service, may not recur.
Fault compiler_fault(const Plan& plan) {
  using Clock = std::chrono::steady_clock;
  const Clock::time_point start = Clock::now();
  Fault fault = caught([&] {
    metal::prepare(plan);
    return Fault{};
  });
  if (fault) {
    const auto has = [&](const char* words) { return fault.why.find(words) != std::string::npos; };
    fault.lasting = has("error: ") || has(" threads ");
    return fault;
  }
  const double seconds = std::chrono::duration<double>(Clock::now() - start).count();
  if (seconds <= kMaxCompileSeconds) return {};
  char text[64];
  std::snprintf(text, sizeof text, "it took %.1f s to compile (at most %.0f)", seconds, kMaxCompileSeconds);
  return {text};
}

Verdict run_self_test(UnitsSize size, const DeviceFacts& gpu) {
  const c10::impl::ExcludeDispatchKeyGuard backend_only(kAbove);
  std::string why;
  bool lasting = true;
  for (const UnitsState variant : {UnitsState::kRegisters, UnitsState::kThreadgroup}) {
    if (variant == UnitsState::kRegisters && size.is_latent()) continue;
    const Fault fault = caught([&] { return fault_of_variant(size, variant, gpu); });
    if (!fault) return {variant, "passed the self-test" + (why.empty() ? "" : "; " + why), lasting};
    why += (why.empty() ? "" : "; ") + std::string(name_of(variant)) + ": " + fault.why;
    lasting = lasting && fault.lasting;
  }
  return {UnitsState::kOff, why, lasting};
}

}  // namespace fattn
